// y = x w^T of few rows with integer multiplications: x becomes integers with a scale for the columns of each word of
// weights, so that sums in int32 are exact, and an outlier costs the precision of its neighbours in a word alone.
#pragma once

#include <algorithm>

#include "cpu/isa/matmul/integer_forms.h"
#include "cpu/isa/matmul/products.h"

namespace mittens::cpu::MITTENS_ISA {

// A row of x as integers, in steps of a source's weights, zeros at the end. Lane i is of word i. A step has the words
// of x; then, of each word's columns, the initial value of the integer sum, which takes off the weights' middle; and
// the scale. Behind the steps is the sum of each group's columns where the source has an offset for it.
template <typename Source, typename Form>
struct ArrangedIntegers {
  static constexpr int of_word = Form::template of_word<Source>;
  static constexpr size_t start = of_word * Form::parts * width, scale = start + width, step = scale + width;

  static size_t steps(size_t columns) {
    return ceil_divide(columns, Source::step) * step;
  }
  static size_t size(const Source& source, size_t columns) {
    return steps(columns) + (Source::offset ? source.groups.floats(columns) : 0);
  }

  // Whether the row's integers may stand for it.
  template <typename T>
  static bool fill(const Source& source, const T* x, size_t columns, float* y) {
    Sums sums;
    float* group_sums = y + steps(columns);
    std::fill_n(group_sums, size(source, columns) - steps(columns), 0.0f);
    for (size_t begin = 0; begin < columns; begin += Source::step, y += step) {
      const Float words = fill_step(x + begin, smaller(Source::step, columns - begin), y, sums);
      if constexpr (Source::offset) {
        for (size_t i = 0; i < width && begin + Source::column(0, i) < columns; ++i) {
          group_sums[(begin + Source::column(0, i)) >> source.groups.group_bits] += words[i];
        }
      }
    }
    const float most = reduce(sums.most, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
    return Form::stands_for({most, total(sums.sizes), static_cast<float>(columns)});
  }

 private:
  static constexpr float least = 0x1p-80f;

  struct Sums {
    Float most = {}, sizes = {};
  };

  // The sums of the columns of words.
  template <typename T>
  static MITTENS_INLINE Float fill_step(const T* x, size_t size, float* y, Sums& sums) {
    Float values[Source::vectors], largest = {};
    arrange_step<Source>(x, size, values);
    for (size_t v = 0; v < Source::vectors; ++v) {
      const Float sizes = maximum(values[v], -values[v]);
      largest = maximum(sizes, largest);
      sums.sizes = sums.sizes + sizes;
    }
    sums.most = maximum(largest, sums.most);
    const Float inverse = largest > least ? Form::largest / largest : Float{};
    const Float scales = largest * (Source::one / Form::largest);
    constexpr uint32_t mask = (uint64_t{1} << Form::bits) - 1;
    UInt words[of_word][Form::parts] = {};
    Int integers = {};
    for (size_t v = 0; v < Source::vectors; ++v) {
      const Int rounded = integers_of_form<Form>(values[v] * inverse);
      integers = integers + rounded;
      repeat<Form::parts>([&](auto p) MITTENS_INLINED {
        UInt& word = words[v % of_word][p.value];
        word = word | ((UInt)Form::template part<p.value>(rounded) & mask)
                          << static_cast<uint32_t>(v / of_word * Form::bits);
      });
    }
    for (size_t k = 0; k < of_word * Form::parts; ++k) {
      write(y + k * width, words[k / Form::parts][k % Form::parts], All());
    }
    write(y + start, integers * -static_cast<int32_t>(Form::template middle<Source>), All());
    write(y + scale, scales, All());
    return __builtin_convertvector(integers, Float) * scales;
  }
};

template <typename Source, typename Form>
class IntegerProducts {
 public:
  using X = ArrangedIntegers<Source, Form>;
  static constexpr size_t most_refused = 1;

  IntegerProducts(const Source& source, size_t columns) : source_(source), columns_(columns) {}

