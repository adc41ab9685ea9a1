#include "ops/matmul/row_products.h"

#include <algorithm>
#include <limits>

#include "params/matmul.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

// Simdgroups that share out the columns, which are so many chunks of what a simdgroup takes at once. Few, each of which
// goes over many columns: on an H200 four read a fifth more a second than eight. Where more than a seventh of what four
// take in their rounds would be no columns, five or three if those leave less; more only where few outputs would leave
// a GPU idle.
uint32_t simdgroups_for(uint32_t chunks, uint64_t outputs) {
  constexpr uint64_t few_outputs = 256;
  if (outputs < few_outputs) {
    return ceil_divide(chunks, ceil_divide(chunks, kProductSimdgroups));
  }
  auto taken = [&](uint32_t n) { return ceil_divide(chunks, n) * n; };
  uint32_t best = std::min(chunks, 4u);
  if (taken(best) * 6 > chunks * 7) {
    for (uint32_t simdgroups : {5u, 3u}) {
      best = taken(simdgroups) < taken(best) ? simdgroups : best;
    }
  }
  return best;
}

}  // namespace

RowProductsPlan plan_row_products(uint32_t chunks, uint64_t outputs, uint32_t products, uint32_t resident_simdgroups) {
  constexpr uint64_t batched = 4;  // outputs whose weights a lane loads at once
  constexpr uint64_t most_outputs = 32;  // with one product each; with more a threadgroup has other work besides
  RowProductsPlan plan;
  plan.simdgroups = simdgroups_for(chunks, outputs);
  // As many simdgroups as are held: as much as possible is on its way then, and none waits for another to end.
  const uint64_t wanted = ceil_divide(outputs * plan.simdgroups, resident_simdgroups * batched) * batched;
  const uint64_t fitting = kProductPartials / (plan.simdgroups * products) / batched * batched;
  const uint64_t most = std::min(products == 1 ? most_outputs : 2 * most_outputs, fitting);
  plan.outputs_per_group = static_cast<uint32_t>(std::clamp(wanted, batched, most));
  return plan;
}

uint32_t plan_tile_simdgroups(uint64_t threadgroups, uint32_t chunks, uint32_t held_by_core, uint32_t fewest,
                              uint32_t most) {
  uint32_t best = fewest;
  uint64_t fewest_rounds = std::numeric_limits<uint64_t>::max();
  for (uint32_t simdgroups = fewest; simdgroups <= most; ++simdgroups) {
    const uint64_t waves = ceil_divide(threadgroups, h200_cores * (held_by_core / simdgroups));
    const uint64_t rounds = waves * ceil_divide(chunks, simdgroups);
    if (rounds < fewest_rounds) {
      fewest_rounds = rounds;
      best = simdgroups;
    }
  }
  return best;
}

}  // namespace mittens
