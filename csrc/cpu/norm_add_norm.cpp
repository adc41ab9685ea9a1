#include "cpu/norm_add_norm.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(norm_add_norm)

void norm_add_norm(Type type, const void* x, const void* residual, NormScale scale, NormScale next_scale, void* y,
                   void* sum, size_t rows, size_t columns, float eps) {
  norm_add_norm_versions[isa_index()](type, x, residual, scale, next_scale, y, sum, rows, columns, eps);
}

}  // namespace mittens::cpu
