// The primitive behind quantized_matmul.
#pragma once

#include "ops/matmul/quantized_weights.h"
#include "ops/matmul/plan.h"
#include "runtime/primitive.h"

namespace mittens {

inline constexpr uint32_t most_product_rows = 8;  // of x that a kernel takes at once
inline constexpr QuantizedKernels quantized_matmul_kernels{"quantized_matmul", 1, most_product_rows, true, true};

// x [.., rows, columns], w, scales and biases [.., rows, ..] and bias [outputs], if there is one -> y [.., rows,
// outputs]. The axes before w's last two are x's, or 1 at the end: there x's axes count as rows. exact: every matrix is
// computed as if it were the only one.
mx::array quantized_matmul_by_kernels(Arrays inputs, const QuantizedFormat& format, bool exact, mx::Stream stream);

}  // namespace mittens
