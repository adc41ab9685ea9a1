// Where the weights of a product come from: dense elements, affine quantized integers, small floats, GGUF blocks.
// Products are written once over such sources. A source gives rows in steps of some vectors:
//   vectors                     of width weights that a step has; step: its columns
//   column(v, i)                which of the step's columns is in lane i of vector v
//   Element                     the type of x, or void where it may be any
//   scaled, offset              weights are scale * value + offset, and not value itself; both vectors of a step
//   Row row(n, begin, size, memory)   columns [begin, begin + size) of row n; begin is a multiple of the step.
//                               memory: floats for the row's scales, memory(size) of them
//   Raw read(row, s, part)      step s of a row; part: all of the step, or how many columns of it there are
//   value<v>(raw)               vector v of it; zero beyond the part if the source is not scaled
//   scale(row, s), bias(row, s) finite beyond the row's end
//   address(row, s)             of step s in memory; step_bytes: of a step there
//   stride_bytes()              from row to row; bytes(columns): of a row
#pragma once

#include "cpu/matmul/gguf.h"
#include "cpu/isa/matmul/unpack_integers.h"
#include "cpu/isa/row_op.h"
#include "cpu/matmul/quantized_matmul.h"

// Without AVX2 every format is unpacked by a function of its own, and half types are widened, before a product: such
// processors are rare, and sources of their own take long to compile.
#if defined(__x86_64__) && !defined(__AVX2__)
#define MITTENS_UNPACKS_ALL
#endif

namespace mittens::cpu::MITTENS_ISA {

// Elements as they are.
template <typename T>
struct Dense {
  const T* w;
  size_t stride;

  static constexpr int vectors = 2;
  static constexpr size_t step = unit;
  static constexpr size_t step_bytes = unit * sizeof(T);
  static constexpr bool scaled = false;
  static constexpr bool offset = false;
  using Element = T;
  using Row = const T*;
  using Raw = Floats;

  static constexpr size_t column(size_t v, size_t i) {
    return __is_same(T, bfloat16) ? 2 * i + v : v * width + i;
  }
  static size_t memory(size_t) {
    return 0;
  }
  static size_t bytes(size_t columns) {
    return columns * sizeof(T);
  }
  size_t stride_bytes() const {
    return stride * sizeof(T);
  }
  MITTENS_INLINE Row row(size_t n, size_t begin, size_t, float*) const {
    return w + n * stride + begin;
  }
  static MITTENS_INLINE const void* address(Row row, size_t s) {
    return row + s * step;
  }

  template <typename Part>
  MITTENS_INLINE Raw read(Row row, size_t s, Part part) const {
    return load(row + s * step, part);
  }

  template <int v>
  static MITTENS_INLINE Float value(const Raw& raw) {
    return v == 0 ? raw.a : raw.b;
  }
};

// q - middle, q the integer of some bits of each word from bit shift on. As the lowest bits of a float32 of the right
// exponent the integer is the fraction above a power of 2: no conversion, and no shift from every place.
template <int bits, int shift>
MITTENS_INLINE Float centered(UInt words) {
  constexpr int at = shift % 16;
  constexpr uint32_t mask = ((1u << bits) - 1) << at;
  constexpr uint32_t power = (127u + 23 - at) << 23;
  const UInt placed = shift < 16 ? words : words >> 16;
#if defined(__AVX512F__)
  const UInt sum =
      (UInt)_mm512_ternarylogic_epi32((__m512i)placed, (__m512i)(UInt{} + mask), (__m512i)(UInt{} + power), 0xea);
#else
  const UInt sum = (placed & mask) | power;
#endif
  return (Float)sum - (static_cast<float>(1 << (23 - at)) + static_cast<float>(1 << (bits - 1)));
}

// Prefetches the scales of rows to come: a row has few, so that hardware takes long to see that they follow each other.
template <typename T>
MITTENS_INLINE void prefetch_scales(const T* now) {
  constexpr size_t beyond = 512;
  __builtin_prefetch(reinterpret_cast<const char*>(now) + beyond, 0, 2);
}

// Scales of groups of columns in steps of whole words of neighbours, widened to float32 when a row is begun.
struct ScalesOfWords {
  int group_bits;  // log2 of the group's size
  size_t step;
  UInt group_of_lane;  // within a step

  MITTENS_INLINE ScalesOfWords(int group_size, size_t columns_of_word)
      : group_bits(__builtin_ctz(static_cast<unsigned>(group_size))), step(columns_of_word * width) {
    for (size_t i = 0; i < width; ++i) {
      group_of_lane[i] = static_cast<uint32_t>(i * columns_of_word >> group_bits);
    }
  }

  // Of all groups, and of some beyond, as the last step reads a whole vector of them.
  size_t floats(size_t columns) const {
    return (ceil_divide(columns >> group_bits, width) + 1) * width;
  }

