// Queries and keys that mx.fast.rope has turned and nothing has computed yet: under the patch a layer turns both and
// then appends to its cache, which is one kernel.
#pragma once

#include <optional>
#include <variant>

#include "mlx/utils.h"
#include "ops/cache/rope_append.h"

namespace mittens {

mx::array mx_rope(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale,
                  const std::variant<int, mx::array>& offset, const std::optional<mx::array>& freqs,
                  mx::StreamOrDevice where);

// Columns of heads, [batch, heads, tokens, width], and behind them turned ones, of as many heads or of one for all. Of
// queries, `whole` is the array that both are parts of, and `part` the one that was to be turned. The append may do
// both.
mx::array before_turned(const mx::array& columns, const mx::array& turned, const std::optional<mx::array>& whole,
                        const std::optional<mx::array>& part);

// mx.fast.rope itself, which leaves a note for the append.
std::optional<mx::array> try_rope(const mx::array& x, int dims, bool traditional, std::optional<float> base,
                                  float scale, const std::variant<int, mx::array>& offset,
                                  const std::optional<mx::array>& freqs, mx::StreamOrDevice where);

// The append of new keys and values to the buffers from `first` on, together with turning the keys and the queries that
// this thread has turned beside them: their holders get the kernel's results. nullopt unless this is provably safe.
// Buffers that have just been made for it are computed of the arrays `made_of`, and of nothing else that is pending.
std::optional<CacheStep> append_with_rope(const Arrays& buffers, const Packing& packing, const mx::array& new_keys,
                                          const mx::array& new_values, int first, const Arrays& made_of);
std::optional<CacheStep> append_with_rope(const Arrays& buffers, const Packing& packing, const mx::array& new_keys,
                                          const mx::array& new_values, int first);

// Turns new keys, and the queries beside them, as that append does, for a cache that appends them itself: the arrays
// become the kernel's. Does nothing where the append would be none.
void turn_as_append_does(mx::array& new_keys, mx::array& new_values);

}  // namespace mittens
