// y = x w: an element of x times a row of weights is added to a row of outputs, which lie along the lanes.
//
// Few rows of x go along some rows of weights as they are read, with sums in the first cache; long columns of narrow
// weights are split, by the shape alone. For many rows of x a panel of weights is widened to float32 once, and a tile
// of sums stays in registers along its columns.
#pragma once

#include "cpu/isa/matmul/tiles.h"

namespace mittens::cpu::MITTENS_ISA {

constexpr size_t most_direct_columns_rows = 8;
static_assert(smallest_part(most_direct_columns_rows + 1, batch_rows, tile_rows) >= fewest_tile_rows);
constexpr size_t column_panel_rows = 256;  // of weights
// Additions to a sum that starts at zero: the roundings of equal products all go the same way, and their error grows
// with the chain. Where weights are read directly, it is the rows that are read together.
constexpr size_t column_chain = 64;
constexpr size_t column_panel_vectors = width == 4 ? 32 : 16;
constexpr size_t direct_steps_bytes = 1 << 10;  // of a row of weights, for one thread at a time
constexpr size_t split_rows = 1024;  // of weights, at least
constexpr size_t fewest_pieces = 8;  // fewer are split
constexpr size_t largest_group = 128;  // pieces of outputs are multiples of it

template <typename Source>
class ColumnProducts {
 public:
  static constexpr int vectors = Source::vectors;
  static constexpr size_t step = Source::step;
  static constexpr int weight_rows = Source::scaled ? 4 : 8;  // read together
  static constexpr size_t panel_steps = column_panel_vectors / Source::vectors;
  static constexpr size_t panel_outputs = panel_steps * Source::step;
  static_assert(panel_outputs % largest_group == 0);

  ColumnProducts(const Source& source, size_t outputs) : source_(source), outputs_(outputs) {}

  static size_t direct_memory(const Source& source, size_t outputs) {
    return weight_rows * source.memory(outputs);
  }
  static size_t panel_memory(const Source& source) {
    return column_panel_rows * panel_outputs + source.memory(panel_outputs);
  }

  // sums[m * stride + s * step ..] for the steps [begin, begin + steps) of outputs, from the rows [first, last) of
  // weights.
  void direct(const float* x, size_t rows, size_t columns, size_t first, size_t last, size_t begin, size_t steps,
              float* sums, size_t stride, float* memory) const {
    for (size_t row = 0; row < rows; ++row) {
      for (size_t i = begin * step; i < (begin + steps) * step; i += width) {
        write(sums + row * stride + i, Float{}, All());
      }
    }
    size_t k = first;
    for (; k + weight_rows <= last; k += weight_rows) {
      all_rows<weight_rows>(x + k, rows, columns, k, begin, steps, sums, stride, memory);
    }
    for (; k < last; ++k) {
      all_rows<1>(x + k, rows, columns, k, begin, steps, sums, stride, memory);
    }
  }

  // sums[m * panel_outputs + i], i < panel_outputs, for outputs from n on, in the source's order.
  void panel(const float* x, size_t rows, size_t columns, size_t n, float* sums, float* memory) const {
    constexpr size_t tile_outputs = tile_vectors * width;
    float* panel = memory;  // [tiles, rows of weights, tile_outputs]
    float* scales = panel + column_panel_rows * panel_outputs;
    const size_t size = smaller(panel_outputs, outputs_ - n);
    const size_t tiles = ceil_divide(rounded_up(size, Source::step), tile_outputs);
    for (size_t begin = 0; begin < columns; begin += column_panel_rows) {
      const size_t length = smaller(column_panel_rows, columns - begin);
      for (size_t k = 0; k < length; ++k) {
        widen(begin + k, n, size, panel + k * tile_outputs, scales);
      }
      each_part(rows, tile_rows, [&](size_t row, size_t count) {
        with_index<fewest_tile_rows, tile_rows>(count, [&](auto m) {
          for (size_t t = 0; t < tiles; ++t) {
            for (size_t k = 0; k < length; k += column_chain) {
              column_tile<m.value>(x + row * columns + begin + k, columns,
                                   panel + (t * column_panel_rows + k) * tile_outputs,
                                   smaller(column_chain, length - k), sums + row * panel_outputs + t * tile_outputs,
                                   panel_outputs, begin + k != 0);
            }
          }
        });
      });
    }
  }

