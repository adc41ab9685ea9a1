// A recording Metal device: the calls of csrc/backends/metal.cpp to MLX's Metal device and encoder, noted as a dispatch
// that the simulator can execute. Nothing here knows the launch: a wrong index, constant or grid in the macOS code shows.
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/compiled.h"
#include "backends/frontend.h"
#include "backends/metal.h"
#include "mlx/backend/metal/device.h"
#include "simulator/simulator.h"

namespace {

using mittens::simulator::Buffer;
using mittens::simulator::Dispatch;

struct Recording {
  MTL::ComputeCommandEncoder encoder;
  std::map<int, Buffer> arrays;
  MTL::Size threadgroups{0, 0, 0};
  MTL::Size threads{0, 0, 0};
};

thread_local Recording* recording = nullptr;

// The GPU's compiler, as a test plays it: by a kernel's name, most threads and bytes of threadgroup memory.
std::map<std::string, std::pair<size_t, size_t>>& compiled() {
  static std::map<std::string, std::pair<size_t, size_t>> kernels;
  return kernels;
}

// A Metal buffer reaches as far as its memory does; of row contiguous arrays no more than the elements is meant.
size_t reach(const mlx::core::array& array, int64_t offset) {
  return array.flags().row_contiguous ? array.nbytes() - offset : array.buffer_size() - (array.offset() + offset);
}

void keep(const mlx::core::array& array, int index, int64_t offset, Buffer::Role role) {
  char* data = const_cast<char*>(array.data<char>()) + offset;
  const Buffer buffer{"", data, reach(array, offset), role, static_cast<size_t>(array.offset() + offset)};
  if (!recording->arrays.emplace(index, buffer).second) {
    throw std::runtime_error("buffer " + std::to_string(index) + " is set twice");
  }
}

// The libraries that MLX's Metal device was asked to compile, by name; and how long that takes.
std::vector<std::string>& libraries() {
  static std::vector<std::string> names;
  return names;
}
double compile_seconds = 0;

// Stand-in for the text of a kernel, from a test.
using Text = const char* (*)(const char* file, const char* kernel);
Text text_of = nullptr;

// Uninitialised storage: the recording device has no state of MLX's own, and none of its members is touched.
template <typename T>
T& blank() {
  alignas(T) static std::byte storage[sizeof(T)];
  return *reinterpret_cast<T*>(storage);
}

// The macOS that the macOS code believes to run on: its major and its minor number.
std::pair<int, int> pretended_macos = {14, 0};

}  // namespace

bool pretended_macos_is_at_least(const char* version) {
  int major = 0, minor = 0;
  if (std::sscanf(version, "macOS %d.%d", &major, &minor) != 2) {
    throw std::runtime_error(std::string(version) + " is no version of macOS");
  }
  return pretended_macos >= std::pair(major, minor);
}

namespace mlx::core::metal {

Device& device(mlx::core::Device) {
  return blank<Device>();
}

CommandEncoder& get_command_encoder(Stream) {
  return blank<CommandEncoder>();
}

MTL::Library* Device::get_library(const std::string&, const std::string&) {
  throw std::runtime_error("the recording device has no metallib");
}

MTL::Library* Device::get_library(
    const std::string& name, const CompileOptions&, const std::function<std::string(void)>& builder) {
  static std::map<std::string, MTL::Library*> known;
  if (const auto found = known.find(name); found != known.end()) {
    return found->second;
  }
  libraries().push_back(name);
  std::this_thread::sleep_for(std::chrono::duration<double>(compile_seconds));
  auto* library = known[name] = new MTL::Library{builder()};
  for (const auto& [name, pipeline] : compiled()) {
    library->names.strings.push_back({name});
  }
  return library;
}

MTL::ComputePipelineState* Device::get_kernel(const std::string& name, MTL::Library* library, const std::string&,
                                              const MTLFCList&, const std::vector<MTL::Function*>&) {
  const auto found = compiled().find(name);
  if (found == compiled().end()) {
    return new MTL::ComputePipelineState{name, library};
  }
  const auto [threads, memory] = found->second;
  if (threads == 0) {
    throw std::runtime_error("[metal::Device] Unable to load kernel " + name);
  }
  return new MTL::ComputePipelineState{name, library, threads, memory};
}

MTL::ComputeCommandEncoder* CommandEncoder::get_command_encoder() {
  return &recording->encoder;
}

void CommandEncoder::set_input_array(const array& input, int index, int64_t offset) {
  keep(input, index, offset, Buffer::input);
}

void CommandEncoder::set_output_array(array& output, int index, int64_t offset) {
  keep(output, index, offset, Buffer::output);
}

// An input that is an output too: its contents stay where nothing is written.
void CommandEncoder::register_output_array(const array& output) {
  for (auto& [index, buffer] : recording->arrays) {
    if (buffer.data == output.data<char>()) {
      buffer.role = Buffer::inout;
    }
  }
}

void CommandEncoder::dispatch_threadgroups(MTL::Size threadgroups, MTL::Size threads) {
  recording->threadgroups = threadgroups;
  recording->threads = threads;
}

}  // namespace mlx::core::metal

