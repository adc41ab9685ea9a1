// Gives a launch to Metal on a Mac, and elsewhere to CUDA.
#include <stdexcept>
#include <string>
#include <string_view>

#include "backends/cuda.h"
#include "backends/launch.h"
#include "backends/metal.h"

namespace mittens {

void run_on_gpu(const Launch& launch, mx::Stream stream) {
  if (metal::built()) {
    metal::run(launch, stream);
    return;
  }
  if (const std::string_view missing = cuda::missing(); !missing.empty()) {
    throw std::runtime_error("[mlx_mittens] kernel " + launch.kernel.text() +
                             " cannot run on the GPU: " + std::string(missing));
  }
  cuda::run(launch, stream);
}

}  // namespace mittens
