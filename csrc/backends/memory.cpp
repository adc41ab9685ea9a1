#include "backends/memory.h"

#include <utility>
#include <vector>

#include "backends/cuda.h"
#include "backends/metal.h"
#include "backends/stand_in.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx_internals/device_allocator.h"

namespace mittens {

Span span_of(const mx::array& view) {
  if (view.size() == 0) {
    return {0, 0};
  }
  int64_t lowest = 0, highest = 0;
  for (int d = 0; d < static_cast<int>(view.ndim()); ++d) {
    const int64_t reach = (view.shape(d) - 1) * view.strides(d);
    (reach < 0 ? lowest : highest) += reach;
  }
  const int64_t item = view.itemsize();
  return {lowest * item, static_cast<size_t>((highest - lowest + 1) * item)};
}

void allocate_output(mx::array& output, mx::Stream stream) {
  if (allocates_stand_ins()) {
    allocate_stand_in(output);
  } else if (stream.device == mx::Device::gpu && cuda::available() && output.nbytes() > 0) {
    mlx_internals::allocate_on_device(output, stream);
  } else {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream) {
  if (allocates_stand_ins()) {
    return;
  }
  if (stream.device == mx::Device::cpu) {
    auto& encoder = mx::cpu::get_command_encoder(stream);
    for (const mx::array& array : arrays) {
      encoder.add_temporary(array);
    }
  } else if (metal::built()) {
    metal::keep_until_done(std::move(arrays), stream);
  } else {
    cuda::keep_until_done(std::move(arrays), stream);
  }
}

mx::array temporary(const mx::Shape& shape, mx::Dtype dtype, mx::Stream stream) {
  mx::array array(shape, dtype, nullptr, {});
  allocate_output(array, stream);
  keep_until_done({array}, stream);
  return array;
}

}  // namespace mittens
