// Parts of quantized_embedding that the patch uses.
#pragma once

#include <optional>
#include <string>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mittens {

namespace mx = mlx::core;

// Rows of a quantized matrix by indices of integers, as floats.
mx::array quantized_embedding(const mx::array& indices, const mx::array& w, const mx::array& scales,
                              const std::optional<mx::array>& biases, std::optional<int> group_size,
                              std::optional<int> bits, const std::string& mode, mx::StreamOrDevice where);

// The same, or nothing where it is for mx.
std::optional<mx::array> try_quantized_embedding(const mx::array& indices, const mx::array& w, const mx::array& scales,
                                                 const std::optional<mx::array>& biases, std::optional<int> group_size,
                                                 std::optional<int> bits, const std::string& mode,
                                                 mx::StreamOrDevice where);

}  // namespace mittens
