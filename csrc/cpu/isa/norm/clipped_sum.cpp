#include "cpu/norm/clipped_sum.h"

#include "cpu/isa/norm/rms_row.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr float largest = 65504;  // of float16

// sum = round(residual + round(y)) within the range. NaN stays.
struct ClippedTo {
  RowsOf<float16> residual;
  float16* sum;  // [rows, columns]

  static constexpr size_t arrays = 2;
  MITTENS_INLINE ClippedTo at(size_t row, size_t column) const {
    return {residual.at(row, column), sum + row * residual.columns + column};
  }
  static MITTENS_INLINE Float clipped(Float x) {
    return minimum(Float{} + largest, maximum(Float{} - largest, x));
  }
  template <typename Part>
  MITTENS_INLINE void store(size_t i, Floats, Floats normed, Part part) const {
    const Floats total = residual.load(i, part) + round<float16>(normed);
    cpu::MITTENS_ISA::store(sum + i, {clipped(total.a), clipped(total.b)}, part);
  }
};

}  // namespace

void clipped_sum(const void* x, const void* residual, NormScale scale, void* sum, size_t rows, size_t columns,
                 float eps) {
  const RmsRows<float16, RowsOf<float16>, ClippedTo> add{{(const float16*)x, columns},
                                                         {{(const float16*)residual, columns}, (float16*)sum},
                                                         (const float16*)scale.values,
                                                         scale.offset,
                                                         columns,
                                                         eps};
  Rows(add, rows, columns).run();
}

}  // namespace mittens::cpu::MITTENS_ISA
