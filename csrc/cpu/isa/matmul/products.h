// Shared by products by rows and by columns of the weights: activations in float32, and the way back to the type.
#pragma once

#include <limits>

#include "cpu/isa/matmul/weights.h"

namespace mittens::cpu::MITTENS_ISA {

// Rows of x that are taken at once at most: in float32 they are expected in the last cache.
constexpr size_t batch_rows = 256;

// Rows of x in a register tile.
constexpr int tile_rows = 6;

#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr bool many_registers = true;
#else
constexpr bool many_registers = false;
#endif

MITTENS_INLINE size_t larger(size_t a, size_t b) {
  return a > b ? a : b;
}

// Which numbers of rows of half types are integers: up to `most_rows` along the weights as they are read (0: none), and
// from `least_panel_rows` in panels (0: never). Floats take the numbers between: their rows share the work on weights
// better.
struct IntegerRows {
  size_t most_rows;
  size_t least_panel_rows;
};

// How the weights of a format become integers.
enum class Integers { packed, small_floats, unpacked, unpacked_beside_floats };

// With AMX few rows are multiplied as in AVX-512 VNNI, and tiles take over at fewer rows than panels do.
// small_floats: of 4 bits, by a table. unpacked_beside_floats: floats of these formats are multiplied as they are read.
constexpr IntegerRows integer_rows(Integers integers) {
#if defined(__AMX_INT8__)
  constexpr IntegerRows rows[] = {{7, 8}, {15, 16}, {7, 8}, {0, 8}};
#elif defined(__AVX512VNNI__)
  constexpr IntegerRows rows[] = {{8, 24}, {23, 24}, {8, 9}, {0, 24}};
#elif defined(__AVX512F__)
  constexpr IntegerRows rows[] = {{2, 0}, {8, 0}, {8, 0}, {0, 0}};
#elif defined(__AVX2__)
  constexpr IntegerRows rows[] = {{2, 12}, {4, 5}, {2, 3}, {0, 12}};
#elif defined(__x86_64__)
  constexpr IntegerRows rows[] = {{2, 0}, {0, 0}, {2, 0}, {2, 0}};
#elif defined(__ARM_FEATURE_DOTPROD)
  constexpr IntegerRows rows[] = {{2, 12}, {4, 12}, {0, 12}, {0, 12}};
#elif defined(__ARM_NEON)
  constexpr IntegerRows rows[] = {{2, 0}, {2, 0}, {0, 0}, {0, 0}};
#else
  constexpr IntegerRows rows[] = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
#endif
  return rows[static_cast<size_t>(integers)];
}

// Up to which int8 along the weights is faster than panels of int8.
#if defined(__AMX_INT8__)
constexpr size_t most_byte_rows = 7;
#else
constexpr size_t most_byte_rows = 8;
#endif

constexpr int tile_outputs = many_registers ? 4 : 2;
constexpr size_t product_piece_bytes = 64 << 10;  // of weights, for one thread at a time

// Calls f(begin, size) for n in as few parts of at most most as there can be, all of about the same size.
template <typename F>
MITTENS_INLINE void each_part(size_t n, size_t most, const F& f) {
  size_t begin = 0;
  for (size_t parts = ceil_divide(n, most); parts > 0; --parts) {
    const size_t size = ceil_divide(n - begin, parts);
    f(begin, size);
    begin += size;
  }
}

// The smallest of the parts that each_part makes of n, least <= n <= greatest.
constexpr int smallest_part(size_t least, size_t greatest, size_t most) {
  size_t smallest = most;
  for (size_t n = least; n <= greatest; ++n) {
    const size_t part = n / ceil_divide(n, most);
    smallest = part < smallest ? part : smallest;
  }
  return static_cast<int>(smallest);
}

// Calls f(Index<n>()), least <= n <= most.
template <int least, int most, typename F>
MITTENS_INLINE void with_index(size_t n, const F& f) {
  if constexpr (most > least) {
    if (n < most) {
      return with_index<least, most - 1>(n, f);
    }
  }
  f(Index<most>());
}

// n elements, in their order.
template <typename T>
MITTENS_INLINE void widen_row(const T* x, float* y, size_t n) {
  each_vector(n, [&](size_t i, auto part) MITTENS_INLINED { write(y + i, load_in_order(x + i, part), part); });
}

// y = round(sums + bias), n of them.
template <typename T>
MITTENS_INLINE void round_row(T* y, const float* sums, const T* bias, size_t n) {
  each_vector(n, [&](size_t i, auto part) MITTENS_INLINED {
    Float v = read<Float>(sums + i, part);
    if (bias) {
      v = v + load_in_order(bias + i, part);
    }
    store_in_order(y + i, v, part);
  });
}

// y = round(activation(gates) * ups), n of them.
template <typename T>
MITTENS_INLINE void gate_row(T* y, const float* gates, const float* ups, const Activation& activation, size_t n) {
  each_vector(n, [&](size_t i, auto part) MITTENS_INLINED {
    const Float g = read<Float>(gates + i, part);
    const Float square = g * g, most = Float{} + std::numeric_limits<float>::max();
    const Float slope = fma(square < most ? square : most, activation.beta, activation.alpha);
    store_in_order(y + i, g / (exp(-g * slope) + 1.0f) * read<Float>(ups + i, part), part);
  });
}

// The arguments of products with weights, and the use of their sums. Loops over the weights are compiled without the
// element type, which is known here alone.
struct ProductCall {
  Type type;
  const Activation* activation;  // of pairs of products, or nullptr
  const void* x;  // [matrices, rows, columns]
  const void* bias;  // [outputs] or nullptr
  void* y;  // [matrices, rows, outputs]
  size_t matrices;
  size_t rows;
  size_t columns;
  size_t outputs;
  bool exact;  // sums of up to most_exact_rows do not depend on how many there are

