#include "cpu/integer_matmul.h"

#include "cpu/isa/matmul/integer_calls.h"
#include "cpu/isa/matmul/integer_products.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// most_rows: of integers of 16 bits.
template <int bits>
bool multiply_by(const IntegerCall& call, size_t most_rows, ProductMode mode) {
  using Source = Affine<bits>;
  if constexpr (Int8::exists<bits>) {
    if (mode.int8 && call.rows <= larger(most_rows, most_byte_rows)) {
      multiply_in_batches<Source, IntegerProducts<Source, Int8>>(call);
      return true;
    }
  }
  if (call.type == Type::float32 || call.rows > most_rows) {
    return false;
  }
  multiply_in_batches<Source, IntegerProducts<Source, Int16>>(call);
  return true;
}

}  // namespace

bool integer_matmul(Type type, const Activation* activation, const QuantizedWeights* w, const QuantizedWeights* up,
                    const void* x, const void* bias, void* y, size_t matrices, size_t rows, size_t columns,
                    size_t outputs, ProductMode mode, bool* taken) {
  const size_t most_rows = mode.exact && most_integer_rows != 0 ? most_exact_rows : most_integer_rows;
  const IntegerCall call{{type, activation, x, bias, y, matrices, rows, columns, outputs, mode.exact}, w, up, taken};
  return w->bits == 4 ? multiply_by<4>(call, most_rows, mode) : multiply_by<8>(call, most_rows, mode);
}

}  // namespace mittens::cpu::MITTENS_ISA
