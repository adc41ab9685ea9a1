#include "cpu/gemv.h"

#include "cpu/isa/matmul/column_products.h"
#include "cpu/isa/matmul/row_products.h"

namespace mittens::cpu::MITTENS_ISA {

void gemv(Type type, const void* const* w, size_t weight_stride, bool transpose, const void* x, const void* bias,
          void* y, size_t matrices, size_t rows, size_t columns, size_t outputs, bool exact) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    using Source = Dense<T>;
    auto source_of = [&](size_t i, int = 0) { return Source{(const T*)w[i], weight_stride}; };
    auto finish = [&](size_t row, size_t n, size_t size, const float* sums, const float* = nullptr) {
      round_row((T*)y + row * outputs + n, sums, bias ? (const T*)bias + n : nullptr, size);
    };
    if (transpose) {
      row_products<Source, 1>(source_of, (const T*)x, matrices, rows, columns, outputs, finish, exact);
    } else {
      column_products<Source>(source_of, (const T*)x, matrices, rows, columns, outputs, finish);
    }
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
