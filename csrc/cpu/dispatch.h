// Which of the instruction sets that the kernels in cpu/isa were compiled for is used, chosen once per process.
#pragma once

#include <string>
#include <vector>

namespace mittens::cpu {

// The best one this machine runs, or the one named by the environment variable MLX_MITTENS_CPU.
// Throws std::invalid_argument where that name is unknown or cannot run here.
const char* isa_name();

// The sets that this machine runs, slowest first.
std::vector<std::string> isa_names();

// Index of the chosen one in the table that MITTENS_VERSIONS makes.
int isa_index();

}  // namespace mittens::cpu

// MITTENS_VERSIONS(op), in namespace mittens::cpu, declares an op's function for each instruction set and lists
// them as op_versions.
#if defined(__x86_64__)
#define MITTENS_VERSIONS(op) \
  namespace baseline {       \
  decltype(cpu::op) op;      \
  }                          \
  namespace avx2 {           \
  decltype(cpu::op) op;      \
  }                          \
  namespace avx512 {         \
  decltype(cpu::op) op;      \
  }                          \
  static constexpr decltype(&cpu::op) op##_versions[] = {baseline::op, avx2::op, avx512::op};
#elif defined(__aarch64__)
#define MITTENS_VERSIONS(op) \
  namespace neon {           \
  decltype(cpu::op) op;      \
  }                          \
  static constexpr decltype(&cpu::op) op##_versions[] = {neon::op};
#else
#define MITTENS_VERSIONS(op) \
  namespace baseline {       \
  decltype(cpu::op) op;      \
  }                          \
  static constexpr decltype(&cpu::op) op##_versions[] = {baseline::op};
#endif
