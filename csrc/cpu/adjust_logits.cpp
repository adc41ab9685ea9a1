#include "cpu/adjust_logits.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(adjust_logits)

void adjust_logits(Type type, const void* x, void* y, uint32_t* counts, size_t rows, size_t columns,
                   const Adjustment& adjustment) {
  adjust_logits_versions[isa_index()](type, x, y, counts, rows, columns, adjustment);
}

}  // namespace mittens::cpu
