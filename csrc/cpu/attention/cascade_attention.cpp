#include "cpu/attention/cascade_attention.h"

#include <vector>

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(attention_merge)

void attention_merge(const AttentionMerge& call) {
  attention_merge_versions[isa_index()](call);
}

void cascade_attention(const Attention& prefix, const Attention& own, const RaggedKeys& keys) {
  const size_t rows = own.batch * own.heads * own.queries;
  std::vector<char> y(rows * own.value_width * (own.type == Type::float32 ? 4 : 2));
  std::vector<float> prefix_sums(rows), own_sums(rows);
  Attention first = prefix, second = own;
  first.y = y.data();
  first.logsumexp = prefix_sums.data();
  second.logsumexp = own_sums.data();
  attention_here()(first);  // the call below gives memory back, by how many queries a row has
  keys.starts || keys.ends ? ragged_attention(second, keys) : attention(second);
  attention_merge({own.type, own.batch, own.heads, own.queries, own.value_width, y.data(), prefix_sums.data(), own.y,
                   own_sums.data(), own.y});
}

}  // namespace mittens::cpu
