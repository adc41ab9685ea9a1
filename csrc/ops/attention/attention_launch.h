// Attention as its op hands it to the kernels: the meaning of the arrays, and the launches.
#pragma once

#include <string>
#include <vector>

#include "backends/launch.h"
#include "params/attention.h"

namespace mittens {

// Keys and values may lie packed, as mx.quantize makes them along the head dimension.
struct AttentionOptions {
  float scale = 1;
  bool causal = false;  // query i sees keys up to i + keys - queries
  int window = 0;  // and of these only the last `window`; 0: all
  bool has_mask = false;  // an input after the values: bool, or additive of the queries' type
  bool has_sinks = false;  // an input after the mask: [heads], of the queries' type
  int bits = 0;  // of packed keys and values: 4 or 8; 0: they are of the queries' type
  int group_size = 0;  // of packed keys and values
  bool has_starts = false;  // an input after the sinks: [batch] or [batch, queries], int32
  bool has_ends = false;  // an input after the starts: [batch], int32
  bool exact = false;  // a query's result has the bits of a call of this query and the keys in its range alone

  // Keys and values are blocks of a pool, [blocks, key_heads, keys of a block, ..]. There are ends, and the last input
  // is the table of blocks: [batch, entries], int32.
  bool is_paged = false;

  bool leaves_parts = false;  // results are put together with others': at least two threadgroups share a row's keys

  // Whether rows of the batch have keys of their own.
  bool is_ragged() const {
    return has_starts || has_ends;
  }

  bool operator==(const AttentionOptions&) const = default;
};

// Inputs of a launch, in order:
//   queries  [batch, heads, queries, width]           last stride 1, any other strides
//   keys     [batch, key_heads, keys, width]          likewise; packed: words, scales, biases, one after the other
//   values   [batch, key_heads, keys, value_width]    likewise
//   mask     [batch, heads, queries, keys]            any strides, 0 where it is broadcast
//   sinks    [heads]                                  contiguous
//   starts   [batch] or [batch, queries]              contiguous
//   ends     [batch]                                  contiguous
//   table    [batch, entries]                         last stride 1
// Output: y [batch, heads, queries, value_width], row contiguous, and if wanted logsumexp [batch, heads, queries] in
// float32: the natural logarithm of the sum of e^score of a row, -inf where it sees no key.

// Where the rows of an array of four dimensions are in the view that add_view binds.
TokenRows token_rows(const mx::array& rows);

// Why no kernel covers these shapes, for the rule that sends the call to mx. Empty: one does.
std::string attention_not_covered(const mx::Shape& queries, const mx::Shape& values, int bits);

// The same of keys and values in blocks.
std::string paged_attention_not_covered(const mx::Shape& queries, const mx::Shape& values, int bits);

std::vector<Launch> attention_launches(const std::vector<mx::array>& inputs, const mx::array& y,
                                       const mx::array* logsumexp, const AttentionOptions& options, mx::Stream stream);

// Attention over a prefix that all rows of the batch share, then over the keys of each row, then both put together.
// prefix: queries [1, heads, batch * queries, width], keys and values of the prefix; own: inputs as above.
std::vector<Launch> cascade_launches(std::vector<mx::array> prefix, const AttentionOptions& prefix_options,
                                     std::vector<mx::array> own, const AttentionOptions& own_options,
                                     const mx::array& y, mx::Stream stream);

}  // namespace mittens
