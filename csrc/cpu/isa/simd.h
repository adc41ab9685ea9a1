// Vectors of float32 and their operations, for the instruction set this is compiled for.
//
// Sources in cpu/isa are compiled once for each instruction set, with MITTENS_ISA naming their namespace. They use no
// inline function of another namespace, the standard library's included: of the copies of such a function the linker
// keeps one, which may hold instructions that the machine at hand lacks. Arithmetic, comparison and ?: on vectors are
// the compiler's own (GCC's and clang's vector extension); the rest is written for each instruction set. There the
// masked form with a full mask stands for some unmasked intrinsics, because GCC 12 warns of those in its own header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

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

// ---- arithmetic ----

MITTENS_INLINE Float fma(Float x, Float y, Float z) {
#if defined(__AVX512F__)
  return (Float)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX2__)
  return (Float)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__ARM_NEON)
  return (Float)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
  return x * y + z;
#endif
}
MITTENS_INLINE Float fma(Float x, float y, float z) {
  return fma(x, Float{} + y, Float{} + z);
}

// Where one is NaN, the second.
MITTENS_INLINE Float maximum(Float x, Float y) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_max_ps(0xffff, (__m512)x, (__m512)y);
#else
  return x > y ? x : y;
#endif
}
MITTENS_INLINE Float minimum(Float x, Float y) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_min_ps(0xffff, (__m512)x, (__m512)y);
#else
  return x < y ? x : y;
#endif
}

// The nearest whole number, for |x| < 2^22; infinity may give NaN.
MITTENS_INLINE Float nearest(Float x) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, 0);
#elif defined(__AVX2__)
  return (Float)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__ARM_NEON)
  return (Float)vrndnq_f32((float32x4_t)x);
#else
  return (x + 0x1.8p23f) - 0x1.8p23f;
#endif
}

// p 2^n for a whole number n of at most 8 bits.
MITTENS_INLINE Float scale(Float p, Float n) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  const Int exponent = __builtin_convertvector(n, Int);
  const Int half = exponent >> 1;  // in two steps, since 2^n itself may not be a float32
  return p * (Float)((half + 127) << 23) * (Float)((exponent - half + 127) << 23);
#endif
}

// e^x within 1 ulp, subnormal results included; NaN stays NaN.
MITTENS_INLINE Float exp(Float x) {
  x = minimum(Float{} + 89.0f, maximum(Float{} - 104.0f, x));  // beyond them infinity and 0
  const Float n = nearest(x * 0x1.715476p0f);
  Float r = fma(n, Float{} - 0x1.62e4p-1f, x);  // x - n log(2), log(2) in two parts; |r| <= log(2) / 2
  r = fma(n, Float{} - 0x1.7f7d1cp-20f, r);
  Float p = fma(r, 0x1.6a2434p-10f, 0x1.1239e2p-7f);
  p = fma(p, r, Float{} + 0x1.5558f2p-5f);
  p = fma(p, r, Float{} + 0x1.555492p-3f);
  p = fma(p, r, Float{} + 0x1.fffffcp-2f);
  return scale(fma(p * r, r, r) + 1.0f, n);
}

// 2^x within 3e-6 of it, for x <= 127; NaN stays NaN. Enough for results of 2-byte types.
MITTENS_INLINE Float fast_exp2(Float x) {
  x = maximum(Float{} - 150.0f, x);
  const Float n = nearest(x);
  const Float r = x - n;
  Float p = fma(r, 0x1.3a02ccp-7f, 0x1.c9fc46p-5f);
  p = fma(p, r, Float{} + 0x1.ec0378p-3f);
  p = fma(p, r, Float{} + 0x1.62e12cp-1f);
  return scale(fma(p, r, Float{} + 1.0f), n);
}

MITTENS_INLINE float exp(float x) {
  return exp(Float{} + x)[0];
}

MITTENS_INLINE Floats operator+(Floats x, Floats y) {
  return {x.a + y.a, x.b + y.b};
}
MITTENS_INLINE Floats operator-(Floats x, Floats y) {
  return {x.a - y.a, x.b - y.b};
}
MITTENS_INLINE Floats operator*(Floats x, Floats y) {
  return {x.a * y.a, x.b * y.b};
}
MITTENS_INLINE Floats operator+(Floats x, float y) {
  return {x.a + y, x.b + y};
}
MITTENS_INLINE Floats operator-(Floats x, float y) {
  return {x.a - y, x.b - y};
}
MITTENS_INLINE Floats operator*(Floats x, float y) {
  return {x.a * y, x.b * y};
}
MITTENS_INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)};
}
MITTENS_INLINE Floats maximum(Floats x, Floats y) {
  return {maximum(x.a, y.a), maximum(x.b, y.b)};
}

