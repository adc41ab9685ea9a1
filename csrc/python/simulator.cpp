// The simulator for Python: a kernel library on Python's buffers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <map>
#include <optional>

#include "python/registry.h"
#include "python/simulator.h"

namespace nb = nanobind;

namespace mittens::simulator {

namespace {

using Triple = std::array<uint32_t, 3>;

Buffer::Role role_named(const std::string& name) {
  static const std::map<std::string, Buffer::Role> roles{
      {"input", Buffer::input}, {"output", Buffer::output}, {"constant", Buffer::constant}, {"inout", Buffer::inout}};
  const auto found = roles.find(name);
  if (found == roles.end()) {
    throw nb::value_error(("[simulate] a buffer's role is input, output, constant or inout, not " + name).c_str());
  }
  return found->second;
}

// The memory of a Python buffer for as long as it is held.
class Held {
 public:
  Held(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) {
      throw nb::python_error();
    }
  }
  Held(const Held&) = delete;
  ~Held() {
    PyBuffer_Release(&view_);
  }
  void* data() const {
    return view_.buf;
  }
  size_t bytes() const {
    return static_cast<size_t>(view_.len);
  }
  size_t item() const {
    return static_cast<size_t>(view_.itemsize);
  }

 private:
  Py_buffer view_;
};

}  // namespace

nb::dict dict_of(const Counts& counts) {
  nb::dict result;
  result["threads"] = counts.threads;
  result["threadgroup_barriers"] = counts.threadgroup_barriers;
  result["simdgroup_barriers"] = counts.simdgroup_barriers;
  result["simd_operations"] = counts.simd_operations;
  result["matrix_operations"] = counts.matrix_operations;
  result["half_matrix_operations"] = counts.half_matrix_operations;
  result["bfloat_matrix_operations"] = counts.bfloat_matrix_operations;
  result["tensor_operations"] = counts.tensor_operations;
  result["tensor_multiplies"] = counts.tensor_multiplies;
  result["byte_tensor_multiplies"] = counts.byte_tensor_multiplies;
  result["threadgroup_bytes"] = counts.threadgroup_bytes;
  result["device_bytes_loaded"] = counts.device_bytes_loaded;
  result["params_bytes_loaded"] = counts.params_bytes_loaded;
  result["device_bytes_stored"] = counts.device_bytes_stored;
  result["threadgroup_bytes_loaded"] = counts.threadgroup_bytes_loaded;
  result["threadgroup_bytes_stored"] = counts.threadgroup_bytes_stored;
  result["device_accesses"] = counts.device_accesses;
  result["device_lines"] = counts.device_lines;
  result["device_lines_fewest"] = counts.device_lines_fewest;
  result["threadgroup_accesses"] = counts.threadgroup_accesses;
  result["bank_conflicts"] = counts.bank_conflicts;
  if (counts.profiled) {
    result["distinct_lines"] = counts.distinct_lines;
    result["distinct_lines_loaded"] = counts.distinct_lines_loaded;
    result["distinct_lines_stored"] = counts.distinct_lines_stored;
    result["threadgroup_lines"] = counts.threadgroup_lines;
    result["device_loads"] = counts.device_loads;
    result["device_stores"] = counts.device_stores;
    result["threadgroup_loads"] = counts.threadgroup_loads;
    result["threadgroup_stores"] = counts.threadgroup_stores;
  }
  return result;
}

nb::list lines_of(const Counts& counts) {
  nb::list result;
  for (const auto& line : counts.lines) {
    result.append(nb::make_tuple(line.file, line.line, line.operation, line.memory, line.executions, line.operations));
  }
  return result;
}

