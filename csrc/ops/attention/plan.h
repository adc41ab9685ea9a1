// Which kernel serves an attention, how its keys are shared out, and where mx is faster. All that depends on the GPU is
// here; the table is in plan.cpp.
#pragma once

#include <cstdint>
#include <limits>

#include "mlx/array.h"
#include "ops/attention/attention_launch.h"
#include "runtime/calibration.h"

namespace mittens {

struct AttentionSizes {
  uint32_t batches;
  uint32_t heads;
  uint32_t key_heads;
  uint32_t queries;
  uint32_t keys;
  uint32_t width;
  uint32_t value_width;

  uint32_t ratio() const {
    return heads / key_heads;
  }
  uint64_t rows() const {
    return uint64_t(batches) * heads * queries;
  }
};

// Shapes in elements, also of keys and values that lie packed.
AttentionSizes attention_sizes(const mx::Shape& queries, const mx::Shape& keys, const mx::Shape& values);

// The problem that calibration knows a call by.
Problem attention_problem(const char* op, const AttentionSizes& sizes, const AttentionOptions& options,
                          mx::Dtype dtype);

// In decoding the simdgroups of a threadgroup share the keys of 8 rows of queries, and threadgroups may share them
// further; in prompts each simdgroup has 8 rows of its own and all their keys. Kernels with a number, which counts
// their rows, load ahead: attention/nvidia/attention_ahead.metal.
enum class AttentionKernel { decode, prompt, decode8, decode16, prompt16 };

constexpr bool shares_keys(AttentionKernel kernel) {
  return kernel != AttentionKernel::prompt && kernel != AttentionKernel::prompt16;
}

constexpr bool loads_ahead(AttentionKernel kernel) {
  return kernel != AttentionKernel::decode && kernel != AttentionKernel::prompt;
}

// Blocks of 8 rows of queries that a simdgroup has.
constexpr uint32_t row_blocks_of(AttentionKernel kernel) {
  return kernel == AttentionKernel::decode16 || kernel == AttentionKernel::prompt16 ? 2 : 1;
}

struct AttentionPlan {
  const char* name;  // of the kernel, between the op's and the widths
  AttentionKernel kernel;
  uint32_t simdgroups;  // of a threadgroup
  uint32_t row_blocks;  // threadgroups that share out the rows of a key head
  uint32_t splits;  // threadgroups that share out the keys of a row
  uint32_t first_key;  // those before are not read
  uint32_t keys_per_split;
};

AttentionPlan plan_attention(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype,
                             mx::Stream stream);

// Simdgroups of a threadgroup that puts the parts of a row together: 1 or kCombineSimdgroups.
uint32_t combine_simdgroups(const AttentionSizes& sizes, uint32_t parts, const AttentionOptions& options,
                            mx::Stream stream);

// Kernels count the elements of a mask in 32 bits.
inline constexpr size_t most_mask_elements = std::numeric_limits<uint32_t>::max();

// Why the kernels cannot be launched, or null. No elements: there is no mask.
const char* why_not_launched(const AttentionSizes& sizes, size_t mask_elements, mx::Stream stream);

// Why mx is faster; null where it is not known to be.
const char* why_mx_attention(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype,
                             mx::Stream stream);

// Whether mx's kernels get packed keys and values unpacked, where they are the faster ones.
bool unpacks_first(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype, mx::Stream stream);

}  // namespace mittens