  // y[0 .. size) in order, from sums in the source's order, in splits that lie apart.
  static void in_order(const float* sums, size_t splits, size_t apart, size_t size, float* y) {
    for (size_t begin = 0; begin < size; begin += step, sums += step) {
      alignas(64) float natural[step];
      for (size_t v = 0; v < vectors; ++v) {
        const Float values = total_of_splits(sums + v * width, splits, apart);
        for (size_t i = 0; i < width; ++i) {
          natural[Source::column(v, i)] = values[i];
        }
      }
      __builtin_memcpy(y + begin, natural, smaller(step, size - begin) * sizeof(float));
    }
  }

 private:
  static MITTENS_INLINE Float total_of_splits(const float* sums, size_t splits, size_t apart) {
    Float sum = read<Float>(sums, All());
    for (size_t i = 1; i < splits; ++i) {
      sum = sum + read<Float>(sums + i * apart, All());
    }
    return sum;
  }

  // Two rows of x at a time: the first pair brings the weights into the first cache.
  template <int count>
  void all_rows(const float* x, size_t rows, size_t columns, size_t k, size_t begin, size_t steps, float* sums,
                size_t stride, float* memory) const {
    each_part(rows, 2, [&](size_t row, size_t size) {
      with_index<1, 2>(size, [&](auto m) {
        along<m.value, count>(x + row * columns, columns, k, begin, steps, sums + row * stride, stride, memory);
      });
    });
  }

  template <int rows, int count>
  void along(const float* x, size_t columns, size_t k, size_t begin, size_t steps, float* sums, size_t stride,
             float* memory) const {
    const size_t size = smaller(steps * Source::step, outputs_ - begin * Source::step);
    const size_t scales = source_.memory(size);
    typename Source::Row w[count];
    repeat<count>([&](auto r) MITTENS_INLINED {
      w[r.value] = source_.row(k + r.value, begin * Source::step, size, memory + r.value * scales);
    });
    const size_t next = count * source_.stride_bytes();
    each_step<Source>(size, [&](size_t s, auto part) MITTENS_INLINED {
      float* at = sums + (begin + s) * step;
      Float sum[rows][vectors] = {};
      repeat<count>([&](auto r) MITTENS_INLINED {
        __builtin_prefetch(static_cast<const char*>(Source::address(w[r.value], s)) + next);
        Float activations[rows];
        repeat<rows>([&](auto m) MITTENS_INLINED { activations[m.value] = Float{} + x[m.value * columns + r.value]; });
        widen_step(source_, w[r.value], s, part, [&](int v, Float weights) MITTENS_INLINED {
          repeat<rows>([&](auto m)
                           MITTENS_INLINED { sum[m.value][v] = fma(weights, activations[m.value], sum[m.value][v]); });
        });
      });
      repeat<rows>([&](auto m) MITTENS_INLINED {
        repeat<vectors>([&](auto v) MITTENS_INLINED {
          float* total = at + m.value * stride + v.value * width;
          write(total, read<Float>(total, All()) + sum[m.value][v.value], All());
        });
      });
    });
  }

  // Row k of a panel.
  void widen(size_t k, size_t n, size_t size, float* y, float* memory) const {
    const typename Source::Row w = source_.row(k, n, size, memory);
    each_step<Source>(size, [&](size_t s, auto part) MITTENS_INLINED {
      widen_step(source_, w, s, part, [&](size_t v, Float weights) MITTENS_INLINED {
        const size_t at = s * Source::vectors + v;
        write(y + (at / tile_vectors * column_panel_rows * tile_vectors + at % tile_vectors) * width, weights, All());
      });
    });
  }

