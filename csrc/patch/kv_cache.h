// mlx-lm's plain key/value cache, and a token's attention over it.
#pragma once

#include <memory>
#include <optional>

#include <nanobind/nanobind.h>

#include "ops/cache/rope_append.h"
#include "python/array_caster.h"

namespace mittens {

// A KVCache that holds tokens; a subclass of it is none.
class PlainCache {
 public:
  static std::optional<PlainCache> of(nanobind::handle cache);

  mx::array& keys() const {
    return *nanobind::inst_ptr<mx::array>(keys_);
  }
  mx::array& values() const {
    return *nanobind::inst_ptr<mx::array>(values_);
  }
  int offset() const {
    return offset_;
  }
  void advance(int tokens);

 private:
  PlainCache(nanobind::handle cache, nanobind::object keys, nanobind::object values);

  nanobind::object cache_;
  nanobind::object keys_;
  nanobind::object values_;
  int offset_;
};

// The attention of one token's queries over what the cache holds and the token itself; null where it has no room for
// that, no kernel covers it, or mx is faster at it or at what comes before: the rotary embedding, after norms of heads
// if there are any, and the append.
std::shared_ptr<mx::Primitive> attention_of_token(const PlainCache& cache, int query_heads, float scale, bool has_norms,
                                                  mx::Stream stream);

// Does it: the token's queries, keys and values are [batch, 1, heads * width], as is the result, and the latter two are
// in the cache then. None where they do not fit, or a transformation looks at them.
std::optional<mx::array> attend(PlainCache& cache, std::shared_ptr<mx::Primitive> attention, const mx::array& queries,
                                const mx::array& keys, const mx::array& values, const Rotary& rotary,
                                mx::Stream stream);

}  // namespace mittens
