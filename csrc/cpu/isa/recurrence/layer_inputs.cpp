// The inputs of recurrent layers for all steps of a prompt (gated_delta_inputs, ssm_inputs).
#include "cpu/isa/recurrence/gates.h"
#include "cpu/recurrence/token_layers.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr size_t channels_of_task = 256;  // or a block that is normalized
constexpr size_t steps_of_task = 64;
constexpr size_t numbers_of_piece = 32 << 10;  // fewer are done sooner than another thread wakes up

// Some neighbouring channels of a part in a sequence.
template <typename T>
struct Channels {
  const LayerInputs& all;
  const LayerPart& part;
  size_t sequence;
  size_t block;
  size_t first;  // of the block
  size_t count;
  const T* zeros;  // [count]

  size_t channel() const {
    return block * part.width + first;
  }

  // The channels in a step's row of the window; before the first one the state's.
  const T* window_at(int64_t step) const {
    const auto at = static_cast<int64_t>(sequence);
    if (step < 0) {
      const int64_t tap = step + static_cast<int64_t>(all.taps) - 1;
      return part.before ? (const T*)part.before + at * part.state_sequence + tap * part.state_tap + channel() : zeros;
    }
    if (all.mask && !all.mask[sequence * all.steps + static_cast<size_t>(step)]) {
      return zeros;
    }
    return (const T*)part.x + at * part.sequence + step * part.step + static_cast<int64_t>(block) * part.block + first;
  }

  // [taps, whole vectors], of [channels, taps].
  void weights(float* given, float* by_tap) const {
    const size_t stride = padded_width(count);
    widened((const T*)part.weight + channel() * all.taps, count * all.taps, given);
    for (size_t j = 0; j < all.taps; ++j) {
      for (size_t i = 0; i < count; ++i) {
        by_tap[j * stride + i] = given[i * all.taps + j];
      }
      clear(by_tap + j * stride + count, stride - count);
    }
  }

  // rows: memory for the rows of the window.
  void convolve(size_t step, const float* by_tap, float* sums, const T** rows) const {
    const size_t past = all.taps - 1, stride = padded_width(count);
    for (size_t j = 0; j <= past; ++j) {
      rows[j] = window_at(static_cast<int64_t>(step) - static_cast<int64_t>(past - j));
    }
    Float square = {};
    T* out = (T*)part.out + (sequence * all.steps + step) * part.blocks * part.width + channel();
    each_vector(count, [&](size_t i, auto some) MITTENS_INLINED {
      Float sum = load_in_order(rows[past] + i, some) * read<Float>(by_tap + past * stride + i, All());
      for (size_t j = 0; j < past; ++j) {
        sum = fma(load_in_order(rows[j] + i, some), read<Float>(by_tap + j * stride + i, All()), sum);
      }
      if (part.bias) {
        sum += load_in_order((const T*)part.bias + channel() + i, some);
      }
      const Float c = silu(sum);
      if (part.is_normalized) {
        square = fma(c, c, square);
        write(sums + i, c, All());
      } else {
        store_in_order(out + i, c, some);
      }
    });
    if (part.is_normalized) {
      const float scale = part.scale * inverse_root(total(square) + all.key_eps);
      each_vector(count, [&](size_t i, auto some)
                             MITTENS_INLINED { store_in_order(out + i, read<Float>(sums + i, All()) * scale, some); });
    }
  }

  void leave_state(int64_t end) const {
    const size_t past = all.taps - 1;
    T* next = (T*)part.next + sequence * past * all.channels + channel();
    for (size_t j = 0; j < past; ++j) {
      const T* row = window_at(end - static_cast<int64_t>(past - j));
      for (size_t i = 0; i < count; ++i) {
        next[j * all.channels + i] = row[i];
      }
    }
  }
};

// Where a task's steps begin and end, and where the next state is taken.
struct Steps {
  size_t begin;
  size_t end;
  int64_t length;

  bool has_end() const {
    const auto first = static_cast<int64_t>(begin), last = static_cast<int64_t>(end);
    return length == 0 ? first == 0 : length > first && length <= last;
  }
};

Steps steps_of(const LayerInputs& all, size_t sequence, size_t run) {
  const auto most = static_cast<int64_t>(all.steps);
  int64_t length = all.lengths ? all.lengths[sequence] : most;
  length = length < 0 ? 0 : length > most ? most : length;
  return {run * steps_of_task, smaller((run + 1) * steps_of_task, all.steps), length};
}

