#include "cpu/softcap.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(softcap)
MITTENS_VERSIONS(softcap_vjp)

void softcap(Type type, const void* x, void* y, size_t size, float cap) {
  softcap_versions[isa_index()](type, x, y, size, cap);
}

void softcap_vjp(Type type, const void* x, const void* dy, void* dx, size_t size, float cap) {
  softcap_vjp_versions[isa_index()](type, x, dy, dx, size, cap);
}

}  // namespace mittens::cpu
