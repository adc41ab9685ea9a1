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
// them as op_versions. MITTENS_INTEGER_VERSIONS(op) is for integer products, and MITTENS_PANEL_VERSIONS(op) for those
// of panels, for which there are more sets: other ops have the set before in their place.
#define MITTENS_VERSION(set, op) \
  namespace set {                \
  decltype(cpu::op) op;          \
  }
#if defined(__x86_64__)
#define MITTENS_COMMON_VERSIONS(op) \
  MITTENS_VERSION(baseline, op)     \
  MITTENS_VERSION(avx2, op)         \
  MITTENS_VERSION(avx512, op)
#define MITTENS_VERSIONS(op)                                                                 \
  MITTENS_COMMON_VERSIONS(op)                                                                \
  static constexpr decltype(&cpu::op) op##_versions[] = {baseline::op, avx2::op,   avx2::op, \
                                                         avx512::op,   avx512::op, avx512::op};
#define MITTENS_ALL_INTEGER_VERSIONS(op, amx)                                                       \
  MITTENS_COMMON_VERSIONS(op)                                                                       \
  MITTENS_VERSION(avxvnni, op)                                                                      \
  MITTENS_VERSION(avx512vnni, op)                                                                   \
  static constexpr decltype(&cpu::op) op##_versions[] = {baseline::op, avx2::op,       avxvnni::op, \
                                                         avx512::op,   avx512vnni::op, amx::op};
#define MITTENS_INTEGER_VERSIONS(op) MITTENS_ALL_INTEGER_VERSIONS(op, avx512vnni)
#if defined(MITTENS_AMX)
#define MITTENS_PANEL_VERSIONS(op) \
  MITTENS_VERSION(avx512amx, op)   \
  MITTENS_ALL_INTEGER_VERSIONS(op, avx512amx)
#else
#define MITTENS_PANEL_VERSIONS MITTENS_INTEGER_VERSIONS
#endif
#elif defined(__aarch64__)
#define MITTENS_VERSIONS(op) \
  MITTENS_VERSION(neon, op)  \
  static constexpr decltype(&cpu::op) op##_versions[] = {neon::op, neon::op, neon::op};
#define MITTENS_INTEGER_VERSIONS(op) \
  MITTENS_VERSION(neon, op)          \
  MITTENS_VERSION(dotprod, op)       \
  static constexpr decltype(&cpu::op) op##_versions[] = {neon::op, dotprod::op, dotprod::op};
#define MITTENS_PANEL_VERSIONS(op) \
  MITTENS_VERSION(neon, op)        \
  MITTENS_VERSION(dotprod, op)     \
  MITTENS_VERSION(i8mm, op)        \
  static constexpr decltype(&cpu::op) op##_versions[] = {neon::op, dotprod::op, i8mm::op};
#else
#define MITTENS_VERSIONS(op)    \
  MITTENS_VERSION(baseline, op) \
  static constexpr decltype(&cpu::op) op##_versions[] = {baseline::op};
#define MITTENS_INTEGER_VERSIONS MITTENS_VERSIONS
#define MITTENS_PANEL_VERSIONS MITTENS_VERSIONS
#endif
