#include "cpu/paged_append.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(paged_append)

void paged_append(const PagedAppend& call) {
  paged_append_versions[isa_index()](call);
}

}  // namespace mittens::cpu