  // Calls f(p), p a pointer to a row's elements. Rows of dense weights are of the weights' type.
  template <typename Source, typename F>
  MITTENS_INLINE void with_x(size_t row, const F& f) const {
    auto use = [&](auto t) MITTENS_INLINED { f(static_cast<const decltype(t)*>(x) + row * columns); };
    if constexpr (__is_same(typename Source::Element, void)) {
      with_type(type, use);
    } else {
      use(typename Source::Element());
    }
  }

  // Outputs [n, n + size) of a row. ups: sums of the second of each pair.
  void finish(size_t row, size_t n, size_t size, const float* sums, const float* ups) const {
    with_type(type, [&](auto t) {
      using T = decltype(t);
      T* to = static_cast<T*>(y) + row * outputs + n;
      if (activation) {
        gate_row(to, sums, ups, *activation, size);
      } else {
        round_row(to, sums, bias ? static_cast<const T*>(bias) + n : nullptr, size);
      }
    });
  }
};

// How many outputs one thread takes at a time where weights are read as they are, of `count` matrices.
MITTENS_INLINE size_t outputs_of_piece(size_t row_bytes, size_t count, size_t outputs) {
  const size_t block = smaller(rounded_up(ceil_divide(product_piece_bytes, larger(row_bytes, 1)), tile_outputs), 256);
  if (count * ceil_divide(outputs, block) >= 2 * threads()) {
    return block;
  }
  return rounded_up(ceil_divide(outputs, ceil_divide(2 * threads(), count)), tile_outputs);
}

// Integers are multiplied before their scale. A row with an element of at least `large` is multiplied by `reduction`
// first, its sums by the inverse, so that neither these products nor sums that cancel overflow. A power of two: the
// others of the row lose nothing that counts.
constexpr float large = 0x1p96f;
constexpr float reduction = 0x1p-32f;

// At most a step of x in the order of a source's weights, zeros behind the last.
template <typename Source, typename T>
MITTENS_INLINE void arrange_step(const T* x, size_t size, Float (&values)[Source::vectors]) {
  alignas(64) float natural[Source::step];
  widen_row(x, natural, size);
  for (size_t i = size; i < Source::step; ++i) {
    natural[i] = 0;
  }
  for (size_t v = 0; v < Source::vectors; ++v) {
    for (size_t i = 0; i < width; ++i) {
      values[v][i] = natural[Source::column(v, i)];
    }
  }
}

// A row of x in the order of a source's weights, in whole steps, zeros at the end. With sums each step has one more
// vector, the sum of the others.
template <typename Source, bool sums>
struct Arranged {
  static constexpr size_t step = (Source::vectors + sums) * width;

