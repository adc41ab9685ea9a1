// y = x w^T: each output is the product of a row of x with a row of weights, summed along the lanes.
//
// Few rows of x go along the weights as they are read. For many, a panel of weights is widened to float32 once, and
// register tiles of both go along it. Either way the order of a sum depends on the shape alone.
#pragma once

#include "cpu/isa/matmul/tiles.h"

namespace mittens::cpu::MITTENS_ISA {

constexpr size_t most_direct_rows = 8;
static_assert(smallest_part(most_direct_rows + 1, batch_rows, tile_rows) >= fewest_tile_rows);
constexpr size_t panel_outputs = 64;
constexpr size_t panel_columns = 1024;
constexpr size_t few_rows = 16;  // of x: for them a panel is one tile wide, which leaves it in the first cache

// Additions to one sum, after which it goes to a total. The roundings of equal terms all go the same way: the error
// grows with the chain. Of the sums of a tile the totals lie in memory; in half types, where the rounding of the result
// is larger, chains of wide vectors are as long as there are columns.
constexpr bool narrow_vectors = width == 4;
constexpr size_t longest_chain = narrow_vectors ? 32 : 64;
constexpr size_t longest_tile_chain(Type type) {
  return type == Type::float32 ? 16 : narrow_vectors ? 32 : size_t{1} << 40;
}

template <typename Source>
class RowProducts {
 public:
  // chain: additions to a sum of a tile.
  RowProducts(const Source& source, size_t columns, size_t chain) : source_(source), columns_(columns), chain_(chain) {}

  static size_t memory(const Source& source, size_t columns, bool direct) {
    return direct ? most_outputs * source.memory(columns)
                  : panel_outputs * panel_columns + source.memory(smaller(columns, panel_columns));
  }

  // sums[m * stride + i] = the product of row m of x and row n + i, i < size. x: Arranged, with sums.
  // sums_apart: values and offsets may be summed apart. Two large sums may cancel, which float32 shows.
  // exact: a sum does not depend on the number of rows, as it never does where they are not summed apart.
  template <bool sums_apart>
  void direct(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride, float* memory,
              bool exact) const;

  // The same for any number of rows; stride is at least size, rounded up to whole tiles. x: Arranged, without sums.
  void panel(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride, float* memory) const;

 private:
  static constexpr int most_outputs = 4;

  // One or two rows of x at a time along some rows of weights, which stay in the first cache meanwhile.
  void exact_groups(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride,
                    float* memory) const {
    constexpr int outputs = many_registers ? 4 : 2;
    const size_t x_stride = Arranged<Source, Source::offset>::size(columns_);
    for (size_t i = 0; i < size; i += outputs) {
      for (size_t row = 0; row < rows; row += 2) {
        with_index<1, 2>(rows - row, [&](auto m) {
          along<m.value, outputs>(x + row * x_stride, n + i, size - i, sums + row * stride + i, stride, memory);
        });
      }
    }
  }

  // least: rows. Those of exact products are more than most_direct_rows.
  template <int least, int most, int outputs>
  void direct_groups(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride,
                     float* memory) const {
    const size_t x_stride = Arranged<Source, Source::offset>::size(columns_);
    for (size_t i = 0; i < size; i += outputs) {
      each_part(rows, most, [&](size_t row, size_t count) {
        with_index<smallest_part(least, most_exact_rows, most), most>(count, [&](auto m) {
          shared<m.value, outputs>(x + row * x_stride, n + i, size - i, sums + row * stride + i, stride, memory);
        });
      });
    }
  }

