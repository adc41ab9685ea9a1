// The sum of the results of threadgroups that share the columns of x.
#pragma once

#include "backends/launch.h"

namespace mittens {

// Floats that splits leave for `results` elements of y; none where there is one split.
mx::Shape workspace_shape(uint32_t splits, uint64_t results);

// How many splits a workspace has room for.
uint32_t splits_of_workspace(const std::vector<mx::array>& outputs);

// Adds up the splits in `sums` and gives y its type, and its bias along the last axis.
Launch split_sum_launch(const mx::array& sums, const mx::array& bias, bool has_bias, mx::array& y, uint32_t splits);

}  // namespace mittens
