// The inputs of a recurrence, from the projections of all steps of a prompt:
//
//   window = [conv_state; x];   x = silu(sum_j window[j] * conv_weight[:, j] + conv_bias)
//   q = columns^(-1/2) q / |q|;   k = k / |k|;   gate = e^(-e^A_log log(1 + e^(a + dt_bias)));   beta = sigmoid(b)
//
// x is q, k and v of a layer of the gated delta rule, or x, B and C of one of state spaces, which takes the first line
// alone. |.| has key_eps under its root. A step that the mask hides has zeros for x. The next conv_state has the last
// taps - 1 rows of the window, or the rows at the end of `lengths`.
//
// A simdgroup has 128 channels of one block of a part, four for each lane, or a whole block that is normalized, over 16
// steps. Other simdgroups have gates and rates of 32 heads, or of 32 columns of heads. Nothing passes between them.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "params/recurrence.h"
#include "recurrence/gates.h"
#include "recurrence/state.h"

using namespace metal;
using namespace mittens;

// Four neighbours, or the first `count` and zeros: at least one, which the others read again instead of branching.
template <typename T>
inline float4 load_four(const device T* p, uint count, bool packs) {
  if (packs && count == 4) {
    if constexpr (sizeof(T) == 4) {
      return *(const device float4*)p;
    } else {
      const uint2 bits = *(const device uint2*)p;
      if constexpr (is_same_v<T, half>) {
        const half2 low = as_type<half2>(bits.x), high = as_type<half2>(bits.y);
        return float4(float(low.x), float(low.y), float(high.x), float(high.y));
      } else {
        return float4(
            as_type<float>(bits.x << 16), as_type<float>(bits.x & 0xffff0000u), as_type<float>(bits.y << 16),
            as_type<float>(bits.y & 0xffff0000u));
      }
    }
  }
  float4 v = 0;
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const float value = float(p[i < count ? i : 0]);
    v[i] = i < count ? value : 0.0f;
  }
  return v;
}

template <typename T>
inline void store_four(device T* p, float4 v, uint count, bool packs) {
  if (packs && count == 4) {
    if constexpr (sizeof(T) == 4) {
      *(device float4*)p = v;
    } else {
      *(device uint2*)p = uint2(as_type<uint>(vec<T, 2>(T(v.x), T(v.y))), as_type<uint>(vec<T, 2>(T(v.z), T(v.w))));
    }
    return;
  }
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    if (i < count) {
      p[i] = T(v[i]);
    }
  }
}

// Four neighbours of a step's row of the window, or the first `count`: of the state before the first step.
template <typename T>
inline float4 window_at(
    const device T* x, const device T* before, const device bool* mask, int step, uint count, bool packs,
    constant InputPart& part, constant LayerInputsParams& params) {
  const bool is_zero = step < 0 ? !params.has_state : params.has_mask && !mask[step];
  if (is_zero || count == 0) {
    return 0;
  }
  const device T* row = step < 0 ? before + (step + int(params.taps) - 1) * part.state_tap : x + step * part.step;
  return load_four(row, count, packs);
}

template <typename T>
inline float4 silu_of(float4 sum, const device T* bias, uint count, constant LayerInputsParams& params) {
  if (params.has_bias && count > 0) {
    sum += load_four(bias, count, false);
  }
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    sum[i] *= sigmoid(sum[i]);
  }
  return sum;
}

template <typename T>
inline float4 tap_of(const device T* weight, uint j, uint taps, uint count) {
  float4 v = 0;
  if (count == 0) {
    return v;
  }
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    const float value = float(weight[(i < count ? i : 0) * taps + j]);
    v[i] = i < count ? value : 0.0f;
  }
  return v;
}

inline float4 times_and(float4 x, float4 factor, float4 sum) {
#pragma unroll
  for (uint i = 0; i < 4; ++i) {
    sum[i] = fma(x[i], factor[i], sum[i]);
  }
  return sum;
}

inline float sum_of_squares(float4 v) {
  return fma(v.x, v.x, v.y * v.y) + fma(v.z, v.z, v.w * v.w);
}

