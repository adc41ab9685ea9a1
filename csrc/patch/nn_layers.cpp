// The calls of mlx.nn's layers under the patch. A layer is read here: in Python that, and handing its arrays on by
// name, costs the host as much as the op.
#include <optional>
#include <string>
#include <variant>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include "ops/matmul/gemv.h"
#include "ops/matmul/quantized_embedding.h"
#include "ops/matmul/quantized_matmul.h"
#include "ops/norm/norms.h"
#include "patch/deferred_rope.h"
#include "patch/nn_module.h"
#include "patch/pending_norm.h"
#include "python/registry.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

// mlx.nn.Linear, and others that are a dense product.
std::optional<mx::array> try_linear(const nb::dict& layer, const mx::array& x) {
  static PyObject* const weight = name("weight");
  static PyObject* const bias = name("bias");
  static const auto attempt = lenient("gemv", &try_gemv, &gemv);
  const auto w = array(layer, weight);
  return w ? attempt(*w, x, array(layer, bias), true, {}) : std::nullopt;
}

// The arrays of a quantized layer, and their format.
struct QuantizedLayer {
  mx::array weight;
  mx::array scales;
  std::optional<mx::array> biases;
  std::optional<int> group_size;
  std::optional<int> bits;
  std::string mode;
};

// None where it has no such arrays.
std::optional<QuantizedLayer> read_quantized(const nb::dict& layer) {
  static PyObject* const weight = name("weight");
  static PyObject* const scales = name("scales");
  static PyObject* const biases = name("biases");
  static PyObject* const group_size = name("group_size");
  static PyObject* const bits = name("bits");
  static PyObject* const mode = name("mode");
  auto w = array(layer, weight);
  auto s = array(layer, scales);
  if (!w || !s) {
    return std::nullopt;
  }
  return QuantizedLayer{*std::move(w),
                        *std::move(s),
                        array(layer, biases),
                        attribute<std::optional<int>>(layer, group_size),
                        attribute<std::optional<int>>(layer, bits),
                        attribute<std::string>(layer, mode)};
}

// mlx.nn.QuantizedLinear. Calls that this leaves go to mx.quantized_matmul, which is patched as well and counts them.
std::optional<mx::array> try_quantized_linear(const nb::dict& layer, const mx::array& x) {
  static PyObject* const bias = name("bias");
  static const auto attempt = lenient("quantized_matmul", &try_product_of_model, &quantized_matmul);
  const auto found = read_quantized(layer);
  if (!found) {
    return std::nullopt;
  }
  const auto& [w, scales, biases, group_size, bits, mode] = *found;
  const Tentative tentative;
  return attempt(x, w, scales, biases, true, group_size, bits, mode, array(layer, bias), {});
}

// mlx.nn.QuantizedEmbedding.
std::optional<mx::array> try_quantized_embedding_layer(const nb::dict& layer, const mx::array& x) {
  static const auto attempt = lenient("quantized_embedding", &try_quantized_embedding, &quantized_embedding);
  const auto found = read_quantized(layer);
  if (!found) {
    return fallback("quantized_embedding", "a layer without arrays");
  }
  const auto& [w, scales, biases, group_size, bits, mode] = *found;
  return attempt(x, w, scales, biases, group_size, bits, mode, {});
}

// mlx.nn.RMSNorm. Calls that this leaves go to mx.fast.rms_norm, as above.
std::optional<mx::array> try_norm_layer(const nb::dict& layer, mx::array& x, float weight_offset) {
  static PyObject* const weight = name("weight");
  static PyObject* const eps = name("eps");
  static const auto attempt = lenient("rms_norm", &try_pending_rms_norm, &rms_norm);
  const auto w = array(layer, weight);
  if (!w) {
    return std::nullopt;
  }
  const Tentative tentative;
  return attempt(x, *w, attribute<float>(layer, eps), weight_offset, {});
}

std::optional<mx::array> try_rms_norm_layer(const nb::dict& layer, mx::array& x) {
  return try_norm_layer(layer, x, 0.0f);
}

// mlx-lm's norms of Gemma, whose scale is 1 + weight.
std::optional<mx::array> try_offset_rms_norm_layer(const nb::dict& layer, mx::array& x) {
  return try_norm_layer(layer, x, 1.0f);
}

// mlx.nn.RoPE, and mlx-lm's of Llama 3.
std::optional<mx::array> try_rope_layer(const nb::dict& layer, const mx::array& x,
                                        const std::variant<int, mx::array>& offset) {
  static const auto attempt = lenient("rope", &try_rope, &mx_rope);
  const RopeLayer rope = read_rope(layer);
  const Tentative tentative;
  return attempt(x, rope.dims, rope.traditional, rope.base, rope.scale, offset, rope.freqs, {});
}

void bind(nb::module_& module) {
  module.def("try_linear", &try_linear, "layer"_a, "x"_a);
  module.def("try_quantized_linear", &try_quantized_linear, "layer"_a, "x"_a);
  module.def("try_quantized_embedding_layer", &try_quantized_embedding_layer, "layer"_a, "x"_a);
  module.def("try_rms_norm_layer", &try_rms_norm_layer, "layer"_a, "x"_a);
  module.def("try_offset_rms_norm_layer", &try_offset_rms_norm_layer, "layer"_a, "x"_a);
  module.def("try_rope_layer", &try_rope_layer, "layer"_a, "x"_a, "offset"_a = 0);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
