#include "cpu/isa/recurrence/convolution.h"
#include "cpu/isa/recurrence/gates.h"
#include "cpu/isa/recurrence/over_steps.h"
#include "cpu/token_layers.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

template <typename T>
struct Token {
  const SsmToken& shape;
  const SsmTokenInputs& inputs;
  T* y;
  float* state;

  Convolution<T> convolution(size_t sequence) const {
    const TokenConvolution& all = inputs.convolution;
    const size_t at = sequence * (shape.taps - 1) * shape.channels();
    return {(const T*)all.before + at, (const T*)all.weight, (const T*)all.bias,
            (T*)all.after + at,        shape.channels(),     shape.taps};
  }

  size_t numbers_of_head() const {
    const size_t columns = padded_width(shape.columns), rows = padded_width(shape.rows);
    return (2 + rows_at_once) * columns + 2 * rows + 2 * shape.taps * (columns > rows ? columns : rows);
  }

  void head(size_t sequence, size_t head, float* memory) const {
    const size_t columns = shape.columns, stride = padded_width(columns), rows = shape.rows;
    const size_t heads_of_group = shape.heads / shape.groups, group = head / heads_of_group;
    float* b = memory;
    float* c = b + stride;
    float* s = c + stride;
    float* values = s + rows_at_once * stride;
    float* results = values + padded_width(rows);
    float* weights = results + padded_width(rows);
    const T* projected = (const T*)inputs.projected + sequence * (shape.inner() + shape.channels() + shape.heads);
    const T* mixed = projected + shape.inner();
    const Convolution<T> all = convolution(sequence);
    const bool is_first = head % heads_of_group == 0;
    const auto convolved = [&](size_t channel, size_t n, bool writes, float* out) {
      convolve(all, channel, mixed + channel, n, writes, weights, out,
               [](Float sum) MITTENS_INLINED { return silu(sum); });
    };
    convolved(head * rows, rows, true, values);
    convolved(shape.inner() + group * columns, columns, is_first, b);
    convolved(shape.inner() + (shape.groups + group) * columns, columns, is_first, c);
    float step = softplus(widen_one<T>(mixed + shape.channels(), head) + number_of(inputs.dt_bias, head));
    step = step < shape.least_step ? shape.least_step : step;
    step = step > shape.greatest_step ? shape.greatest_step : step;
    const Step of_head = {b, c, nullptr, exp(-(step * exp(number_of(inputs.a_log, head)))), step, false};
    const size_t first = (sequence * shape.heads + head) * rows;
    for (size_t r = 0; r < rows; r += rows_at_once) {
      const size_t some = smaller(rows_at_once, rows - r);
      for (size_t i = 0; i < some; ++i) {
        read_row(inputs.state + (first + r + i) * columns, columns, s + i * stride);
      }
      float predicted[rows_at_once], update[rows_at_once];
      if (some == rows_at_once) {
        advance<rows_at_once>(s, stride, of_head, values + r, predicted, update, results + r);
      } else {
        for (size_t i = 0; i < some; ++i) {
          advance<1>(s + i * stride, stride, of_head, values + r + i, predicted, update, results + r + i);
        }
      }
      for (size_t i = 0; i < some; ++i) {
        write_row(state + (first + r + i) * columns, columns, s + i * stride);
      }
    }
    const float skip = number_of(inputs.d, head);
    const T* z = projected + head * rows;
    each_vector(rows, [&](size_t i, auto part) MITTENS_INLINED {
      const Float sum = fma(read<Float>(values + i, All()), Float{} + skip, read<Float>(results + i, All()));
      store_in_order(y + first + i, shape.is_gated ? sum * silu(load_in_order(z + i, part)) : sum, part);
    });
  }
};

}  // namespace

void ssm_token(Type type, const SsmToken& shape, const SsmTokenInputs& inputs, void* y, float* state) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Token<T> token = {shape, inputs, (T*)y, state};
    const size_t work = shape.rows * shape.columns;
    const size_t grain = work == 0 ? 1 : ceil_divide(work_of_piece, work);
    parallel_for(shape.batch * shape.heads, grain, [&](size_t begin, size_t end) {
      const Scratch memory(token.numbers_of_head());
      for (size_t i = begin; i < end; ++i) {
        token.head(i / shape.heads, i % shape.heads, memory.data());
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
