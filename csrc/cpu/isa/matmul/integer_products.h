// y = x w^T with integer multiplications: x becomes int16 with a scale for the columns of each word of weights, so that
// sums in int32 are exact, and an outlier costs the precision of its neighbours in a word alone.
#pragma once

#include "cpu/isa/matmul/products.h"

namespace mittens::cpu::MITTENS_ISA {

// Rows up to which integers are faster than float32, which shares the work on weights; 0: never.
#if defined(__AVX512VNNI__)
constexpr size_t most_integer_rows = 8;
#elif defined(__x86_64__)
constexpr size_t most_integer_rows = 2;
#else
constexpr size_t most_integer_rows = 0;
#endif

constexpr float largest_int16 = 32767;

// v, of at most 2^22, rounded to the nearest.
MITTENS_INLINE Int round_to_integers(Float v) {
#if defined(__AVX512F__)
  return (Int)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
#elif defined(__AVX2__)
  return (Int)_mm256_cvtps_epi32((__m256)v);
#elif defined(__x86_64__)
  return (Int)_mm_cvtps_epi32((__m128)v);
#else
  return __builtin_convertvector((v + 0x1.8p23f) - 0x1.8p23f, Int);
#endif
}

// sum + the products of both int16 of each lane.
MITTENS_INLINE Int add_products(Int sum, UInt a, UInt b) {
#if defined(__AVX512VNNI__)
  return (Int)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
  return sum + (Int)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (Int)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return sum + (Int)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return sum + ((Int)a << 16 >> 16) * ((Int)b << 16 >> 16) + ((Int)a >> 16) * ((Int)b >> 16);
#endif
}

// A row of x as integers, in steps of a source's weights, zeros at the end. Lane i is of word i. A step has `pairs`
// vectors, each with the columns k and k + pairs of a word; then, of each word's columns, the initial value of the
// integer sum, which takes off the weights' middle; the scale; and the sum.
template <typename Source>
struct ArrangedIntegers {
  static constexpr int pairs = Source::vectors / 2;
  static constexpr size_t start = pairs * width, scale = start + width, sum = scale + width;
  static constexpr size_t step = sum + width;

  static size_t size(size_t columns) {
    return ceil_divide(columns, Source::step) * step;
  }

  // Whether the row's integers may stand for it. They may not where an element is not finite, huge or tiny, or so much
  // larger than the mean that rounding its neighbours would show where its own weight is 0.
  template <typename T>
  static bool fill(const T* x, size_t columns, float* y) {
    Float most = {}, total = {};
    for (size_t begin = 0; begin < columns; begin += Source::step, y += step) {
      const Float largest = fill_step(x + begin, smaller(Source::step, columns - begin), y, total);
      most = maximum(largest, most);
    }
    const float largest = reduce(most, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
    const float sizes = reduce(total, [](auto a, auto b) MITTENS_INLINED { return a + b; });
    const float by_mean = largest * static_cast<float>(columns) / sizes;
    const bool even = by_mean * by_mean <= 4 * static_cast<float>(columns);
    return sizes == 0 || (even && largest > least && largest < large);
  }

 private:
  static constexpr float least = 0x1p-80f;

  // Returns the largest absolute value of each word's columns, and adds their sizes to a total.
  template <typename T>
  static MITTENS_INLINE Float fill_step(const T* x, size_t size, float* y, Float& total) {
    Float values[Source::vectors], largest = {};
    arrange_step<Source>(x, size, values);
    for (size_t v = 0; v < Source::vectors; ++v) {
      const Float sizes = maximum(values[v], -values[v]);
      largest = maximum(sizes, largest);
      total = total + sizes;
    }
    const Float inverse = largest > least ? largest_int16 / largest : Float{};
    UInt low[pairs];
    Int integers = {};
    for (size_t v = 0; v < Source::vectors; ++v) {
      const Int rounded = round_to_integers(values[v] * inverse);
      integers = integers + rounded;
      if (v < pairs) {
        low[v] = (UInt)rounded & 0xffff;
      } else {
        write(y + (v - pairs) * width, low[v - pairs] | (UInt)rounded << 16, All());
      }
    }
    const Float scales = largest * (1 / largest_int16);
    write(y + start, integers * -static_cast<int32_t>(Source::middle), All());
    write(y + scale, scales, All());
    write(y + sum, __builtin_convertvector(integers, Float) * scales, All());
    return largest;
  }
};

template <typename Source>
class IntegerProducts {
 public:
  IntegerProducts(const Source& source, size_t columns) : source_(source), columns_(columns) {}

