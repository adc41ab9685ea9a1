// Vectors of numbers between 0 and 1, or -1 and 1, as the bytes or halves of a word.
#pragma once

namespace mittens {

template <typename Part, typename V>
MITTENS_INLINE uint pack_normalized(V x) {
  constexpr int bits = 8 * sizeof(Part);
  constexpr float most = __is_signed(Part) ? float((1 << (bits - 1)) - 1) : float((1u << bits) - 1);
  uint word = 0;
  for (int i = 0; i < Vector<V>::size; ++i) {
    const float value = metal::clamp(float(x[i]), __is_signed(Part) ? -1.0f : 0.0f, 1.0f);
    word |= uint(metal::make_unsigned_t<Part>(Part(metal::rint(value * most)))) << (i * bits);
  }
  return word;
}
template <typename Part, typename V>
MITTENS_INLINE V unpack_normalized(uint word) {
  constexpr int bits = 8 * sizeof(Part);
  constexpr float most = __is_signed(Part) ? float((1 << (bits - 1)) - 1) : float((1u << bits) - 1);
  V result;
  for (int i = 0; i < Vector<V>::size; ++i) {
    result[i] = Element<V>(metal::max(float(Part(word >> (i * bits))) / most, -1.0f));
  }
  return result;
}

// Fields of different widths, the first in the lowest bits.
template <int... bits, typename V>
MITTENS_INLINE uint pack_fields(V x) {
  uint word = 0;
  int i = 0, at = 0;
  ((word |= uint(metal::rint(metal::clamp(float(x[i++]), 0.0f, 1.0f) * ((1 << bits) - 1))) << at, at += bits), ...);
  return word;
}
template <typename V, int... bits>
MITTENS_INLINE V unpack_fields(uint word) {
  V result;
  int i = 0, at = 0;
  ((result[i++] = Element<V>(float(word >> at & ((1u << bits) - 1)) / ((1 << bits) - 1)), at += bits), ...);
  return result;
}

// The transfer function of sRGB, which leaves the fourth component alone.
MITTENS_INLINE float srgb(float x) {
  x = metal::clamp(x, 0.0f, 1.0f);
  return x < 0.0031308f ? 12.92f * x : 1.055f * metal::pow(x, 1.0f / 2.4f) - 0.055f;
}
MITTENS_INLINE float linear(float x) {
  return x <= 0.04045f ? x / 12.92f : metal::pow((x + 0.055f) / 1.055f, 2.4f);
}
template <typename V>
MITTENS_INLINE uint pack_srgb(V x) {
  return pack_normalized<uchar>(float4{srgb(x[0]), srgb(x[1]), srgb(x[2]), float(x[3])});
}
template <typename V>
MITTENS_INLINE V unpack_srgb(uint word) {
  const float4 x = unpack_normalized<uchar, float4>(word);
  return construct<V>(float4{linear(x[0]), linear(x[1]), linear(x[2]), x[3]});
}

}  // namespace mittens

namespace metal {

#define MITTENS_PACK(kind, part, type, size)                         \
  MITTENS_INLINE uint pack_##type##_to_##kind(vec<type, size> x) {   \
    return mittens::pack_normalized<part>(x);                        \
  }                                                                  \
  MITTENS_INLINE vec<type, size> unpack_##kind##_to_##type(uint x) { \
    return mittens::unpack_normalized<part, vec<type, size>>(x);     \
  }
#define MITTENS_PACKS(type)                                            \
  MITTENS_PACK(unorm4x8, uchar, type, 4)                               \
  MITTENS_PACK(snorm4x8, signed char, type, 4)                         \
  MITTENS_PACK(unorm2x16, ushort, type, 2)                             \
  MITTENS_PACK(snorm2x16, short, type, 2)                              \
  MITTENS_INLINE uint pack_##type##_to_srgb_unorm4x8(vec<type, 4> x) { \
    return mittens::pack_srgb(x);                                      \
  }                                                                    \
  MITTENS_INLINE vec<type, 4> unpack_unorm4x8_srgb_to_##type(uint x) { \
    return mittens::unpack_srgb<vec<type, 4>>(x);                      \
  }                                                                    \
  MITTENS_INLINE uint pack_##type##_to_unorm10a2(vec<type, 4> x) {     \
    return mittens::pack_fields<10, 10, 10, 2>(x);                     \
  }                                                                    \
  MITTENS_INLINE vec<type, 4> unpack_unorm10a2_to_##type(uint x) {     \
    return mittens::unpack_fields<vec<type, 4>, 10, 10, 10, 2>(x);     \
  }                                                                    \
  MITTENS_INLINE ushort pack_##type##_to_unorm565(vec<type, 3> x) {    \
    return ushort(mittens::pack_fields<5, 6, 5>(x));                   \
  }                                                                    \
  MITTENS_INLINE vec<type, 3> unpack_unorm565_to_##type(ushort x) {    \
    return mittens::unpack_fields<vec<type, 3>, 5, 6, 5>(x);           \
  }
MITTENS_PACKS(float)
MITTENS_PACKS(half)
#undef MITTENS_PACKS
#undef MITTENS_PACK

}  // namespace metal
