#include "launch/memory.h"

#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/cuda.h"
#include "launch/metal.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mittens {

namespace {

// MLX's CUDA build exports no way to allocate device memory in stream order: allocator::malloc gives managed memory,
// and moves a cached device buffer there with a blocking copy. Its Abs primitive allocates its output as MLX's own
// kernels do, and of an input without elements it does nothing else, while Concatenate, say, leaves an empty node in
// MLX's graph; that the input is not contiguous leaves the size to the output.
class DeviceAllocator {
 public:
  explicit DeviceAllocator(mx::Stream stream) : primitive_(mx::abs(mx::array(0.0f), stream).primitive_ptr()) {
    if (std::string_view(primitive_->name()) != "Abs") {
      throw unknown();
    }
    const mx::array zero = mx::array(0.0f);
    nothing_.emplace_back(mx::Shape{0}, mx::float32, nullptr, std::vector<mx::array>{});
    nothing_[0].copy_shared_buffer(zero, {1}, {false, false, false}, 0);
  }

  void allocate(mx::array& output) {
    // Abs asks its output's primitive for the stream: a primitive's own output can be handed to it as it is.
    const bool lent = !output.has_primitive();
    outputs_.assign(1, lent ? mx::array(output.shape(), output.dtype(), primitive_, {}) : output);
    primitive_->eval_gpu(nothing_, outputs_);
    if (outputs_[0].data_size() != output.size()) {
      throw unknown();
    }
    if (lent) {
      output.copy_shared_buffer(outputs_[0]);
    }
    outputs_.clear();
  }

 private:
  static std::runtime_error unknown() {
    return std::runtime_error("[mlx_mittens] this MLX allocates GPU memory in a way that mlx_mittens does not know");
  }

  std::shared_ptr<mx::Primitive> primitive_;
  std::vector<mx::array> nothing_;
  std::vector<mx::array> outputs_;  // its memory is kept: this is on the path of every call
};

DeviceAllocator& device_allocator(mx::Stream stream) {
  static thread_local std::vector<std::unique_ptr<DeviceAllocator>> by_stream;
  if (by_stream.size() <= static_cast<size_t>(stream.index)) {
    by_stream.resize(stream.index + 1);
  }
  auto& allocator = by_stream[stream.index];
  if (!allocator) {
    allocator = std::make_unique<DeviceAllocator>(stream);
  }
  return *allocator;
}

}  // namespace

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
  if (stream.device == mx::Device::gpu && cuda::available() && output.nbytes() > 0) {
    device_allocator(stream).allocate(output);
  } else {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream) {
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
