#include "cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string_view>

#if defined(MITTENS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace mittens::cpu {

namespace {

struct Isa {
  const char* name;
  bool supported;
};

#if defined(__x86_64__)
// Whether there are tiles of bytes (AMX) and Linux grants them, which it is asked once for all threads of the process.
// It refuses where a thread's signal stack has no room for their 8 KiB.
bool has_tiles() {
#if defined(MITTENS_AMX)
  if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-int8")) {
    return false;
  }
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
#if defined(__APPLE__)
bool has(const char* feature) {
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname(feature, &has, &size, nullptr, 0) == 0 && has != 0;
}
#endif

// Whether there are dot products of bytes (FEAT_DotProd).
bool has_dot_products() {
#if defined(__APPLE__)
  return has("hw.optional.arm.FEAT_DotProd");
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}

// Whether there are products of matrices of bytes (FEAT_I8MM).
bool has_byte_matrices() {
#if defined(__APPLE__)
  return has("hw.optional.arm.FEAT_I8MM");
#elif defined(__linux__)
  return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#else
  return false;
#endif
}
#endif

// In the order of MITTENS_VERSIONS.
const std::vector<Isa>& isas() {
#if defined(__x86_64__)
  static const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool avx512vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  static const bool avxvnni = avx2 && __builtin_cpu_supports("avxvnni");
  static const std::vector<Isa> all = {{"baseline", true},         {"avx2", avx2},
                                       {"avxvnni", avxvnni},       {"avx512", avx512},
                                       {"avx512vnni", avx512vnni}, {"avx512amx", avx512vnni && has_tiles()}};
#elif defined(__aarch64__)
  static const std::vector<Isa> all = {
      {"neon", true}, {"dotprod", has_dot_products()}, {"i8mm", has_dot_products() && has_byte_matrices()}};
#else
  static const std::vector<Isa> all = {{"baseline", true}};
#endif
  return all;
}

int choose() {
  const char* wanted = std::getenv("MLX_MITTENS_CPU");
  const bool any = !wanted || !*wanted;
  for (int i = static_cast<int>(isas().size()) - 1; i >= 0; --i) {
    if (isas()[i].supported && (any || std::string_view(wanted) == isas()[i].name)) {
      return i;
    }
  }
  std::string message = std::string("[mlx_mittens] MLX_MITTENS_CPU is '") + wanted + "', this machine runs";
  for (const std::string& name : isa_names()) {
    message += " '" + name + "'";
  }
  throw std::invalid_argument(message + ".");
}

}  // namespace

int isa_index() {
  static const int index = choose();
  return index;
}

const char* isa_name() {
  return isas()[isa_index()].name;
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa& isa : isas()) {
    if (isa.supported) {
      names.emplace_back(isa.name);
    }
  }
  return names;
}

}  // namespace mittens::cpu
