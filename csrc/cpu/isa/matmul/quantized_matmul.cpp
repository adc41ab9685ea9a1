#include "cpu/quantized_matmul.h"

#include "cpu/isa/matmul/column_products.h"
#include "cpu/isa/matmul/row_products.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Calls f with a value of the element type and the bits as an Index.
template <typename F>
void with_format(Type type, int bits, const F& f) {
  with_type(type, [&](auto t) { bits == 4 ? f(t, Index<4>()) : f(t, Index<8>()); });
}

}  // namespace

void quantized_matmul(Type type, const QuantizedWeights* w, const void* x, const void* bias, void* y, size_t matrices,
                      size_t rows, size_t columns, size_t outputs) {
  with_format(type, w->bits, [&](auto t, auto bits) {
    using T = decltype(t);
    using Source = Affine<decltype(bits)::value, __is_same(T, float)>;
    auto finish = [&](size_t row, size_t n, size_t size, const float* sums, const float* = nullptr) {
      round_row((T*)y + row * outputs + n, sums, bias ? (const T*)bias + n : nullptr, size);
    };
    auto source_of = [&](size_t i, int = 0) { return Source(w[i], type); };
    if (w->transpose) {
      row_products<Source, 1>(source_of, (const T*)x, matrices, rows, columns, outputs, finish);
    } else {
      column_products<Source>(source_of, (const T*)x, matrices, rows, columns, outputs, finish);
    }
  });
}

void quantized_swiglu(Type type, const QuantizedWeights* gate, const QuantizedWeights* up, const void* x, void* y,
                      size_t matrices, size_t rows, size_t columns, size_t outputs) {
  with_format(type, gate->bits, [&](auto t, auto bits) {
    using T = decltype(t);
    using Source = Affine<decltype(bits)::value, __is_same(T, float)>;
    auto finish = [&](size_t row, size_t n, size_t size, const float* gates, const float* ups) {
      each_vector(size, [&](size_t i, auto part) MITTENS_INLINED {
        const Float g = read<Float>(gates + i, part);
        store_in_order((T*)y + row * outputs + n + i, g / (exp(-g) + 1.0f) * read<Float>(ups + i, part), part);
      });
    };
    auto source_of = [&](size_t i, int j) { return Source((j == 0 ? gate : up)[i], type); };
    row_products<Source, 2>(source_of, (const T*)x, matrices, rows, columns, outputs, finish);
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
