#include "cpu/matmul/gguf.h"

#include "cpu/isa/matmul/unpack_blocks.h"
#include "cpu/isa/matmul/unpacked.h"

namespace mittens::cpu::MITTENS_ISA {

template void RowProducts<Unpacked>::direct<true>(const float*, size_t, size_t, size_t, float*, size_t, float*,
                                                  bool) const;
template void RowProducts<Unpacked>::panel(const float*, size_t, size_t, size_t, float*, size_t, float*) const;

namespace {

constexpr size_t piece_blocks = 512;  // for one thread at a time

template <BlockKind kind>
struct Kind {
  static constexpr BlockKind value = kind;
};

// Calls f with a value of the element type and a Kind that has a source or a quantizer of its own.
template <BlockKind... kinds, typename F>
void with_kinds(Type type, BlockKind kind, const F& f) {
  with_type(type, [&](auto t) { ((kind == kinds ? f(t, Kind<kinds>()) : void()), ...); });
}

#if !defined(MITTENS_UNPACKS_ALL)
bool has_source(BlockKind kind) {
  return kind == BlockKind::q4_0 || kind == BlockKind::q8_0;
}
#endif

constexpr size_t most_quantized = 32;  // weights of a block that there is a quantizer for

constexpr size_t vectors = most_quantized / width;

// Towards zero, for |x| < 2^31.
MITTENS_INLINE Float truncated(Float x) {
  return __builtin_convertvector(__builtin_convertvector(x, Int), Float);
}

MITTENS_INLINE Float magnitude(Float x) {
  return (Float)((UInt)x & 0x7fffffff);
}

MITTENS_INLINE void store_scale(uint8_t* block, float d) {
  const Half bits = narrow(d - Float{});  // -0 stays -0
  __builtin_memcpy(block, &bits, 2);
}

constexpr int32_t smallest_nan = 0x7f800001;  // as bits, larger than any number's

// The weight of the largest magnitude, the first of equals; if one is NaN, the first that is.
MITTENS_INLINE float furthest(const Float (&w)[vectors]) {
  Int most = {};
  for (size_t v = 0; v < vectors; ++v) {
    const Int bits = (Int)magnitude(w[v]);
    most = bits > most ? bits : most;
  }
  int32_t largest = most[0];
  for (size_t i = 1; i < width; ++i) {
    largest = most[i] > largest ? most[i] : largest;
  }
  largest = largest < smallest_nan ? largest : smallest_nan;
  for (size_t i = 0; i < most_quantized; ++i) {
    if (((Int)magnitude(w[i / width]))[i % width] >= largest) {
      return w[i / width][i % width];
    }
  }
  __builtin_unreachable();
}

template <BlockKind kind>
MITTENS_INLINE void quantize(const Float (&w)[vectors], uint8_t* block) {
  constexpr bool q4 = kind == BlockKind::q4_0;
  const float most = furthest(w);
  const float size = most == most ? __builtin_fabsf(most) : __builtin_nanf("");  // as the package has it
  const float d = q4 ? most / -8 : size / 127;
  const float inverse = d == 0 ? 0 : 1 / d;
  store_scale(block, d);
  uint8_t q[most_quantized];  // 0 where the quotient is no finite number
  for (size_t v = 0; v < vectors; ++v) {
    const Float scaled = w[v] * inverse;
    Float rounded;
    if (q4) {
      rounded = truncated(minimum(Float{} + 15.0f, maximum(Float{}, scaled + 8.5f)));
    } else {
      const Float size = magnitude(scaled);
      const Float whole = truncated(size);
      const Float away = whole + truncated(2 * (size - whole));
      rounded = scaled < 0 ? -away : away;
    }
    rounded = magnitude(scaled) < infinity ? rounded : Float{};
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(rounded, Int), Bytes);
    __builtin_memcpy(q + v * width, &bytes, width);
  }
  if (!q4) {
    __builtin_memcpy(block + 2, q, most_quantized);
    return;
  }
  for (size_t i = 0; i < 16; ++i) {
    block[2 + i] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
  }
}

// Of integers 0 .. most. with_minimum: w = d * q + m; else w = d * (q - zero), zero half of them.
template <BlockKind kind>
MITTENS_INLINE void quantize_up(const Float (&values)[vectors], uint8_t* block) {
  constexpr bool with_minimum = kind == BlockKind::q4_1 || kind == BlockKind::q5_1;
  constexpr bool fifth = kind != BlockKind::q4_1;
  constexpr int most = fifth ? 31 : 15;
  float w[most_quantized];
  __builtin_memcpy(w, values, sizeof(w));
  float origin = 0, d;
  if constexpr (with_minimum) {
    float least = w[0], greatest = w[0];
    for (float v : w) {  // a NaN stays
      least = v < least || v != v ? v : least;
      greatest = v > greatest || v != v ? v : greatest;
    }
    origin = least;
    d = (greatest - least) / most;
  } else {
    d = furthest(values) / -16;
  }
  const float inverse = d == 0 ? 0 : 1 / d;
  store_scale(block, d);
  if constexpr (with_minimum) {
    store_scale(block + 2, origin);
  }
  uint8_t q[most_quantized];  // 0 where the quotient is no finite number
  for (size_t i = 0; i < most_quantized; ++i) {
    const float scaled = (with_minimum ? w[i] - origin : w[i]) * inverse;
    const float raised = scaled + (with_minimum ? 0.5f : 16.5f);
    const int whole = __builtin_fabsf(scaled) < infinity ? static_cast<int>(raised) : 0;
    q[i] = static_cast<uint8_t>(whole < most ? whole : most);
  }
  uint8_t* nibbles = block + block_bytes(kind) - 16;
  for (size_t i = 0; i < 16; ++i) {
    nibbles[i] = static_cast<uint8_t>((q[i] & 15) | q[i + 16] << 4);
  }
  if constexpr (fifth) {
    uint32_t upper = 0;
    for (size_t i = 0; i < most_quantized; ++i) {
      upper |= static_cast<uint32_t>(q[i] >> 4) << i;
    }
    __builtin_memcpy(nibbles - 4, &upper, 4);
  }
}

// The exponent that the package takes from a float32 logarithm, which rounds up shortly before a power of two; 0 where
// there is none. The first of the nearest of 16 values.
MITTENS_INLINE void quantize_floats(const Float (&values)[vectors], uint8_t* block) {
  const float most = __builtin_fabsf(furthest(values));
  const float exponent = most > 0 ? __builtin_floorf(static_cast<float>(__builtin_log2(most))) + 125 : 0;
  block[0] = exponent > 0 && exponent < 256 ? static_cast<uint8_t>(exponent) : 0;
  const float d = mxfp4_scale(block[0]);
  uint8_t q[most_quantized];
  for (size_t v = 0; v < vectors; ++v) {
    Float least = magnitude(values[v]);
    Int best = {};
    for (int i = 1; i < 16; ++i) {
      const float value = d * static_cast<float>(fp4_bytes[i] - 128);
      const Float error = magnitude(value - values[v]);
      best = error < least ? Int{} + i : best;
      least = error < least ? error : least;
    }
    const Bytes bytes = __builtin_convertvector(best, Bytes);
    __builtin_memcpy(q + v * width, &bytes, width);
  }
  for (size_t i = 0; i < 16; ++i) {
    block[1 + i] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
  }
}

}  // namespace

