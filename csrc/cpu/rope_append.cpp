#include "cpu/rope_append.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(rope_append)

void rope_append(const RopeAppend& call) {
  rope_append_versions[isa_index()](call);
}

}  // namespace mittens::cpu