namespace mittens::frontend {

// Stands for the text: the simulator compiles the file itself, or the source that a test registered.
MetalText metal_text(const std::string& file, const std::string& kernel) {
  if (const char* text = text_of ? text_of(file.c_str(), kernel.c_str()) : nullptr) {
    return {text, kernel};
  }
  return {file, ""};
}

std::vector<std::string> metal_kernels(const std::string&) {
  return {};
}

std::string metallib(const std::string&) {
  return "";
}

}  // namespace mittens::frontend

// Lets a test replace the text of a kernel by the name of a registered source, which has no other kernel. Without it
// the file stands for itself, with all of its kernels.
extern "C" __attribute__((visibility("default"))) void mittens_texts(Text texts) {
  text_of = texts;
}

// How long the GPU's compiler takes for a library from now on.
extern "C" __attribute__((visibility("default"))) void mittens_compile_takes(double seconds) {
  compile_seconds = seconds;
}

// The libraries that were compiled since the last call, a line each.
extern "C" __attribute__((visibility("default"))) const char* mittens_libraries() {
  static std::string text;
  text.clear();
  for (const auto& name : libraries()) {
    text += name + "\n";
  }
  libraries().clear();
  return text.c_str();
}

// The kernels that the macOS code says were compiled, a line each: "file kernel".
extern "C" __attribute__((visibility("default"))) const char* mittens_compiled() {
  static std::string text;
  text.clear();
  for (const auto& compiled : mittens::compiled_kernels()) {
    text += compiled.file + " " + compiled.kernel + "\n";
  }
  return text.c_str();
}

// Whether the macOS code finds matrix units on a Mac with such a GPU and such a macOS.
extern "C" __attribute__((visibility("default"))) bool mittens_has_matrix_units(const char* architecture, int major,
                                                                                int minor) {
  // The one member of the device that is read. It is made here, and never destroyed.
  static auto* of_device = new (const_cast<std::string*>(
      &mlx::core::metal::device(mlx::core::Device::gpu).get_architecture())) std::string;
  *of_device = architecture;
  pretended_macos = {major, minor};
  return mittens::metal::has_matrix_units();
}

// Sets the compiler's answer for a kernel; without threads it refuses it.
extern "C" __attribute__((visibility("default"))) void mittens_compile(const char* kernel, size_t threads,
                                                                       size_t memory) {
  compiled()[kernel] = {threads, memory};
}

// The macOS code's answer for every pipeline of a file: a line each, "kernel threads memory width" or "kernel: error".
extern "C" __attribute__((visibility("default"))) const char* mittens_pipelines(const char* file) {
  static std::string text;
  text.clear();
  for (const auto& kernel : mittens::metal::kernels(file)) {
    text += kernel;
    try {
      const auto made = mittens::metal::pipeline(file, kernel);
      for (const auto value : {made.max_total_threads_per_threadgroup, made.static_threadgroup_memory_length,
                               made.thread_execution_width}) {
        text += " " + std::to_string(value);
      }
    } catch (const std::exception& error) {
      text += std::string(": ") + error.what();
    }
    text += "\n";
  }
  return text.c_str();
}

// Runs the macOS code for a launch and gives the dispatch it made. The constants' memory belongs to the recording, which
// the caller keeps for as long as it uses the dispatch.
extern "C" __attribute__((visibility("default"))) void mittens_record(
    const mittens::Launch& launch, mlx::core::Stream stream, std::string& file, Dispatch& dispatch,
    std::shared_ptr<void>& owner) {
  auto made = std::make_shared<Recording>();
  recording = made.get();
  mittens::metal::run(launch, stream);
  recording = nullptr;
  if (!made->encoder.pipeline || made->threads.width == 0) {
    throw std::runtime_error("the macOS code dispatched nothing");
  }
  for (auto& [index, bytes] : made->encoder.bytes) {
    if (!made->arrays.emplace(index, Buffer{"", bytes.data(), bytes.size(), Buffer::constant}).second) {
      throw std::runtime_error("buffer " + std::to_string(index) + " is set twice");
    }
  }
  file = made->encoder.pipeline->library->source;
  dispatch.kernel = made->encoder.pipeline->kernel;
  for (int index = 0; auto& [place, buffer] : made->arrays) {
    if (place != index++) {
      throw std::runtime_error("buffer " + std::to_string(index - 1) + " is not set");
    }
    dispatch.buffers.push_back(buffer);
  }
  const auto fill = [](uint32_t(&to)[3], const MTL::Size& from) {
    to[0] = from.width, to[1] = from.height, to[2] = from.depth;
  };
  fill(dispatch.threadgroups, made->threadgroups);
  fill(dispatch.threads, made->threads);
  dispatch.threadgroup_bytes = made->encoder.threadgroup_bytes;
  owner = made;
}
