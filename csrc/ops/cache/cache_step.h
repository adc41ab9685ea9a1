// A step of a key-value cache as one primitive: the append to its buffers, then attention over them.
#pragma once

#include <memory>
#include <optional>

#include "runtime/primitive.h"

namespace mittens {

inline constexpr int tokens_axis = 2;  // of a buffer, [batch, heads, tokens, width]

// An append to buffers: heads, the buffers of keys and of values, and more -> queries and the buffers.
struct Append {
  std::shared_ptr<KernelPrimitive> primitive;
  Arrays inputs;
  mx::Shape queries;
  size_t buffers;  // the number of inputs after the first
};

// An attention over tokens of the buffers.
struct Attending {
  std::shared_ptr<mx::Primitive> primitive;  // of queries and the buffers, and of more
  mx::Shape shape;  // of its output
  int end;  // behind the tokens that it sees
  int first = 0;
};

// The queries, or the attention as [batch, tokens, heads * width] of one token, and the buffers.
struct CacheStep {
  mx::array result;
  Arrays buffers;
};

// Its buffers may be updated in place while work on them is on its way. It has no derivatives. A pending array of the
// queries' shape and dtype that is given becomes its result.
CacheStep cache_step(Append append, std::optional<Attending> attending, std::optional<mx::array> result = std::nullopt);

// The attention of one token as a part of the pending append whose queries and buffers it has: these may then be
// updated in place while it is on its way. inputs: queries, views of tokens of the buffers, and other inputs of the
// attention. shape: of its output. None where the queries are no append's, or it has computed them.
std::optional<mx::array> join_step(const Arrays& inputs, const std::shared_ptr<mx::Primitive>& attention,
                                   const mx::Shape& shape);

// Whether an array is known to be computed of few others, and not of `result`: a layer's frequencies are, which nothing
// computes before its first call, and so are the buffers of a cache that has just been made.
bool is_of_few_but(const mx::array& array, const mx::array& result);

// A buffer whose elements nobody has written: for an append that writes all of them.
mx::array unwritten_buffer(mx::Shape shape, mx::Dtype dtype, mx::Stream stream);

}  // namespace mittens
