#include "backends/metal.h"

#include <stdexcept>

#ifdef _METAL_
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "backends/compiled.h"
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

// How long Metal's compiler may take in all before a line says so. Kernels in macOS's cache take milliseconds.
constexpr double patience_seconds = 0.25;

void say_that_it_compiles(double seconds) {
  static std::mutex mutex;
  static double waited = 0;
  static bool said = false;
  std::lock_guard lock(mutex);
  waited += seconds;
  if (said || waited < patience_seconds) {
    return;
  }
  said = true;
  const char* quiet = std::getenv("MLX_MITTENS_QUIET");
  if (!quiet || std::string(quiet) != "1") {
    std::fputs(
        "mlx-mittens: Metal compiles each kernel at its first use; macOS keeps it for the next run. "
        "`mlx-mittens warm MODEL` does this ahead, MLX_MITTENS_QUIET=1 leaves out this line.\n",
        stderr);
  }
}

// MLX caches a library by name, so the name has a hash of the text besides the file and its only kernel.
MTL::Library* library_from(mx::metal::Device& device, const std::string& file, const frontend::MetalText& source) {
  const std::string kernel = source.kernel.empty() ? "" : source.kernel + "_";
  const std::string hash = std::to_string(std::hash<std::string>{}(source.text));
  return device.get_library("mlx_mittens_" + file + "_" + kernel + hash, [&source] { return source.text; });
}

MTL::Library* built_library(mx::metal::Device& device, const std::string& metallib) {
  return device.get_library("mlx_mittens", metallib);
}

std::string metallib_of(const std::string& file) {
  return jit_forced() ? "" : frontend::metallib(file);
}

// From the library that was built ahead; without one Metal compiles a text that instantiates this kernel alone.
MTL::ComputePipelineState* compile(mx::metal::Device& device, const std::string& file, const std::string& kernel) {
  using Clock = std::chrono::steady_clock;
  const std::string metallib = metallib_of(file);
  const auto source = metallib.empty() ? frontend::metal_text(file, kernel) : frontend::MetalText{};
  const auto start = Clock::now();
  MTL::Library* library = metallib.empty() ? library_from(device, file, source) : built_library(device, metallib);
  MTL::ComputePipelineState* pipeline = device.get_kernel(kernel, library);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  note_compiled(file, kernel, seconds);
  if (metallib.empty()) {
    say_that_it_compiles(seconds);
  }
  return pipeline;
}

// Each thread caches its lookups: this is on the path of every call.
MTL::ComputePipelineState* pipeline_of(mx::metal::Device& device, const Launch& launch) {
  struct Key {
    Name file;
    Name kernel;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<Name>()(key.kernel) * 31 + std::hash<Name>()(key.file);
    }
  };
  static thread_local std::unordered_map<Key, MTL::ComputePipelineState*, Hash> known;
  MTL::ComputePipelineState*& mine = known[{launch.file, launch.kernel}];
  if (!mine) {
    mine = compile(device, launch.file, launch.kernel);
  }
  return mine;
}

MTL::Size dimensions(const Size3& size) {
  return MTL::Size(size.x, size.y, size.z);
}

}  // namespace

bool built() {
  return true;
}

bool has_matrix_units() {
  if (__builtin_available(macOS 26.2, *)) {
    return has_matrix_units(mx::metal::device(mx::Device::gpu).get_architecture());
  }
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
  MTL::ComputePipelineState* pipeline = pipeline_of(device, launch);
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
                     if (owner_of(input.array)) {  // the next kernel that overwrites it has to wait
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

std::optional<std::pair<int, int>> command_buffer_limits() {
  const auto read = [](const auto& device) -> std::optional<std::pair<int, int>> {
    if constexpr (requires { device.get_max_ops_mb_per_buffer(); }) {
      const auto [ops, mb] = device.get_max_ops_mb_per_buffer();
      return std::pair(ops, mb);
    } else {
      return std::nullopt;
    }
  };
  return read(mx::metal::device(mx::Device::gpu));
}

std::vector<std::string> kernels(const std::string& file) {
  const std::string metallib = metallib_of(file);
  if (metallib.empty()) {
    if (auto names = frontend::metal_kernels(file); !names.empty()) {
      return names;
    }
  }
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto& device = mx::metal::device(mx::Device::gpu);
  MTL::Library* library =
      metallib.empty() ? library_from(device, file, frontend::metal_text(file, "")) : built_library(device, metallib);
  const NS::Array* names = library->functionNames();
  std::vector<std::string> result;
  for (NS::UInteger i = 0; i < names->count(); ++i) {
    result.emplace_back(names->object<NS::String>(i)->utf8String());
  }
  return result;
}

Pipeline pipeline(const std::string& file, const std::string& kernel) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  const MTL::ComputePipelineState* state = compile(mx::metal::device(mx::Device::gpu), file, kernel);
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

std::optional<std::pair<int, int>> command_buffer_limits() {
  return std::nullopt;
}

std::vector<std::string> kernels(const std::string& file) {
  throw std::runtime_error(file + ": this build of mlx_mittens has no Metal");
}

Pipeline pipeline(const std::string& file, const std::string& kernel) {
  throw std::runtime_error(file + ", kernel " + kernel + ": this build of mlx_mittens has no Metal");
}

#endif

}  // namespace mittens::metal
