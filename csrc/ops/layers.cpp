// The calls of mlx.nn's linear layers under the patch. A layer is read here: in Python that, and handing its arrays on by
// name, costs the host as much as the product.
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "ops/define.h"
#include "ops/fallback.h"
#include "ops/gemv.h"
#include "ops/quantized_matmul.h"
#include "ops/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

// A name as Python keeps it, for as long as the process lives.
PyObject* name(const char* text) {
  return PyUnicode_InternFromString(text);
}

// A layer of mlx.nn is a dict of its arrays. Nothing where there is no such array.
std::optional<mx::array> array(const nb::dict& layer, PyObject* key) {
  const nb::handle found = PyDict_GetItemWithError(layer.ptr(), key);
  if (!found.is_valid() || !nb::isinstance<mx::array>(found)) {
    return std::nullopt;
  }
  return *nb::inst_ptr<mx::array>(found);
}

// mlx.nn.Linear, and others that are a dense product.
std::optional<mx::array> attempt_linear(const nb::dict& layer, const mx::array& x) {
  static PyObject* const weight = name("weight");
  static PyObject* const bias = name("bias");
  static const auto attempt = lenient("gemv", &attempt_gemv);
  const auto w = array(layer, weight);
  return w ? attempt(*w, x, array(layer, bias), true, {}) : std::nullopt;
}

// mlx.nn.QuantizedLinear. What this leaves is mx.quantized_matmul's, which is patched as well: that one counts.
std::optional<mx::array> attempt_quantized_linear(const nb::dict& layer, const mx::array& x) {
  static PyObject* const weight = name("weight");
  static PyObject* const scales = name("scales");
  static PyObject* const biases = name("biases");
  static PyObject* const bias = name("bias");
  static const auto attempt = lenient("quantized_matmul", &attempt_quantized_matmul);
  const auto w = array(layer, weight);
  const auto s = array(layer, scales);
  if (!w || !s) {
    return std::nullopt;
  }
  const Tentative tentative;
  return attempt(x, *w, *s, array(layer, biases), true, nb::cast<std::optional<int>>(layer.attr("group_size")),
                 nb::cast<std::optional<int>>(layer.attr("bits")), nb::cast<std::string>(layer.attr("mode")),
                 array(layer, bias), {});
}

void bind(nb::module_& module) {
  module.def("attempt_linear", &attempt_linear, "layer"_a, "x"_a);
  module.def("attempt_quantized_linear", &attempt_quantized_linear, "layer"_a, "x"_a);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
