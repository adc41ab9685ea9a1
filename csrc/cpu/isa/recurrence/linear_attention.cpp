#include "cpu/isa/recurrence/over_steps.h"
#include "cpu/recurrence.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Of a head.
template <typename T>
struct DecayNumbers {
  T* y;
  float decay, scale;

  MITTENS_INLINE Step step(size_t, const float* k, const float* q, float*) const {
    return {k, q, nullptr, decay, 1, false};
  }

  MITTENS_INLINE void write_y(size_t value_at, size_t rows, const float* results, const T*) const {
    each_vector(rows, [&](size_t i, auto part) MITTENS_INLINED {
      store_in_order(y + value_at + i, read<Float>(results + i, All()) * scale, part);
    });
  }
};

}  // namespace

void linear_attention(Type type, const Recurrence& shape, const LinearAttentionInputs& inputs, void* y, float* state) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Sequences<T> all = {shape, (const T*)inputs.q, (const T*)inputs.k, (const T*)inputs.v, inputs.state, nullptr,
                              state};
    over_steps(all, [&](size_t head) {
      const float decay = inputs.decays.data ? number(inputs.decays.type, inputs.decays.data, head) : inputs.decay;
      return DecayNumbers<T>{(T*)y, decay, inputs.scale};
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
