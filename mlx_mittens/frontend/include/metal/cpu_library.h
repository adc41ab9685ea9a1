// Support code of a kernel library, which is linked against nothing: the compiler's callbacks,
// block copies, conversions, and the one function that the simulator looks up. After the entries.
#pragma once

#undef device
#undef threadgroup
#undef constant
#undef thread

#define MITTENS_HIDDEN __attribute__((no_sanitize("coverage"), visibility("hidden"), noinline))

extern "C" {

MITTENS_HIDDEN void __sanitizer_cov_trace_pc_guard(unsigned*) {
  if (--mittens::runtime->steps <= mittens::runtime->pause) {
    mittens::runtime->paused(__builtin_return_address(0));
  }
}
MITTENS_HIDDEN void __sanitizer_cov_trace_pc_guard_init(unsigned*, unsigned*) {}

MITTENS_HIDDEN void __ubsan_handle_out_of_bounds_minimal() {
  mittens::runtime->outside_array(__builtin_return_address(0));
}

#define MITTENS_TRACE(bytes)                                              \
  MITTENS_HIDDEN void __sanitizer_cov_load##bytes(void* address) {        \
    mittens::runtime->load(address, bytes, __builtin_return_address(0));  \
  }                                                                       \
  MITTENS_HIDDEN void __sanitizer_cov_store##bytes(void* address) {       \
    mittens::runtime->store(address, bytes, __builtin_return_address(0)); \
  }
MITTENS_TRACE(1)
MITTENS_TRACE(2)
MITTENS_TRACE(4)
MITTENS_TRACE(8)
MITTENS_TRACE(16)
#undef MITTENS_TRACE

// Of a vector the components of a mask, as vector_lanes.py finds them; where it lies wrong, whole.
#define MITTENS_TRACE_LANES(kind, stores)                                                                        \
  MITTENS_HIDDEN __attribute__((used)) void mittens_##kind##_mask(char* address, unsigned align, unsigned count, \
                                                                  unsigned bytes, unsigned mask) {               \
    if ((unsigned long)address % align) {                                                                        \
      mittens::runtime->kind(address, (count + count % 2) * bytes, __builtin_return_address(0));                 \
    }                                                                                                            \
    mittens::runtime->lanes(address, bytes, mask, stores, __builtin_return_address(0));                          \
  }
MITTENS_TRACE_LANES(load, false)
MITTENS_TRACE_LANES(store, true)
#undef MITTENS_TRACE_LANES

MITTENS_HIDDEN void* memcpy(void* to, const void* from, size_t bytes) {
#ifdef MITTENS_WATCHED
  mittens::runtime->load(from, bytes, __builtin_return_address(0));
  mittens::runtime->store(to, bytes, __builtin_return_address(0));
#endif
  for (size_t i = 0; i < bytes; ++i) {
    static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
  }
  return to;
}
MITTENS_HIDDEN void* memmove(void* to, const void* from, size_t bytes) {
#ifdef MITTENS_WATCHED
  mittens::runtime->load(from, bytes, __builtin_return_address(0));
  mittens::runtime->store(to, bytes, __builtin_return_address(0));
#endif
  for (size_t i = 0; i < bytes; ++i) {
    const size_t at = to < from ? i : bytes - 1 - i;
    static_cast<char*>(to)[at] = static_cast<const char*>(from)[at];
  }
  return to;
}
MITTENS_HIDDEN void* memset(void* to, int value, size_t bytes) {
#ifdef MITTENS_WATCHED
  mittens::runtime->store(to, bytes, __builtin_return_address(0));
#endif
  for (size_t i = 0; i < bytes; ++i) {
    static_cast<char*>(to)[i] = static_cast<char>(value);
  }
  return to;
}

// Conversions that a CPU without instructions for them asks of its compiler's run-time library. Ties go to even.
MITTENS_HIDDEN bfloat __truncsfbf2(float x) {
  unsigned bits = __builtin_bit_cast(unsigned, x);
  bits = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(bfloat, static_cast<ushort>(bits >> 16));
}
MITTENS_HIDDEN float __extendhfsf2(half x) {
  const unsigned bits = __builtin_bit_cast(ushort, x);
  const unsigned sign = (bits & 0x8000) << 16;
  const unsigned exponent = bits >> 10 & 31;
  const unsigned fraction = bits & 0x3ff;
  const float small = static_cast<float>(fraction) * 0x1p-24f;
  const unsigned large = (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | fraction << 13;
  return __builtin_bit_cast(float, sign | (exponent == 0 ? __builtin_bit_cast(unsigned, small) : large));
}
MITTENS_HIDDEN half __truncsfhf2(float x) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  const unsigned sign = bits >> 16 & 0x8000;
  const unsigned magnitude = bits & 0x7fffffff;
  unsigned result;
  if (magnitude > 0x7f800000) {
    result = 0x7e00;
  } else if (magnitude >= 0x477ff000) {
    result = 0x7c00;
  } else if (magnitude < 0x38800000) {
    // Adding 1/2 leaves the multiples of 2^-24 in the low bits, rounded as the addition rounds.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    result = __builtin_bit_cast(unsigned, shifted) - 0x3f000000;
  } else {
    result = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return __builtin_bit_cast(half, static_cast<ushort>(sign | result));
}

}  // extern "C"

#define MITTENS_LIBRARY(kernels, kernel_count)                                                                       \
  extern "C" __attribute__((no_sanitize("coverage"), visibility("default"))) const mittens::abi::Library*            \
  mittens_library(mittens::abi::Runtime* runtime) {                                                                  \
    mittens::runtime = runtime;                                                                                      \
    static const mittens::abi::Library library = {mittens::abi::version, MITTENS_IS_WATCHED, kernels, kernel_count}; \
    return &library;                                                                                                 \
  }
#ifdef MITTENS_WATCHED
#define MITTENS_IS_WATCHED true
#else
#define MITTENS_IS_WATCHED false
#endif
