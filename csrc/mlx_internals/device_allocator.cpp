#include "mlx_internals/device_allocator.h"

#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mittens::mlx_internals {

namespace mx = mlx::core;

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

void allocate_on_device(mx::array& output, mx::Stream stream) {
  device_allocator(stream).allocate(output);
}

}  // namespace mittens::mlx_internals