  static size_t memory(const Source& source, size_t columns) {
    return most_outputs * source.memory(columns);
  }
  static size_t block(size_t row_bytes, size_t count, size_t outputs) {
    return outputs_of_piece(row_bytes, count, outputs);
  }

  // As RowProducts::direct. x: ArrangedIntegers. A sum does not depend on the number of rows.
  void products(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride, float* memory) const {
    const size_t x_stride = X::size(source_, columns_);
    for (size_t i = 0; i < size; i += most_outputs) {
      each_part(rows, most_rows, [&](size_t row, size_t count) {
        with_index<1, most_rows>(count, [&](auto m) {
          along<m.value>(x + row * x_stride, n + i, size - i, sums + row * stride + i, stride, memory);
        });
      });
    }
  }

 private:
  static constexpr int most_outputs = 4;
  static constexpr int most_rows = many_registers ? 4 : 2;
  static constexpr bool in_int32 = __is_same(typename Form::Sum, Int);

  template <int rows>
  void along(const float* x, size_t n, size_t size, float* sums, size_t stride, float* memory) const {
    const size_t x_stride = X::size(source_, columns_);
    constexpr int outputs = most_outputs;
    typename Source::Row w[outputs];
    begin_rows(source_, n, size, columns_, memory, w);
    Float sum[rows][outputs] = {};
    const Ahead<Source> ahead(source_, w[0], outputs);
    each_step<Source>(columns_, [&](size_t s, auto part) MITTENS_INLINED {
      const float* at = x + s * X::step;
      repeat<outputs>([&](auto i) MITTENS_INLINED {
        ahead.prefetch(s * outputs + i.value);
        const typename Source::Raw raw = source_.read(w[i.value], s, part);
        Int products[rows];
        repeat<rows>([&](auto m)
                         MITTENS_INLINED { products[m.value] = read<Int>(at + m.value * x_stride + X::start, All()); });
        typename Form::Sum some[rows] = {};
        repeat<X::of_word>([&](auto k) MITTENS_INLINED {
          const UInt weights = Form::template weights<k.value, Source>(raw);
          repeat<rows>([&](auto m) MITTENS_INLINED {
            UInt activations[Form::parts];
            repeat<Form::parts>([&](auto p) MITTENS_INLINED {
              activations[p.value] =
                  read<UInt>(at + m.value * x_stride + (k.value * Form::parts + p.value) * width, All());
            });
            if constexpr (in_int32) {
              products[m.value] = Form::add(products[m.value], weights, activations);
            } else {
              some[m.value] = Form::add(some[m.value], weights, activations);
            }
          });
        });
        if constexpr (!in_int32) {
          repeat<rows>([&](auto m)
                           MITTENS_INLINED { products[m.value] = products[m.value] + Form::widened(some[m.value]); });
        }
        const Float scale = source_.scale(w[i.value], s);
        repeat<rows>([&](auto m) MITTENS_INLINED {
          Float& to = sum[m.value][i.value];
          const Float scale_of_x = read<Float>(at + m.value * x_stride + X::scale, All());
          to = fma(__builtin_convertvector(products[m.value], Float) * scale_of_x, scale, to);
        });
      });
    });
    if constexpr (Source::offset) {
      const float* sums_of_groups = x + X::steps(columns_);
      for (size_t g = 0; g < columns_ >> source_.groups.group_bits; g += width) {
        repeat<outputs>([&](auto i) MITTENS_INLINED {
          const Float offset = read<Float>(w[i.value].offsets + g, All());
          repeat<rows>([&](auto m) MITTENS_INLINED {
            const Float sum_of_x = read<Float>(sums_of_groups + m.value * x_stride + g, All());
            sum[m.value][i.value] = fma(offset, sum_of_x, sum[m.value][i.value]);
          });
        });
      }
    }
    repeat<rows>([&](auto m) MITTENS_INLINED { write_some_totals(sums + m.value * stride, sum[m.value], size); });
  }

  const Source& source_;
  size_t columns_;
};

}  // namespace mittens::cpu::MITTENS_ISA
