// A state space (ssm_update).
#include "cpu/isa/recurrence/gates.h"
#include "cpu/isa/recurrence/over_steps.h"
#include "cpu/recurrence/recurrence.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Of a head: gates and rates from its time steps.
template <typename T, typename Y>
struct SpaceNumbers {
  const Recurrence& shape;
  const StateSpaceInputs& inputs;
  Y* y;
  size_t head;
  float bias = number_of(inputs.dt_bias, head);
  float decay = exp(number_of(inputs.a_log, head));
  float skip = number_of(inputs.d, head);

  MITTENS_INLINE Step step(size_t at, const float* k, const float* q, float*) const {
    float step = softplus(number_of(inputs.dt, at * shape.heads + head) + bias);
    step = step < inputs.least_step ? inputs.least_step : step;
    step = step > inputs.greatest_step ? inputs.greatest_step : step;
    return {k, q, nullptr, exp(-(step * decay)), step, false};
  }

  // `results` is null where the step is hidden.
  MITTENS_INLINE void write_y(size_t value_at, size_t rows, const float* results, const T* x) const {
    each_vector(rows, [&](size_t i, auto part) MITTENS_INLINED {
      const Float result = results ? read<Float>(results + i, All()) : Float{};
      store_in_order(y + value_at + i, fma(load_in_order(x + value_at + i, part), Float{} + skip, result), part);
    });
  }
};

}  // namespace

void state_space(Type type, const Recurrence& shape, const StateSpaceInputs& inputs, Type y_type, void* y,
                 float* state) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Sequences<T> all = {
        shape, (const T*)inputs.c, (const T*)inputs.b, (const T*)inputs.x, inputs.state, inputs.mask, state};
    const auto with_results = [&](auto r) {
      using Y = decltype(r);
      over_steps(all, [&](size_t head) { return SpaceNumbers<T, Y>{shape, inputs, (Y*)y, head}; });
    };
    if (y_type == type) {
      with_results(T());
    } else {
      with_results(float());
    }
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
