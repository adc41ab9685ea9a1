// Packs: 16 bytes of one array, held as raw bits; the unit in which the row kernels load and store.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// Elements of T in a pack.
template <typename T>
constexpr int pack_size() {
  return 16 / sizeof(T);
}

// v as an element of T has it.
template <typename T>
inline float round_to(float v) {
  return float(T(v));
}

// bfloat is widened by its bits: the upper half of a float.
template <typename T>
inline void unpack(uint4 bits, thread float (&v)[16 / sizeof(T)]) {
  if constexpr (is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = as_type<float>(bits[i]);
    }
  } else if constexpr (is_same_v<T, half>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const half2 pair = as_type<half2>(bits[i]);
      v[2 * i] = float(pair.x);
      v[2 * i + 1] = float(pair.y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = as_type<float>(bits[i] << 16);
      v[2 * i + 1] = as_type<float>(bits[i] & 0xffff0000u);
    }
  }
}

// Each value rounded to T.
template <typename T>
inline uint4 pack(thread const float (&v)[16 / sizeof(T)]) {
  uint4 bits;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits[i] = as_type<uint>(v[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits[i] = as_type<uint>(vec<T, 2>(T(v[2 * i]), T(v[2 * i + 1])));
    }
  }
  return bits;
}

// The values rounded to T, two of a pack at once: one at a time would be four instructions each on NVIDIA GPUs.
template <typename T, int W>
inline void round_values(thread float (&v)[W]) {
  if constexpr (W == pack_size<T>()) {
    unpack<T>(pack<T>(v), v);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[i] = round_to<T>(v[i]);
    }
  }
}

// A pack whose elements all equal v.
template <typename T>
inline uint4 pack_of(float v) {
  float values[16 / sizeof(T)];
#pragma unroll
  for (int i = 0; i < pack_size<T>(); ++i) {
    values[i] = v;
  }
  return pack<T>(values);
}

// The pack at p; `aligned` says that p is on a 16-byte boundary, and is fast where it is the same for all lanes.
template <typename T>
inline uint4 load_pack(const device T* p, bool aligned) {
  if (aligned) {
    return *(const device uint4*)p;
  }
  uint4 bits;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits[i] = as_type<uint>(p[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint low = as_type<ushort>(p[2 * i]);
      const uint high = as_type<ushort>(p[2 * i + 1]);
      bits[i] = low | (high << 16);
    }
  }
  return bits;
}

template <typename T>
inline void store_pack(device T* p, bool aligned, uint4 bits) {
  if (aligned) {
    *(device uint4*)p = bits;
    return;
  }
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = as_type<T>(bits[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[2 * i] = as_type<T>(ushort(bits[i] & 0xffffu));
      p[2 * i + 1] = as_type<T>(ushort(bits[i] >> 16));
    }
  }
}

}  // namespace mittens
