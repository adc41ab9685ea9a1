// Chooses the code of a quantized product: integers along the weights for a few rows of half types, integers in panels
// for many, and float32 for all others.
#include "cpu/matmul/quantized_matmul.h"

#include <algorithm>
#include <memory>

#include "cpu/dispatch.h"
#include "cpu/huge_pages.h"
#include "cpu/matmul/integer_matmul.h"
#include "cpu/matmul/packed_rows.h"

namespace mittens::cpu {

MITTENS_VERSIONS(quantized_matmul)
MITTENS_VERSIONS(quantized_swiglu)
MITTENS_VERSIONS(block_matmul)
MITTENS_VERSIONS(packed_rows)
MITTENS_INTEGER_VERSIONS(integer_matmul)
MITTENS_PANEL_VERSIONS(integer_panel_matmul)

namespace {

// The arguments of either op; up and activation: quantized_swiglu's, or nullptr.
struct Product {
  Type type;
  const Activation* activation;
  const QuantizedWeights* w;
  const QuantizedWeights* up;
  const void* x;
  const void* bias;
  void* y;
  size_t matrices;
  size_t rows;
  size_t columns;
  size_t outputs;
  ProductMode mode;

  // Some rows of one matrix.
  Product part(size_t matrix, size_t first, size_t size) const {
    Product part = *this;
    part.w = w + matrix;
    part.up = up ? up + matrix : nullptr;
    part.matrices = 1;
    part.rows = size;
    const size_t row = matrix * rows + first, item = type == Type::float32 ? 4 : 2;
    part.x = static_cast<const char*>(x) + row * columns * item;
    part.y = static_cast<char*>(y) + row * outputs * item;
    return part;
  }
};

// Of one matrix for a few rows, which read it at the speed of memory.
void note_weights(const QuantizedWeights* w, size_t matrices, size_t rows, size_t columns, size_t outputs) {
  if (w && matrices == 1 && rows <= most_noted_rows) {
    const bool blocks = w->mode == QuantizedMode::blocks;
    cpu::note_weights(w->words, blocks ? outputs * w->blocks * block_bytes(w->kind)
                                       : (w->transpose ? outputs : columns) * w->words_stride * sizeof(uint32_t));
  }
}

bool has_integers(const QuantizedWeights& w) {
  return w.mode != QuantizedMode::mxfp8 && w.transpose;
}

void multiply_in_float32(const Product& p) {
  if (p.w->mode == QuantizedMode::blocks) {
    block_matmul_versions[isa_index()](p.type, p.w->kind, reinterpret_cast<const uint8_t*>(p.w->words), p.x, p.bias,
                                       p.y, p.rows, p.columns, p.outputs, p.mode.exact);
  } else if (p.activation) {
    quantized_swiglu_versions[isa_index()](p.type, *p.activation, p.w, p.up, p.x, p.y, p.matrices, p.rows, p.columns,
                                           p.outputs, p.mode);
  } else {
    quantized_matmul_versions[isa_index()](p.type, p.w, p.x, p.bias, p.y, p.matrices, p.rows, p.columns, p.outputs,
                                           p.mode);
  }
}

// Whether integers take the product; taken: for which rows.
bool multiply_integers(const Product& p, bool* taken) {
  auto takes = [&](const auto& versions) {
    return versions[isa_index()](p.type, p.activation, p.w, p.up, p.x, p.bias, p.y, p.matrices, p.rows, p.columns,
                                 p.outputs, p.mode, taken);
  };
  // Tiles (AMX) are faster for some numbers of rows that the other takes too.
  return takes(integer_panel_matmul_versions) || takes(integer_matmul_versions);
}

void multiply(const Product& product) {
  const bool may_be_integers = product.matrices > 0 && product.rows > 0 && has_integers(*product.w) &&
                               (product.type != Type::float32 || product.mode.int8);
  const size_t rows = product.rows;
  const std::unique_ptr<bool[]> taken(may_be_integers ? new bool[product.matrices * rows] : nullptr);
  if (!may_be_integers || !multiply_integers(product, taken.get())) {
    multiply_in_float32(product);
    return;
  }
  for (size_t matrix = 0; matrix < product.matrices; ++matrix) {
    const bool* begin = taken.get() + matrix * rows;
    for (const bool* row = std::find(begin, begin + rows, false); row != begin + rows;) {
      const bool* end = std::find(row, begin + rows, true);
      Product part = product.part(matrix, row - begin, end - row);
      if (part.mode.int8) {  // int16 may cover it where int8 does not
        part.mode.int8 = false;
        multiply(part);
      } else {
        multiply_in_float32(part);
      }
      row = std::find(end, begin + rows, false);
    }
  }
}

}  // namespace

PackedRows packed_rows(const QuantizedWeights& w, Type type) {
  return packed_rows_versions[isa_index()](w, type);
}

void quantized_matmul(Type type, const QuantizedWeights* w, const void* x, const void* bias, void* y, size_t matrices,
                      size_t rows, size_t columns, size_t outputs, ProductMode mode) {
  note_weights(w, matrices, rows, columns, outputs);
  multiply({type, nullptr, w, nullptr, x, bias, y, matrices, rows, columns, outputs, mode});
}

void quantized_swiglu(Type type, Activation activation, const QuantizedWeights* gate, const QuantizedWeights* up,
                      const void* x, void* y, size_t matrices, size_t rows, size_t columns, size_t outputs,
                      ProductMode mode) {
  note_weights(gate, matrices, rows, columns, outputs);
  note_weights(up, matrices, rows, columns, outputs);
  multiply({type, &activation, gate, up, x, nullptr, y, matrices, rows, columns, outputs, mode});
}

void block_matmul(Type type, BlockKind kind, const uint8_t* blocks, const void* x, const void* bias, void* y,
                  size_t rows, size_t columns, size_t outputs, bool exact) {
  const QuantizedWeights w = weights_of_blocks(kind, blocks, columns / block_weights(kind));
  note_weights(&w, 1, rows, columns, outputs);
  multiply({type, nullptr, &w, nullptr, x, bias, y, 1, rows, columns, outputs, {exact, false}});
}

}  // namespace mittens::cpu