  static size_t size(size_t columns) {
    return ceil_divide(columns, Source::step) * step;
  }

  // Whether the row is multiplied by `reduction`: where it is large, and a scale comes after the integers.
  template <typename T>
  static bool fill(const T* x, size_t columns, float* y) {
    const float most = fill_by<false>(x, columns, y);
    if (!Source::scaled || __is_same(T, float16) || !(most >= large)) {
      return false;
    }
    fill_by<true>(x, columns, y);
    return true;
  }

 private:
  // Returns the largest absolute value.
  template <bool reduces, typename T>
  static float fill_by(const T* x, size_t columns, float* y) {
    Float most = {};
    for (size_t begin = 0; begin < columns; begin += Source::step, y += step) {
      Float arranged[Source::vectors];
      arrange_step<Source>(x + begin, smaller(Source::step, columns - begin), arranged);
      Float sum = {};
      for (size_t v = 0; v < Source::vectors; ++v) {
        const Float values = reduces ? arranged[v] * reduction : arranged[v];
        most = maximum(maximum(values, -values), most);
        write(y + v * width, values, All());
        sum = sum + values;
      }
      if (sums) {
        write(y + Source::vectors * width, sum, All());
      }
    }
    return reduce(most, [](auto x, auto y) MITTENS_INLINED { return x > y ? x : y; });
  }
};

// Each y[n] = total(v[n]) + (add ? y[n] : 0).
template <int n>
MITTENS_INLINE void write_totals(float* y, const Float (&v)[n], bool add) {
#if defined(__AVX512F__)
  if constexpr (n == 4) {
    auto halves = [](Float a, Float b) MITTENS_INLINED {
      return (Float)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)a, (__m512)b, 0x44) +
             (Float)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)a, (__m512)b, 0xee);
    };
    const Float ab = halves(v[0], v[1]), cd = halves(v[2], v[3]);
    const Float quarters = (Float)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)ab, (__m512)cd, 0x88) +
                           (Float)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)ab, (__m512)cd, 0xdd);
    const Float pairs = quarters + (Float)_mm512_maskz_permute_ps(0xffff, (__m512)quarters, 0x4e);
    const Float all = pairs + (Float)_mm512_maskz_permute_ps(0xffff, (__m512)pairs, 0xb1);
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    Float four = (Float)_mm512_maskz_permutexvar_ps(0xf, first, (__m512)all);
    if (add) {
      four = four + read<Float>(y, Some{n});
    }
    write(y, four, Some{n});
    return;
  }
#endif
  for (int i = 0; i < n; ++i) {
    y[i] = total(v[i]) + (add ? y[i] : 0);
  }
}

// Rows n, n + 1, .. of a source, and the last of `size` rows again in the place of rows beyond.
template <typename Source, int outputs>
MITTENS_INLINE void begin_rows(const Source& source, size_t n, size_t size, size_t columns, float* memory,
                               typename Source::Row (&rows)[outputs]) {
  const size_t scales = source.memory(columns);
  repeat<outputs>([&](auto i) MITTENS_INLINED {
    const size_t row = n + smaller(i.value, size - 1);
    rows[i.value] = source.row(row, 0, columns, memory + i.value * scales);
  });
}

// The first `size` totals.
template <int n>
MITTENS_INLINE void write_some_totals(float* y, const Float (&v)[n], size_t size) {
  if (size >= n) {
    write_totals(y, v, false);
    return;
  }
  float totals[n];
  write_totals(totals, v, false);
  for (size_t i = 0; i < size; ++i) {
    y[i] = totals[i];
  }
}

// Prefetches the rows behind some that are read side by side, in the order of memory: hardware prefetchers follow that
// order too, not steps from row to row.
template <typename Source>
class Ahead {
 public:
  MITTENS_INLINE Ahead(const Source& source, const typename Source::Row& first, size_t rows)
      : from_(static_cast<const char*>(Source::address(first, 0)) + rows * source.stride_bytes() + beyond) {}

  // step: counted along all rows.
  MITTENS_INLINE void prefetch(size_t step) const {
    __builtin_prefetch(from_ + step * Source::step_bytes, 0, 2);
  }

 private:
  static constexpr size_t beyond = 4096;  // a page of most machines
  const char* from_;
};

}  // namespace mittens::cpu::MITTENS_ISA
