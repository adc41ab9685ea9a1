#include "cpu/quantized_matmul.h"

#include <algorithm>

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(quantized_matmul)
MITTENS_VERSIONS(quantized_swiglu)

namespace {

// Float32 products with integers of 4 and 8 bits: their sums do not depend on the number of rows up to these.
constexpr size_t alike_rows = 4;

bool goes_in_parts(Type type, const QuantizedWeights& w, size_t matrices, size_t rows, bool exact) {
  const bool is_widened = w.mode == QuantizedMode::affine && (w.bits == 4 || w.bits == 8);
  return exact && type == Type::float32 && is_widened && w.transpose && matrices == 1 && rows <= most_exact_rows;
}

// Calls product(x, y, rows) for parts of x [rows, columns] and y [rows, outputs] in float32.
template <typename Product>
void in_parts(const void* x, void* y, size_t rows, size_t columns, size_t outputs, const Product& product) {
  for (size_t row = 0; row < rows; row += alike_rows) {
    product(static_cast<const float*>(x) + row * columns, static_cast<float*>(y) + row * outputs,
            std::min(alike_rows, rows - row));
  }
}

}  // namespace

void quantized_matmul(Type type, const QuantizedWeights* w, const void* x, const void* bias, void* y, size_t matrices,
                      size_t rows, size_t columns, size_t outputs, bool exact) {
  const auto product = [&](const void* x, void* y, size_t rows, bool exact) {
    quantized_matmul_versions[isa_index()](type, w, x, bias, y, matrices, rows, columns, outputs, exact);
  };
  if (matrices > 0 && goes_in_parts(type, *w, matrices, rows, exact)) {
    in_parts(x, y, rows, columns, outputs, [&](const void* x, void* y, size_t rows) { product(x, y, rows, false); });
  } else {
    product(x, y, rows, exact);
  }
}

void quantized_swiglu(Type type, Activation activation, const QuantizedWeights* gate, const QuantizedWeights* up,
                      const void* x, void* y, size_t matrices, size_t rows, size_t columns, size_t outputs,
                      bool exact) {
  const auto product = [&](const void* x, void* y, size_t rows, bool exact) {
    quantized_swiglu_versions[isa_index()](type, activation, gate, up, x, y, matrices, rows, columns, outputs, exact);
  };
  if (matrices > 0 && goes_in_parts(type, *gate, matrices, rows, exact)) {
    in_parts(x, y, rows, columns, outputs, [&](const void* x, void* y, size_t rows) { product(x, y, rows, false); });
  } else {
    product(x, y, rows, exact);
  }
}

}  // namespace mittens::cpu
