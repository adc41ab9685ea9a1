#include "cpu/cache/rope_append.h"

#include "cpu/isa/cache/quantize_group.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Where load<T> puts element i of a table of float32 that is to be combined with elements of T.
template <typename T>
MITTENS_INLINE size_t place_of(size_t i) {
  if constexpr (__is_same(T, bfloat16)) {
    const size_t within = i % unit;
    return i - within + within % 2 * width + within / 2;
  } else {
    return i;
  }
}

MITTENS_INLINE Floats table_at(const float* table, size_t i) {
  return {read<Float>(table + i, All()), read<Float>(table + i + width, All())};
}

// The cosines and sines of a token's angles.
template <typename T>
struct Turns {
  const float* cosines;  // [pairs], in the order of place_of where pairs are no neighbours, padded to whole units
  const float* sines;
};

template <typename T>
Turns<T> fill_turns(const RopeAppend& call, size_t batch, size_t token, float* memory) {
  float* sines = memory + padded(call.pairs);
  const int offset = call.offsets ? call.offsets[batch] : call.offset;
  const float position = call.scale * static_cast<float>(offset + static_cast<int>(token));
  const double log_base = call.freqs ? 0.0 : __builtin_log2(static_cast<double>(call.base));
  for (size_t i = 0; i < call.pairs; ++i) {
    const float exponent = static_cast<float>(-log_base * static_cast<double>(i) / static_cast<double>(call.pairs));
    const float angle = position * (call.freqs ? 1.0f / call.freqs[i] : __builtin_exp2f(exponent));
    const size_t place = call.traditional ? i : place_of<T>(i);
    memory[place] = __builtin_cosf(angle);
    sines[place] = __builtin_sinf(angle);
  }
  return {memory, sines};
}

template <typename T>
MITTENS_INLINE float rstd(const T* x, size_t columns, float eps) {
  Sums squares;
  each_unit(columns, [&](size_t i, auto part, int k) MITTENS_INLINED {
    const Floats v = load(x + i, part);
    squares.add_product(k, v, v);
  });
  return inverse_root(squares.total() / static_cast<float>(columns) + eps);
}

// Pairs of neighbours. Memory for a head, [width], comes with it.
template <typename T, typename Input>
MITTENS_INLINE void turn_neighbours(T* y, const Turns<T>& turns, const RopeAppend& call, float* memory,
                                    const Input& input) {
  each_unit(call.width - call.begin,
            [&](size_t i, auto part, int) MITTENS_INLINED { store(y + i, input(i, part), part); });
  const size_t rotated = 2 * call.pairs;
  for (size_t i = 0; i < rotated; i += width) {
    const Some part{smaller(width, rotated - i)};
    write(memory + i, load_in_order(y + i, part), part);
  }
  for (size_t i = 0; i < call.pairs; ++i) {
    const float a = memory[2 * i], b = memory[2 * i + 1];
    memory[2 * i] = a * turns.cosines[i] - b * turns.sines[i];
    memory[2 * i + 1] = a * turns.sines[i] + b * turns.cosines[i];
  }
  for (size_t i = 0; i < rotated; i += width) {
    const Some part{smaller(width, rotated - i)};
    store_in_order(y + i, read<Float>(memory + i, part), part);
  }
}

template <typename T>
MITTENS_INLINE Floats normed(const T* x, const T* weight, float n, float weight_offset, size_t i, auto part) {
  return round<T>(round<T>(load(x + i, part) * n) * (load(weight + i, part) + weight_offset));
}

// The columns of a head from call.begin on.
template <typename T>
void turn_head(const T* x, const T* weight, T* y, const Turns<T>& turns, const RopeAppend& call, float scale,
               float* memory) {
  const float n = weight ? rstd(x, call.width, call.eps) : 1.0f;
  const auto input = [&](size_t i, auto part) MITTENS_INLINED {
    return (weight ? normed(x, weight, n, call.weight_offset, i, part) : load(x + i, part)) * scale;
  };
  if (call.traditional) {
    return turn_neighbours(y, turns, call, memory, input);
  }
  const size_t pairs = call.pairs;
  each_unit(pairs, [&](size_t i, auto part, int) MITTENS_INLINED {
    const Floats c = table_at(turns.cosines, i), s = table_at(turns.sines, i);
    const Floats a = input(i, part), b = input(pairs + i, part);
    store(y + i, a * c - b * s, part);
    store(y + pairs + i, a * s + b * c, part);
  });
  each_unit(call.width - call.begin - 2 * pairs, [&](size_t i, auto part, int) MITTENS_INLINED {
    store(y + 2 * pairs + i, input(2 * pairs + i, part), part);
  });
}

