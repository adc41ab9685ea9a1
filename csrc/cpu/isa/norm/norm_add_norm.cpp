#include "cpu/norm/norm_add_norm.h"

#include "cpu/isa/norm/rms_row.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// sum = round(residual + round(y)).
template <typename T>
struct AddedTo {
  RowsOf<T> residual;
  T* sum;  // [rows, columns]

  static constexpr size_t arrays = 2;
  MITTENS_INLINE AddedTo at(size_t row, size_t column) const {
    return {residual.at(row, column), sum + row * residual.columns + column};
  }
  template <typename Part>
  MITTENS_INLINE void store(size_t i, Floats, Floats normed, Part part) const {
    cpu::MITTENS_ISA::store(sum + i, residual.load(i, part) + round<T>(normed), part);
  }
};

}  // namespace

void norm_add_norm(Type type, const void* x, const void* residual, NormScale scale, NormScale next_scale, void* y,
                   void* sum, size_t rows, size_t columns, float eps) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(rows * columns * sizeof(T), y, x, residual) && y != sum;
    const RmsRows<T, RowsOf<T>, AddedTo<T>> add{{(const T*)x, columns},
                                                {{(const T*)residual, columns}, (T*)sum},
                                                (const T*)scale.values,
                                                scale.offset,
                                                columns,
                                                eps};
    const RmsRows<T, RowsOf<T>, NormTo<T>> norm{{(const T*)sum, columns},
                                                {(T*)y, columns, through},
                                                (const T*)next_scale.values,
                                                next_scale.offset,
                                                columns,
                                                eps};
    const Rows adding(add, rows, columns);
    const Rows normalizing(norm, rows, columns);
    const size_t row_bytes = 4 * columns * sizeof(T);
    if (rows < 2 * threads() && rows * row_bytes > serial_bytes) {  // few long rows: threads share each
      adding.run();
      normalizing.run();
      return;
    }
    const size_t piece = rows * row_bytes <= serial_bytes ? rows : ceil_divide(piece_bytes, row_bytes);
    parallel_for(rows, piece, [&](size_t begin, size_t end) {  // row by row, while the sum is in the first cache
      for (size_t row = begin; row < end; ++row) {
        adding.whole_rows(row, row + 1);
        normalizing.whole_rows(row, row + 1);
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