template <typename T>
void convolve_part(const LayerInputs& all, const LayerPart& part) {
  const size_t width = part.is_normalized ? part.width : smaller(part.width, channels_of_task);
  const size_t chunks = width == 0 ? 0 : ceil_divide(part.width, width), runs = ceil_divide(all.steps, steps_of_task);
  const size_t work = width * smaller(all.steps, steps_of_task) * all.taps;
  const size_t stride = padded_width(width);
  const size_t of_zeros = padded_width(ceil_divide(stride * sizeof(T), sizeof(float)));
  const size_t of_rows = ceil_divide(all.taps * sizeof(T*), sizeof(float));
  const size_t tasks = all.batch * part.blocks * chunks * runs;
  parallel_for(tasks, ceil_divide(numbers_of_piece, work > 0 ? work : 1), [&](size_t begin, size_t end) {
    const Scratch memory((2 * all.taps + 1) * stride + of_zeros + of_rows);
    float* by_tap = memory.data() + all.taps * stride;
    float* sums = by_tap + all.taps * stride;
    float* zeros = sums + stride;
    clear(zeros, of_zeros);
    auto* rows = reinterpret_cast<const T**>(zeros + of_zeros);
    for (size_t i = begin; i < end; ++i) {
      const size_t sequence = i / runs / chunks / part.blocks, first = i / runs % chunks * width;
      const Channels<T> some = {all,
                                part,
                                sequence,
                                i / runs / chunks % part.blocks,
                                first,
                                smaller(width, part.width - first),
                                (const T*)zeros};
      const Steps steps = steps_of(all, sequence, i % runs);
      some.weights(memory.data(), by_tap);
      for (size_t step = steps.begin; step < steps.end; ++step) {
        some.convolve(step, by_tap, sums, rows);
      }
      if (steps.has_end()) {
        some.leave_state(steps.length);
      }
    }
  });
}

// Gates and rates of a step's heads.
template <typename T>
struct Gates {
  const LayerInputs& all;
  const float* decays;  // [heads]
  const float* biases;  // of gates

  const T* of_head(const void* data, const int64_t (&strides)[4], size_t sequence, size_t step, size_t head) const {
    const auto at = [](size_t i, int64_t stride) { return static_cast<int64_t>(i) * stride; };
    return static_cast<const T*>(data) + at(sequence, strides[0]) + at(step, strides[1]) +
           at(head / all.heads_of_key, strides[2]) + at(head % all.heads_of_key, strides[3]);
  }

  void step(size_t sequence, size_t step) const {
    float* rates = all.rates_out + (sequence * all.steps + step) * all.heads;
    float* gates = all.gates_out + (sequence * all.steps + step) * all.heads * all.gates;
    for (size_t head = 0; head < all.heads; ++head) {
      const T* a = of_head(all.a, all.a_strides, sequence, step, head);
      each_vector(all.gates, [&](size_t i, auto some) MITTENS_INLINED {
        const Float time = load_in_order(a + i, some) + read<Float>(biases + head * all.gates + i, some);
        write(gates + head * all.gates + i, exp(softplus(time) * -decays[head]), some);
      });
      rates[head] = sigmoid(widen_one<T>(of_head(all.b, all.b_strides, sequence, step, head), 0));
    }
  }
};

template <typename T>
void gates_and_rates(const LayerInputs& all) {
  const size_t gates = all.heads * all.gates;
  if (gates == 0) {
    return;
  }
  parallel_for(all.batch * all.steps, ceil_divide(numbers_of_piece, 16 * gates), [&](size_t begin, size_t end) {
    const Scratch memory(all.heads + gates);
    float* biases = memory.data() + all.heads;
    for (size_t i = 0; i < all.heads; ++i) {
      memory.data()[i] = exp(number_of(all.a_log, i));
    }
    for (size_t i = 0; i < gates; ++i) {
      biases[i] = number_of(all.dt_bias, i);
    }
    const Gates<T> each = {all, memory.data(), biases};
    for (size_t i = begin; i < end; ++i) {
      each.step(i / all.steps, i % all.steps);
    }
  });
}

}  // namespace

void layer_inputs(Type type, const LayerInputs& all) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    for (const LayerPart& part : all.parts) {
      convolve_part<T>(all, part);
    }
    gates_and_rates<T>(all);
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
