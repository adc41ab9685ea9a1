// Parts of quantized_matmul that other ops use.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mlx/utils.h"
#include "ops/matmul/quantized_weights.h"
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

// The same of one matrix or several, where nothing else reads x: if x is a norm that nothing has computed yet, the
// products may take that in (ops/matmul/normed_row.h). Nothing for one matrix where they do not.
std::optional<std::vector<mx::array>> try_products_of_norm(const mx::array& x, const std::vector<Arrays>& matrices,
                                                           std::optional<int> group_size, std::optional<int> bits,
                                                           const std::string& mode,
                                                           const std::optional<std::vector<mx::array>>& bias,
                                                           mx::StreamOrDevice where);

// try_quantized_matmul; the product of a model's head takes in the norm that x is.
std::optional<mx::array> try_product_of_model(const mx::array& x, const mx::array& w, const mx::array& scales,
                                              const std::optional<mx::array>& biases, bool transpose,
                                              std::optional<int> group_size, std::optional<int> bits,
                                              const std::string& mode, const std::optional<mx::array>& bias,
                                              mx::StreamOrDevice where);

// The format of an array that is to be this op's: x by the transpose of one matrix, without a bias, not yet computed.
// Its inputs are x and the triple. Nothing for any other array.
std::optional<QuantizedFormat> pending_product(const mx::array& y);

// The same of one row of x, where there may be a bias: the fifth input.
std::optional<QuantizedFormat> pending_row_product(const mx::array& y);

}  // namespace mittens
