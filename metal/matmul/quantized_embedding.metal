// Rows of a matrix that mx.quantize has packed, as floats: the embedding of a quantized model.
//
//   y[i, k] = scale * q[n, k] + bias,  n = indices[i];  mxfp4, mxfp8, nvfp4: scale * q[n, k]
//
// A thread has a run of neighbours of a row. Rounded as mx.dequantize does: the integer, the product and the sum are of
// the scales' type. An index that is out of range gives NaN, and no row is read.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "mittens/source/affine.h"
#include "mittens/source/small_floats.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

// Weights of one format: where rows lie, and the values of a run of columns.
template <typename T, int bits>
struct Integral {
  using Rows = Affine<T, bits, bits == 1 ? 32 : bits == 4 || bits == 8 ? 8 : 16>;
  using Values = typename Rows::Values;

  static Rows rows(
      const device uint* words, const device T* scales, const device T* biases, constant EmbeddingParams& params) {
    return {
        {words, scales, biases, params.words_stride, params.scales_stride, params.biases_stride}, params.group_shift};
  }

  static void weights(typename Rows::Run run, thread T (&w)[Values::size]) {
    half q[Values::size];
    Values::unpack(run.words, q);
#pragma unroll
    for (int i = 0; i < Values::size; ++i) {
      const half unit = half(1 / Values::factor(Values::level(i)));
      w[i] = T((q[i] - half(Values::base)) * unit) * run.scale + run.bias;
    }
  }
};

// The scale of a group of 32: mx has no NaN among these, but infinity.
inline float scale_of_32(uchar bits) {
  return as_type<float>(bits == 0 ? 0x00400000u : uint(bits) << 23);
}

template <typename T, int bits, int group_shift>
struct Floating {
  using Rows = FloatRows<bits, group_shift, 8>;
  using Values = typename Rows::Values;

  static Rows rows(
      const device uint* words, const device uchar* scales, const device uchar*, constant EmbeddingParams& params) {
    return {words, scales, params.words_stride, params.scales_stride};
  }

  // The bits of a half that is too small by Values::factor, each by itself: a run may hold one that is no number.
  static float value(uint code) {
    if constexpr (bits == 4) {
      return float(as_type<half>(ushort((code & 0x7u) << 9 | (code & 0x8u) << 12)));
    } else {
      const uint size = (code & 0x7fu) == 0x7fu ? 0x7e00u : (code & 0x7fu) << 7;
      return float(as_type<half>(ushort(size | (code & 0x80u) << 8)));
    }
  }

  static void weights(typename Rows::Run run, thread T (&w)[Values::size]) {
    constexpr int each = 32 / bits;  // of a word
    const float scale = group_shift == 4 ? small_scale(run.scale) : scale_of_32(run.scale);
#pragma unroll
    for (int i = 0; i < Values::size; ++i) {
      w[i] = T(scale * (value(run.words.at[i / each] >> (i % each * bits)) * (1 / Values::factor(0))));
    }
  }
};

template <typename T, typename Scale, typename Format>
[[kernel, max_total_threads_per_threadgroup(kEmbeddingThreads)]] void quantized_embedding(
    const device uint* indices [[buffer(0)]],  // [count], int32 or uint32
    const device uint* words [[buffer(1)]],    // [rows, columns * bits / 32]
    const device Scale* scales [[buffer(2)]],  // [rows, groups]
    const device Scale* biases [[buffer(3)]],  // [rows, groups]; nothing that has none reads them
    device T* y [[buffer(4)]],                 // [count, columns]
    constant EmbeddingParams& params [[buffer(5)]], uint at [[thread_position_in_grid]]) {
  constexpr int E = Format::Values::size;
  constexpr int W = pack_size<T>();
  const uint runs = params.columns / E;
  const uint i = at / runs;
  if (i >= params.count) {
    return;
  }
  uint n = indices[i];
  n += params.is_signed && int(n) < 0 ? params.rows : 0;
  T w[E];
  if (n < params.rows) {
    Format::weights(Format::rows(words, scales, biases, params).at(n, true).load(0, 0, at % runs * E), w);
  } else {
#pragma unroll
    for (int j = 0; j < E; ++j) {
      w[j] = T(NAN);
    }
  }
  device uint4* packs = (device uint4*)y + size_t(at) * (E / W);
#pragma unroll
  for (int p = 0; p < E / W; ++p) {
    float v[W];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      v[j] = float(w[p * W + j]);
    }
    packs[p] = pack<T>(v);
  }
}

#define instantiate_integral(bits)                                                                               \
  instantiate_kernel("quantized_embedding_" #bits "bit_float32", quantized_embedding, float, float,            \
                     Integral<float, bits>)                                                                      \
  instantiate_kernel("quantized_embedding_" #bits "bit_float16", quantized_embedding, half, half,              \
                     Integral<half, bits>)                                                                       \
  instantiate_kernel("quantized_embedding_" #bits "bit_bfloat16", quantized_embedding, bfloat, bfloat,         \
                     Integral<bfloat, bits>)

instantiate_integral(1)
instantiate_integral(2)
instantiate_integral(3)
instantiate_integral(4)
instantiate_integral(5)
instantiate_integral(6)
instantiate_integral(8)

#define instantiate_floating(name, bits, group_shift)                                                            \
  instantiate_kernel("quantized_embedding_" name "_bfloat16", quantized_embedding, bfloat, uchar,              \
                     Floating<bfloat, bits, group_shift>)

instantiate_floating("mxfp4", 4, 5)
instantiate_floating("mxfp8", 8, 5)
instantiate_floating("nvfp4", 4, 4)
