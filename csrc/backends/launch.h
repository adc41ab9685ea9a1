// A Launch holds everything that a GPU needs to run one kernel once. Ops build it; an executor runs it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "backends/name.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace mittens {

namespace mx = mlx::core;

struct Size3 {
  uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;
};

// One argument of a kernel; its place in Launch::arguments is its Metal buffer index. It refers to arrays, since owning
// one takes atomic instructions: the builder of a launch keeps them until it has run, or gives it an owner.
struct Input {
  std::reference_wrapper<const mx::array> array;
  // The part that the kernel may read: bytes from an offset off the array's first element. Row contiguous: all of it.
  int64_t offset = 0;
  size_t bytes = 0;
};
struct Output {
  std::reference_wrapper<const mx::array> array;
  bool updated = false;  // it holds data already, which stays where the kernel does not write
};
struct Bytes {
  std::vector<std::byte> data;
  bool by_pointer = false;  // the kernel's parameter is `constant T*`, not `constant T&`
};
// An index that nothing was bound to.
struct Absent {
  bool declared = false;  // whether the kernel has a parameter there
};
using Argument = std::variant<Input, Output, Bytes, Absent>;

struct Launch {
  Launch() {
    arguments.reserve(12);  // enough for most kernels: this is on the path of every call
  }

  Name file;  // the .metal file that holds the kernel: "norm/rms_norm.metal"
  Name kernel;  // the host name of one instantiation in it: "rms_norm_simd_float16"
  std::vector<Argument> arguments;
  Size3 threadgroups;
  Size3 threads;  // per threadgroup
  uint32_t threadgroup_bytes = 0;  // of a [[threadgroup(0)]] argument, if the kernel has one
  std::map<uint32_t, std::string> function_constants;  // by index, as C++ writes them; our own kernels have none
  std::shared_ptr<const void> owner;  // of arguments that were made for the launch, if there are any

  // Each adds the next argument. They return an rvalue, so that a launch that was built is moved, not copied, into
  // place: this is on the path of every call.
  Launch&& input(const mx::array& array) {
    // A broadcast view has fewer elements in memory than in its shape.
    return input(array, 0, std::min(array.size(), array.data_size()) * array.itemsize());
  }
  // For an argument that the kernel does not use, but needs a buffer for. Reading more of it than one element is a
  // fault in the simulator.
  Launch&& stand_in(const mx::array& array) {
    return input(array, 0, std::min<size_t>(array.data_size(), 1) * array.itemsize());
  }
  // For an argument that may be absent: then the array is another one, which stands in.
  Launch&& input_if(bool present, const mx::array& array) {
    return present ? input(array) : stand_in(array);
  }
  Launch&& input(const mx::array& array, int64_t offset, size_t bytes) {
    arguments.emplace_back(Input{array, offset, bytes});
    return std::move(*this);
  }
  Launch&& output(const mx::array& array) {
    arguments.emplace_back(Output{array});
    return std::move(*this);
  }
  // For an output that may be absent, null: then another array stands in.
  Launch&& output_if(const mx::array* array, const mx::array& other) {
    return array ? output(*array) : stand_in(other);
  }
  Launch&& update(const mx::array& array) {
    arguments.emplace_back(Output{array, true});
    return std::move(*this);
  }
  Launch&& input(const mx::array&&) = delete;  // it would be gone when the launch runs
  Launch&& input(const mx::array&&, int64_t, size_t) = delete;
  Launch&& stand_in(const mx::array&&) = delete;
  Launch&& input_if(bool, const mx::array&&) = delete;
  Launch&& output(const mx::array&&) = delete;
  Launch&& update(const mx::array&&) = delete;
  // A plain struct, handed over by value: `constant Params& params` in the kernel.
  template <typename Params>
  Launch&& params(const Params& params) {
    static_assert(std::is_trivially_copyable_v<Params>);
    const auto* data = reinterpret_cast<const std::byte*>(&params);
    arguments.emplace_back(Bytes{{data, data + sizeof(Params)}});
    return std::move(*this);
  }
};

template <typename... Launches>
std::vector<Launch> in_order(Launches&&... launches) {
  std::vector<Launch> all;
  all.reserve(sizeof...(launches));
  (all.push_back(std::move(launches)), ...);
  return all;
}

// Runs a launch on the stream's GPU: Metal on a Mac, CUDA under MLX's CUDA build. Throws where there is neither.
void run_on_gpu(const Launch& launch, mx::Stream stream);

// Runs launches, in order, through the simulator on the CPU; earlier work of the stream is waited for.
void run_in_simulator(const std::vector<Launch>& launches, mx::Stream stream);

// Whether ops on the CPU go through the simulator instead of their native code.
bool simulator_enabled();

// The name of the GPU that the simulator stands for, as mlx_mittens/gpus.py knows it.
Name simulator_gpu();

}  // namespace mittens