  // Some rows of x along some rows of weights, each read and widened once.
  template <int rows, int outputs>
  void shared(const float* x, size_t n, size_t size, float* sums, size_t stride, float* memory) const {
    using X = Arranged<Source, Source::offset>;
    const size_t x_stride = X::size(columns_);
    typename Source::Row w[outputs];
    begin_rows(source_, n, size, columns_, memory, w);
    LaneSums<rows, outputs, true> sum;
    const size_t group_bytes = outputs * source_.stride_bytes();
    auto add_step = [&](size_t s, auto part) MITTENS_INLINED {
      const float* at = x + s * X::step;
      typename Source::Raw raw[outputs];
      Float scale[outputs], bias[outputs];
      repeat<outputs>([&](auto i) MITTENS_INLINED {
        __builtin_prefetch(static_cast<const char*>(Source::address(w[i.value], s)) + group_bytes);
        raw[i.value] = source_.read(w[i.value], s, part);
        if constexpr (Source::scaled) {
          scale[i.value] = source_.scale(w[i.value], s);
        }
        if constexpr (Source::offset) {
          bias[i.value] = source_.bias(w[i.value], s);
        }
      });
      repeat<Source::vectors>([&](auto v) MITTENS_INLINED {
        Float weights[outputs];
        repeat<outputs>([&](auto i) MITTENS_INLINED {
          weights[i.value] = Source::template value<v.value>(raw[i.value]);
          if constexpr (Source::offset) {
            weights[i.value] = fma(weights[i.value], scale[i.value], bias[i.value]);
          } else if constexpr (Source::scaled) {
            weights[i.value] = weights[i.value] * scale[i.value];
          }
        });
        repeat<rows>([&](auto m) MITTENS_INLINED {
          const Float activations = held(read<Float>(at + m.value * x_stride + v.value * width, All()));
          repeat<outputs>([&](auto i) MITTENS_INLINED {
            sum.v[m.value][i.value] = fma(weights[i.value], activations, sum.v[m.value][i.value]);
          });
        });
      });
    };
    each_step<Source>(columns_, chain_ / Source::vectors, add_step, [&]() MITTENS_INLINED { sum.end_chains(); });
    repeat<rows>([&](auto m) MITTENS_INLINED {
      write_some_totals(sums + m.value * stride, sum.template of_row<m.value>(), size);
    });
  }

  template <int rows, int outputs>
  void along(const float* x, size_t n, size_t size, float* sums, size_t stride, float* memory) const {
    using X = Arranged<Source, Source::offset>;
    const size_t x_stride = X::size(columns_);
    typename Source::Row w[outputs];
    begin_rows(source_, n, size, columns_, memory, w);
    constexpr bool chained = narrow_vectors || !Source::scaled;
    LaneSums<rows, outputs, chained> sum;
    const Ahead<Source> ahead(source_, w[0], outputs);
    auto add_step = [&](size_t s, auto part) MITTENS_INLINED {
      const float* at = x + s * X::step;
      repeat<outputs>([&](auto i) MITTENS_INLINED {
        ahead.prefetch(s * outputs + i.value);
        const typename Source::Raw raw = source_.read(w[i.value], s, part);
        Float partial[rows];
        repeat<Source::vectors>([&](auto v) MITTENS_INLINED {
          const Float weights = Source::template value<v.value>(raw);
          repeat<rows>([&](auto m) MITTENS_INLINED {
            const Float activations = read<Float>(at + m.value * x_stride + v.value * width, All());
            if constexpr (!Source::scaled) {
              sum.v[m.value][i.value] = fma(weights, activations, sum.v[m.value][i.value]);
            } else if constexpr (v.value == 0) {
              partial[m.value] = weights * activations;
            } else {
              partial[m.value] = fma(weights, activations, partial[m.value]);
            }
          });
        });
        if constexpr (Source::scaled) {
          const Float scale = source_.scale(w[i.value], s);
          repeat<rows>([&](auto m) MITTENS_INLINED {
            sum.v[m.value][i.value] = fma(partial[m.value], scale, sum.v[m.value][i.value]);
          });
        }
        if constexpr (Source::offset) {
          const Float bias = source_.bias(w[i.value], s);
          repeat<rows>([&](auto m) MITTENS_INLINED {
            const Float of_step = read<Float>(at + m.value * x_stride + Source::vectors * width, All());
            sum.v[m.value][i.value] = fma(bias, of_step, sum.v[m.value][i.value]);
          });
        }
      });
    };
    constexpr size_t additions = Source::scaled ? 1 + Source::offset : Source::vectors;  // of a step
    if constexpr (chained) {
      each_step<Source>(columns_, longest_chain / additions, add_step, [&]() MITTENS_INLINED { sum.end_chains(); });
    } else {
      each_step<Source>(columns_, add_step);
    }
    repeat<rows>([&](auto m) MITTENS_INLINED {
      write_some_totals(sums + m.value * stride, sum.template of_row<m.value>(), size);
    });
  }