  // Zeros from the last whole vector of the groups on.
  void clear_end(float* values, size_t columns) const {
    write(values + floats(columns) - width, Float{}, All());
  }

  // One for each word of step s, which has `most` groups at most. Reads no more: a load of a whole vector would cross a
  // cache line at almost every step, and wait for values that were written in two stores just now.
  template <size_t most>
  MITTENS_INLINE Float of_step(const float* values, size_t s) const {
    const float* first = values + (s * step >> group_bits);
#if defined(__AVX512F__)
    __m512 some;
    if constexpr (most <= 4) {
      some = _mm512_castps128_ps512(_mm_loadu_ps(first));
    } else if constexpr (most <= 8) {
      some = _mm512_castps256_ps512(_mm256_loadu_ps(first));
    } else {
      some = _mm512_loadu_ps(first);
    }
    return (Float)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)group_of_lane, some);
#elif defined(__AVX2__)
    __m256 some;
    if constexpr (most <= 4) {
      some = _mm256_castps128_ps256(_mm_loadu_ps(first));
    } else {
      some = _mm256_loadu_ps(first);
    }
    return (Float)_mm256_permutevar8x32_ps(some, (__m256i)group_of_lane);
#else
    Float scales = Float{} + *first;
    if (step >> group_bits > 1) {
      for (size_t i = 0; i < width; ++i) {
        scales[i] = first[group_of_lane[i]];
      }
    }
    return scales;
#endif
  }
};

// Shared by rows of packed words: vector v of a step has the value v of each of width words. A row has them as `words`,
// and the scales of its groups as `scales`.
template <int bits, int least_group>
struct PackedWords {
  const uint32_t* words;
  size_t words_stride;
  ScalesOfWords groups;

  static constexpr int vectors = 32 / bits;
  static constexpr size_t step = vectors * width, most_groups = ceil_divide(step, least_group);
  static constexpr size_t step_bytes = width * sizeof(uint32_t);
  static constexpr bool scaled = true;
  using Element = void;
  using Raw = UInt;

  MITTENS_INLINE explicit PackedWords(const QuantizedWeights& w)
      : words(w.words), words_stride(w.words_stride), groups(w.group_size, vectors) {}

  static constexpr size_t column(size_t v, size_t i) {
    return i * vectors + v;
  }
  size_t stride_bytes() const {
    return words_stride * sizeof(uint32_t);
  }
  MITTENS_INLINE const uint32_t* words_of(size_t n, size_t begin) const {
    return words + n * words_stride + begin / vectors;
  }
  template <typename Row>
  static MITTENS_INLINE const void* address(const Row& row, size_t s) {
    return row.words + s * width;
  }
  template <typename Row, typename Part>
  MITTENS_INLINE Raw read(const Row& row, size_t s, Part part) const {
    if constexpr (__is_same(Part, All)) {
      return cpu::MITTENS_ISA::read<UInt>(row.words + s * width, All());
    } else {
      return cpu::MITTENS_ISA::read<UInt>(row.words + s * width, Some{part.n / vectors});
    }
  }
  template <typename Row>
  MITTENS_INLINE Float scale(const Row& row, size_t s) const {
    return groups.template of_step<most_groups>(row.scales, s);
  }
};

// Integers with scales and biases of a type that is known when a row is begun.
template <int bits>
struct Affine : PackedWords<bits, bits == 8 ? 16 : 32> {
  using Words = PackedWords<bits, bits == 8 ? 16 : 32>;
  using Words::groups;
  const void* scales;
  const void* biases;
  Type type;
  size_t scales_stride;
  size_t biases_stride;

  static constexpr bool offset = true;
  static constexpr float middle = bits == 4 ? 8 : 128;
  static constexpr float one = 1;
  struct Row {
    const uint32_t* words;
    const float* scales;
    const float* offsets;
  };

  MITTENS_INLINE Affine(const QuantizedWeights& w, Type type)
      : Words(w),
        scales(w.scales),
        biases(w.biases),
        type(type),
        scales_stride(w.scales_stride),
        biases_stride(w.biases_stride) {}

  size_t memory(size_t columns) const {
    return 2 * groups.floats(columns);
  }
  size_t bytes(size_t columns) const {
    return columns * bits / 8 + (columns >> groups.group_bits) * (type == Type::float32 ? 8 : 4);
  }

