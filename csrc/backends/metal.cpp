#include "backends/metal.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#ifdef _METAL_
#include "backends/frontend.h"
#include "backends/visitor.h"
#include "mlx/backend/metal/device.h"
#include "mlx_internals/buffer_ownership.h"
#endif

namespace mittens::metal {

bool has_matrix_units(std::string_view architecture) {
  const size_t size = architecture.size();
  const auto digit = [](char letter) { return letter >= '0' && letter <= '9' ? letter - '0' : 0; };
  if (size < 3) {
    return false;
  }
  const int generation = digit(architecture[size - 3]) * 10 + digit(architecture[size - 2]);
  const bool is_phone = architecture.back() == 'p';
  return generation >= (is_phone ? 18 : 17);
}

#ifdef _METAL_

namespace {

bool jit_forced() {
  const char* value = std::getenv("MLX_MITTENS_JIT");
  return value && std::string(value) == "1";
}

// The metallib that was built ahead holds every file; without it each file is compiled from one flattened string. MLX
// caches a library by name, so the name of compiled text carries a hash of it.
MTL::Library* library_of(mx::metal::Device& device, const std::string& file) {
  static std::mutex mutex;
  static std::map<std::string, MTL::Library*> libraries;
  {
    std::lock_guard lock(mutex);
    if (auto found = libraries.find(file); found != libraries.end()) {
      return found->second;
    }
  }
  const std::string metallib = jit_forced() ? "" : frontend::metallib();
  MTL::Library* library;
  if (!metallib.empty()) {
    library = device.get_library("mlx_mittens", metallib);
  } else {
    const std::string source = frontend::metal_source(file);
    const std::string name = "mlx_mittens_" + file + "_" + std::to_string(std::hash<std::string>{}(source));
    library = device.get_library(name, [&source] { return source; });
  }
  std::lock_guard lock(mutex);
  return libraries.emplace(file, library).first->second;
}

MTL::Size dimensions(const Size3& size) {
  return MTL::Size(size.x, size.y, size.z);
}

}  // namespace

bool built() {
  return true;
}

bool has_matrix_units() {
#ifdef __APPLE__
  if (__builtin_available(macOS 26.2, *)) {
    static const bool has = has_matrix_units(mx::metal::device(mx::Device::gpu).get_architecture());
    return has;
  }
#endif
  return false;
}

void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream) {
  // Not one of MLX's temporaries: work of another command encoder that reads such an array is not held back by its
  // fence.
  mx::metal::get_command_encoder(stream).get_command_buffer()->addCompletedHandler(
      [arrays = std::move(arrays)](MTL::CommandBuffer*) {});
}

void run(const Launch& launch, mx::Stream stream) {
  auto& device = mx::metal::device(stream.device);
  MTL::ComputePipelineState* pipeline = device.get_kernel(launch.kernel, library_of(device, launch.file));
  const size_t threads = size_t(launch.threads.x) * launch.threads.y * launch.threads.z;
  if (threads > pipeline->maxTotalThreadsPerThreadgroup()) {
    throw std::runtime_error("kernel " + launch.kernel.text() + " is launched with " + std::to_string(threads) +
                             " threads a threadgroup, this GPU runs it with at most " +
                             std::to_string(pipeline->maxTotalThreadsPerThreadgroup()));
  }
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline);
  for (size_t i = 0; i < launch.arguments.size(); ++i) {
    const int index = static_cast<int>(i);
    std::visit(Visitor{
                   [&](const Input& input) {
                     encoder.set_input_array(input.array, index, input.offset);
                     if (owner_of(input.array)) {  // what writes over it next has to wait
                       encoder.register_output_array(input.array);
                     }
                   },
                   [&](const Output& output) {
                     mx::array array = output.array;
                     if (output.updated) {  // then it is an input too
                       encoder.set_input_array(array, index);
                       encoder.register_output_array(array);
                     } else {
                       encoder.set_output_array(array, index);
                     }
                   },
                   [&](const Bytes& bytes) {
                     encoder.set_bytes(bytes.data.data(), static_cast<int>(bytes.data.size()), index);
                   },
                   [](const Absent&) {},
               },
               launch.arguments[i]);
  }
  if (launch.threadgroup_bytes) {
    encoder.set_threadgroup_memory_length(launch.threadgroup_bytes, 0);
  }
  encoder.dispatch_threadgroups(dimensions(launch.threadgroups), dimensions(launch.threads));
}

std::vector<std::string> kernels(const std::string& file) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  const NS::Array* names = library_of(mx::metal::device(mx::Device::gpu), file)->functionNames();
  std::vector<std::string> result;
  for (NS::UInteger i = 0; i < names->count(); ++i) {
    result.emplace_back(names->object<NS::String>(i)->utf8String());
  }
  return result;
}

Pipeline pipeline(const std::string& file, const std::string& kernel) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto& device = mx::metal::device(mx::Device::gpu);
  const MTL::ComputePipelineState* state = device.get_kernel(kernel, library_of(device, file));
  return {state->maxTotalThreadsPerThreadgroup(), state->staticThreadgroupMemoryLength(),
          state->threadExecutionWidth()};
}

#else

bool built() {
  return false;
}

bool has_matrix_units() {
  return false;
}

void keep_until_done(std::vector<mx::array>, mx::Stream) {}

void run(const Launch& launch, mx::Stream) {
  throw std::runtime_error("kernel " + launch.kernel.text() + ": this build of mlx_mittens has no Metal");
}

std::vector<std::string> kernels(const std::string& file) {
  throw std::runtime_error(file + ": this build of mlx_mittens has no Metal");
}

Pipeline pipeline(const std::string& file, const std::string& kernel) {
  throw std::runtime_error(file + ", kernel " + kernel + ": this build of mlx_mittens has no Metal");
}

#endif

}  // namespace mittens::metal
