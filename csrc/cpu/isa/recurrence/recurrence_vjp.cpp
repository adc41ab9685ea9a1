// Gradients of the gated delta rule and of state spaces.
#include "cpu/isa/recurrence/recurrence_rows.h"
#include "cpu/recurrence/recurrence.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr size_t steps_of_chunk = 32;  // whose states are held at once

// Memory of one thread, parted by need.
struct Parts {
  float* next;

  MITTENS_INLINE float* take(size_t n) {
    float* p = next;
    next += padded(n);
    return p;
  }
};

// The gradients of the heads that share a key head, in float32.
template <typename T>
class KeyHead {
 public:
  KeyHead(const Recurrence& shape, const RecurrenceInputs& inputs, const T* dy, const float* dstate,
          const RecurrenceGradients& gradients, size_t sequence, size_t key_head, float* memory)
      : shape_(shape),
        inputs_(inputs),
        dy_(dy),
        dstate_(dstate),
        gradients_(gradients),
        sequence_(sequence),
        key_head_(key_head),
        stride_(padded_width(shape.columns)) {
    const size_t steps = shape.steps;
    Parts parts{memory};
    k_ = parts.take(steps * stride_);
    q_ = parts.take(steps * stride_);
    dk_ = parts.take(steps * stride_);
    dq_ = parts.take(steps * stride_);
    gates_ = parts.take(steps * stride_);
    dgates_ = parts.take(steps * stride_);
    drates_ = parts.take(steps);
    kept_ = parts.take(ceil_divide(steps, steps_of_chunk) * rows_at_once * stride_);
    before_ = parts.take(steps_of_chunk * rows_at_once * stride_);
    s_ = parts.take(rows_at_once * stride_);
    ds_ = parts.take(rows_at_once * stride_);
    updates_ = parts.take(steps_of_chunk * rows_at_once);
    predicted_ = parts.take(steps_of_chunk * rows_at_once);
  }

  static size_t memory(const Recurrence& shape) {
    const size_t stride = padded_width(shape.columns), of_rows = rows_at_once * stride;
    const size_t numbers = 6 * shape.steps * stride + shape.steps +
                           (ceil_divide(shape.steps, steps_of_chunk) + steps_of_chunk + 2) * of_rows +
                           2 * steps_of_chunk * rows_at_once;
    return numbers + 13 * unit;
  }

  void run() {
    for (size_t t = 0; t < shape_.steps; ++t) {
      widened((const T*)inputs_.k + key_at(t), shape_.columns, k_ + t * stride_);
      widened((const T*)inputs_.q + key_at(t), shape_.columns, q_ + t * stride_);
    }
    clear(dk_, shape_.steps * stride_);
    clear(dq_, shape_.steps * stride_);
    const size_t group = shape_.heads / shape_.key_heads;
    for (size_t i = 0; i < group; ++i) {
      of_head(key_head_ * group + i);
    }
    for (size_t t = 0; t < shape_.steps; ++t) {
      each_vector(shape_.columns, [&](size_t i, auto part) MITTENS_INLINED {
        store_in_order((T*)gradients_.k + key_at(t) + i, read<Float>(dk_ + t * stride_ + i, All()), part);
        store_in_order((T*)gradients_.q + key_at(t) + i, read<Float>(dq_ + t * stride_ + i, All()), part);
      });
    }
  }

 private:
  void of_head(size_t head) {
    const size_t gate_size = shape_.gate_per_column ? shape_.columns : 1;
    for (size_t t = 0; shape_.gate_per_column && t < shape_.steps; ++t) {
      read_row(inputs_.gates + number_at(t, head) * gate_size, gate_size, gates_ + t * stride_);
    }
    clear(dgates_, shape_.steps * stride_);
    clear(drates_, shape_.steps);
    size_t row = 0;
    for (; row + rows_at_once <= shape_.rows; row += rows_at_once) {
      of_rows<rows_at_once>(head, row);
    }
    for (; row < shape_.rows; ++row) {
      of_rows<1>(head, row);
    }
    for (size_t t = 0; t < shape_.steps; ++t) {
      float* dgates = gradients_.gates + number_at(t, head) * gate_size;
      if (shape_.gate_per_column) {
        write_row(dgates, gate_size, dgates_ + t * stride_);
      } else {
        Float sum = {};
        for (size_t i = 0; i < stride_; i += width) {
          sum = sum + read<Float>(dgates_ + t * stride_ + i, All());
        }
        *dgates = total(sum);
      }
      gradients_.rates[number_at(t, head)] = drates_[t];
    }
  }