  Row row(size_t n, size_t begin, size_t size, float* memory) const {
    const size_t first = begin >> groups.group_bits;
    float* offsets = memory + groups.floats(size);
    with_type(type, [&](auto t) {
      using T = decltype(t);
      const T* s = static_cast<const T*>(scales) + n * scales_stride + first;
      const T* b = static_cast<const T*>(biases) + n * biases_stride + first;
      each_vector(size >> groups.group_bits, [&](size_t i, auto part) MITTENS_INLINED {
        prefetch_scales(s + i);
        prefetch_scales(b + i);
        const Float scale = load_in_order(s + i, part);
        write(memory + i, scale, All());
        write(offsets + i, fma(Float{} + middle, scale, load_in_order(b + i, part)), All());
      });
    });
    groups.clear_end(memory, size);
    groups.clear_end(offsets, size);
    return {Words::words_of(n, begin), memory, offsets};
  }

  template <int v>
  static MITTENS_INLINE Float value(UInt raw) {
    return centered<bits, v * bits>(raw);
  }

  // `count` integers of each word, 2 as int16 or 4 as bytes: k, k + vectors / count, ..
  template <int k, int count, typename Words>
  static MITTENS_INLINE Words integers(Words raw) {
    constexpr uint32_t ones = count == 2 ? 0x10001 : 0x1010101;
    return (raw >> k * bits) & ((1u << bits) - 1) * ones;
  }

  MITTENS_INLINE Float bias(const Row& row, size_t s) const {
    return groups.template of_step<Words::most_groups>(row.offsets, s);
  }
};

// Floats of few bits without infinities: a sign above the exponent, and that above the fraction. Shifted to the place
// of float32's the bits below the least exponent would be subnormal, which many machines multiply slowly.
template <int exponent_bits, int fraction_bits>
MITTENS_INLINE Float widen_small(UInt size) {
  constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  const UInt placed = size << (23 - fraction_bits);
  const Float normal = (Float)(placed + (static_cast<uint32_t>(127 - bias) << 23));
  constexpr uint32_t least = static_cast<uint32_t>(128 - bias) << 23;
  const Float below = (Float)(placed | least) - __builtin_bit_cast(float, least);
  return size < (1u << fraction_bits) ? below : normal;
}

// E4M3 in the lowest byte of each word; the largest code is no number.
MITTENS_INLINE Float e4m3(UInt bits) {
  const UInt size = bits & 0x7f;
  const UInt widened = (UInt)widen_small<4, 3>(size) | (bits & 0x80) << 24;
  return (Float)(size == 0x7f ? UInt{} + 0x7fc00000 : widened);
}

// E2M1 in the lowest 4 bits of each word: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Higher bits are ignored.
MITTENS_INLINE Float e2m1(UInt bits) {
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  return (Float)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)bits, values);
#elif defined(__AVX2__)
  const __m256 sizes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  const UInt size = (UInt)_mm256_permutevar8x32_ps(sizes, (__m256i)bits);
  return (Float)(size | (bits << 28 & 0x80000000));
#else
  return (Float)((UInt)widen_small<2, 1>(bits & 7) | (bits << 28 & 0x80000000));
#endif
}

// 12 and twice the E2M1 in each byte, which has 4 bits.
MITTENS_INLINE UInt doubled_e2m1(UInt bytes) {
  constexpr Bytes16 doubled = fp4_bytes - 116;
#if defined(__AVX512F__)
  return (UInt)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, (__m128i)doubled), (__m512i)bytes);
#elif defined(__AVX2__)
  return (UInt)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)doubled), (__m256i)bytes);
#else
  return (UInt)look_up(doubled, (Bytes16)bytes);
#endif
}

// Powers of two in bytes; the largest code is no number.
MITTENS_INLINE Float e8m0(UInt bits) {
  return (Float)(bits == 0 ? UInt{} + 0x00400000 : bits == 0xff ? UInt{} + 0x7fc00000 : bits << 23);
}

// Floats of 4 or 8 bits, E2M1 or E4M3, with a scale in a byte for each group.
template <int bits>
struct SmallFloats : PackedWords<bits, 16> {
  using Words = PackedWords<bits, 16>;
  using Words::groups;
  const uint8_t* scales;
  size_t scales_stride;
  bool powers;  // scales are E8M0, and not E4M3

  static constexpr bool offset = false;
  struct Row {
    const uint32_t* words;
    const float* scales;
  };

  MITTENS_INLINE SmallFloats(const QuantizedWeights& w, Type)
      : Words(w),
        scales(static_cast<const uint8_t*>(w.scales)),
        scales_stride(w.scales_stride),
        powers(w.mode != QuantizedMode::nvfp4) {}

  size_t memory(size_t columns) const {
    return groups.floats(columns);
  }
  size_t bytes(size_t columns) const {
    return columns * bits / 8 + (columns >> groups.group_bits);
  }

