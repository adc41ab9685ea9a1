#include "cpu/head_norm.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(head_norm)

void head_norm(Type type, StridedRows x, const void* weight, void* y, size_t columns, float eps, float weight_offset) {
  head_norm_versions[isa_index()](type, x, weight, y, columns, eps, weight_offset);
}

}  // namespace mittens::cpu
