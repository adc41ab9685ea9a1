#include "cpu/rms_norm.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(rms_norm)
MITTENS_VERSIONS(add_rms_norm)
MITTENS_VERSIONS(rms_norm_vjp)

void rms_norm(Type type, const void* x, const void* weight, void* y, size_t rows, size_t columns, float eps,
              float weight_offset) {
  rms_norm_versions[isa_index()](type, x, weight, y, rows, columns, eps, weight_offset);
}

void add_rms_norm(Type type, const void* x, const void* residual, const void* weight, void* y, void* sum, size_t rows,
                  size_t columns, float eps, float weight_offset) {
  add_rms_norm_versions[isa_index()](type, x, residual, weight, y, sum, rows, columns, eps, weight_offset);
}

void rms_norm_vjp(Type type, const void* x, const void* weight, const void* dy, const void* dsum, void* dx,
                  void* dweight, size_t rows, size_t columns, float eps, float weight_offset) {
  rms_norm_vjp_versions[isa_index()](type, x, weight, dy, dsum, dx, dweight, rows, columns, eps, weight_offset);
}

}  // namespace mittens::cpu
