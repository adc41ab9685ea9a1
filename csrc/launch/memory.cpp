#include "launch/memory.h"

#include <memory>
#include <string_view>

#include "launch/cuda.h"
#include "launch/metal.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mittens {

namespace {

// MLX's CUDA build exports no way to allocate device memory in stream order: allocator::malloc gives managed memory, and
// moves a cached device buffer there with a blocking copy. Its Concatenate primitive allocates as MLX's own kernels do,
// and of no inputs it does nothing else.
std::shared_ptr<mx::Primitive> device_allocator(mx::Stream stream) {
  static thread_local std::vector<std::shared_ptr<mx::Primitive>> by_stream;
  if (by_stream.size() <= static_cast<size_t>(stream.index)) {
    by_stream.resize(stream.index + 1);
  }
  auto& primitive = by_stream[stream.index];
  if (!primitive) {
    const mx::array one = mx::array(0.0f);
    const mx::array row = mx::reshape(one, {1}, stream);
    primitive = mx::concatenate({row, row}, 0, stream).primitive_ptr();
    if (std::string_view(primitive->name()) != "Concatenate") {
      throw std::runtime_error("[mlx_mittens] this MLX allocates GPU memory in a way that mlx_mittens does not know");
    }
  }
  return primitive;
}

}  // namespace

void allocate_output(mx::array& output, mx::Stream stream) {
  if (stream.device == mx::Device::gpu && cuda::available() && output.nbytes() > 0) {
    static thread_local std::vector<mx::array> outputs;  // its memory is kept: this is on the path of every call
    outputs.assign(1, output);
    device_allocator(stream)->eval_gpu({}, outputs);
    output.copy_shared_buffer(outputs[0]);
    outputs.clear();
  } else {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

void keep_until_done(const mx::array& array, mx::Stream stream) {
  if (stream.device == mx::Device::cpu) {
    mx::cpu::get_command_encoder(stream).add_temporary(array);
  } else if (metal::built()) {
    metal::keep_until_done(array, stream);
  } else {
    cuda::keep_until_done(array, stream);
  }
}

}  // namespace mittens
