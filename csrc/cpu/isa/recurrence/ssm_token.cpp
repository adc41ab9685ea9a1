#include "cpu/isa/recurrence/convolution.h"
#include "cpu/isa/recurrence/gates.h"
#include "cpu/isa/recurrence/token_heads.h"
#include "cpu/recurrence/token_layers.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

template <typename T>
struct Token {
  const SsmToken& shape;
  const SsmTokenInputs& inputs;
  T* y;
  float* state;

  void head(size_t sequence, size_t head, float* numbers) const {
    const size_t columns = shape.columns, rows = shape.rows;
    const size_t heads_of_group = shape.heads / shape.groups, group = head / heads_of_group;
    const HeadMemory memory(numbers, rows, columns);
    const T* projected = (const T*)inputs.projected + sequence * (shape.inner() + shape.channels() + shape.heads);
    const T* mixed = projected + shape.inner();
    const Convolution<T> all = convolution_of<T>(inputs.convolution, sequence, shape.channels(), shape.taps);
    const bool is_first = head % heads_of_group == 0;
    const auto convolved = [&](size_t channel, size_t n, bool writes, float* out) {
      convolve(all, channel, mixed + channel, n, writes, weights_by_tap(all, channel, n, memory.weights), out,
               [](Float sum) MITTENS_INLINED { return silu(sum); });
    };
    convolved(head * rows, rows, true, memory.values);
    convolved(shape.inner() + group * columns, columns, is_first, memory.keys);
    convolved(shape.inner() + (shape.groups + group) * columns, columns, is_first, memory.queries);
    float step = softplus(widen_one<T>(mixed + shape.channels(), head) + number_of(inputs.dt_bias, head));
    step = step < shape.least_step ? shape.least_step : step;
    step = step > shape.greatest_step ? shape.greatest_step : step;
    const float gate = exp(-(step * exp(number_of(inputs.a_log, head))));
    const size_t first = (sequence * shape.heads + head) * rows;
    advance_head(inputs.state + first * columns, state + first * columns, rows, columns,
                 {memory.keys, memory.queries, nullptr, gate, step, false}, memory);
    const float skip = number_of(inputs.d, head);
    const T* z = projected + head * rows;
    each_vector(rows, [&](size_t i, auto part) MITTENS_INLINED {
      const Float sum =
          fma(read<Float>(memory.values + i, All()), Float{} + skip, read<Float>(memory.results + i, All()));
      store_in_order(y + first + i, shape.is_gated ? sum * silu(load_in_order(z + i, part)) : sum, part);
    });
  }
};

}  // namespace

void ssm_token(Type type, const SsmToken& shape, const SsmTokenInputs& inputs, void* y, float* state) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Token<T> token = {shape, inputs, (T*)y, state};
    each_head(shape.batch, shape.heads, shape.rows * shape.columns,
              HeadMemory::numbers(shape.rows, shape.columns, shape.taps),
              [&](size_t sequence, size_t head, float* memory) { token.head(sequence, head, memory); });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
