// Products of many rows of x as integers with quantized weights, by panels of both.
#include "cpu/matmul/integer_matmul.h"

#include "cpu/isa/matmul/integer_calls.h"
#if defined(__AMX_INT8__)
#include "cpu/isa/matmul/integer_tiles.h"
#else
#include "cpu/isa/matmul/integer_panels.h"
#endif

namespace mittens::cpu::MITTENS_ISA {

namespace {

#if defined(__AMX_INT8__)
template <typename Source, typename Form>
using Many = IntegerTiles<Source, Form>;
#else
template <typename Source, typename Form>
using Many = IntegerPanels<Source, Form>;
#endif

// least_rows: 0 if never.
template <int bits, typename Source, typename Form>
bool panels_of(const IntegerCall& call, size_t least_rows) {
  if constexpr (Form::template exists<bits> &&
                (__is_same(Form, Int8) || integer_rows(Integers::packed).least_panel_rows)) {
    if (least_rows != 0 && call.rows >= least_rows) {
      multiply_in_batches<Source, Many<Source, Form>>(call);
      return true;
    }
  }
  return false;
}

template <int bits, typename Source>
bool panels_by(const IntegerCall& call, Integers integers, bool int8) {
  const IntegerRows rows = integer_rows(integers);
  return (int8 && panels_of<bits, Source, Int8>(call, larger(rows.most_rows, most_byte_rows) + 1)) ||
         (call.type != Type::float32 && panels_of<bits, Source, Int16>(call, rows.least_panel_rows));
}

}  // namespace

bool integer_panel_matmul(Type type, const Activation* activation, const QuantizedWeights* w,
                          const QuantizedWeights* up, const void* x, const void* bias, void* y, size_t matrices,
                          size_t rows, size_t columns, size_t outputs, ProductMode mode, bool* taken) {
  if (mode.exact && rows <= most_exact_rows) {
    return false;
  }
  const IntegerCall call{{type, activation, x, bias, y, matrices, rows, columns, outputs, mode.exact}, w, up, taken};
  const Integers integers = integers_of(*w);
  return integers == Integers::packed && w->bits == 4 ? panels_by<4, Affine<4>>(call, integers, mode.int8)
                                                      : panels_by<8, ByteRows>(call, integers, mode.int8);
}

}  // namespace mittens::cpu::MITTENS_ISA
