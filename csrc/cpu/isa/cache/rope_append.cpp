#include "cpu/rope_append.h"

#include "cpu/isa/rows.h"

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
  const float* cosines;  // [pairs], in the order of place_of, padded to whole units
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
    memory[place_of<T>(i)] = __builtin_cosf(angle);
    sines[place_of<T>(i)] = __builtin_sinf(angle);
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

template <typename T>
void turn_head(const T* x, const T* weight, T* y, const Turns<T>& turns, const RopeAppend& call) {
  const float n = weight ? rstd(x, call.width, call.eps) : 1.0f;
  const auto input = [&](size_t i, auto part) MITTENS_INLINED {
    const Floats v = load(x + i, part);
    return weight ? round<T>(round<T>(v * n) * load(weight + i, part)) : v;
  };
  const size_t pairs = call.pairs;
  each_unit(pairs, [&](size_t i, auto part, int) MITTENS_INLINED {
    const Floats c = table_at(turns.cosines, i), s = table_at(turns.sines, i);
    const Floats a = input(i, part), b = input(pairs + i, part);
    store(y + i, a * c - b * s, part);
    store(y + pairs + i, a * s + b * c, part);
  });
  each_unit(call.width - 2 * pairs, [&](size_t i, auto part, int) MITTENS_INLINED {
    store(y + 2 * pairs + i, input(2 * pairs + i, part), part);
  });
}

template <typename T>
void append_token(const RopeAppend& call, size_t batch, size_t token, const Turns<T>& turns) {
  const auto source = [&](const Heads& heads, size_t head) {
    return static_cast<const T*>(heads.data) + static_cast<int64_t>(batch) * heads.strides[0] +
           static_cast<int64_t>(head) * heads.strides[1] + static_cast<int64_t>(token) * heads.strides[2];
  };
  for (size_t head = 0; head < call.query_heads; ++head) {
    const size_t row = (batch * call.query_heads + head) * call.tokens + token;
    turn_head(source(call.new_queries, head), static_cast<const T*>(call.query_norm),
              static_cast<T*>(call.queries) + row * call.width, turns, call);
  }
  for (size_t head = 0; head < call.key_heads; ++head) {
    const size_t row = batch * call.key_heads + head;
    T* key = static_cast<T*>(call.keys) + (row * call.key_capacity + call.first + token) * call.width;
    T* value = static_cast<T*>(call.values) + (row * call.value_capacity + call.first + token) * call.width;
    turn_head(source(call.new_keys, head), static_cast<const T*>(call.key_norm), key, turns, call);
    __builtin_memcpy(value, source(call.new_values, head), call.width * sizeof(T));
  }
}

}  // namespace

void rope_append(const RopeAppend& call) {
  with_type(call.type, [&](auto t) {
    using T = decltype(t);
    const size_t bytes = (call.query_heads + 2 * call.key_heads) * call.width * sizeof(T);
    parallel_for(call.batch * call.tokens, serial_bytes / bytes + 1, [&](size_t begin, size_t end) {
      const Scratch memory(2 * padded(call.pairs));
      for (size_t i = begin; i < end; ++i) {
        const size_t batch = i / call.tokens, token = i % call.tokens;
        append_token(call, batch, token, fill_turns<T>(call, batch, token, memory.data()));
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
