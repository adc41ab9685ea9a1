#include "cpu/softmax.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(softmax)
MITTENS_VERSIONS(softmax_vjp)

void softmax(Type type, const void* x, void* y, size_t rows, size_t columns) {
  softmax_versions[isa_index()](type, x, y, rows, columns);
}

void softmax_vjp(Type type, const void* y, const void* dy, void* dx, size_t rows, size_t columns) {
  softmax_vjp_versions[isa_index()](type, y, dy, dx, rows, columns);
}

}  // namespace mittens::cpu
