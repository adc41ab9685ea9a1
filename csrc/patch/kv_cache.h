// mlx-lm's key/value cache of a layer, and a token's attention over it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <nanobind/nanobind.h>

#include "ops/cache/rope_append.h"
#include "python/array_caster.h"

namespace mittens {

// A KVCache or a QuantizedKVCache that holds tokens; a subclass of them is none.
class LayerCache {
 public:
  static std::optional<LayerCache> of(nanobind::handle cache);

  // The shapes of keys and values, as if they were not packed, and the type that they are read in.
  mx::Shape keys() const;
  mx::Shape values() const;
  mx::Dtype dtype() const;

  const std::vector<mx::array*>& buffers() const {
    return buffers_;
  }
  const Packing& packing() const {
    return packing_;
  }
  int offset() const {
    return offset_;
  }
  void advance(int tokens);

 private:
  LayerCache(nanobind::handle cache, nanobind::object keys, nanobind::object values, std::vector<mx::array*> buffers,
             Packing packing);

  nanobind::object cache_;
  nanobind::object keys_;
  nanobind::object values_;
  std::vector<mx::array*> buffers_;  // in keys and values, each four-dimensional
  Packing packing_;
  int offset_;
};

// The attention of one token's queries over the cache and the token itself; null where it has no room for that, no
// kernel covers it, or mx is faster at it or at the steps before: norms of heads if there are any, the rotary embedding
// and the append.
std::shared_ptr<mx::Primitive> attention_of_token(const LayerCache& cache, int query_heads, float scale, bool has_norms,
                                                  mx::Stream stream);

// Does it: the token's queries, keys and values are [batch, 1, heads * width], as is the result, and the latter two are
// in the cache then. None where they do not fit, or a transformation looks at them.
std::optional<mx::array> attend(LayerCache& cache, std::shared_ptr<mx::Primitive> attention, const mx::array& queries,
                                const mx::array& keys, const mx::array& values, const Rotary& rotary,
                                mx::Stream stream);

}  // namespace mittens
