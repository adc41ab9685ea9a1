#include "cpu/gguf.h"

#include "cpu/isa/matmul/row_products.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr size_t piece_blocks = 512;  // for one thread at a time

template <typename F>
void with_blocks(Type type, BlockKind kind, const F& f) {
  with_type(type, [&](auto t) {
    kind == BlockKind::q4_0 ? f(t, Index<static_cast<int>(BlockKind::q4_0)>())
                            : f(t, Index<static_cast<int>(BlockKind::q8_0)>());
  });
}

constexpr size_t vectors = block_weights / width;

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

constexpr int32_t smallest_nan = 0x7f800001;  // as bits, which are larger than those of any number

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
  for (size_t i = 0; i < block_weights; ++i) {
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
  uint8_t q[block_weights];  // 0 where the quotient is no finite number
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
    __builtin_memcpy(block + 2, q, block_weights);
    return;
  }
  for (size_t i = 0; i < 16; ++i) {
    block[2 + i] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
  }
}

}  // namespace

void block_matmul(Type type, BlockKind kind, const uint8_t* blocks, const void* x, const void* bias, void* y,
                  size_t rows, size_t columns, size_t outputs) {
  with_blocks(type, kind, [&](auto t, auto kind) {
    using T = decltype(t);
    using Source = Blocks<static_cast<BlockKind>(decltype(kind)::value)>;
    const Source source{blocks, columns / block_weights};
    row_products<Source, 1>([&](size_t, int) { return source; }, (const T*)x, 1, rows, columns, outputs,
                            [&](size_t row, size_t n, size_t size, const float* sums, const float*) {
                              round_row((T*)y + row * outputs + n, sums, bias ? (const T*)bias + n : nullptr, size);
                            });
  });
}

void block_dequantize(Type type, BlockKind kind, const uint8_t* blocks, void* y, size_t count) {
  with_blocks(type, kind, [&](auto t, auto kind) {
    using T = decltype(t);
    using Source = Blocks<static_cast<BlockKind>(decltype(kind)::value)>;
    const Source source{blocks, count};
    parallel_for(count, piece_blocks, [&](size_t begin, size_t end) {
      for (size_t b = begin; b < end; ++b) {
        widen_step(source, blocks, b, All(), [&](size_t v, Float w) MITTENS_INLINED {
          store_in_order((T*)y + b * block_weights + v * width, w);
        });
      }
    });
  });
}

void block_quantize(Type type, BlockKind kind, const void* w, uint8_t* blocks, size_t count) {
  with_blocks(type, kind, [&](auto t, auto kind) {
    using T = decltype(t);
    constexpr BlockKind block_kind = static_cast<BlockKind>(decltype(kind)::value);
    parallel_for(count, piece_blocks, [&](size_t begin, size_t end) {
      for (size_t b = begin; b < end; ++b) {
        Float values[vectors];
        for (size_t v = 0; v < vectors; ++v) {
          values[v] = load_in_order((const T*)w + b * block_weights + v * width);
        }
        quantize<block_kind>(values, blocks + b * block_bytes(block_kind));
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
