// Where mx is faster at recurrences. All that depends on the GPU is here.
#pragma once

#include "cpu/recurrence.h"
#include "mlx/dtype.h"
#include "mlx/stream.h"
#include "runtime/calibration.h"

namespace mittens {

namespace mx = mlx::core;

// What a call is for calibration: the heads of all sequences, the steps, and the rows and columns of a state.
Problem recurrence_problem(const char* op, mx::Dtype dtype, const cpu::Recurrence& sizes);

// Why mx is faster; null where it is not known to be. gate_of_head: whether all columns of a head share a gate.
// uncorrected: ssm_update and linear_attention.
const char* why_mx_gated_delta_update(bool gate_of_head, mx::Stream stream);
const char* why_mx_uncorrected(int steps, mx::Stream stream);

}  // namespace mittens
