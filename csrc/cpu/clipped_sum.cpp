#include "cpu/clipped_sum.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(clipped_sum)

void clipped_sum(const void* x, const void* residual, NormScale scale, void* sum, size_t rows, size_t columns,
                 float eps) {
  clipped_sum_versions[isa_index()](x, residual, scale, sum, rows, columns, eps);
}

}  // namespace mittens::cpu