  template <int R>
  void of_rows(size_t head, size_t row) {
    const size_t state_at = ((sequence_ * shape_.heads + head) * shape_.rows + row) * shape_.columns;
    for (int r = 0; r < R; ++r) {
      if (inputs_.state) {
        read_row(inputs_.state + state_at + r * shape_.columns, shape_.columns, s_ + r * stride_);
      } else {
        clear(s_ + r * stride_, stride_);
      }
      read_row(dstate_ + state_at + r * shape_.columns, shape_.columns, ds_ + r * stride_);
    }
    const size_t chunks = ceil_divide(shape_.steps, steps_of_chunk);
    for (size_t t = 0; t < shape_.steps; ++t) {
      if (t % steps_of_chunk == 0) {
        copy<R>(s_, kept_ + t / steps_of_chunk * rows_at_once * stride_);
      }
      if (t < (chunks - 1) * steps_of_chunk) {  // steps after the last kept state are computed below
        forward<R>(head, row, t, 0);
      }
    }
    for (size_t chunk = chunks; chunk-- > 0;) {
      const size_t begin = chunk * steps_of_chunk, end = smaller(begin + steps_of_chunk, shape_.steps);
      copy<R>(kept_ + chunk * rows_at_once * stride_, s_);
      for (size_t t = begin; t < end; ++t) {
        copy<R>(s_, before_ + (t - begin) * rows_at_once * stride_);
        forward<R>(head, row, t, t - begin);
      }
      for (size_t t = end; t-- > begin;) {
        backward<R>(head, row, t, t - begin);
      }
    }
    for (int r = 0; r < R; ++r) {
      write_row(gradients_.state + state_at + r * shape_.columns, shape_.columns, ds_ + r * stride_);
    }
  }

  template <int R>
  MITTENS_INLINE void copy(const float* from, float* to) const {
    for (size_t i = 0; i < R * stride_; i += width) {
      write(to + i, read<Float>(from + i, All()), All());
    }
  }

  MITTENS_INLINE bool is_hidden(size_t t) const {
    return inputs_.mask && !inputs_.mask[sequence_ * shape_.steps + t];
  }

  // Of an array [batch, steps, key_heads, columns].
  MITTENS_INLINE size_t key_at(size_t t) const {
    return ((sequence_ * shape_.steps + t) * shape_.key_heads + key_head_) * shape_.columns;
  }
  // Of an array [batch, steps, heads].
  MITTENS_INLINE size_t number_at(size_t t, size_t head) const {
    return (sequence_ * shape_.steps + t) * shape_.heads + head;
  }

  MITTENS_INLINE Step step_at(size_t t, size_t head) const {
    const size_t at = number_at(t, head);
    return {k_ + t * stride_,
            q_ + t * stride_,
            shape_.gate_per_column ? gates_ + t * stride_ : nullptr,
            shape_.gate_per_column ? 0.0f : inputs_.gates[at],
            number(inputs_.rate_type, inputs_.rates, at),
            shape_.corrects};
  }

  template <int R>
  MITTENS_INLINE void values_at(const T* p, size_t t, size_t head, size_t row, float* values) const {
    const T* first = p + number_at(t, head) * shape_.rows + row;
    for (int r = 0; r < R; ++r) {
      values[r] = widen_one<T>(first, r);
    }
  }

  template <int R>
  void forward(size_t head, size_t row, size_t t, size_t of_chunk) {
    if (is_hidden(t)) {
      return;
    }
    float values[R];
    values_at<R>((const T*)inputs_.v, t, head, row, values);
    advance<R>(s_, stride_, step_at(t, head), values, predicted_ + of_chunk * rows_at_once,
               updates_ + of_chunk * rows_at_once, nullptr);
  }

