#include "backends/frontend.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "python/interrupt.h"
#include "python/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens::frontend {

namespace {

constexpr const char* kModule = "mlx_mittens.frontend";
constexpr const char* kSimulated = "mlx_mittens.simulator.user_sources";

template <typename Result = std::string, typename... Arguments>
Result call_of(const char* module, const char* function, const Arguments&... arguments) {
  nb::gil_scoped_acquire gil;
  try {
    // Named arguments are told by their type as it is handed over: the nanobind of older mlx knows no reference to it.
    return nb::cast<Result>(nb::module_::import_(module).attr(function)(Arguments(arguments)...));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) {
      throw Interrupted(std::move(error));
    }
    const std::string message = nb::cast<std::string>(nb::str(error.value()));
    if (error.matches(nb::module_::import_(kModule).attr("CompileError"))) {
      throw CompileError(message);
    }
    throw std::runtime_error(message);
  }
}

template <typename Result = std::string, typename... Arguments>
Result call(const char* function, const Arguments&... arguments) {
  return call_of<Result>(kModule, function, arguments...);
}

void bind(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const CompileError& error) {
      PyErr_SetString(nb::module_::import_(kModule).attr("CompileError").ptr(), error.what());
    }
  });
}

const Register registered(bind);

}  // namespace

std::string ptx(const std::string& file, const std::string& kernel, const std::map<uint32_t, size_t>& bytes_sizes,
                const Constants& constants) {
  nb::gil_scoped_acquire gil;  // for the named arguments, which become Python's before the call
  return call("ptx", file, kernel, "bytes_sizes"_a = bytes_sizes, "constants"_a = constants);
}

std::string simulator_library(const std::string& file, const simulator::Options& options, const Constants& constants) {
  nb::gil_scoped_acquire gil;
  return call("simulator_library", file, "watch"_a = options.watch, "constants"_a = constants, "fuse"_a = options.fuse,
              "flush_subnormals"_a = options.flush_subnormals);
}

std::string user_library(const std::string& file, const std::string& text, const std::string& kernel,
                         const simulator::Options& options) {
  return call_of(kSimulated, "compiled", file, text, kernel, options.watch, options.fuse, options.flush_subnormals);
}

std::string with_source_lines(const std::string& message, const std::string& file, const std::string& library) {
  return call_of(kSimulated, "with_lines", message, file, library);
}

MetalText metal_text(const std::string& file, const std::string& kernel) {
  auto [text, only] = call<std::pair<std::string, std::string>>("metal_text", file, kernel);
  return {std::move(text), std::move(only)};
}

std::vector<std::string> metal_kernels(const std::string& file) {
  return call<std::vector<std::string>>("metal_kernels", file);
}

std::string metallib(const std::string& file) {
  return call("metallib", file);
}

}  // namespace mittens::frontend