  static size_t memory(const Source& source, size_t columns) {
    return most_outputs * source.memory(columns);
  }

  // As RowProducts::direct. x: ArrangedIntegers. A sum does not depend on the number of rows.
  void direct(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride, float* memory) const {
    size_t i = 0;
    for (; i + most_outputs <= size; i += most_outputs) {
      all_rows<most_outputs>(x, rows, n + i, sums + i, stride, memory);
    }
    for (; i < size; ++i) {
      all_rows<1>(x, rows, n + i, sums + i, stride, memory);
    }
  }

 private:
  using X = ArrangedIntegers<Source>;
  static constexpr int most_outputs = 4;
  static constexpr int most_rows = many_registers ? 4 : 2;

  template <int outputs>
  void all_rows(const float* x, size_t rows, size_t n, float* sums, size_t stride, float* memory) const {
    each_part(rows, most_rows, [&](size_t row, size_t count) {
      with_index<1, most_rows>(count, [&](auto m) {
        along<m.value, outputs>(x + row * X::size(columns_), n, sums + row * stride, stride, memory);
      });
    });
  }

  template <int rows, int outputs>
  void along(const float* x, size_t n, float* sums, size_t stride, float* memory) const {
    const size_t x_stride = X::size(columns_);
    const size_t scales = source_.memory(columns_);
    typename Source::Row w[outputs];
    repeat<outputs>(
        [&](auto i) MITTENS_INLINED { w[i.value] = source_.row(n + i.value, 0, columns_, memory + i.value * scales); });
    Float sum[rows][outputs] = {};
    const Ahead ahead = prefetched<Source>(source_, columns_, outputs);
    each_step<Source>(columns_, [&](size_t s, auto part) MITTENS_INLINED {
      const float* at = x + s * X::step;
      repeat<outputs>([&](auto i) MITTENS_INLINED {
        __builtin_prefetch(static_cast<const char*>(Source::address(w[i.value], s)) + ahead.bytes(s));
        const typename Source::Raw raw = source_.read(w[i.value], s, part);
        Int products[rows];
        repeat<rows>([&](auto m)
                         MITTENS_INLINED { products[m.value] = read<Int>(at + m.value * x_stride + X::start, All()); });
        repeat<X::pairs>([&](auto k) MITTENS_INLINED {
          const UInt weights = Source::template pair<k.value>(raw);
          repeat<rows>([&](auto m) MITTENS_INLINED {
            const UInt activations = read<UInt>(at + m.value * x_stride + k.value * width, All());
            products[m.value] = add_products(products[m.value], weights, activations);
          });
        });
        const Float scale = source_.scale(w[i.value], s), bias = source_.bias(w[i.value], s);
        repeat<rows>([&](auto m) MITTENS_INLINED {
          const float* of_row = at + m.value * x_stride;
          Float& to = sum[m.value][i.value];
          to =
              fma(__builtin_convertvector(products[m.value], Float) * read<Float>(of_row + X::scale, All()), scale, to);
          to = fma(bias, read<Float>(of_row + X::sum, All()), to);
        });
      });
    });
    repeat<rows>([&](auto m) MITTENS_INLINED { write_totals(sums + m.value * stride, sum[m.value], false); });
  }

  const Source& source_;
  size_t columns_;
};

}  // namespace mittens::cpu::MITTENS_ISA
