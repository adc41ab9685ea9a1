#include "cpu/quantized_matmul.h"

#include <algorithm>
#include <memory>
#include <type_traits>

#include "cpu/dispatch.h"
#include "cpu/integer_matmul.h"

namespace mittens::cpu {

MITTENS_VERSIONS(quantized_matmul)
MITTENS_VERSIONS(quantized_swiglu)
MITTENS_INTEGER_VERSIONS(integer_matmul)

namespace {

// Float32 products with integers of 4 and 8 bits: their sums do not depend on the number of rows up to these.
constexpr size_t alike_rows = 4;

bool goes_in_parts(Type type, const QuantizedWeights& w, size_t matrices, size_t rows, bool exact) {
  const bool is_widened = w.mode == QuantizedMode::affine && (w.bits == 4 || w.bits == 8);
  return exact && type == Type::float32 && is_widened && w.transpose && matrices == 1 && rows <= most_exact_rows;
}

// Whether integer_matmul takes the call. Calls row(i) for each row that it leaves.
template <typename Row>
bool in_integers(Type type, const Activation* activation, const QuantizedWeights* w, const QuantizedWeights* up,
                 const void* x, const void* bias, void* y, size_t matrices, size_t rows, size_t columns, size_t outputs,
                 bool exact, const Row& row) {
  const bool is_known = w->mode == QuantizedMode::affine && (w->bits == 4 || w->bits == 8) && w->transpose;
  if (!is_known || type == Type::float32 || rows > most_exact_rows) {
    return false;
  }
  const std::unique_ptr<bool[]> taken(new bool[matrices * rows]);
  if (!integer_matmul_versions[isa_index()](type, activation, w, up, x, bias, y, matrices, rows, columns, outputs,
                                            exact, taken.get())) {
    return false;
  }
  for (size_t i = 0; i < matrices * rows; ++i) {
    if (!taken[i]) {
      row(i);
    }
  }
  return true;
}

// Element `index` of an array of 2-byte elements.
template <typename Pointer>
Pointer element_of_halves(Pointer p, size_t index) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return static_cast<Byte*>(p) + 2 * index;
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
  if (matrices > 0 &&
      in_integers(type, nullptr, w, nullptr, x, bias, y, matrices, rows, columns, outputs, exact, [&](size_t i) {
        quantized_matmul_versions[isa_index()](type, w + i / rows, element_of_halves(x, i * columns), bias,
                                               element_of_halves(y, i * outputs), 1, 1, columns, outputs, exact);
      })) {
    return;
  }
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
  if (matrices > 0 &&
      in_integers(type, &activation, gate, up, x, nullptr, y, matrices, rows, columns, outputs, exact, [&](size_t i) {
        quantized_swiglu_versions[isa_index()](type, activation, gate + i / rows, up + i / rows,
                                               element_of_halves(x, i * columns), element_of_halves(y, i * outputs), 1,
                                               1, columns, outputs, exact);
      })) {
    return;
  }
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
