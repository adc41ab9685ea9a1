// Products whose rows do not depend on how many there are: each is computed as if it were alone.
#pragma once

#include <numeric>

#include "mlx/ops.h"
#include "runtime/array_layout.h"
#include "runtime/primitive.h"

namespace mittens {

// y [.., outputs] of x [.., columns], whose rows go to one_row [1, columns] -> [1, outputs] one by one.
template <typename OneRow>
mx::array row_by_row(const mx::array& x, mx::StreamOrDevice where, const OneRow& one_row) {
  const int rows = static_cast<int>(leading_size(x, 1));
  const mx::array flat = mx::reshape(x, {rows, x.shape(-1)}, where);
  Arrays results;
  results.reserve(rows);
  for (int i = 0; i < rows; ++i) {
    results.push_back(one_row(mx::slice(flat, {i, 0}, {i + 1, x.shape(-1)}, where)));
  }
  const mx::array y = mx::concatenate(std::move(results), 0, where);
  return mx::reshape(y, with_columns(x.shape(), y.shape(-1)), where);
}

}  // namespace mittens