  // The next panel is of the same rows, or of the next ones.
  void one_panel(const float* x, size_t rows, size_t n, size_t size, size_t most, float* sums, size_t stride,
                 float* memory) const {
    using X = Arranged<Source, false>;
    float* panel = memory;
    float* scales = panel + panel_outputs * panel_columns;
    const size_t x_stride = X::size(columns_);
    for (size_t begin = 0; begin < columns_; begin += panel_columns) {
      const size_t columns = smaller(panel_columns, columns_ - begin);
      const size_t length = rounded_up(columns, Source::step);
      const size_t panel_bytes = panel_columns / Source::step * Source::step_bytes;
      const size_t ahead = begin + columns < columns_
                               ? panel_bytes
                               : most * source_.stride_bytes() - begin / panel_columns * panel_bytes;
      for (size_t i = 0; i < size; ++i) {
        widen(n + i, begin, columns, panel + i * length, scales, ahead);
      }
      for (size_t i = size * length; i < rounded_up(size, tile_outputs) * length; ++i) {
        panel[i] = 0;
      }
      each_part(rows, tile_rows, [&](size_t row, size_t count) {
        with_index<fewest_tile_rows, tile_rows>(count, [&](auto m) {
          for (size_t i = 0; i < size; i += tile_outputs) {
            row_tile<m.value>(x + row * x_stride + begin, x_stride, panel + i * length, length, sums + row * stride + i,
                              stride, begin != 0, chain_);
          }
        });
      });
    }
  }

  void widen(size_t n, size_t begin, size_t columns, float* y, float* memory, size_t ahead) const {
    const typename Source::Row w = source_.row(n, begin, columns, memory);
    each_step<Source>(columns, [&](size_t s, auto part) MITTENS_INLINED {
      __builtin_prefetch(static_cast<const char*>(Source::address(w, s)) + ahead);
      widen_step(source_, w, s, part, [&](int v, Float weights) MITTENS_INLINED {
        write(y + s * Source::step + v * width, weights, All());
      });
    });
  }

