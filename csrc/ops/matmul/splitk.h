// Kernels in which lanes go along the outputs (metal/matmul/outputs.h), and the sum of what threadgroups leave that
// share the columns of x.
#pragma once

#include "backends/launch.h"

namespace mittens {

struct ColumnsPlan {
  uint32_t rows;  // of x that a threadgroup takes
  uint32_t row_blocks;  // of so many rows
  uint32_t lanes;  // of a simdgroup along the outputs
  uint32_t tiles;  // threadgroups along the outputs
  uint32_t splits;  // threadgroups that share the columns of x
  uint32_t columns_per_split;
  uint32_t threads;  // of a threadgroup
};

// owned: outputs of a lane. most_owned: those of the kernel that owns the most; the splits go by it, so that they are
// known before it is known which kernel serves.
ColumnsPlan plan_columns(uint32_t rows, uint32_t columns, uint32_t outputs, uint32_t matrices, uint32_t owned,
                         uint32_t most_owned, uint32_t most_rows, bool may_split = true);

// Floats that splits leave for `results` elements of y; none where there is one split.
mx::Shape workspace_shape(uint32_t splits, uint64_t results);

// Adds up the splits in `sums` and gives y its type, and its bias along the last axis.
Launch split_sum_launch(const mx::array& sums, const mx::array& bias, bool has_bias, mx::array& y, uint32_t splits);

}  // namespace mittens
