#include "cpu/gemv.h"

#include "cpu/isa/matmul/column_products.h"
#include "cpu/isa/matmul/row_products.h"

namespace mittens::cpu::MITTENS_ISA {

void gemv(Type type, const void* const* w, size_t weight_stride, bool transpose, const void* x, const void* bias,
          void* y, size_t matrices, size_t rows, size_t columns, size_t outputs, bool exact) {
  const ProductCall call{type, nullptr, x, bias, y, matrices, rows, columns, outputs, exact};
  with_type(type, [&](auto t) {
    using T = decltype(t);
    using Source = Dense<T>;
    auto source_of = [&](size_t i, size_t = 0) { return Source{static_cast<const T*>(w[i]), weight_stride}; };
    if (transpose) {
      row_products<Source>(source_of, call);
    } else {
      column_products<Source>(source_of, call);
    }
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
