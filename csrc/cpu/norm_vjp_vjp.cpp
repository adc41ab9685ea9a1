#include "cpu/norm_vjp_vjp.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(norm_vjp_vjp)

void norm_vjp_vjp(Type type, const NormVjpVjp& of) {
  norm_vjp_vjp_versions[isa_index()](type, of);
}

}  // namespace mittens::cpu
