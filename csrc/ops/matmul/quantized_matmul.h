// What others use of quantized_matmul.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mlx/utils.h"
#include "ops/matmul/affine.h"
#include "runtime/primitive.h"

namespace mittens {

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                           std::optional<int> bits, const std::string& mode, const std::optional<mx::array>& bias,
                           mx::StreamOrDevice where);

// The same, or nothing where it is for mx.
std::optional<mx::array> try_quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                                              const std::optional<mx::array>& biases, bool transpose,
                                              std::optional<int> group_size, std::optional<int> bits,
                                              const std::string& mode, const std::optional<mx::array>& bias,
                                              mx::StreamOrDevice where);

// Products of one row of x with several such triples, and biases for each or none, by one launch; nothing where they
// are as good one by one.
std::optional<std::vector<mx::array>> try_quantized_matmuls(const mx::array& x, const std::vector<Arrays>& matrices,
                                                            std::optional<int> group_size, std::optional<int> bits,
                                                            const std::string& mode,
                                                            const std::optional<std::vector<mx::array>>& bias,
                                                            mx::StreamOrDevice where);

// The format of an array that is to be this op's: x by the transpose of one matrix, without a bias, not yet computed.
// Its inputs are x and the triple. Nothing for any other array.
std::optional<AffineFormat> pending_product(const mx::array& y);

}  // namespace mittens
