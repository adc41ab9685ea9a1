// Running launches through the simulator: the .metal text, compiled for the CPU, on the arrays' own memory.
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

#include <nanobind/nanobind.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>

#include "launch/frontend.h"
#include "launch/launch.h"
#include "launch/visitor.h"
#include "mlx/scheduler.h"
#include "ops/registry.h"
#include "simulator/simulator.h"

namespace nb = nanobind;

namespace mittens {

namespace {

struct State {
  std::mutex mutex;
  bool enabled;
  simulator::Options options{};
  std::set<std::string> launched;  // "file:kernel"

  State() {
    const char* value = std::getenv("MLX_MITTENS_SIMULATOR");
    enabled = value && std::string(value) == "1";
    options.watch = true;
  }
};

State& state() {
  static State* instance = new State();
  return *instance;
}

std::shared_ptr<simulator::Library> library_of(const std::string& file) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<simulator::Library>> by_path;
  const std::string path = frontend::simulator_library(file);
  std::lock_guard lock(mutex);
  auto& library = by_path[path];
  if (!library) {
    library = simulator::Library::open(path);
  }
  return library;
}

simulator::Buffer buffer_of(const mx::array& array, int64_t offset, size_t bytes, simulator::Buffer::Role role) {
  return {"", const_cast<char*>(array.data<char>()) + offset, bytes, role, static_cast<size_t>(array.offset() + offset)};
}

simulator::Dispatch dispatch_of(const Launch& launch) {
  simulator::Dispatch dispatch{
      .kernel = launch.kernel,
      .buffers = {},
      .threadgroups = {launch.threadgroups.x, launch.threadgroups.y, launch.threadgroups.z},
      .threads = {launch.threads.x, launch.threads.y, launch.threads.z},
      .threadgroup_bytes = launch.threadgroup_bytes,
  };
  for (const auto& argument : launch.arguments) {
    dispatch.buffers.push_back(std::visit(
        Visitor{
            [](const Input& input) { return buffer_of(input.array, input.offset, input.bytes, simulator::Buffer::input); },
            [](const Output& output) { return buffer_of(output.array, 0, output.array.nbytes(), simulator::Buffer::output); },
            [](const Bytes& bytes) {
              return simulator::Buffer{"", const_cast<std::byte*>(bytes.data.data()), bytes.data.size(),
                                       simulator::Buffer::constant};
            },
        },
        argument));
  }
  return dispatch;
}

void bind(nb::module_& module) {
  module.def("simulator_enabled", &simulator_enabled, "Whether ops on the CPU go through the simulator.");
  module.def(
      "simulator_configure",
      [](bool enabled, uint64_t seed, bool watch) {
        std::lock_guard lock(state().mutex);
        state().enabled = enabled;
        state().options.seed = seed;
        state().options.watch = watch;
      },
      nb::arg("enabled"), nb::arg("seed") = 0, nb::arg("watch") = true,
      "Sends ops on the CPU through the simulator or through their native code; the seed shuffles the threads.");
  module.def(
      "simulator_state",
      [] {
        std::lock_guard lock(state().mutex);
        return nb::make_tuple(state().enabled, state().options.seed, state().options.watch);
      },
      "The three settings that simulator_configure takes.");
  module.def(
      "launched_kernels",
      [] {
        std::lock_guard lock(state().mutex);
        return state().launched;
      },
      "The kernels that the simulator has run in this process, as \"file:kernel\".");
}

const Register registered(bind);

}  // namespace

bool simulator_enabled() {
  std::lock_guard lock(state().mutex);
  return state().enabled;
}

void run_in_simulator(const std::vector<Launch>& launches, mx::Stream stream) {
  // The inputs may still be on their way on the stream's thread; the simulator runs here, so that a fault is an
  // exception of this call.
  mx::synchronize(stream);
  simulator::Options options;
  {
    std::lock_guard lock(state().mutex);
    options = state().options;
  }
  for (const auto& launch : launches) {
    simulator::run(*library_of(launch.file), dispatch_of(launch), options);
    std::lock_guard lock(state().mutex);
    state().launched.insert(launch.file + ":" + launch.kernel);
  }
}

}  // namespace mittens
