// y = x w^T for many rows with integer multiplications: x becomes integers with a scale for each group of the weights.
// A panel of weights, which lie one output a lane, is unpacked once, and register tiles of x go along it.
#pragma once

#include "cpu/isa/matmul/integer_forms.h"
#include "cpu/isa/matmul/products.h"

namespace mittens::cpu::MITTENS_ISA {

constexpr size_t panel_words = 256;  // of x, along which a panel goes

// A row of x: the words of all parts side by side, and then of each group the scale, the sum, and the initial
// value of the integer sum, which takes off the weights' middle.
template <typename Source, typename Form>
struct GroupIntegers {
  static constexpr int of_word = Form::template of_word<Source>;
  static constexpr int in_word = 32 / Form::bits, parts = Form::parts;
  static constexpr size_t of_group = 3;

  static size_t words(size_t columns) {
    return columns / in_word;
  }
  static size_t size(const Source& source, size_t columns) {
    return parts * words(columns) + of_group * (columns >> source.groups.group_bits);
  }

  // Whether the row's integers may stand for it.
  template <typename T>
  static bool fill(const Source& source, const T* x, size_t columns, float* y) {
    const size_t group = size_t{1} << source.groups.group_bits;
    float* end = y + parts * words(columns);
    Float most = {}, sizes = {};
    for (size_t begin = 0; begin < columns; begin += group, end += of_group) {
      Float largest = {};
      for (size_t i = 0; i < group; i += width) {
        const Float v = load_in_order(x + begin + i);
        const Float size = maximum(v, -v);
        largest = maximum(size, largest);
        sizes = sizes + size;
      }
      most = maximum(largest, most);
      const float greatest = reduce(largest, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
      const float inverse = greatest > least_group ? Form::largest / greatest : 0;
      const float scale = greatest * (1 / Form::largest);
      alignas(64) int32_t integers[128];
      Int sum = {};
      for (size_t i = 0; i < group; i += width) {
        const Int rounded = integers_of_form<Form>(load_in_order(x + begin + i) * inverse);
        sum = sum + rounded;
        write(integers + i, rounded, All());
      }
      pack(integers, group, y + parts * words(begin));
      const float total_of_group = total(__builtin_convertvector(sum, Float));
      end[0] = scale;
      end[1] = total_of_group * scale;
      const int32_t start = static_cast<int32_t>(total_of_group) * -static_cast<int32_t>(Form::template middle<Source>);
      __builtin_memcpy(end + 2, &start, 4);
    }
    const float largest = reduce(most, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
    return Form::stands_for({largest, total(sizes), static_cast<float>(columns)});
  }

 private:
  static MITTENS_INLINE void pack(const int32_t* integers, size_t count, float* words) {
    constexpr uint32_t mask = (uint64_t{1} << Form::bits) - 1;
    for (size_t w = 0; w < count / Source::vectors; ++w) {
      for (int k = 0; k < of_word; ++k) {
        uint32_t word[parts] = {};
        for (int j = 0; j < in_word; ++j) {
          const Int integer = Int{} + integers[w * Source::vectors + k + j * of_word];
          repeat<parts>([&](auto p) MITTENS_INLINED {
            word[p.value] |= (static_cast<uint32_t>(Form::template part<p.value>(integer)[0]) & mask) << Form::bits * j;
          });
        }
        __builtin_memcpy(words + (w * of_word + k) * parts, word, sizeof(word));
      }
    }
  }
};

template <typename Source, typename Form>
class IntegerPanels {
 public:
  using X = GroupIntegers<Source, Form>;

  IntegerPanels(const Source& source, size_t columns) : source_(source), columns_(columns) {}

  static constexpr size_t most_refused = 16;
  static constexpr size_t lanes = (many_registers ? 4 : 2) * width;  // outputs of a tile

  static size_t memory(const Source& source, size_t) {
    return panel_integers * (panel_words + 2 * most_groups) + 4 * source.memory(chunk);
  }

  static size_t block(size_t, size_t count, size_t outputs) {
    return outputs_of_task(panel_integers, lanes, count, outputs);
  }

  // sums[m * stride + i] = the product of row m of x and row n + i of the weights, i < size. stride: at least size
  // rounded up to lanes.
  void products(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride, float* memory) const {
    const size_t x_stride = X::size(source_, columns_);
    float* scales = memory + panel_integers * panel_words;
    float* offsets = scales + panel_integers * most_groups;
    for (size_t begin = 0; begin < columns_; begin += chunk) {
      const size_t columns = smaller(chunk, columns_ - begin), words = X::words(columns);
      const size_t groups = columns >> source_.groups.group_bits;
      for (size_t i = 0; i < size; i += lanes) {
        unpack(n + i, smaller(lanes, size - i), begin, columns, memory + i * words, scales + i * groups,
               offsets + i * groups, offsets + panel_integers * most_groups);
      }
      each_part(rows, most_rows, [&](size_t row, size_t count) {
        with_index<1, most_rows>(count, [&](auto m) {
          const float* from = x + row * x_stride;
          for (size_t i = 0; i < size; i += lanes) {
            tile<m.value>(from + X::parts * X::words(begin),
                          from + X::parts * X::words(columns_) + X::of_group * (begin >> source_.groups.group_bits),
                          x_stride, memory + i * words, scales + i * groups, offsets + i * groups, groups,
                          sums + row * stride + i, stride, begin != 0);
          }
        });
      });
    }
  }

 private:
  static constexpr int vectors = lanes / width;
  static constexpr int most_rows = (many_registers && !Form::pairs ? 6 : 4) / Form::parts;
  static constexpr size_t chunk = panel_words * X::in_word;
  static constexpr size_t most_groups = chunk / 16;

  // Words [word][output] of some rows of weights, with pairs [pair of words][output][2], and [group][output] of their
  // scales and offsets. Behind the last output it repeats.
  void unpack(size_t n, size_t size, size_t begin, size_t columns, float* words, float* scales, float* offsets,
              float* memory) const {
    typedef uint32_t Four __attribute__((vector_size(16)));
    const size_t groups = columns >> source_.groups.group_bits, of_row = source_.memory(chunk);
    for (size_t i = 0; i < lanes; i += 4) {
      const uint32_t* from[4];
      for (size_t j = 0; j < 4; ++j) {
        const typename Source::Row row = source_.row(n + smaller(i + j, size - 1), begin, columns, memory + j * of_row);
        from[j] = row.words;
        for (size_t g = 0; g < groups; ++g) {
          scales[g * lanes + i + j] = row.scales[g];
          offsets[g * lanes + i + j] = row.offsets[g];
        }
      }
      for (size_t w = 0; w < columns / Source::vectors; w += 4) {
        Four rows[4];
        for (size_t j = 0; j < 4; ++j) {
          __builtin_memcpy(rows + j, from[j] + w, 16);
        }
        const Four a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
        const Four b = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
        const Four c = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
        const Four d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
        const Four turned[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                                __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
        for (size_t j = 0; j < 4; ++j) {
          repeat<X::of_word>([&](auto k) MITTENS_INLINED {
            const Four weights = Form::template weights<k.value, Source>(turned[j]);
            const size_t word = (w + j) * X::of_word + k.value;
            if constexpr (Form::pairs) {
              for (size_t l = 0; l < 4; ++l) {
                const uint32_t of_output = weights[l];
                __builtin_memcpy(words + word / 2 * 2 * lanes + (i + l) * 2 + word % 2, &of_output, 4);
              }
            } else {
              __builtin_memcpy(words + word * lanes + i, &weights, 16);
            }
          });
        }
      }
    }
  }

  // Some rows of x by the outputs of a tile, added to the sums or written to them.
  template <int rows>
  void tile(const float* x, const float* of_groups, size_t x_stride, const float* words, const float* scales,
            const float* offsets, size_t groups, float* sums, size_t stride, bool add) const {
    const size_t of_group = X::words(size_t{1} << source_.groups.group_bits);
    for (size_t g = 0; g < groups; ++g, of_groups += X::of_group, add = true) {
      Int products[rows][vectors];
      repeat<rows>([&](auto m) MITTENS_INLINED {
        int32_t start;
        __builtin_memcpy(&start, of_groups + m.value * x_stride + 2, 4);
        repeat<vectors>([&](auto v) MITTENS_INLINED { products[m.value][v.value] = Int{} + start; });
      });
      if constexpr (Form::pairs) {
        typename Form::Sum pairs[ceil_divide(rows, 2)][2 * vectors] = {};
        for (size_t i = 0; i < of_group; i += 2, x += 2 * X::parts, words += 2 * lanes) {
          add_pair_of_words<rows>(x, x_stride, words, pairs);
        }
        repeat<rows>([&](auto m) MITTENS_INLINED {
          repeat<vectors>([&](auto v) MITTENS_INLINED {
            const Int a = Form::widened(pairs[m.value / 2][2 * v.value]);
            const Int b = Form::widened(pairs[m.value / 2][2 * v.value + 1]);
            constexpr int first = m.value % 2 * 2;
            products[m.value][v.value] =
                products[m.value][v.value] + __builtin_shufflevector(a, b, first, first + 1, first + 4, first + 5);
          });
        });
      } else if constexpr (__is_same(typename Form::Sum, Int)) {
        for (size_t i = 0; i < of_group; ++i, x += X::parts, words += lanes) {
          add_word<rows>(x, x_stride, words, products);
        }
      } else {
        for (size_t i = 0; i < of_group; i += Form::longest) {
          typename Form::Sum some[rows][vectors] = {};
          for (size_t j = 0; j < Form::longest; ++j, x += X::parts, words += lanes) {
            add_word<rows>(x, x_stride, words, some);
          }
          repeat<rows>([&](auto m) MITTENS_INLINED {
            repeat<vectors>([&](auto v) MITTENS_INLINED {
              products[m.value][v.value] = products[m.value][v.value] + Form::widened(some[m.value][v.value]);
            });
          });
        }
      }
      repeat<vectors>([&](auto v) MITTENS_INLINED {
        const Float scale = read<Float>(scales + g * lanes + v.value * width, All());
        const Float offset = read<Float>(offsets + g * lanes + v.value * width, All());
        repeat<rows>([&](auto m) MITTENS_INLINED {
          float* to = sums + m.value * stride + v.value * width;
          const float* of_row = of_groups + m.value * x_stride;
          Float sum = add ? read<Float>(to, All()) : Float{};
          sum = fma(__builtin_convertvector(products[m.value][v.value], Float) * scale, Float{} + of_row[0], sum);
          write(to, fma(offset, Float{} + of_row[1], sum), All());
        });
      });
    }
  }

  template <int rows, typename Sums>
  static MITTENS_INLINE void add_word(const float* x, size_t x_stride, const float* words, Sums& sums) {
    UInt weights[vectors];
    repeat<vectors>([&](auto v) MITTENS_INLINED { weights[v.value] = read<UInt>(words + v.value * width, All()); });
    repeat<rows>([&](auto m) MITTENS_INLINED {
      uint32_t word[X::parts];
      __builtin_memcpy(word, x + m.value * x_stride, sizeof(word));
      UInt activations[X::parts];
      repeat<X::parts>([&](auto p) MITTENS_INLINED { activations[p.value] = UInt{} + word[p.value]; });
      repeat<vectors>([&](auto v) MITTENS_INLINED {
        sums[m.value][v.value] = Form::add(sums[m.value][v.value], weights[v.value], activations);
      });
    });
  }

  // The second row of the last pair is the first again where there is none.
  template <int rows, typename Sums>
  static MITTENS_INLINE void add_pair_of_words(const float* x, size_t x_stride, const float* words, Sums& sums) {
    UInt activations[ceil_divide(rows, 2)][X::parts];
    repeat<ceil_divide(rows, 2)>([&](auto pair) MITTENS_INLINED {
      constexpr int first = pair.value * 2, second = first + 1 < rows ? first + 1 : first;
      const float *a = x + first * x_stride, *b = x + second * x_stride;
      if constexpr (X::parts == 1) {
        typedef uint64_t Two __attribute__((vector_size(16)));
        Two words_of;
        __builtin_memcpy(&words_of, a, 8);
        __builtin_memcpy(reinterpret_cast<char*>(&words_of) + 8, b, 8);
        activations[pair.value][0] = (UInt)words_of;
      } else {
        const UInt of_a = read<UInt>(a, All()), of_b = read<UInt>(b, All());
        activations[pair.value][0] = __builtin_shufflevector(of_a, of_b, 0, 2, 4, 6);
        activations[pair.value][1] = __builtin_shufflevector(of_a, of_b, 1, 3, 5, 7);
      }
    });
    repeat<2 * vectors>([&](auto v) MITTENS_INLINED {
      const UInt weights = read<UInt>(words + v.value * width, All());
      repeat<ceil_divide(rows, 2)>([&](auto pair) MITTENS_INLINED {
        sums[pair.value][v.value] = Form::add_pairs(sums[pair.value][v.value], weights, activations[pair.value]);
      });
    });
  }

  const Source& source_;
  size_t columns_;
};

}  // namespace mittens::cpu::MITTENS_ISA
