#include "cpu/matmul/gemv.h"

#include "cpu/isa/matmul/column_products.h"
#include "cpu/isa/matmul/row_products.h"

namespace mittens::cpu::MITTENS_ISA {

#if defined(MITTENS_UNPACKS_ALL)
// Rows of any type, widened when they are begun.
struct Widened : Dense<float> {
  const void* rows;
  Type type;

  using Element = void;

  Widened(Type type, const void* rows, size_t stride) : Dense<float>{nullptr, stride}, rows(rows), type(type) {}

  size_t memory(size_t size) const {
    return type == Type::float32 ? 0 : rounded_up(size, unit);
  }
  size_t stride_bytes() const {
    return 0;  // the next weights are not in memory yet
  }
  Row row(size_t n, size_t begin, size_t size, float* memory) const {
    const float* row = memory;
    with_type(type, [&](auto t) {
      using T = decltype(t);
      const T* from = static_cast<const T*>(rows) + n * stride + begin;
      if constexpr (__is_same(T, float)) {
        row = from;
      } else {
        widen_row(from, memory, size);
      }
    });
    return row;
  }
};
#endif

void gemv(Type type, const void* const* w, size_t weight_stride, bool transpose, const void* x, const void* bias,
          void* y, size_t matrices, size_t rows, size_t columns, size_t outputs, bool exact) {
  const ProductCall call{type, nullptr, x, bias, y, matrices, rows, columns, outputs, exact};
  auto multiply = [&](const auto& source_of) {
    using Source = std::remove_cvref_t<decltype(source_of(0, 0))>;
    if (transpose) {
      row_products<Source>(source_of, call);
    } else {
      column_products<Source>(source_of, call);
    }
  };
#if defined(MITTENS_UNPACKS_ALL)
  multiply([&](size_t i, size_t = 0) { return Widened(type, w[i], weight_stride); });
#else
  with_type(type, [&](auto t) {
    using T = decltype(t);
    multiply([&](size_t i, size_t = 0) { return Dense<T>{static_cast<const T*>(w[i]), weight_stride}; });
  });
#endif
}

}  // namespace mittens::cpu::MITTENS_ISA
