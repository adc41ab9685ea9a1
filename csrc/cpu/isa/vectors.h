// Vectors of float32, for the instruction set this is compiled for: their loads, stores and conversions.
//
// Sources in cpu/isa are compiled once for each instruction set, with MITTENS_ISA naming their namespace. They use no
// inline function of another namespace, the standard library's included: of the copies of such a function the linker
// keeps one, which may hold instructions that the machine at hand lacks. Arithmetic, comparison and ?: on vectors are
// the compiler's own (GCC's and clang's vector extension); the rest is written for each instruction set. There the
// masked form with a full mask stands for some unmasked intrinsics, because GCC 12 warns of those in its own header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define MITTENS_INLINE __attribute__((always_inline)) inline
// Stands between a lambda's parameters and its body.
#define MITTENS_INLINED __attribute__((always_inline))

namespace mittens::cpu::MITTENS_ISA {

#if defined(__AVX512F__)
constexpr size_t width = 16;
#elif defined(__AVX2__)
constexpr size_t width = 8;
#else
constexpr size_t width = 4;
#endif

typedef float Float __attribute__((vector_size(4 * width)));
typedef int32_t Int __attribute__((vector_size(4 * width)));
typedef uint32_t UInt __attribute__((vector_size(4 * width)));
typedef uint16_t Half __attribute__((vector_size(2 * width)));  // width elements of 2 bytes
typedef uint16_t Halves __attribute__((vector_size(4 * width)));  // twice as many
typedef uint8_t Bytes __attribute__((vector_size(width)));
typedef int8_t SignedBytes __attribute__((vector_size(width)));

// The result of loads and operand of stores: two registers, since one of bfloat16 widens to two without crossing lanes
// if the even elements go to a and the odd ones to b. The other types have their first half in a. So which element is
// where depends on the type alone, and arrays of one type can be combined element by element.
struct Floats {
  Float a, b;
};

constexpr size_t unit = 2 * width;

constexpr float infinity = __builtin_inff();

// How many elements of a unit a load or a store touches: all, or the first n.
struct All {
  MITTENS_INLINE All first() const {
    return {};
  }
  MITTENS_INLINE All second() const {
    return {};
  }
};
struct Some {
  size_t n;
  MITTENS_INLINE Some first() const {
    return {n < width ? n : width};
  }
  MITTENS_INLINE Some second() const {
    return {n < width ? 0 : n - width};
  }
};

// ---- memory: raw vectors ----

template <typename Raw>
MITTENS_INLINE Raw read(const void* p, All) {
  Raw raw;
  __builtin_memcpy(&raw, p, sizeof(raw));
  return raw;
}

template <typename Raw>
MITTENS_INLINE void write(void* p, Raw raw, All) {
  __builtin_memcpy(p, &raw, sizeof(raw));
}

// Elements beyond the first n are zero.
template <typename Raw>
MITTENS_INLINE Raw read(const void* p, Some some) {
#if defined(__AVX512F__)
  const uint32_t mask = static_cast<uint32_t>((1ull << some.n) - 1);
  if constexpr (sizeof(Raw{}[0]) == 4) {
    return (Raw)_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), p);
  } else if constexpr (sizeof(Raw) == 64) {
    return (Raw)_mm512_maskz_loadu_epi16(mask, p);
  } else {
    return (Raw)_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p);
  }
#else
  Raw raw = {};
  __builtin_memcpy(&raw, p, some.n * sizeof(raw[0]));
  return raw;
#endif
}

template <typename Raw>
MITTENS_INLINE void write(void* p, Raw raw, Some some) {
#if defined(__AVX512F__)
  const uint32_t mask = static_cast<uint32_t>((1ull << some.n) - 1);
  if constexpr (sizeof(raw[0]) == 4) {
    _mm512_mask_storeu_epi32(p, static_cast<__mmask16>(mask), (__m512i)raw);
  } else if constexpr (sizeof(Raw) == 64) {
    _mm512_mask_storeu_epi16(p, mask, (__m512i)raw);
  } else {
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(mask), (__m256i)raw);
  }
#else
  __builtin_memcpy(p, &raw, some.n * sizeof(raw[0]));
#endif
}

// Past the caches, for outputs larger than they are; p is a multiple of the vector's size. publish() comes after.
template <typename Raw>
MITTENS_INLINE void write_through(void* p, Raw raw) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)raw);
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)raw);
#elif defined(__x86_64__)
  _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)raw);
