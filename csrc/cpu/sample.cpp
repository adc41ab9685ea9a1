#include "cpu/sample.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(sample)

void sample(Type type, const void* x, const uint32_t* key, uint32_t* tokens, float* logprobs, void* all, size_t rows,
            size_t columns, const SampleOptions& options) {
  sample_versions[isa_index()](type, x, key, tokens, logprobs, all, rows, columns, options);
}

}  // namespace mittens::cpu