  template <int R>
  void backward(size_t head, size_t row, size_t t, size_t of_chunk) {
    T* dv = (T*)gradients_.v + number_at(t, head) * shape_.rows + row;
    if (is_hidden(t)) {
      for (int r = 0; r < R; ++r) {
        store_in_order(dv + r, Float{}, Some{1});
      }
      return;
    }
    const Step step = step_at(t, head);
    const float* update = updates_ + of_chunk * rows_at_once;
    const float* before = before_ + of_chunk * rows_at_once * stride_;
    float values[R], dy[R];
    values_at<R>((const T*)inputs_.v, t, head, row, values);
    values_at<R>(dy_, t, head, row, dy);

    Float of_update[R] = {};  // the gradient of k's factor
    for (size_t i = 0; i < stride_; i += width) {
      const Float k = read<Float>(step.k + i, All()), q = read<Float>(step.q + i, All()), gate = step.gate_at(i);
      Float dq = read<Float>(dq_ + t * stride_ + i, All());
      for (int r = 0; r < R; ++r) {
        const Float after = fma(k, Float{} + update[r], read<Float>(before + r * stride_ + i, All()) * gate);
        const Float ds = fma(q, Float{} + dy[r], read<Float>(ds_ + r * stride_ + i, All()));
        write(ds_ + r * stride_ + i, ds, All());
        of_update[r] = fma(ds, k, of_update[r]);
        dq = fma(after, Float{} + dy[r], dq);
      }
      write(dq_ + t * stride_ + i, dq, All());
    }
    float of_predicted[R];
    for (int r = 0; r < R; ++r) {
      const float gradient = total(of_update[r]);
      const float error = values[r] - predicted_[of_chunk * rows_at_once + r];
      drates_[t] += gradient * error;
      of_predicted[r] = step.corrects ? -step.rate * gradient : 0.0f;
      store_in_order(dv + r, Float{} + step.rate * gradient, Some{1});
    }
    for (size_t i = 0; i < stride_; i += width) {
      const Float k = read<Float>(step.k + i, All()), gate = step.gate_at(i);
      Float dk = read<Float>(dk_ + t * stride_ + i, All()), dgate = read<Float>(dgates_ + t * stride_ + i, All());
      for (int r = 0; r < R; ++r) {
        const Float old = read<Float>(before + r * stride_ + i, All());
        const Float ds = read<Float>(ds_ + r * stride_ + i, All());
        dk = fma(ds, Float{} + update[r], fma(old * gate, Float{} + of_predicted[r], dk));
        const Float gated = fma(k, Float{} + of_predicted[r], ds);
        dgate = fma(gated, old, dgate);
        write(ds_ + r * stride_ + i, gated * gate, All());
      }
      write(dk_ + t * stride_ + i, dk, All());
      write(dgates_ + t * stride_ + i, dgate, All());
    }
  }

  const Recurrence& shape_;
  const RecurrenceInputs& inputs_;
  const T* dy_;
  const float* dstate_;
  const RecurrenceGradients& gradients_;
  size_t sequence_, key_head_, stride_;
  float *k_, *q_, *dk_, *dq_, *gates_, *dgates_, *drates_;  // [steps, ..]
  float *kept_, *before_;  // states before chunks, and before the steps of one
  float *s_, *ds_;
  float *updates_, *predicted_;  // of the steps of a chunk
};

}  // namespace

void recurrence_vjp(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, const void* dy,
                    const float* dstate, const RecurrenceGradients& gradients) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    parallel_for(shape.batch * shape.key_heads, 1, [&](size_t begin, size_t end) {
      const Scratch memory(KeyHead<T>::memory(shape));
      for (size_t task = begin; task < end; ++task) {
        KeyHead<T>(shape, inputs, (const T*)dy, dstate, gradients, task / shape.key_heads, task % shape.key_heads,
                   memory.data())
            .run();
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