  const Source& source_;
  size_t columns_;
  size_t chain_;
};

// Not inline, so that only one file compiles products that several use (unpacked.h).
template <typename Source>
template <bool sums_apart>
void RowProducts<Source>::direct(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride,
                                 float* memory, bool exact) const {
  if constexpr (sums_apart) {
    if (exact && rows > 2) {
      exact_groups(x, rows, n, size, sums, stride, memory);
      return;
    }
  }
  if (rows > 4 && many_registers && Source::vectors >= 4) {  // the loads of a step serve long
    direct_groups<5, 8, 2>(x, rows, n, size, sums, stride, memory);
    return;
  }
  if (rows > 2 || !sums_apart) {
    direct_groups<sums_apart ? 3 : 1, 4, tile_outputs>(x, rows, n, size, sums, stride, memory);
    return;
  }
  if constexpr (sums_apart) {
    with_index<1, 2>(rows, [&](auto m) {
      constexpr int outputs = many_registers || m.value == 1 ? 4 : 2;
      for (size_t i = 0; i < size; i += outputs) {
        along<m.value, outputs>(x, n + i, size - i, sums + i, stride, memory);
      }
    });
  }
}

template <typename Source>
void RowProducts<Source>::panel(const float* x, size_t rows, size_t n, size_t size, float* sums, size_t stride,
                                float* memory) const {
  const size_t most = rows <= few_rows ? tile_outputs : panel_outputs;
  for (size_t i = 0; i < size; i += most) {
    one_panel(x, rows, n + i, smaller(most, size - i), most, sums + i, stride, memory);
  }
}

// For each of the matrices, x times the rows of its sources, one or two.
//   source_of(matrix, j)   source j of a matrix
template <typename Source, typename SourceOf>
void row_products(const SourceOf& source_of, const ProductCall& call) {
  const size_t rows = call.rows, columns = call.columns, outputs = call.outputs;
  const size_t sources = call.activation ? 2 : 1;
  auto batch = [&](auto direct, size_t matrix, size_t count, size_t row, size_t size) {
    using X = Arranged<Source, direct.value && Source::offset>;
    const size_t x_stride = X::size(columns);
    const Scratch arranged(count * size * x_stride);
    bool reduced[batch_rows] = {};
    parallel_for(count * size, ceil_divide(16384, columns), [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        call.with_x<Source>(matrix * rows + row + i,
                            [&](const auto* x) { reduced[i] = X::fill(x, columns, arranged.data() + i * x_stride); });
      }
    });
    const Source example = source_of(matrix, 0);
    const size_t row_bytes = larger(sources * example.bytes(columns), 1);
    size_t block = panel_outputs;
    if (direct.value) {
      block = outputs_of_piece(row_bytes, count, outputs);
    } else if (count * ceil_divide(outputs, block) < 2 * threads()) {
      block = smaller(rounded_up(ceil_divide(outputs, ceil_divide(2 * threads(), count)), tile_outputs), block);
    }
    const size_t blocks = ceil_divide(outputs, block);
    const bool serial = count * outputs * row_bytes * size <= serial_bytes;
    parallel_for(count * blocks, serial ? count * blocks : 1, [&](size_t begin, size_t end) {
      const size_t needed = RowProducts<Source>::memory(example, columns, direct.value);
      const Scratch memory(sources * size * block + needed);
      float* sums = memory.data() + needed;
      for (size_t i = begin; i < end; ++i) {
        const size_t part = i / blocks, n = i % blocks * block;
        const size_t part_size = smaller(block, outputs - n);
        for (size_t j = 0; j < sources; ++j) {
          const Source source = source_of(matrix + part, j);
          const RowProducts<Source> products(source, columns, longest_tile_chain(call.type));
          const float* from = arranged.data() + part * size * x_stride;
          float* to = sums + j * size * block;
          if constexpr (!direct.value) {
            products.panel(from, size, n, part_size, to, block, memory.data());
          } else if constexpr (!Source::offset) {
            products.template direct<true>(from, size, n, part_size, to, block, memory.data(), call.exact);
          } else if constexpr (integer_rows(Integers::packed).most_rows != 0) {
            products.template direct<false>(from, size, n, part_size, to, block, memory.data(), false);
          } else if (call.type != Type::float32) {
            products.template direct<true>(from, size, n, part_size, to, block, memory.data(), call.exact);
          } else {
            products.template direct<false>(from, size, n, part_size, to, block, memory.data(), false);
          }
        }
        for (size_t m = 0; m < size; ++m) {
          for (size_t j = 0; j < sources && reduced[part * size + m]; ++j) {
            each_vector(part_size, [&](size_t o, auto part) MITTENS_INLINED {
              float* sum = sums + (j * size + m) * block + o;
              write(sum, read<Float>(sum, part) * (1 / reduction), part);
            });
          }
          call.finish((matrix + part) * rows + row + m, n, part_size, sums + m * block, sums + (size + m) * block);
        }
      }
    });
  };
  const size_t together = larger(batch_rows / rows, 1);
  for (size_t matrix = 0; matrix < call.matrices; matrix += together) {
    each_part(rows, batch_rows, [&](size_t row, size_t size) {
      const size_t count = smaller(together, call.matrices - matrix);
      if (size <= most_direct_rows || (call.exact && size <= most_exact_rows)) {
        batch(Index<1>(), matrix, count, row, size);
      } else {
        batch(Index<0>(), matrix, count, row, size);
      }
    });
  }
}

}  // namespace mittens::cpu::MITTENS_ISA
