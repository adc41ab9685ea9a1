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

}  // namespace mittens

namespace metal {

#define MITTENS_PACK(kind, part, type, size)                         \
  MITTENS_INLINE uint pack_##type##_to_##kind(vec<type, size> x) {   \
    return mittens::pack_normalized<part>(x);                        \
  }                                                                  \
  MITTENS_INLINE vec<type, size> unpack_##kind##_to_##type(uint x) { \
    return mittens::unpack_normalized<part, vec<type, size>>(x);     \
  }
#define MITTENS_PACKS(type)                    \
  MITTENS_PACK(unorm4x8, uchar, type, 4)       \
  MITTENS_PACK(snorm4x8, signed char, type, 4) \
  MITTENS_PACK(unorm2x16, ushort, type, 2)     \
  MITTENS_PACK(snorm2x16, short, type, 2)
MITTENS_PACKS(float)
MITTENS_PACKS(half)
#undef MITTENS_PACKS
#undef MITTENS_PACK

}  // namespace metal