  const Source& source_;
  size_t outputs_;
};

// For each of the matrices, x times its source.
//   source_of(matrix)
template <typename Source, typename SourceOf>
void column_products(const SourceOf& source_of, const ProductCall& call) {
  using Products = ColumnProducts<Source>;
  const size_t rows = call.rows, columns = call.columns, outputs = call.outputs;
  const size_t steps = ceil_divide(outputs, Source::step);

  auto direct = [&](const float* widened, size_t matrix, size_t count, size_t row, size_t size) {
    const Source example = source_of(matrix);
    size_t piece = ceil_divide(direct_steps_bytes, larger(example.bytes(Source::step), 1));
    piece = rounded_up(smaller(piece, ceil_divide(steps, 2 * threads())), larger(largest_group / Source::step, 1));
    const size_t pieces = ceil_divide(steps, piece);
    const size_t wide_pieces = count * ceil_divide(example.bytes(outputs), direct_steps_bytes);
    const size_t splits =
        wide_pieces < fewest_pieces ? smaller(larger(columns / split_rows, 1), fewest_pieces / wide_pieces) : 1;
    const size_t stride = steps * Source::step;
    const size_t apart = size * stride;
    const Scratch sums(count * splits * apart);
    const bool serial = count * columns * example.bytes(outputs) <= serial_bytes;
    const size_t all = count * splits * pieces;
    parallel_for(all, serial ? all : 1, [&](size_t begin, size_t end) {
      const Scratch memory(Products::direct_memory(example, piece * Source::step));
      for (size_t i = begin; i < end; ++i) {
        const size_t part = i / pieces / splits, split = i / pieces % splits, first = i % pieces * piece;
        const Source source = source_of(matrix + part);
        Products(source, outputs)
            .direct(widened + part * size * columns, size, columns, columns * split / splits,
                    columns * (split + 1) / splits, first, smaller(piece, steps - first),
                    sums.data() + (part * splits + split) * apart, stride, memory.data());
      }
    });
    const Scratch memory(outputs);
    for (size_t i = 0; i < count * size; ++i) {
      const size_t part = i / size, m = i % size;
      Products::in_order(sums.data() + part * splits * apart + m * stride, splits, apart, outputs, memory.data());
      call.finish((matrix + part) * rows + row + m, 0, outputs, memory.data(), nullptr);
    }
  };

  auto panel = [&](const float* widened, size_t matrix, size_t count, size_t row, size_t size) {
    const size_t blocks = ceil_divide(outputs, Products::panel_outputs);
    parallel_for(count * blocks, 1, [&](size_t begin, size_t end) {
      const size_t needed = Products::panel_memory(source_of(matrix));
      const Scratch memory(needed + (size + 1) * Products::panel_outputs);
      float* sums = memory.data() + needed;
      float* ordered = sums + size * Products::panel_outputs;
      for (size_t i = begin; i < end; ++i) {
        const size_t part = i / blocks, n = i % blocks * Products::panel_outputs;
        const Source source = source_of(matrix + part);
        Products(source, outputs).panel(widened + part * size * columns, size, columns, n, sums, memory.data());
        const size_t block = smaller(Products::panel_outputs, outputs - n);
        for (size_t m = 0; m < size; ++m) {
          Products::in_order(sums + m * Products::panel_outputs, 1, 0, block, ordered);
          call.finish((matrix + part) * rows + row + m, n, block, ordered, nullptr);
        }
      }
    });
  };

  const size_t together = larger(batch_rows / rows, 1);
  for (size_t matrix = 0; matrix < call.matrices; matrix += together) {
    each_part(rows, batch_rows, [&](size_t row, size_t size) {
      const size_t count = smaller(together, call.matrices - matrix);
      const Scratch widened(count * size * columns);
      parallel_for(count * size, ceil_divide(16384, columns), [&](size_t begin, size_t end) {
        call.with_x<Source>(matrix * rows + row + begin, [&](const auto* x) {
          widen_row(x, widened.data() + begin * columns, (end - begin) * columns);
        });
      });
      if (size <= most_direct_columns_rows) {
        direct(widened.data(), matrix, count, row, size);
      } else {
        panel(widened.data(), matrix, count, row, size);
      }
    });
  }
}

}  // namespace mittens::cpu::MITTENS_ISA
