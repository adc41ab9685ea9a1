#include "cpu/weighted_sum.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(weighted_sum)

void weighted_sum(Type type, const void* x, const void* bias, const uint32_t* matrices, size_t stack,
                  const void* weights, Type weights_type, void* y, size_t sums, size_t terms, size_t columns) {
  weighted_sum_versions[isa_index()](type, x, bias, matrices, stack, weights, weights_type, y, sums, terms, columns);
}

}  // namespace mittens::cpu
