#include "cpu/integer_matmul.h"
#include "cpu/isa/matmul/integer_calls.h"
#include "cpu/isa/matmul/integer_panels.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Rows from which a panel of integers is faster than what these rows have otherwise; 0: never.
template <typename Form>
constexpr size_t least_rows = 0;
template <>
constexpr size_t least_rows<Int8> = most_byte_rows + 1;
#if defined(__AVX512VNNI__)
template <>
constexpr size_t least_rows<Int16> = 24;
#elif defined(__AVX2__) && !defined(__AVX512F__)
template <>
constexpr size_t least_rows<Int16> = 12;
#endif

template <int bits, typename Form>
bool panels_of(const IntegerCall& call) {
  if constexpr (least_rows<Form> != 0 && Form::template exists<bits>) {
    if (call.rows >= least_rows<Form>) {
      multiply_in_batches<Affine<bits>, IntegerPanels<Affine<bits>, Form>>(call);
      return true;
    }
  }
  return false;
}

template <int bits>
bool panels_by(const IntegerCall& call, bool int8) {
  return (int8 && panels_of<bits, Int8>(call)) || (call.type != Type::float32 && panels_of<bits, Int16>(call));
}

}  // namespace

bool integer_panel_matmul(Type type, const Activation* activation, const QuantizedWeights* w,
                          const QuantizedWeights* up, const void* x, const void* bias, void* y, size_t matrices,
                          size_t rows, size_t columns, size_t outputs, ProductMode mode, bool* taken) {
  if (mode.exact && rows <= most_exact_rows) {
    return false;
  }
  const IntegerCall call{{type, activation, x, bias, y, matrices, rows, columns, outputs, mode.exact}, w, up, taken};
  return w->bits == 4 ? panels_by<4>(call, mode.int8) : panels_by<8>(call, mode.int8);
}

}  // namespace mittens::cpu::MITTENS_ISA
