// The primitive behind the appends to a cache: rotary embedding of new queries and keys, and keys and values into
// buffers that hold elements, or into quantized ones.
#pragma once

#include "ops/cache/rope_append.h"
#include "runtime/primitive.h"

namespace mittens {

// The arguments of a call that are no arrays.
struct Rope {
  int begin;  // the first column that is rotated; above 0 all heads of keys share the columns from there on
  int dims;
  float base;  // 0 where there are frequencies
  float scale;
  float eps;
  float weight_offset;
  float query_scale;
  float value_scale;
  int offset;
  int start;
  bool has_freqs;
  bool has_norms;
  bool has_value_norm;
  bool has_offsets;
  bool traditional;
  bool is_apart;  // the new heads are three arrays
  Packing packing;

  bool operator==(const Rope&) const = default;

  size_t norms() const {  // number of arrays with norm weights
    return 2 * has_norms + has_value_norm;
  }

  size_t buffers() const {
    return buffers_of(packing);
  }
};

Rope rope_of(const Rotary& rotary, const Offset& offset, int start, const Packing& packing, bool is_apart);

// [batch, heads, tokens, width] of heads that may be [batch, tokens, heads * width] as well.
std::optional<mx::Shape> shape_of_heads(const mx::array& heads, int width);

// The inputs of the primitive but new keys and values that are apart, and the shared key before them.
Arrays inputs_of(const mx::array& heads, const Arrays& buffers, const Rotary& rotary, const Offset& offset,
                 mx::Stream stream);

// The columns of a head of queries and keys, and of values.
int width_of(const Arrays& inputs, const Rope& rope);
int value_width_of(const Arrays& inputs, const Rope& rope);

// A call in mx's operations.
CacheStep compose_rope_append(const Arrays& inputs, const Rope& rope, mx::Stream stream);

std::shared_ptr<KernelPrimitive> rope_append_primitive(const Rope& rope, mx::Stream stream);

}  // namespace mittens