template <typename T>
void put_value(const T* x, const T* weight, T* y, const RopeAppend& call) {
  if (!weight) {
    __builtin_memcpy(y, x, call.value_width * sizeof(T));
    return;
  }
  const float n = rstd(x, call.value_width, call.eps);
  each_unit(call.value_width, [&](size_t i, auto part, int) MITTENS_INLINED {
    store(y + i, normed(x, weight, n, call.weight_offset, i, part) * call.value_scale, part);
  });
}

// Into a row of a buffer.
template <typename T>
void quantize_head(const T* x, const RopeAppend& call, const CacheBuffer& buffer, size_t row) {
  const size_t groups = call.width / call.group_size, words = call.group_size * call.bits / 32;
  for (size_t group = 0; group < groups; ++group) {
    const size_t at = row * groups + group;
    quantize_group(x + group * call.group_size, call.group_size, call.bits,
                   static_cast<uint32_t*>(buffer.data) + at * words, static_cast<T*>(buffer.scales) + at,
                   static_cast<T*>(buffer.biases) + at);
  }
}

template <typename T>
void append_token(const RopeAppend& call, size_t batch, size_t token, const Turns<T>& turns, float* memory) {
  T* turned = reinterpret_cast<T*>(memory + padded(call.width));  // a key on its way to be quantized
  const auto source = [&](const Heads& heads, size_t head) {
    return static_cast<const T*>(heads.data) + static_cast<int64_t>(batch) * heads.strides[0] +
           static_cast<int64_t>(head) * heads.strides[1] + static_cast<int64_t>(token) * heads.strides[2];
  };
  for (size_t head = 0; head < call.query_heads; ++head) {
    const size_t row = (batch * call.query_heads + head) * call.tokens + token;
    const T* query = source(call.new_queries, head);
    T* y = static_cast<T*>(call.queries) + row * call.width;
    __builtin_memcpy(y, query, call.begin * sizeof(T));
    turn_head(query + call.begin, static_cast<const T*>(call.query_norm), y + call.begin, turns, call, call.query_scale,
              memory);
  }
  for (size_t head = 0; head < call.key_heads; ++head) {
    const size_t row = batch * call.key_heads + head;
    const size_t key_row = row * call.key_capacity + call.first + token;
    const size_t value_row = row * call.value_capacity + call.first + token;
    const T* value = source(call.new_values, head);
    T* key = call.bits != 0 ? turned : static_cast<T*>(call.keys.data) + key_row * call.width;
    const T* fresh = source(call.new_keys, head);
    __builtin_memcpy(key, fresh, call.begin * sizeof(T));
    turn_head(call.begin == 0 ? fresh : source(call.shared_key, 0), static_cast<const T*>(call.key_norm),
              key + call.begin, turns, call, 1.0f, memory);
    if (call.bits != 0) {
      quantize_head(key, call, call.keys, key_row);
      quantize_head(value, call, call.values, value_row);
    } else {
      put_value(value, static_cast<const T*>(call.value_norm),
                static_cast<T*>(call.values.data) + value_row * call.value_width, call);
    }
  }
}

}  // namespace

void rope_append(const RopeAppend& call) {
  with_type(call.type, [&](auto t) {
    using T = decltype(t);
    const size_t turned = (call.query_heads + call.key_heads) * call.width;
    const size_t bytes = (turned + call.key_heads * call.value_width) * sizeof(T);
    parallel_for(call.batch * call.tokens, serial_bytes / bytes + 1, [&](size_t begin, size_t end) {
      const Scratch memory(2 * padded(call.pairs) + 2 * padded(call.width));
      float* of_head = memory.data() + 2 * padded(call.pairs);
      for (size_t i = begin; i < end; ++i) {
        const size_t batch = i / call.tokens, token = i % call.tokens;
        append_token(call, batch, token, fill_turns<T>(call, batch, token, memory.data()), of_head);
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
