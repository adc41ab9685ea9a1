// The extension module. Ops, the simulator and the executors register their own bindings; none is named here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "backends/compiled.h"
#include "backends/cuda.h"
#include "backends/metal.h"
#include "cpu/dispatch.h"
#include "cpu/heap.h"
#include "cpu/huge_pages.h"
#include "cpu/parallel.h"
#include "mlx_internals/known.h"
#include "mlx_internals/releases.h"
#include "python/array_caster.h"
#include "python/registry.h"
#include "runtime/checks.h"

namespace nb = nanobind;

namespace {

// Both a TypeError, which it is, and a ValueError, which MLX raises for it.
constexpr const char* kDtypeErrorDoc =
    R"(An array of a dtype that an op does not take: a TypeError, and a ValueError as MLX raises for it.

Example:
    >>> try:
    ...     mm.rms_norm(mx.arange(4), None, 1e-5)
    ... except mm.DtypeError as error:
    ...     print(error)
    [rms_norm] x has dtype int32: expected float32, float16 or bfloat16
)";

nb::object dtype_error;

void bind_dtype_error(nb::module_& module) {
  nb::object bases = nb::make_tuple(nb::borrow(PyExc_TypeError), nb::borrow(PyExc_ValueError));
  dtype_error = nb::steal(PyErr_NewExceptionWithDoc("mlx_mittens.DtypeError", kDtypeErrorDoc, bases.ptr(), nullptr));
  module.attr("DtypeError") = dtype_error;
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const mittens::DtypeError& error) {
      PyErr_SetString(dtype_error.ptr(), error.what());
    }
  });
}

}  // namespace

NB_MODULE(_ext, module) {
  module.attr("mlx_version") = MITTENS_MLX_VERSION;
  module.attr("metal_built") = mittens::metal::built();
  module.def("has_matrix_units", nb::overload_cast<std::string_view>(&mittens::metal::has_matrix_units),
             nb::arg("architecture"), "Whether an Apple GPU of this architecture has matrix units.");
  module.def("metal_kernels", &mittens::metal::kernels, nb::arg("file"),
             "The kernels that Metal finds in a .metal file, or in the metallib where one was built.");
  module.def("command_buffer_limits", &mittens::metal::command_buffer_limits,
             "Launches and MB after which MLX ends a command buffer of Metal's; None where it has none.");
  module.def(
      "metal_pipeline",
      [](const std::string& file, const std::string& kernel) {
        const auto pipeline = mittens::metal::pipeline(file, kernel);
        nb::dict result;
        result["maxTotalThreadsPerThreadgroup"] = pipeline.max_total_threads_per_threadgroup;
        result["staticThreadgroupMemoryLength"] = pipeline.static_threadgroup_memory_length;
        result["threadExecutionWidth"] = pipeline.thread_execution_width;
        return result;
      },
      nb::arg("file"), nb::arg("kernel"), "What this Mac's GPU makes of a kernel, by Metal's names.");
  module.def(
      "compiled_kernels",
      [] {
        nb::list result;
        for (const auto& compiled : mittens::compiled_kernels()) {
          result.append(nb::make_tuple(compiled.file, compiled.kernel, compiled.seconds));
        }
        return result;
      },
      "The kernels that this process launched on a GPU or in the simulator, in the order of their first launches: "
      "file, "
      "kernel, and the seconds that the first launch waited for its compiler.");
  module.def("cuda_available", &mittens::cuda::available, "Whether the MLX that is loaded is a CUDA build.");
  module.def("cuda_missing", &mittens::cuda::missing,
             "What keeps kernels from running on an NVIDIA GPU; empty if nothing.");
  module.def("mlx_internals_problem", &mittens::mlx_internals::problem,
             "Why what rests on private parts of MLX is off; empty where it is on.");
  module.attr("cpu_instructions") = mittens::cpu::isa_name();
  module.def("cpu_give_back", &mittens::cpu::give_back, "Gives memory that was freed back to the system.");
  module.def("cpu_huge_pages_made", &mittens::cpu::huge_pages_made,
             "How often a large page of weights was made, or found made.");
  module.def("cpu_times_given_back", &mittens::cpu::times_given_back, "How many times memory was given back.");
  module.def("cpu_threads", &mittens::cpu::threads, "How many threads the native CPU code uses.");
  bind_dtype_error(module);
  mittens::find_array_type();
  mittens::Register::bind_all(module);
}