// exp(x - shift), for x <= shift, as precise as T needs.
template <typename T>
MITTENS_INLINE Floats exp_below(Floats x, float shift) {
  if constexpr (__is_same(T, float)) {
    return {exp(x.a - shift), exp(x.b - shift)};
  } else {
    constexpr float log2_e = 0x1.715476p0f;
    // Not as one fma: shift * log2_e may be infinite where x - shift is not.
    return {fast_exp2((x.a - shift) * log2_e), fast_exp2((x.b - shift) * log2_e)};
  }
}

// One value from all elements, by halves.
template <typename Combine>
MITTENS_INLINE float reduce(Float v, const Combine& combine) {
#if defined(__x86_64__)
#if defined(__AVX512F__)
  __m256 halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
  const __m256 half = combine(halves[0], halves[1]);
  const __m128 quarter = combine(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  const __m128 quarter = combine(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  const __m128 quarter = (__m128)v;
#endif
  const __m128 pair = combine(quarter, _mm_movehl_ps(quarter, quarter));
  return combine(pair[0], pair[1]);
#else
  return combine(combine(v[0], v[2]), combine(v[1], v[3]));
#endif
}

MITTENS_INLINE float total(Float v) {
  return reduce(v, [](auto x, auto y) MITTENS_INLINED { return x + y; });
}

// ---- loops ----

// A number that a lambda can use as a template argument.
template <int i>
struct Index {
  static constexpr int value = i;
};

// Calls body(Index<0>()) to body(Index<n - 1>()), unrolled.
template <typename Body, int... i>
MITTENS_INLINE void repeat(std::integer_sequence<int, i...>, const Body& body) {
  (body(Index<i>()), ...);
}
template <int n, typename Body>
MITTENS_INLINE void repeat(const Body& body) {
  repeat(std::make_integer_sequence<int, n>(), body);
}

// Accumulators of a loop: neighbouring units go to different ones, so that they do not wait for each other.
struct Sums {
  Floats v[2] = {};
  Float ended = {};  // of chains before
  MITTENS_INLINE void add(int k, Floats x) {
    v[k] = v[k] + x;
  }
  MITTENS_INLINE void add_product(int k, Floats x, Floats y) {
    v[k] = fma(x, y, v[k]);
  }
  MITTENS_INLINE void end_chains() {
    ended = ended + ((v[0].a + v[0].b) + (v[1].a + v[1].b));
    v[0] = v[1] = Floats();
  }
  MITTENS_INLINE float total() const {
    return reduce(ended + ((v[0].a + v[0].b) + (v[1].a + v[1].b)),
                  [](auto x, auto y) MITTENS_INLINED { return x + y; });
  }
};

struct Maxima {
  Floats v[2] = {{Float{} - infinity, Float{} - infinity}, {Float{} - infinity, Float{} - infinity}};
  MITTENS_INLINE void add(int k, Floats x) {
    v[k] = maximum(x, v[k]);
  }
  MITTENS_INLINE float total() const {
    const Floats all = maximum(v[0], v[1]);
    return reduce(maximum(all.a, all.b), [](auto x, auto y) MITTENS_INLINED { return x > y ? x : y; });
  }
};

// Calls body(index, part) for the vectors of n elements.
template <typename Body>
MITTENS_INLINE void each_vector(size_t n, const Body& body) {
  size_t i = 0;
  for (; i + width <= n; i += width) {
    body(i, All());
  }
  if (i < n) {
    body(i, Some{n - i});
  }
}

// Calls body(index, part, k) for the units of n elements; k names one of two accumulators.
template <typename Body>
MITTENS_INLINE void each_unit(size_t n, const Body& body) {
  size_t i = 0;
  for (; i + 2 * unit <= n; i += 2 * unit) {
    body(i, All(), 0);
    body(i + unit, All(), 1);
  }
  if (i + unit <= n) {
    body(i, All(), 0);
    i += unit;
  }
  if (i < n) {
    body(i, Some{n - i}, 1);
  }
}

// As each_unit, where body adds to each of `sums` once: no lane adds more than 16 numbers in a chain, whose roundings
// may all go the same way.
template <typename Body, typename... S>
MITTENS_INLINE void each_unit_into(size_t n, const Body& body, S&... sums) {
  constexpr size_t part = 16 * 2 * unit;
  size_t begin = 0;
  do {
    const size_t left = n - begin;
    each_unit(left < part ? left : part, [&](size_t i, auto tail, int k) MITTENS_INLINED { body(begin + i, tail, k); });
    (sums.end_chains(), ...);
    begin += part;
  } while (begin < n);
}

}  // namespace mittens::cpu::MITTENS_ISA
