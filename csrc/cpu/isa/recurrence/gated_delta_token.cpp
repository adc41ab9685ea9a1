#include "cpu/isa/recurrence/convolution.h"
#include "cpu/isa/recurrence/gates.h"
#include "cpu/isa/recurrence/token_heads.h"
#include "cpu/isa/recurrence/recurrence_rows.h"
#include "cpu/recurrence/recurrence.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

MITTENS_INLINE float sum_of_squares(const float* p, size_t stride) {
  Float sum = {};
  for (size_t i = 0; i < stride; i += width) {
    const Float v = read<Float>(p + i, All());
    sum = fma(v, v, sum);
  }
  return total(sum);
}

MITTENS_INLINE void scale_by(float* p, size_t stride, float factor) {
  for (size_t i = 0; i < stride; i += width) {
    write(p + i, read<Float>(p + i, All()) * factor, All());
  }
}

template <typename T>
struct Token {
  const GatedDeltaToken& shape;
  const GatedDeltaTokenInputs& inputs;
  T* y;
  float* state;

  static const T* row(const HeadRows& rows, size_t sequence, size_t key_head, size_t head) {
    return static_cast<const T*>(rows.data) + static_cast<int64_t>(sequence) * rows.sequence +
           static_cast<int64_t>(key_head) * rows.key_head + static_cast<int64_t>(head) * rows.head;
  }

  void head(size_t sequence, size_t key_head, size_t head_of_key, float* numbers) const {
    const size_t columns = shape.columns, stride = padded_width(columns), rows = shape.rows;
    const size_t head = key_head * shape.heads_of_key + head_of_key;
    const HeadMemory memory(numbers, rows, columns);
    float *q = memory.queries, *k = memory.keys, *values = memory.values, *results = memory.results;
    const bool is_first = head_of_key == 0;
    const auto convolved = [&](int which, size_t channel, const T* x, size_t n, bool writes, float* out) {
      const ConvolvedPart& part = inputs.parts[which];
      const int64_t at = static_cast<int64_t>(sequence);
      const Convolution<T> convolution = {(const T*)part.before + at * part.sequence,
                                          (const T*)part.weight,
                                          nullptr,
                                          (T*)part.after + at * part.after_sequence,
                                          part.tap,
                                          part.after_tap,
                                          shape.taps};
      convolve(convolution, channel, x, n, writes, weights_by_tap(convolution, channel, n, memory.weights), out,
               [](Float sum) MITTENS_INLINED { return silu(sum); });
    };
    convolved(0, key_head * columns, row(inputs.q, sequence, key_head, 0), columns, is_first, q);
    convolved(1, key_head * columns, row(inputs.k, sequence, key_head, 0), columns, is_first, k);
    convolved(2, head * rows, row(inputs.v, sequence, key_head, head_of_key), rows, true, values);
    scale_by(q, stride,
             inverse_root(sum_of_squares(q, stride) + shape.key_eps) * inverse_root(static_cast<float>(columns)));
    scale_by(k, stride, inverse_root(sum_of_squares(k, stride) + shape.key_eps));
    const T* a = row(inputs.a, sequence, key_head, head_of_key);
    const float decay = exp(number_of(inputs.a_log, head));
    float gate = 0;
    if (shape.gate_per_column) {
      widened_numbers(inputs.dt_bias, head * columns, columns, memory.gates);
      each_vector(columns, [&](size_t i, auto part) MITTENS_INLINED {
        const Float time = softplus(load_in_order(a + i, part) + read<Float>(memory.gates + i, All()));
        write(memory.gates + i, exp(-(decay * time)), All());
      });
    } else {
      gate = exp(-(decay * softplus(widen_one<T>(a, 0) + number_of(inputs.dt_bias, head))));
    }
    const Step step = {k,
                       q,
                       shape.gate_per_column ? memory.gates : nullptr,
                       gate,
                       sigmoid(widen_one<T>(row(inputs.b, sequence, key_head, head_of_key), 0)),
                       true};
    const size_t first = (sequence * shape.heads() + head) * rows;
    advance_head(inputs.state + first * columns, state + first * columns, rows, columns, step, memory);
    for (size_t i = rows; i < padded_width(rows); ++i) {
      results[i] = 0;
    }
    const float square = sum_of_squares(results, padded_width(rows));
    const float inverse = inverse_root(square / static_cast<float>(rows) + shape.eps);
    widened_numbers(inputs.norm_weight, 0, rows, values);
    const T* z = row(inputs.z, sequence, key_head, head_of_key);
    each_vector(rows, [&](size_t i, auto part) MITTENS_INLINED {
      const Float normed = read<Float>(results + i, All()) * inverse * read<Float>(values + i, All());
      const Float gating = load_in_order(z + i, part);
      store_in_order(y + first + i, normed * (shape.is_sigmoid ? sigmoid(gating) : silu(gating)), part);
    });
  }

  static void widened_numbers(const Numbers& numbers, size_t first, size_t n, float* out) {
    with_type(numbers.type, [&](auto t) MITTENS_INLINED { widened((const decltype(t)*)numbers.data + first, n, out); });
  }
};

}  // namespace

void gated_delta_token(Type type, const GatedDeltaToken& shape, const GatedDeltaTokenInputs& inputs, void* y,
                       float* state) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Token<T> token = {shape, inputs, (T*)y, state};
    each_head(shape.batch, shape.heads(), shape.rows * shape.columns,
              HeadMemory::numbers(shape.rows, shape.columns, shape.taps),
              [&](size_t sequence, size_t head, float* memory) {
                token.head(sequence, head / shape.heads_of_key, head % shape.heads_of_key, memory);
              });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