// The steps [begin, end) of a lane's four channels, or of fewer, with four taps: the window stays in registers.
// Pointers are to the lane's first channel in the sequence, `row` is the elements from step to step of the results.
template <typename T>
inline void convolve_four_taps(
    const device T* x, const device T* before, const device T* weight, const device T* bias, const device bool* mask,
    device T* out, device T* next, size_t row, uint count, int begin, int end, int length, constant InputPart& part,
    constant LayerInputsParams& params) {
  const float4 w0 = tap_of(weight, 0, 4, count), w1 = tap_of(weight, 1, 4, count);
  const float4 w2 = tap_of(weight, 2, 4, count), w3 = tap_of(weight, 3, 4, count);
  float4 a = 0, b = 0, c = 0;
  for (int step = begin - 3; step < end; ++step) {
    const float4 now = window_at(x, before, mask, step, count, part.packs, part, params);
    if (step >= begin) {
      float4 y = silu_of(times_and(c, w2, times_and(b, w1, times_and(a, w0, now * w3))), bias, count, params);
      if (part.is_normalized) {
        y *= part.scale * precise::rsqrt(simd_sum(sum_of_squares(y)) + params.key_eps);
      }
      store_four(out + step * row, y, count, part.packs);
    }
    a = b;
    b = c;
    c = now;
    if (step + 1 == length) {
      store_four(next, a, count, part.packs);
      store_four(next + params.channels, b, count, part.packs);
      store_four(next + 2 * size_t(params.channels), c, count, part.packs);
    }
  }
}

// The same with any number of taps, and of a block that is wider than a simdgroup's channels: those from `first` to
// `width`, each computed once for the sum of squares and once for the result.
template <typename T>
inline void convolve(
    const device T* x, const device T* before, const device T* weight, const device T* bias, const device bool* mask,
    device T* out, device T* next, size_t row, uint first, uint width, int begin, int end, int length,
    constant InputPart& part, constant LayerInputsParams& params) {
  const int past = int(params.taps) - 1;
  for (int step = begin; step < end; ++step) {
    float scale = 1;
    for (uint pass = part.is_normalized ? 0 : 1; pass < 2; ++pass) {
      float square = 0;
      for (uint at = 0; first + at < width; at += kInputChannels) {
        const uint count = min(width - first - at, 4u);
        float4 sum = 0;
        for (int i = 0; i <= past; ++i) {  // this step first, then the earlier ones in their order
          const int j = i == 0 ? past : i - 1;
          const float4 then = window_at(x + at, before + at, mask, step - past + j, count, false, part, params);
          const float4 factor = tap_of(weight + size_t(at) * params.taps, j, params.taps, count);
          sum = i == 0 ? then * factor : times_and(then, factor, sum);
        }
        sum = silu_of(sum, bias + at, count, params);
        if (pass == 0) {
          square += sum_of_squares(sum);
        } else {
          store_four(out + step * row + at, sum * scale, count, false);
        }
      }
      if (pass == 0) {
        scale = part.scale * precise::rsqrt(simd_sum(square) + params.key_eps);
      }
    }
  }
  if (length < 0) {
    return;
  }
  for (uint at = 0; first + at < width; at += kInputChannels) {
    const uint count = min(width - first - at, 4u);
    for (int j = 0; j < past; ++j) {
      store_four(
          next + size_t(j) * params.channels + at,
          window_at(x + at, before + at, mask, length - past + j, count, false, part, params), count, false);
    }
  }
}

// The steps [begin, end) of a simdgroup's channels.
template <typename T, bool HasFourTaps>
inline void convolve_unit(
    const device T* x, const device T* before, const device T* weight, const device T* bias, const device bool* mask,
    device T* out, device T* next, uint unit, uint sequence, int begin, int end, int length, uint lane,
    constant InputPart& part, constant LayerInputsParams& params) {
  const uint chunks = (part.width + kInputChannels - 1) / kInputChannels;
  const uint block = part.is_normalized ? unit : unit / chunks;
  const uint first = (part.is_normalized ? 0 : unit % chunks) * kInputChannels + 4 * lane;
  const size_t row = size_t(part.blocks) * part.width;
  const size_t channel = size_t(block) * part.width + first;
  x += sequence * part.sequence + block * part.block + part.input_at + first;
  before += sequence * part.state_sequence + part.state_at + channel;
  weight += (part.weight_at + channel) * params.taps;
  bias += part.weight_at + channel;
  mask += size_t(sequence) * params.steps;
  out += size_t(sequence) * params.steps * row + channel;
  next += size_t(sequence) * (params.taps - 1) * params.channels + part.next_at + channel;
  if (length == 0 ? begin > 0 : length <= begin || length > end) {
    length = -4;  // before any step of the window: others leave the state
  }
  if constexpr (HasFourTaps) {
    const uint count = first < part.width ? min(part.width - first, 4u) : 0;
    convolve_four_taps(x, before, weight, bias, mask, out, next, row, count, begin, end, length, part, params);
  } else {
    convolve(
        x, before, weight, bias, mask, out, next, row, first,
        part.is_normalized ? part.width : min(part.width, first + 4), begin, end, length, part, params);
  }
}

