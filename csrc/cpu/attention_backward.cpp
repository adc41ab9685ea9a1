#include "cpu/attention_backward.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(attention_backward)

void attention_backward(const AttentionBackward& call) {
  attention_backward_versions[isa_index()](call);
}

}  // namespace mittens::cpu
