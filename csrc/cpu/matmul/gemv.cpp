#include "cpu/matmul/gemv.h"

#include "cpu/dispatch.h"
#include "cpu/huge_pages.h"

namespace mittens::cpu {

MITTENS_VERSIONS(gemv)

void gemv(Type type, const void* const* w, size_t weight_stride, bool transpose, const void* x, const void* bias,
          void* y, size_t matrices, size_t rows, size_t columns, size_t outputs, bool exact) {
  if (matrices == 1 && rows <= most_noted_rows) {
    note_weights(w[0], (transpose ? outputs : columns) * weight_stride * (type == Type::float32 ? 4 : 2));
  }
  gemv_versions[isa_index()](type, w, weight_stride, transpose, x, bias, y, matrices, rows, columns, outputs, exact);
}

}  // namespace mittens::cpu
