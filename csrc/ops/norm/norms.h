// Parts of the norms that other norms use.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "runtime/primitive.h"

namespace mittens {

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, float weight_offset,
                   mx::StreamOrDevice where);

// None where no kernel covers a call.
std::optional<mx::array> try_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps,
                                      float weight_offset, mx::StreamOrDevice where);

std::pair<mx::array, mx::array> add_rms_norm(const mx::array& x, const mx::array& residual,
                                             const std::optional<mx::array>& weight, float eps, float weight_offset,
                                             mx::StreamOrDevice where);

// The normed sum and the sum of residual and the norm of x, clipped to finite numbers where that is float16.
std::pair<mx::array, mx::array> norm_add_norm(const mx::array& x, const mx::array& residual,
                                              const std::optional<mx::array>& weight,
                                              const std::optional<mx::array>& next_weight, float eps,
                                              float weight_offset, float next_weight_offset, bool clip_sum,
                                              mx::StreamOrDevice where);

// The arguments of a norm that has not been computed yet; nullopt for other arrays.
struct PendingRmsNorm {
  mx::array x;
  std::optional<mx::array> weight;
  float eps;
  float weight_offset;
};
std::optional<PendingRmsNorm> pending_rms_norm(const mx::array& y);

// The same of the first output of add_rms_norm: the norm is of x + residual, and sum is the second output.
struct PendingAddRmsNorm : PendingRmsNorm {
  mx::array residual;
  mx::array sum;
};
std::optional<PendingAddRmsNorm> pending_add_rms_norm(const mx::array& y);

// The arguments of a sum by norm_add_norm without a weight of the second norm.
struct PendingNormAdd : PendingRmsNorm {
  mx::array residual;
  bool clips;
};
std::optional<PendingNormAdd> pending_norm_add(const mx::array& sum);

// The means of rows in mx operations, [.., 1]. mx's sum of a row may be one chain of additions, in which all roundings
// of nearly equal numbers go the same way. The mean of the row less its first mean corrects it.
mx::array compose_row_mean(const mx::array& a, mx::Stream stream);

// Rows without that mean, more exactly than by its rounded value.
mx::array compose_centred(const mx::array& a, mx::Stream stream);

// In mx operations, rounded as rms_norm rounds.
mx::array compose_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, float weight_offset,
                           mx::Stream stream);

// The scale of a norm in mx operations, rounded to the weight's type.
mx::array compose_scale(const mx::array& weight, float weight_offset, mx::Stream stream);

inline bool contains(const std::vector<int>& arguments, int argument) {
  return std::find(arguments.begin(), arguments.end(), argument) != arguments.end();
}

inline std::optional<mx::array> optional_input(const Arrays& inputs, size_t index) {
  return index < inputs.size() ? std::optional(inputs[index]) : std::nullopt;
}

}  // namespace mittens
