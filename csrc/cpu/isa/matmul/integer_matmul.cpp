// Products of few rows of x as integers with quantized weights, dot product by dot product.
#include "cpu/matmul/integer_matmul.h"

#include "cpu/isa/matmul/integer_calls.h"
#include "cpu/isa/matmul/integer_products.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// most_rows: of integers of 16 bits.
template <int bits, typename Source>
bool multiply_by(const IntegerCall& call, size_t most_rows, ProductMode mode) {
  if constexpr (Int8::exists<bits>) {
    if (mode.int8 && call.rows <= larger(most_rows, most_byte_rows)) {
      multiply_in_batches<Source, IntegerProducts<Source, Int8>>(call);
      return true;
    }
  }
  if (call.type == Type::float32 || call.rows > most_rows) {
    return false;
  }
  multiply_in_batches<Source, IntegerProducts<Source, RowInt16>>(call);
  return true;
}

}  // namespace

bool integer_matmul(Type type, const Activation* activation, const QuantizedWeights* w, const QuantizedWeights* up,
                    const void* x, const void* bias, void* y, size_t matrices, size_t rows, size_t columns,
                    size_t outputs, ProductMode mode, bool* taken) {
  const IntegerCall call{{type, activation, x, bias, y, matrices, rows, columns, outputs, mode.exact}, w, up, taken};
  const Integers integers = integers_of(*w);
  const size_t most_inexact = integer_rows(integers).most_rows;
  const size_t most_rows = mode.exact && most_inexact != 0 ? most_exact_rows : most_inexact;
  if (integers == Integers::small_floats) {
    if constexpr (integer_rows(Integers::small_floats).most_rows != 0) {
      return multiply_by<4, SmallFloats<4>>(call, most_rows, mode);
    }
    return false;
  }
  return integers == Integers::packed && w->bits == 4 ? multiply_by<4, Affine<4>>(call, most_rows, mode)
                                                      : multiply_by<8, ByteRows>(call, most_rows, mode);
}

}  // namespace mittens::cpu::MITTENS_ISA