#else
  write(p, raw, All());
#endif
}

// Makes stores of write_through visible to other threads before any later store.
MITTENS_INLINE void publish() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Brings the unit at p into the first cache; p may lie outside of its array.
template <typename T>
MITTENS_INLINE void prefetch(const T* p) {
  __builtin_prefetch(p);
  if constexpr (unit * sizeof(T) > 64) {
    __builtin_prefetch(p + unit / 2);
  }
}

// ---- integers ----

// One vector of bytes; GCC 12 takes the generic conversion apart.
MITTENS_INLINE UInt read_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (UInt)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (UInt)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(read<Bytes>(p, All()), UInt);
#endif
}

MITTENS_INLINE Int read_signed_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Int)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Int)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector((SignedBytes)read<Bytes>(p, All()), Int);
#endif
}

MITTENS_INLINE UInt widen_integers(Half raw) {
#if defined(__AVX512F__)
  return (UInt)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)raw);
#elif defined(__AVX2__)
  return (UInt)_mm256_cvtepu16_epi32((__m128i)raw);
#else
  return __builtin_convertvector(raw, UInt);
#endif
}

// ---- float16 ----

MITTENS_INLINE Float widen(Half raw) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_cvtph_ps(0xffff, (__m256i)raw);
#elif defined(__AVX2__)
  return (Float)_mm256_cvtph_ps((__m128i)raw);
#elif defined(__ARM_NEON)
  return (Float)vcvt_f32_f16((float16x4_t)raw);
#else
  const UInt bits = __builtin_convertvector(raw, UInt);
  const UInt magnitude = bits & 0x7fff;
  const UInt finite = (UInt)((Float)(magnitude << 13) * 0x1p112f);  // exact, subnormals too
  return (Float)((bits & 0x8000) << 16 | (magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000 : finite));
#endif
}

// To the nearest, ties to even; NaN stays NaN.
MITTENS_INLINE Half narrow(Float v) {
#if defined(__AVX512F__)
  return (Half)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Half)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__ARM_NEON)
  return (Half)vcvt_f16_f32((float32x4_t)v);
#else
  const UInt bits = (UInt)v;
  const UInt magnitude = bits & 0x7fffffff;
  const UInt normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const UInt subnormal = (UInt)((Float)magnitude + 0.5f) - (UInt)(Float{} + 0.5f);  // the addition rounds to 2^-24
  const UInt large = magnitude > 0x7f800000 ? UInt{} + 0x7e00 : UInt{} + 0x7c00;
  const UInt rounded = magnitude < (113u << 23) ? subnormal : magnitude < 0x477ff000 ? normal : large;
  return __builtin_convertvector(rounded | (bits >> 16 & 0x8000), Half);
#endif
}

MITTENS_INLINE Halves join(Half a, Half b) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512((__m256i)a), (__m256i)b, 1);
#elif defined(__AVX2__)
  return (Halves)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
#else
  Halves joined;
  __builtin_memcpy(&joined, &a, sizeof(a));
  __builtin_memcpy(reinterpret_cast<char*>(&joined) + sizeof(a), &b, sizeof(b));
  return joined;
#endif
}

// ---- rounding in place ----

// Rounds to the bits above, to the nearest, ties to even; the lower ones are left undefined. A NaN stays one if
// arithmetic on 2-byte types made it, as in the kernels: it is quiet, and its lower bits are zero.
template <int bits>
MITTENS_INLINE UInt round_above(Float v) {
  const UInt u = (UInt)v;
  const UInt below = u + ((1u << (bits - 1)) - 1);
#if defined(__AVX512F__)
  const __mmask16 odd = _mm512_test_epi32_mask((__m512i)u, _mm512_set1_epi32(1 << bits));
  return (UInt)_mm512_mask_add_epi32((__m512i)below, odd, (__m512i)below, _mm512_set1_epi32(1));
#else
  return below + (u >> bits & 1);
#endif
}

template <int bits>
MITTENS_INLINE Float round_bits(Float v) {
  return (Float)(round_above<bits>(v) & ~((1u << bits) - 1));
}

// ---- loads, stores, rounding to a type ----

