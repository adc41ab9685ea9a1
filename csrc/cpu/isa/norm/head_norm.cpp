// rms_norm of heads (qk_norm).
#include "cpu/norm/head_norm.h"

#include "cpu/isa/norm/rms_row.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

template <typename T>
struct RowsByStrides {
  StridedRows rows;

  static constexpr size_t arrays = 1;
  MITTENS_INLINE RowsOf<T> at(size_t row, size_t column) const {
    const int64_t i = static_cast<int64_t>(row);
    const int64_t inner = rows.sizes[2], middle = rows.sizes[1];
    const int64_t offset = i / inner / middle * rows.strides[0] + i / inner % middle * rows.strides[1] +
                           i % inner * rows.strides[2] + static_cast<int64_t>(column);
    return {static_cast<const T*>(rows.data) + offset, 0};
  }
};

}  // namespace

void head_norm(Type type, StridedRows x, const void* weight, void* y, size_t columns, float eps, float weight_offset) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const size_t rows = static_cast<size_t>(x.sizes[0] * x.sizes[1] * x.sizes[2]);
    const bool through = passes_caches(rows * columns * sizeof(T), y, x.data);
    const RmsRows<T, RowsByStrides<T>, NormTo<T>> op{
        {x}, {(T*)y, columns, through}, (const T*)weight, weight_offset, columns, eps};
    Rows(op, rows, columns).run();
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
