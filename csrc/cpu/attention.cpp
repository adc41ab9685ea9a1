#include "cpu/attention.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(attention)

void attention(const Attention& call) {
  attention_versions[isa_index()](call);
}

}  // namespace mittens::cpu