namespace {

nb::dict simulate(const std::string& path, const std::string& kernel, nb::list arguments, Triple threadgroups,
                  Triple threads, uint32_t threadgroup_bytes, uint64_t seed, bool watch, std::optional<Triple> grid,
                  uint64_t step_limit, bool complete, bool active_lanes, bool early_exits, bool count, bool profile,
                  bool flush_subnormals, bool shuffled_tensors) {
  const auto library = Library::at(path);
  Dispatch dispatch{.kernel = kernel,
                    .buffers = {},
                    .threadgroups = {threadgroups[0], threadgroups[1], threadgroups[2]},
                    .threads = {threads[0], threads[1], threads[2]},
                    .threadgroup_bytes = threadgroup_bytes};
  if (grid) {
    std::copy(grid->begin(), grid->end(), dispatch.grid);
  }
  std::vector<std::unique_ptr<Held>> held;
  for (nb::handle argument : arguments) {
    const auto parts = nb::cast<nb::tuple>(argument);
    const auto role = role_named(nb::cast<std::string>(parts[1]));
    if (parts[2].is_none()) {
      dispatch.buffers.push_back({nb::cast<std::string>(parts[0]), nullptr, 1, role});
      continue;
    }
    held.push_back(std::make_unique<Held>(parts[2], role == Buffer::output || role == Buffer::inout));
    dispatch.buffers.push_back({nb::cast<std::string>(parts[0]), held.back()->data(), held.back()->bytes(), role});
    dispatch.buffers.back().item = held.back()->item();
    if (parts.size() > 3) {
      dispatch.buffers.back().offset = nb::cast<size_t>(parts[3]);
    }
  }
  Counts counts;
  {
    nb::gil_scoped_release release;
    counts = run(*library, dispatch,
                 {.seed = seed,
                  .step_limit = step_limit,
                  .watch = watch,
                  .active_lanes = active_lanes,
                  .early_exits = early_exits,
                  .count = count,
                  .profile = profile,
                  .complete = complete,
                  .flush_subnormals = flush_subnormals,
                  .shuffled_tensors = shuffled_tensors});
  }
  nb::dict result = dict_of(counts);
  if (counts.profiled) {
    result["lines"] = lines_of(counts);
  }
  return result;
}

constexpr const char* kFaultDoc =
    R"(An error of a kernel in the simulator that a GPU would not forgive; the message names the thread and the line.

Example:
    >>> source = "uint i = thread_position_in_grid.x; y[i + 1] = x[i];"
    >>> kernel = mm.simulator.metal_kernel("shifted", ["x"], ["y"], source)
    >>> sizes = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)]}
    >>> try:
    ...     mx.eval(kernel(inputs=[mx.ones(8)], output_dtypes=[mx.float32], **sizes))
    ... except mm.simulator.Fault as fault:
    ...     print("shifted.metal:1" in str(fault))
    True
)";

void bind(nb::module_& module) {
  nb::exception<Fault>(module, "SimulatorFault", PyExc_RuntimeError).doc() = kFaultDoc;
  module.def("simulate", &simulate, nb::arg("library"), nb::arg("kernel"), nb::arg("arguments"),
             nb::arg("threadgroups"), nb::arg("threads"), nb::arg("threadgroup_bytes") = 0, nb::arg("seed") = 0,
             nb::arg("watch") = true, nb::arg("grid") = nb::none(), nb::arg("step_limit") = Options{}.step_limit,
             nb::arg("complete") = true, nb::arg("active_lanes") = false, nb::arg("early_exits") = false,
             nb::arg("count") = false, nb::arg("profile") = false, nb::arg("flush_subnormals") = false,
             nb::arg("shuffled_tensors") = false,
             "Runs a kernel of a library that frontend.simulator_library made.\n\n"
             "arguments: a list of (name, role, buffer) or (name, role, buffer, offset) by buffer index; the role is\n"
             "input, output, constant or inout, the buffer anything contiguous with the buffer protocol, or None.\n"
             "Returns counts of what was done. Raises SimulatorFault.");
  module.def(
      "simulator_progress",
      [] {
        const Progress now = progress();
        return nb::make_tuple(now.launch, now.done, now.threadgroups);
      },
      "How far the latest launch of this process is: its number, its threadgroups that are done, and all of them.");
  module.def(
      "simulator_polls", [] { return progress().polls; },
      "How often launches of this process have looked for signals: every 2^17 branches.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens::simulator
