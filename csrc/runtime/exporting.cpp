#include "runtime/exporting.h"

#include <cctype>
#include <map>
#include <string>
#include <string_view>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "python/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

thread_local int traces = 0;

class Trace {
 public:
  Trace() {
    ++traces;
  }
  ~Trace() {
    --traces;
  }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
};

nb::object trace_for_export(const nb::callable& function, const nb::args& args, const nb::kwargs& kwargs) {
  const Trace trace;
  return function(*args, **kwargs);
}

// what: the name of an op of ours, or of another of our functions.
std::string refusal(const std::string& what) {
  return "[export] " + what +
         " cannot be exported: MLX saves primitives of its own only. Call mx's op in the exported function, and "
         "mlx_mittens.patch() for these kernels elsewhere. A result that the function captures has to be evaluated "
         "before.";
}

std::string name_of(std::string_view function) {
  return "mlx_mittens." + std::string(function);
}

// The op or function of a primitive, without prefix: mlx_mittens.rms_norm of RmsNorm.
std::string what_makes(std::string_view primitive) {
  static const std::map<std::string_view, std::string_view> others = {
      {"AttentionUnpack", "quantized_scaled_dot_product_attention"},
      {"CacheStep", "rope_append"},  // and modules, which step aside
      {"CacheBuffer", "rope_append"},
      {"CacheRoom", "rope_append"},
      {"GatherMmVjp", "gather_mm"},
      {"LayerNormVjp", "layer_norm"},
      {"LayerNormVjpVjp", "layer_norm"},
      {"QuantizedMatmulSum", "quantized_matmul"},
      {"RecurrenceVjp", ""},  // of any of the recurrences
      {"ShortConvProduct", "short_conv_token"},
      {"SoftcapVjp", "softcap"},
      {"SoftmaxVjp", "softmax"},
      {"ScaledDotProductAttentionVjp", "scaled_dot_product_attention"},
      {"Launch", "ops.custom.launch"},
      {"MetalKernel", "simulator.metal_kernel"},
      {"RmsNormVjp", ""},  // of rms_norm or of add_rms_norm
      {"RmsNormVjpVjp", ""},  // as above
      {"Done", ""},
  };
  if (const auto found = others.find(primitive); found != others.end()) {
    return found->second.empty() ? "an op of mlx_mittens" : name_of(found->second);
  }
  std::string op;
  for (const char letter : primitive) {
    if (std::isupper(static_cast<unsigned char>(letter)) && !op.empty()) {
      op += '_';
    }
    op += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return name_of(op);
}

// Which primitive of ours MLX complains about, without its prefix; empty where it complains about something else.
std::string_view unknown_primitive(std::string_view message) {
  constexpr std::string_view begin = "[export_function] Unable to ", prefix = "primitive Mittens";
  const size_t at = message.find(prefix);
  return message.starts_with(begin) && at != std::string_view::npos ? message.substr(at + prefix.size()) : "";
}

constexpr const char* kExportErrorDoc = R"(An op of mlx_mittens in a function that MLX exports.

Example:
    >>> try:
    ...     mx.export_function("norm.mlxfn", lambda x: mm.rms_norm(x, None, 1e-5), mx.ones((2, 8)))
    ... except mm.ExportError as error:
    ...     print(str(error).partition(":")[0])
    [export] mlx_mittens.rms_norm cannot be exported
)";

void bind(nb::module_& module) {
  static const nb::handle type =
      PyErr_NewExceptionWithDoc("mlx_mittens.ExportError", kExportErrorDoc, PyExc_ValueError, nullptr);
  module.attr("ExportError") = type;
  // mlx.core's functions share the translators: where neither the patch nor a module of ours is used, nothing marks a
  // trace for export, and MLX itself finds our primitive.
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const ExportError& error) {
      PyErr_SetString(type.ptr(), error.what());
    } catch (const std::invalid_argument& error) {
      const std::string_view primitive = unknown_primitive(error.what());
      if (primitive.empty()) {
        throw;
      }
      PyErr_SetString(type.ptr(), refusal(what_makes(primitive)).c_str());
    }
  });
  module.def("what_makes", &what_makes, "primitive"_a, "What the message of an export calls a primitive of ours.");
  module.def("exporting", &exporting, "Whether this thread traces a function for export.");
  module.def("trace_for_export", &trace_for_export, "function"_a, "args"_a, "kwargs"_a,
             "Calls a function, while exporting() is true on this thread.");
}

const Register registered(bind);

}  // namespace

ExportError::ExportError(const char* op) : std::invalid_argument(refusal(name_of(op))) {}

bool exporting() {
  return traces > 0;
}

}  // namespace mittens
