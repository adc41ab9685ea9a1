// Where mx is faster at recurrences. All that depends on the GPU is here.
#pragma once

#include "cpu/recurrence/recurrence.h"
#include "mlx/dtype.h"
#include "mlx/stream.h"
#include "runtime/calibration.h"

namespace mittens {

namespace mx = mlx::core;

// The problem for calibration: the heads of all sequences, the steps, and the rows and columns of a state.
Problem recurrence_problem(const char* op, mx::Dtype dtype, const cpu::Recurrence& sizes);

// Who computes a call of gated_delta_update if not we: MLX's op, mlx-lm's kernel, or operations for each step.
enum class GatedDeltaPeer { op, kernel, operations };

// Why mx is faster; null where it is not known to be. uncorrected: ssm_update.
const char* why_mx_gated_delta_update(GatedDeltaPeer peer, const cpu::Recurrence& sizes, bool has_mask,
                                      mx::Stream stream);
const char* why_mx_uncorrected(int steps, mx::Stream stream);

}  // namespace mittens
