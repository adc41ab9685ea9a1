#include "cpu/softcap.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(softcap)

void softcap(Type type, const void* x, void* y, size_t size, float cap) {
  softcap_versions[isa_index()](type, x, y, size, cap);
}

}  // namespace mittens::cpu
