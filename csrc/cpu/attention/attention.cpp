#include "cpu/attention/attention.h"

#include "cpu/dispatch.h"
#include "cpu/heap.h"
#include "cpu/attention/ragged_attention.h"

namespace mittens::cpu {

MITTENS_VERSIONS(attention)

void attention(const Attention& call) {
  give_back_after_growth(call.queries, call.keys);
  attention_versions[isa_index()](call);
}

void (*attention_here())(const Attention& call) {
  return attention_versions[isa_index()];
}

}  // namespace mittens::cpu