// Elements beyond the part are zero.
template <typename T, typename Part = All>
MITTENS_INLINE Floats load(const T* p, Part part = {}) {
  if constexpr (__is_same(T, float)) {
    return {read<Float>(p, part.first()), read<Float>(p + width, part.second())};
  } else if constexpr (__is_same(T, float16)) {
    return {widen(read<Half>(p, part.first())), widen(read<Half>(p + width, part.second()))};
  } else {
    const UInt both = (UInt)read<Halves>(p, part);
    return {(Float)(both << 16), (Float)(both & 0xffff0000)};
  }
}

// 2-byte types.
template <typename T>
MITTENS_INLINE Halves narrow(Floats v) {
  if constexpr (__is_same(T, float16)) {
    return join(narrow(v.a), narrow(v.b));
  } else {
    return (Halves)(round_above<16>(v.a) >> 16 | (round_above<16>(v.b) & 0xffff0000));
  }
}

// through: past the caches, if the unit is whole. p is then aligned(p).
template <typename T, typename Part = All>
MITTENS_INLINE void store(T* p, Floats v, Part part = {}, bool through = false) {
  constexpr bool whole = __is_same(Part, All);
  if constexpr (__is_same(T, float)) {
    if (whole && through) {
      write_through(p, v.a);
      write_through(p + width, v.b);
    } else {
      write(p, v.a, part.first());
      write(p + width, v.b, part.second());
    }
  } else {
    if (whole && through) {
      write_through(p, narrow<T>(v));
    } else {
      write(p, narrow<T>(v), part);
    }
  }
}

// One vector of elements in their order in memory, whatever the type.
template <typename T, typename Part = All>
MITTENS_INLINE Float load_in_order(const T* p, Part part = {}) {
  if constexpr (__is_same(T, float)) {
    return read<Float>(p, part);
  } else if constexpr (__is_same(T, float16)) {
    return widen(read<Half>(p, part));
  } else {
    return (Float)(widen_integers(read<Half>(p, part)) << 16);
  }
}

// Any NaN stays one.
template <typename T, typename Part = All>
MITTENS_INLINE void store_in_order(T* p, Float v, Part part = {}) {
  if constexpr (__is_same(T, float)) {
    write(p, v, part);
  } else if constexpr (__is_same(T, float16)) {
    write(p, narrow(v), part);
  } else {
    const UInt rounded = v == v ? round_above<16>(v) : UInt{} + 0x7fc00000;
    write(p, __builtin_convertvector(rounded >> 16, Half), part);
  }
}

template <typename T>
MITTENS_INLINE bool aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Float) == 0;
}

// v rounded to T, as float32.
template <typename T>
MITTENS_INLINE Floats round(Floats v) {
  if constexpr (__is_same(T, float)) {
    return v;
  } else if constexpr (__is_same(T, float16)) {
    return {widen(narrow(v.a)), widen(narrow(v.b))};
  } else {
    return {round_bits<16>(v.a), round_bits<16>(v.b)};
  }
}

// v rounded to the precision of T, for further computing: faster, and values that float16 would make
// subnormal or infinite are kept.
template <typename T>
MITTENS_INLINE Floats round_precision(Floats v) {
  if constexpr (__is_same(T, float16)) {
    return {round_bits<13>(v.a), round_bits<13>(v.b)};
  } else {
    return round<T>(v);
  }
}

// Elements beyond the part of a unit of type T replaced.
template <typename T>
MITTENS_INLINE Floats filled(Floats v, All, float) {
  return v;
}
template <typename T>
MITTENS_INLINE Floats filled(Floats v, Some some, float fill) {
  Int lane;
  for (size_t i = 0; i < width; ++i) {
    lane[i] = static_cast<int32_t>(i);
  }
  constexpr bool interleaved = __is_same(T, bfloat16);
  const Int a = interleaved ? 2 * lane : lane;
  const Int b = interleaved ? a + 1 : a + static_cast<int32_t>(width);
  const int32_t n = static_cast<int32_t>(some.n);
  return {a < n ? v.a : Float{} + fill, b < n ? v.b : Float{} + fill};
}

// A value that is used several times: in a register, where GCC would read it from memory for each use.
MITTENS_INLINE Float held(Float v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__ARM_NEON)
  asm("" : "+w"(v));
#endif
  return v;
}

}  // namespace mittens::cpu::MITTENS_ISA