  Row row(size_t n, size_t begin, size_t size, float* memory) const {
    const uint8_t* from = scales + n * scales_stride + (begin >> groups.group_bits);
    each_vector(size >> groups.group_bits, [&](size_t i, auto part) MITTENS_INLINED {
      prefetch_scales(from + i);
      uint8_t some[width] = {};
      if constexpr (!__is_same(decltype(part), All)) {
        __builtin_memcpy(some, from + i, part.n);
      }
      const UInt bytes = read_bytes(__is_same(decltype(part), All) ? from + i : some);
      write(memory + i, powers ? e8m0(bytes) : e4m3(bytes), All());
    });
    groups.clear_end(memory, size);
    return {Words::words_of(n, begin), memory};
  }

  template <int v>
  static MITTENS_INLINE Float value(UInt raw) {
    return bits == 4 ? e2m1(raw >> (v * bits)) : e4m3(raw >> (v * bits));
  }

  // Of 4 bits: the `middle` and twice the value, as integers; `one` is the value of 1.
  static constexpr float middle = 12;
  static constexpr float one = 0.5f;

  // As Affine's.
  template <int k, int count, typename Words>
  static MITTENS_INLINE Words integers(Words raw) {
    const Words bytes = doubled_e2m1((k % 2 == 0 ? raw : raw >> 4) & 0x0f0f0f0f);
    return count == 4 ? bytes : (k < 2 ? bytes : bytes >> 8) & 0x00ff00ff;
  }
};

// GGUF blocks back to back; a step is a block.
template <BlockKind kind>
struct Blocks {
  const uint8_t* blocks;
  size_t row_blocks;

  static constexpr size_t step = block_weights(kind);
  static constexpr int vectors = step / width;
  static constexpr bool scaled = true;
  static constexpr bool offset = false;
  static constexpr size_t step_bytes = block_bytes(kind);
  using Element = void;
  using Row = const uint8_t*;
  using Raw = const uint8_t*;

  static constexpr size_t column(size_t v, size_t i) {
    return v * width + i;
  }
  size_t stride_bytes() const {
    return row_blocks * step_bytes;
  }
  static size_t memory(size_t) {
    return 0;
  }
  static size_t bytes(size_t columns) {
    return columns / step * step_bytes;
  }
  static MITTENS_INLINE const void* address(Row row, size_t s) {
    return row + s * step_bytes;
  }
  MITTENS_INLINE Row row(size_t n, size_t begin, size_t, float*) const {
    return blocks + (n * row_blocks + begin / step) * step_bytes;
  }

  template <typename Part>
  MITTENS_INLINE Raw read(Row row, size_t s, Part) const {
    return row + s * step_bytes + 2;
  }

  template <int v>
  static MITTENS_INLINE Float value(Raw raw) {
    if constexpr (kind == BlockKind::q4_0) {
      constexpr int half = static_cast<int>(16 / width);  // vectors of the low nibbles
      return centered<4, v / half * 4>(read_bytes(raw + v % half * width));
    } else {
      return __builtin_convertvector(read_signed_bytes(raw + v * width), Float);
    }
  }

  MITTENS_INLINE Float scale(Row row, size_t s) const {
    uint16_t d;
    __builtin_memcpy(&d, row + s * step_bytes, 2);
    return widen(Half{} + d);
  }
};

// Calls body(s, part) for the steps of a number of columns.
template <typename Source, typename Body>
MITTENS_INLINE void each_step(size_t columns, const Body& body) {
  const size_t whole = columns / Source::step;
  for (size_t s = 0; s < whole; ++s) {
    body(s, All());
  }
  if (columns % Source::step) {
    body(whole, Some{columns % Source::step});
  }
}

// The same; and end() after every `steps` of them, and after the last ones.
template <typename Source, typename Body, typename End>
MITTENS_INLINE void each_step(size_t columns, size_t steps, const Body& body, const End& end) {
  const size_t whole = columns / Source::step;
  for (size_t s = 0; s < whole;) {
    for (const size_t last = smaller(s + steps, whole); s < last; ++s) {
      body(s, All());
    }
    end();
  }
  if (columns % Source::step) {
    body(whole, Some{columns % Source::step});
    end();
  }
}

// Calls use(v, weights) for the vectors of a step of a row.
template <typename Source, typename Part, typename Use>
MITTENS_INLINE void widen_step(const Source& source, const typename Source::Row& row, size_t s, Part part,
                               const Use& use) {
  const typename Source::Raw raw = source.read(row, s, part);
  Float scale, bias;
  if constexpr (Source::scaled) {
    scale = source.scale(row, s);
  }
  if constexpr (Source::offset) {
    bias = source.bias(row, s);
  }
  repeat<Source::vectors>([&](auto v) MITTENS_INLINED {
    const Float value = Source::template value<v.value>(raw);
    if constexpr (Source::offset) {
      use(v.value, fma(value, scale, bias));
    } else if constexpr (Source::scaled) {
      use(v.value, value * scale);
    } else {
      use(v.value, value);
    }
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
