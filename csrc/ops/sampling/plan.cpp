#include "ops/sampling/plan.h"

#include <algorithm>

#include "params/sampling.h"
#include "runtime/gpu.h"

namespace mittens {

uint32_t plan_sample_splits(size_t rows, uint32_t packs, mx::Stream stream) {
  constexpr uint32_t threadgroups_of_core = 2, most_splits = 64;
  if (rows == 0 || !runs_kernels(stream)) {
    return 1;
  }
  // As many as fill the GPU, none with fewer packs than threads.
  const uint32_t threadgroups = threadgroups_of_core * gpu_of(stream).cores;
  const uint32_t wanted = static_cast<uint32_t>(threadgroups / std::min<size_t>(rows, threadgroups));
  return std::clamp(std::min(wanted, packs / kSampleThreads), 1u, most_splits);
}

}  // namespace mittens
