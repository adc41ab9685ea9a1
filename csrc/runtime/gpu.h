// The properties of a GPU that plans depend on.
#pragma once

#include <cstdint>

#include "backends/name.h"
#include "mlx/dtype.h"
#include "mlx/stream.h"

namespace mittens {

namespace mx = mlx::core;

// Registers of a lane: of 16 bits as Apple's machine code has them (bench/results/agx.md), of 32 bits as NVIDIA's has
// (bench/results/registers.md).
struct Registers {
  uint32_t apple;
  uint32_t nvidia;
};

struct Gpu {
  enum class Vendor { apple, nvidia };

  Name name;  // as mm.simulator.enabled takes it, else as the driver has it
  Vendor vendor;
  int generation;  // Apple's architecture: 13 is the M1's; NVIDIA's compute capability times ten
  Name tier;  // base, pro, max or ultra; empty on NVIDIA GPUs
  uint32_t cores;  // NVIDIA's multiprocessors
  double clock_ghz;  // 0 where it is not known, as the next two
  double bandwidth_gbps;  // of the memory, nominal
  uint64_t last_level_cache;  // bytes
  bool has_matrix_units;  // Apple's since the M5, as MLX decides whether it uses them
  bool float32_matrices;  // whether 8x8 matrices of float32 are multiplied as such
  bool caches_registers;  // Apple's since the M3: their number does not bound the simdgroups of a core

  // Simdgroups of a kernel that one core holds at once.
  uint32_t resident_simdgroups(Registers registers) const;

  // This GPU with 2^power times the cores, one at least: a plan for it shares work out that much more.
  Gpu with_parallelism(int power) const;
};

// The GPU that a stream's kernels run on: the machine's, or for a stream of the CPU the one that the simulator stands
// for. It stays where it is for the life of the process.
const Gpu& gpu_of(mx::Stream stream);

// Whether kernels run on a stream: on a GPU, or on the CPU in the simulator.
bool runs_kernels(mx::Stream stream);

// Whether kernels are launched on a stream, for an Apple GPU.
bool runs_apple_kernels(mx::Stream stream);

// Whether MLX computes products of this dtype on the GPU's matrix units.
bool mlx_uses_matrix_units(const Gpu& gpu, mx::Dtype dtype);

}  // namespace mittens
