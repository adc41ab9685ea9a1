// Small operations on arrays that primitives share.
#pragma once

#include <optional>

#include "backends/memory.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "mlx_internals/buffer_ownership.h"
#include "runtime/contiguous.h"

namespace mittens {

// mx::astype, but for an array that has the dtype already: the call would cost the host time.
inline mx::array in_dtype(const mx::array& array, mx::Dtype dtype, mx::Stream stream) {
  return array.dtype() == dtype ? array : mx::astype(array, dtype, stream);
}

// y plus a bias that broadcasts to it. An empty y takes no addition, and its gradient no sum.
inline mx::array plus_bias(const mx::array& y, const std::optional<mx::array>& bias, mx::StreamOrDevice stream) {
  if (!bias) {
    return y;
  }
  return y.size() > 0 ? mx::add(y, *bias, stream)
                      : mx::zeros(y.shape(), mx::promote_types(y.dtype(), bias->dtype()), stream);
}

// Gives the output the memory of a donor of its shape and dtype that nobody else needs, else memory of its own.
// `outputs` of the primitive hold the donor as their input.
inline void take_or_allocate(mx::array& output, const mx::array& donor, mx::Stream stream, size_t outputs = 1) {
  if (is_donatable(donor, outputs) && donor.flags().row_contiguous && donor.data_size() == output.size()) {
    output.copy_shared_buffer(donor);
  } else {
    allocate_output(output, stream);
  }
}

}  // namespace mittens