// Of 32 gates and rates, one for each lane.
template <typename T>
inline void gates_of(
    const device T* a, const device ushort* a_log, const device ushort* dt_bias, device float* gates,
    constant LayerInputsParams& params, uint first, uint sequence, int begin, int end, uint lane) {
  const uint i = first + lane;
  const uint all = params.heads * params.gates;
  if (i >= all) {
    return;
  }
  const uint head = i / params.gates;
  a += sequence * params.a.sequence + (head / params.heads_of_key) * params.a.key_head +
       (head % params.heads_of_key) * params.a.head + i % params.gates;
  gates += size_t(sequence) * params.steps * all + i;
  const float bias = number(dt_bias, params.dt_bias_type, i);
  const float decay = precise::exp(number(a_log, params.a_log_type, head));
  for (int step = begin; step < end; ++step) {
    gates[size_t(step) * all] = precise::exp(-(decay * softplus(float(a[step * params.a.step]) + bias)));
  }
}

template <typename T>
inline void rates_of(
    const device T* b, device float* rates, constant LayerInputsParams& params, uint first, uint sequence, int begin,
    int end, uint lane) {
  const uint head = first + lane;
  if (head >= params.heads) {
    return;
  }
  b += sequence * params.b.sequence + (head / params.heads_of_key) * params.b.key_head +
       (head % params.heads_of_key) * params.b.head;
  rates += size_t(sequence) * params.steps * params.heads + head;
  for (int step = begin; step < end; ++step) {
    rates[size_t(step) * params.heads] = sigmoid(float(b[step * params.b.step]));
  }
}

template <typename T, bool HasFourTaps>
[[kernel, max_total_threads_per_threadgroup(32 * kInputSimdgroups)]] void layer_inputs(
    const device T* first_x [[buffer(0)]],  // [batch, steps, blocks, width] by strides, as the next two
    const device T* second_x [[buffer(1)]], const device T* third_x [[buffer(2)]],
    const device T* a [[buffer(3)]],            // [batch, steps, heads] by strides, or one for each column
    const device T* b [[buffer(4)]],            // [batch, steps, heads] by strides
    const device T* first_state [[buffer(5)]],  // [batch, taps - 1, channels] by strides, as the next two
    const device T* second_state [[buffer(6)]], const device T* third_state [[buffer(7)]],
    const device T* first_weight [[buffer(8)]],  // [channels, taps], as the next two
    const device T* second_weight [[buffer(9)]], const device T* third_weight [[buffer(10)]],
    const device T* bias [[buffer(11)]],          // [channels]
    const device ushort* a_log [[buffer(12)]],    // [heads], of a_log_type
    const device ushort* dt_bias [[buffer(13)]],  // [heads] or [heads, columns], of dt_bias_type
    const device bool* mask [[buffer(14)]],       // [batch, steps]
    const device int* lengths [[buffer(15)]],     // [batch]
    device T* first_out [[buffer(16)]],           // [batch, steps, blocks, width], as the next two
    device T* second_out [[buffer(17)]], device T* third_out [[buffer(18)]],
    device T* conv_out [[buffer(19)]],   // [batch, taps - 1, channels]
    device float* gates [[buffer(20)]],  // [batch, steps, heads] or [batch, steps, heads, columns]
    device float* rates [[buffer(21)]],  // [batch, steps, heads]
    constant LayerInputsParams& params [[buffer(22)]], lane_of_simdgroup) {
  uint unit = group.x * kInputSimdgroups + simdgroup;
  const int begin = int(group.y) * kInputSteps;
  const int end = min(begin + kInputSteps, int(params.steps));
  const uint sequence = group.z;
  const int length = params.has_lengths ? clamp(lengths[sequence], 0, int(params.steps)) : int(params.steps);
  const uint before_second = params.parts[0].units;
  const uint before_third = before_second + params.parts[1].units;
  const uint all = before_third + params.parts[2].units;
  if (unit < all) {
    const uint i = unit < before_second ? 0 : unit < before_third ? 1 : 2;
    unit -= i == 0 ? 0 : i == 1 ? before_second : before_third;
    convolve_unit<T, HasFourTaps>(
        i == 0   ? first_x
        : i == 1 ? second_x
                 : third_x,
        i == 0   ? first_state
        : i == 1 ? second_state
                 : third_state,
        i == 0   ? first_weight
        : i == 1 ? second_weight
                 : third_weight,
        bias, mask,
        i == 0   ? first_out
        : i == 1 ? second_out
                 : third_out,
        conv_out, unit, sequence, begin, end, length, lane, params.parts[i], params);
    return;
  }
  unit -= all;
  const uint of_gates = (params.heads * params.gates + 31) / 32;
  if (unit < of_gates) {
    gates_of(a, a_log, dt_bias, gates, params, 32 * unit, sequence, begin, end, lane);
  } else {
    rates_of(b, rates, params, 32 * (unit - of_gates), sequence, begin, end, lane);
  }
}

// Of four taps, where no block that is normalized is wider than a simdgroup's channels; and of all others.
instantiate_types("layer_inputs", layer_inputs, true)
instantiate_types("layer_inputs_any", layer_inputs, false)