void block_matmul(Type type, BlockKind kind, const uint8_t* blocks, const void* x, const void* bias, void* y,
                  size_t rows, size_t columns, size_t outputs, bool exact) {
  const ProductCall call{type, nullptr, x, bias, y, 1, rows, columns, outputs, exact};
  auto multiply = [&](const auto& source) {
    using Source = std::remove_cvref_t<decltype(source)>;
    row_products<Source>([&](size_t, size_t) { return source; }, call);
  };
#if !defined(MITTENS_UNPACKS_ALL)
  if (kind == BlockKind::q4_0) {
    return multiply(Blocks<BlockKind::q4_0>{blocks, columns / block_weights(kind)});
  }
  if (kind == BlockKind::q8_0) {
    return multiply(Blocks<BlockKind::q8_0>{blocks, columns / block_weights(kind)});
  }
#endif
  multiply(Unpacked(weights_of_blocks(kind, blocks, columns / block_weights(kind)), type));
}

void block_dequantize(Type type, BlockKind kind, const uint8_t* blocks, void* y, size_t count) {
#if !defined(MITTENS_UNPACKS_ALL)
  if (has_source(kind)) {
    with_kinds<BlockKind::q4_0, BlockKind::q8_0>(type, kind, [&](auto t, auto kind) {
      using T = decltype(t);
      constexpr BlockKind value = decltype(kind)::value;
      const Blocks<value> source{blocks, count};
      parallel_for(count, piece_blocks, [&](size_t begin, size_t end) {
        for (size_t b = begin; b < end; ++b) {
          widen_step(source, blocks, b, All(), [&](size_t v, Float w) MITTENS_INLINED {
            store_in_order((T*)y + b * block_weights(value) + v * width, w);
          });
        }
      });
    });
    return;
  }
#endif
  const size_t weights = block_weights(kind);
  const Unpacked source(weights_of_blocks(kind, blocks, count), type);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    parallel_for(count, piece_blocks * 32 / weights, [&](size_t begin, size_t end) {
      const Scratch widened(source.memory(weights));
      for (size_t b = begin; b < end; ++b) {
        const float* w = source.row(0, b * weights, weights, widened.data());
        for (size_t i = 0; i < weights; i += width) {
          store_in_order((T*)y + b * weights + i, read<Float>(w + i, All()));
        }
      }
    });
  });
}

void block_quantize(Type type, BlockKind kind, const void* w, uint8_t* blocks, size_t count) {
  with_kinds<BlockKind::q4_0, BlockKind::q4_1, BlockKind::q5_0, BlockKind::q5_1, BlockKind::q8_0, BlockKind::mxfp4>(
      type, kind, [&](auto t, auto kind) {
        using T = decltype(t);
        constexpr BlockKind value = decltype(kind)::value;
        parallel_for(count, piece_blocks, [&](size_t begin, size_t end) {
          for (size_t b = begin; b < end; ++b) {
            Float values[vectors];
            for (size_t v = 0; v < vectors; ++v) {
              values[v] = load_in_order((const T*)w + b * most_quantized + v * width);
            }
            if constexpr (value == BlockKind::q4_0 || value == BlockKind::q8_0) {
              quantize<value>(values, blocks + b * block_bytes(value));
            } else if constexpr (value == BlockKind::mxfp4) {
              quantize_floats(values, blocks + b * block_bytes(value));
            } else {
              quantize_up<value>(values, blocks + b * block_bytes(value));
            }
          }
        });
      });
}

}  // namespace mittens::cpu::MITTENS_ISA
