// The gated delta rule (gated_delta_update).
#include "cpu/recurrence/recurrence.h"

#include "cpu/isa/recurrence/over_steps.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Of a head: gates and rates that are given.
template <typename T>
struct GivenNumbers {
  const Recurrence& shape;
  const RecurrenceInputs& inputs;
  T* y;
  size_t head;

  MITTENS_INLINE Step step(size_t at, const float* k, const float* q, float* gates) const {
    const size_t gate_at = at * shape.heads + head;
    if (shape.gate_per_column) {
      read_row(inputs.gates + gate_at * shape.columns, shape.columns, gates);
    }
    return {k,
            q,
            shape.gate_per_column ? gates : nullptr,
            shape.gate_per_column ? 0.0f : inputs.gates[gate_at],
            number(inputs.rate_type, inputs.rates, gate_at),
            shape.corrects};
  }

  // `results` is null where the step is hidden.
  MITTENS_INLINE void write_y(size_t value_at, size_t rows, const float* results, const T*) const {
    each_vector(rows, [&](size_t i, auto part) MITTENS_INLINED {
      store_in_order(y + value_at + i, results ? read<Float>(results + i, All()) : Float{}, part);
    });
  }
};

}  // namespace

void recurrence(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, void* y, float* state) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Sequences<T> all = {
        shape, (const T*)inputs.q, (const T*)inputs.k, (const T*)inputs.v, inputs.state, inputs.mask, state};
    over_steps(all, [&](size_t head) { return GivenNumbers<T>{shape, inputs, (T*)y, head}; });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
