// Parts of gemv that other ops use.
#pragma once

#include <optional>

#include "mlx/utils.h"
#include "runtime/primitive.h"

namespace mittens {

// x @ w.T (or x @ w), plus a bias; nothing where it is for mx.
std::optional<mx::array> try_gemv(const mx::array& w, const mx::array& x, const std::optional<mx::array>& bias,
                                  bool transpose, mx::StreamOrDevice where);

// The same, by mx where it is for mx.
mx::array gemv(const mx::array& w, const mx::array& x, const std::optional<mx::array>& bias, bool transpose,
               mx::StreamOrDevice where);

}  // namespace mittens
