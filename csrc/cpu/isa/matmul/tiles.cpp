#include "cpu/isa/matmul/tiles.h"

namespace mittens::cpu::MITTENS_ISA {

template <int rows>
void row_tile(const float* x, size_t x_stride, const float* w, size_t length, float* sums, size_t stride, bool add,
              size_t chain) {
  LaneSums<rows, tile_outputs, true> sum;
  auto add_columns = [&](size_t k) MITTENS_INLINED {
    Float weights[tile_outputs];
    repeat<tile_outputs>([&](auto i)
                             MITTENS_INLINED { weights[i.value] = read<Float>(w + i.value * length + k, All()); });
    repeat<rows>([&](auto m) MITTENS_INLINED {
      const Float activations = read<Float>(x + m.value * x_stride + k, All());
      repeat<tile_outputs>([&](auto i) MITTENS_INLINED {
        sum.v[m.value][i.value] = fma(weights[i.value], activations, sum.v[m.value][i.value]);
      });
    });
  };
  for (size_t k = 0; k < length;) {
    for (const size_t end = smaller(k + chain * width, length); k < end; k += width) {
      add_columns(k);
    }
    sum.end_chains();
  }
  repeat<rows>([&](auto m)
                   MITTENS_INLINED { write_totals(sums + m.value * stride, sum.template of_row<m.value>(), add); });
}

template <int rows>
void column_tile(const float* x, size_t columns, const float* w, size_t length, float* sums, size_t stride, bool add) {
  Float sum[rows][tile_vectors] = {};
  for (size_t k = 0; k < length; ++k) {
    Float weights[tile_vectors];
    repeat<tile_vectors>([&](auto v) MITTENS_INLINED {
      weights[v.value] = read<Float>(w + (k * tile_vectors + v.value) * width, All());
    });
    repeat<rows>([&](auto m) MITTENS_INLINED {
      const Float activation = Float{} + x[m.value * columns + k];
      repeat<tile_vectors>([&](auto v) MITTENS_INLINED {
        sum[m.value][v.value] = fma(weights[v.value], activation, sum[m.value][v.value]);
      });
    });
  }
  repeat<rows>([&](auto m) MITTENS_INLINED {
    repeat<tile_vectors>([&](auto v) MITTENS_INLINED {
      float* y = sums + m.value * stride + v.value * width;
      write(y, add ? read<Float>(y, All()) + sum[m.value][v.value] : sum[m.value][v.value], All());
    });
  });
}

#define MITTENS_TILES(rows)                                                                               \
  template void row_tile<rows>(const float*, size_t, const float*, size_t, float*, size_t, bool, size_t); \
  template void column_tile<rows>(const float*, size_t, const float*, size_t, float*, size_t, bool);
MITTENS_TILES(4)
MITTENS_TILES(5)
MITTENS_TILES(6)
static_assert(fewest_tile_rows == 4 && tile_rows == 6);

}  // namespace mittens::cpu::MITTENS_ISA
