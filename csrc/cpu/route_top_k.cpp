#include "cpu/route_top_k.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(route_top_k)

void route_top_k(Type type, const Route& route, const void* logits, const float* bias, uint32_t* indices, void* weights,
                 size_t rows, size_t experts, size_t k) {
  route_top_k_versions[isa_index()](type, route, logits, bias, indices, weights, rows, experts, k);
}

}  // namespace mittens::cpu
