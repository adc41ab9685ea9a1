// Running launches through the simulator: the .metal text, compiled for the CPU, on the arrays' own memory.
#include "backends/simulator.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "backends/compiled.h"
#include "backends/frontend.h"
#include "backends/launch.h"
#include "backends/visitor.h"
#include "mlx/scheduler.h"
#include "mlx_internals/releases.h"
#include "python/registry.h"
#include "python/simulator.h"

namespace nb = nanobind;

namespace mittens {

namespace {

// A launch that ran, and its counts.
struct Run {
  std::string file;
  std::string kernel;
  std::string library;
  Constants constants;
  std::array<uint32_t, 3> threadgroups;
  std::array<uint32_t, 3> threads;
  simulator::Counts counts;
  size_t arguments = 0;  // of a launch that did not run: a hash of its arguments by value
};

// Host code that makes the dispatch of a launch, in place of dispatch_of: in tests the macOS code over a recording
// device (tests/macos/recorder.cpp). The owner keeps alive the memory that the dispatch points to.
using Host = void (*)(const Launch& launch, mx::Stream stream, std::string& file, simulator::Dispatch& dispatch,
                      std::shared_ptr<void>& owner);

struct State {
  std::mutex mutex;
  bool enabled;
  Name gpu = "apple";
  Name planned_for;  // in place of gpu, where it is not empty
  simulator::Options options{};
  // Of each "file:kernel" that ran: the most threads that a threadgroup had, and how many the kernel declares.
  std::map<std::string, std::pair<uint64_t, uint32_t>> launched;
  bool recording = false;
  bool profiling = false;
  bool dry = false;  // launches are kept but do not run
  std::vector<Run> runs;
  Host host = nullptr;

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

simulator::Dispatch dispatch_of(const Launch& launch) {
  simulator::Dispatch dispatch{
      .kernel = launch.kernel.text(),
      .buffers = {},
      .threadgroups = {launch.threadgroups.x, launch.threadgroups.y, launch.threadgroups.z},
      .threads = {launch.threads.x, launch.threads.y, launch.threads.z},
      .threadgroup_bytes = launch.threadgroup_bytes,
  };
  for (const auto& argument : launch.arguments) {
    dispatch.buffers.push_back(
        std::visit(Visitor{
                       [](const Input& input) {
                         return buffer_of(input.array, input.offset, input.bytes, simulator::Buffer::input);
                       },
                       [](const Output& output) {
                         return buffer_of(output.array, 0, output.array.get().nbytes(),
                                          output.updated ? simulator::Buffer::inout : simulator::Buffer::output);
                       },
                       [](const Bytes& bytes) {
                         return simulator::Buffer{"", const_cast<std::byte*>(bytes.data.data()), bytes.data.size(),
                                                  simulator::Buffer::constant};
                       },
                       [](const Absent&) { return simulator::Buffer{"", nullptr, 1, simulator::Buffer::constant}; },
                   },
                   argument));
  }
  return dispatch;
}

Host current_host() {
  std::lock_guard lock(state().mutex);
  return state().host;
}

void set_host(const std::string& path) {
  Host host = nullptr;
  if (!path.empty()) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    host = library ? reinterpret_cast<Host>(dlsym(library, "mittens_record")) : nullptr;
    if (!host) {
      throw std::invalid_argument(dlerror());
    }
  }
  std::lock_guard lock(state().mutex);
  state().host = host;
}

void bind(nb::module_& module) {
  module.def("simulator_host", &set_host, nb::arg("path"),
             "Takes the dispatches of launches from the host code in a shared object; with an empty path no more.");
  module.def("simulator_enabled", &simulator_enabled, "Whether ops on the CPU go through the simulator.");
  module.def(
      "simulator_configure",
      [](bool enabled, uint64_t seed, bool watch, uint64_t step_limit, const std::string& gpu, bool flush_subnormals,
         bool fuse, bool shuffled_tensors) {
        std::lock_guard lock(state().mutex);
        state().enabled = enabled;
        state().gpu = gpu;
        state().options.seed = seed;
        state().options.watch = watch;
        state().options.step_limit = step_limit;
        state().options.flush_subnormals = flush_subnormals;
        state().options.fuse = fuse;
        state().options.shuffled_tensors = shuffled_tensors;
      },
      nb::arg("enabled"), nb::arg("seed") = 0, nb::arg("watch") = true,
      nb::arg("step_limit") = simulator::Options{}.step_limit, nb::arg("gpu") = "apple",
      nb::arg("flush_subnormals") = false, nb::arg("fuse") = false, nb::arg("shuffled_tensors") = false,
      "Sends ops on the CPU through the simulator or through their native code; the seed shuffles the threads, and the "
      "kernels are those that the plans choose for the GPU of this name.");
  module.def(
      "simulator_state",
      [] {
        std::lock_guard lock(state().mutex);
        const auto& options = state().options;
        return nb::make_tuple(state().enabled, options.seed, options.watch, options.step_limit, state().gpu.text(),
                              options.flush_subnormals, options.fuse, options.shuffled_tensors);
      },
      "The settings that simulator_configure takes.");
  module.def(
      "simulator_plan_for",
      [](const std::string& gpu) {
        std::lock_guard lock(state().mutex);
        state().planned_for = gpu;
      },
      nb::arg("gpu"), "Plans for this GPU, whatever simulator_configure says; the empty name ends that.");
  module.def(
      "launched_kernels",
      [] {
        std::lock_guard lock(state().mutex);
        return state().launched;
      },
      "The kernels that the simulator has run in this process, as \"file:kernel\": the most threads that a threadgroup "
      "of it had, and the most that it declares.");
  module.def(
      "simulator_record",
      [](bool recording, bool profile, bool dry) {
        std::vector<Run> runs;
        {
          std::lock_guard lock(state().mutex);
          state().recording = recording;
          state().profiling = recording && profile;
          state().dry = recording && dry;
          runs.swap(state().runs);
        }
        nb::list result;
        for (const auto& run : runs) {
          nb::dict entry;
          entry["file"] = run.file;
          entry["kernel"] = run.kernel;
          entry["library"] = run.library;
          entry["constants"] = run.constants;
          entry["threadgroups"] = nb::make_tuple(run.threadgroups[0], run.threadgroups[1], run.threadgroups[2]);
          entry["threads"] = nb::make_tuple(run.threads[0], run.threads[1], run.threads[2]);
          entry["counts"] = simulator::dict_of(run.counts);
          entry["arguments"] = run.arguments;
          if (run.counts.profiled) {
            entry["lines"] = simulator::lines_of(run.counts);
          }
          result.append(entry);
        }
        return result;
      },
      nb::arg("recording"), nb::arg("profile") = false, nb::arg("dry") = false,
      "Begins or ends to keep what every launch did, profiled if so asked; returns what was kept so far. Dry, nothing "
      "runs, and what launches would compute is undefined.");
}

const Register registered(bind);

}  // namespace

bool simulator_enabled() {
  std::lock_guard lock(state().mutex);
  return state().enabled;
}

Name simulator_gpu() {
  std::lock_guard lock(state().mutex);
  return state().planned_for.text().empty() ? state().gpu : state().planned_for;
}

simulator::Buffer buffer_of(const mx::array& array, int64_t offset, size_t bytes, simulator::Buffer::Role role) {
  const int64_t start = array.offset() + offset;
  simulator::Buffer buffer{"", const_cast<char*>(array.data<char>()) + offset, bytes, role, static_cast<size_t>(start)};
  buffer.item = array.itemsize();
#if MITTENS_MLX_KNOWS_OWNED_MEMORY
  if (array.data_shared_ptr()->is_owned()) {  // MLX knows the size of no other memory
    const int64_t room = static_cast<int64_t>(array.buffer_size()) - start;
    buffer.room = start < 0 ? 0 : static_cast<size_t>(std::max<int64_t>(room, 0));
  }
#endif
  return buffer;
}

simulator::Options simulator_options() {
  std::lock_guard lock(state().mutex);
  return state().options;
}

void simulate(const std::string& file, const std::string& library, const simulator::Dispatch& dispatch,
              const simulator::Options& options, const Constants& constants) {
  const auto loaded = simulator::Library::at(library);
  if (!loaded->find(dispatch.kernel)) {
    std::string names;
    for (const std::string& name : loaded->kernels()) {
      names += (names.empty() ? "" : ", ") + name;
    }
    throw std::invalid_argument("[simulator] " + file + " has no kernel \"" + dispatch.kernel + "\"; it has " + names);
  }
  simulator::Options counting = options;
  {
    std::lock_guard lock(state().mutex);
    counting.count = state().recording;
    counting.profile = state().profiling;
  }
  const auto counts = [&] {
    std::optional<nb::gil_scoped_release> release;  // the simulator takes it where it looks for signals
    if (PyGILState_Check()) {
      release.emplace();
    }
    try {
      return simulator::run(*loaded, dispatch, counting);
    } catch (const simulator::Fault& fault) {
      throw simulator::Fault(frontend::with_source_lines(fault.what(), file, library));
    }
  }();
  std::lock_guard lock(state().mutex);
  auto& [launched, declared] = state().launched[file + ":" + dispatch.kernel];
  launched = std::max(launched, uint64_t(dispatch.threads[0]) * dispatch.threads[1] * dispatch.threads[2]);
  declared = loaded->find(dispatch.kernel)->max_threads;
  if (state().recording) {
    const auto& groups = dispatch.threadgroups;
    const auto& threads = dispatch.threads;
    state().runs.push_back({.file = file,
                            .kernel = dispatch.kernel,
                            .library = library,
                            .constants = constants,
                            .threadgroups = {groups[0], groups[1], groups[2]},
                            .threads = {threads[0], threads[1], threads[2]},
                            .counts = counts});
  }
}

namespace {

// Keeps a launch that is not to run; false where launches run.
bool keep_dry(const std::string& file, const simulator::Dispatch& dispatch) {
  std::lock_guard lock(state().mutex);
  if (state().dry) {
    const auto& groups = dispatch.threadgroups;
    const auto& threads = dispatch.threads;
    size_t arguments = dispatch.threadgroup_bytes;
    for (const auto& buffer : dispatch.buffers) {
      if (buffer.role == simulator::Buffer::constant && buffer.data) {
        const std::string_view bytes(static_cast<const char*>(buffer.data), buffer.bytes);
        arguments = arguments * 31 + std::hash<std::string_view>()(bytes);
      }
    }
    state().runs.push_back({.file = file,
                            .kernel = dispatch.kernel,
                            .library = "",
                            .constants = {},
                            .threadgroups = {groups[0], groups[1], groups[2]},
                            .threads = {threads[0], threads[1], threads[2]},
                            .counts = {},
                            .arguments = arguments});
  }
  return state().dry;
}

}  // namespace

void wait_for_inputs(mx::Stream stream) {
  if (mx::is_available(mx::Device::gpu)) {
    for (mx::Stream other : mx::get_streams()) {
      if (other.device == mx::Device::gpu) {
        try {
          mx::synchronize(other);
        } catch (const std::exception& error) {
          if (!std::string_view(error.what()).starts_with("There is no Stream")) {  // in this thread
            throw;
          }
        }
      }
    }
  }
  mx::synchronize(stream);
}

void run_in_simulator(const std::vector<Launch>& launches, mx::Stream stream) {
  wait_for_inputs(stream);
  const auto options = simulator_options();
  const Host host = current_host();
  for (const auto& launch : launches) {
    std::string file = launch.file;
    simulator::Dispatch dispatch;
    std::shared_ptr<void> owner;
    if (host) {
      host(launch, stream, file, dispatch, owner);
    } else {
      dispatch = dispatch_of(launch);
    }
    if (keep_dry(file, dispatch)) {
      continue;
    }
    const auto start = std::chrono::steady_clock::now();
    const auto library = frontend::simulator_library(file, options, launch.function_constants);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    note_compiled(launch.file, launch.kernel, waited.count());
    simulate(file, library, dispatch, options, launch.function_constants);
  }
}

}  // namespace mittens
