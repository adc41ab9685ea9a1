#include "cpu/moe/weighted_sum.h"

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

void weighted_sum(Type type, const void* x, const void* bias, const uint32_t* matrices, size_t stack,
                  const void* weights, Type weights_type, void* y, size_t sums, size_t terms, size_t columns) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    parallel_for(sums, ceil_divide(16384, terms * columns), [&](size_t begin, size_t end) {
      const Scratch memory(padded_width(terms));
      float* factors = memory.data();
      for (size_t s = begin; s < end; ++s) {
        with_type(weights_type, [&](auto w) MITTENS_INLINED {
          for (size_t i = 0; i < terms; ++i) {
            factors[i] = widen_one<decltype(w)>(weights, s * terms + i);
          }
        });
        const T* rows = (const T*)x + s * terms * columns;
        each_vector(columns, [&](size_t column, auto part) MITTENS_INLINED {
          Float sum = Float{};
          for (size_t i = 0; i < terms; ++i) {
            Float v = load_in_order(rows + i * columns + column, part);
            const size_t matrix = matrices[s * terms + i];
            if (bias && matrix < stack) {
              v += load_in_order((const T*)bias + matrix * columns + column, part);
            }
            sum += v * factors[i];
          }
          store_in_order((T*)y + s * columns + column, sum, part);
        });
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
