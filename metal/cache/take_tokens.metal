// Keys and values of some tokens of a cache:
//
//   new_keys[b, h, i] = keys[b, h, indices[b, h, i]],   and values likewise
//
// Negative indices count from the end. One that is out of range reads nothing and gives NaN. A simdgroup takes a token.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "params/chosen_keys.h"

using namespace metal;
using namespace mittens;

namespace mittens {

inline int64_t place_of(uint3 group, uint token, constant int64_t* strides) {
  return group.z * strides[0] + group.y * strides[1] + token * strides[2];
}

template <typename T>
inline void take_row(const device T* from, device T* to, uint width, bool is_there, bool has_packs, uint lane) {
  if (has_packs) {
    for (uint n = lane; n < width / pack_size<T>(); n += 32) {
      ((device uint4*)to)[n] = is_there ? ((const device uint4*)from)[n] : pack_of<T>(NAN);
    }
    return;
  }
  for (uint column = lane; column < width; column += 32) {
    to[column] = is_there ? from[column] : T(NAN);
  }
}

}  // namespace mittens

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kChosenKeysSimdgroups)]] void take_tokens(
    const device T* keys [[buffer(0)]],        // [batch, heads, tokens, width]
    const device T* values [[buffer(1)]],      // [batch, heads, tokens, value width]
    const device uint* indices [[buffer(2)]],  // [batch, heads, count]
    device T* new_keys [[buffer(3)]],          // [batch, heads, count, width]
    device T* new_values [[buffer(4)]],        // [batch, heads, count, value width]
    constant TakeTokensParams& params [[buffer(5)]], lane_of_simdgroup, uint3 groups [[threadgroups_per_grid]]) {
  const uint i = group.x * kChosenKeysSimdgroups + simdgroup;
  if (i >= params.count) {
    return;
  }
  const uint index = indices[group.z * params.index_strides[0] + group.y * params.index_strides[1] + i];
  const bool from_end = params.is_signed != 0 && int(index) < 0;
  const uint asked = from_end ? index + params.tokens : index;
  const bool is_there = asked < params.tokens;
  const uint token = is_there ? asked : 0;
  const size_t row = (size_t(group.z) * groups.y + group.y) * params.count + i;
  const device T* key = keys + place_of(group, token, params.key_strides);
  const device T* value = values + place_of(group, token, params.value_strides);
  take_row(key, new_keys + row * params.width, params.width, is_there, params.has_packs, lane);
  take_row(value, new_values + row * params.value_width, params.value_width, is_there, params.has_packs, lane);
}

instantiate_types("take_tokens", take_tokens)
