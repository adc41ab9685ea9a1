#include "cpu/layer_norm.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(layer_norm)
MITTENS_VERSIONS(layer_norm_vjp)

void layer_norm(Type type, const void* x, const void* weight, const void* bias, void* y, size_t rows, size_t columns,
                float eps) {
  layer_norm_versions[isa_index()](type, x, weight, bias, y, rows, columns, eps);
}

void layer_norm_vjp(Type type, const void* x, const void* weight, const void* dy, void* dx, void* dweight, void* dbias,
                    size_t rows, size_t columns, float eps) {
  layer_norm_vjp_versions[isa_index()](type, x, weight, dy, dx, dweight, dbias, rows, columns, eps);
}

}  // namespace mittens::cpu
