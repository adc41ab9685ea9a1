// The random numbers of mx.random, one for each element of an array: Threefry-2x32 with 20 rounds (Salmon et al.,
// "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). Elements i and i + half of an array share a hash.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

inline void threefry_rounds(thread uint2& x, uint a, uint b, uint c, uint d) {
  x.x += x.y;
  x.y = ((x.y << a) | (x.y >> (32 - a))) ^ x.x;
  x.x += x.y;
  x.y = ((x.y << b) | (x.y >> (32 - b))) ^ x.x;
  x.x += x.y;
  x.y = ((x.y << c) | (x.y >> (32 - c))) ^ x.x;
  x.x += x.y;
  x.y = ((x.y << d) | (x.y >> (32 - d))) ^ x.x;
}

inline uint2 threefry(uint2 key, uint2 counter) {
  const uint third = key.x ^ key.y ^ 0x1bd11bdau;
  uint2 x = counter + key;
  threefry_rounds(x, 13, 15, 26, 6);
  x += uint2(key.y, third + 1);
  threefry_rounds(x, 17, 29, 16, 24);
  x += uint2(third, key.x + 2);
  threefry_rounds(x, 13, 15, 26, 6);
  x += uint2(key.x, key.y + 3);
  threefry_rounds(x, 17, 29, 16, 24);
  x += uint2(key.y, third + 4);
  threefry_rounds(x, 13, 15, 26, 6);
  x += uint2(third, key.x + 5);
  return x;
}

// The 32 bits that mx.random draws for element i of an array of `size`.
inline uint random_bits(uint2 key, uint i, uint size) {
  const uint half_size = size / 2;
  const uint ahead = half_size + size % 2;  // from an element of the first half to its partner in the second
  const bool is_second = i >= ahead;
  const bool is_middle = i == half_size && size % 2 == 1;
  const uint2 counter = is_second ? uint2(i - ahead, i) : uint2(i, is_middle ? 0 : i + ahead);
  const uint2 bits = threefry(key, counter);
  return is_second ? bits.y : bits.x;
}

// The second of the two keys that mx.random.split gives.
inline uint2 second_key(uint2 key) {
  return uint2(threefry(key, uint2(0, 2)).y, threefry(key, uint2(1, 3)).y);
}

}  // namespace mittens
