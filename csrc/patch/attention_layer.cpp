// The call of an attention layer of mlx-lm's under the patch, for one token: heads change no places, and the rotary
// embedding, the append to the cache and the attention are one primitive.
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "ops/matmul/quantized_matmul.h"
#include "patch/function_wrapper.h"
#include "patch/kv_cache.h"
#include "patch/nn_module.h"
#include "python/registry.h"
#include "runtime/checks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

bool is_called_by_patch(nb::handle module) {
  static PyObject* const call = name("__call__");
  return is_patched(attribute(module.type(), call));
}

// Whether the layer's own call would reach the patch's functions, and no other's that wrap them: this does their work
// at once.
bool comes_to_patch(const nb::dict& layer, nb::handle cache, bool is_packed) {
  static PyObject* const home = name("__module__");
  static PyObject* const base = name("mlx_lm.models.base");
  static PyObject* const fast = name("mlx.core.fast");
  static PyObject* const attention = name("scaled_dot_product_attention");
  static PyObject* const packed_attention = name("quantized_scaled_dot_product_attention");
  static PyObject* const update = name("update_and_fetch");
  const nb::object of_model = member(attribute(layer.type(), home).ptr(), attention);
  return of_model.is_valid() && of_model.is(member(base, attention)) &&
         is_patched(is_packed ? member(base, packed_attention) : member(fast, attention)) &&
         is_patched(attribute(cache.type(), update));
}

// The names that layers of a kind have for their projection of the output and norms of heads; null if there is none.
struct Parts {
  PyObject* output;
  PyObject* norms[2];
};

// The norms that a layer has for its heads of queries and of keys, if one kernel can apply both.
bool read_norms(const nb::dict& layer, PyObject* const (&names)[2], Rotary& rotary, mx::Dtype dtype, int width) {
  static PyObject* const module = name("mlx.nn");
  static PyObject* const rms_norm = name("RMSNorm");
  static PyObject* const weight = name("weight");
  static PyObject* const eps = name("eps");
  const nb::object known = member(module, rms_norm);
  std::optional<mx::array>* const weights[] = {&rotary.query_norm, &rotary.key_norm};
  for (int i : {0, 1}) {
    const nb::handle norm = entry(layer, names[i]);
    if (!norm.is_valid() || !norm.type().is(known) || !is_called_by_patch(norm)) {
      return false;
    }
    *weights[i] = array(nb::borrow<nb::dict>(norm), weight);
    const float found = attribute<float>(norm, eps);
    if (!*weights[i] || (*weights[i])->dtype() != dtype || (*weights[i])->shape() != mx::Shape{width} ||
        (i == 1 && found != rotary.eps)) {
      return false;
    }
    rotary.eps = found;
  }
  return true;
}

// How a layer turns its heads, where it does so by mlx.nn.RoPE or by mlx-lm's of Llama 3.
std::optional<Rotary> rotary_of(const nb::dict& layer) {
  static PyObject* const rope = name("rope");
  static PyObject* const modules[] = {name("mlx.nn"), name("mlx_lm.models.rope_utils")};
  static PyObject* const classes[] = {name("RoPE"), name("Llama3RoPE")};
  const nb::handle found = entry(layer, rope);
  if (!found.is_valid()) {
    return std::nullopt;
  }
  const bool is_plain = found.type().is(member(modules[0], classes[0]));
  if ((!is_plain && !found.type().is(member(modules[1], classes[1]))) || !is_called_by_patch(found)) {
    return std::nullopt;
  }
  const RopeLayer turn = read_rope(nb::borrow<nb::dict>(found));
  if (turn.freqs.has_value() == is_plain) {
    return std::nullopt;
  }
  return Rotary{
      .dims = turn.dims, .base = turn.base, .scale = turn.scale, .freqs = turn.freqs, .traditional = turn.traditional};
}

// The products of x with the queries', keys' and values' layers, of mlx.nn.QuantizedLinear, in one launch.
std::optional<std::vector<mx::array>> products_in_one(const nb::object (&layers)[4], const mx::array& x) {
  static PyObject* const module = name("mlx.nn");
  static PyObject* const linear = name("QuantizedLinear");
  static PyObject* const parts[] = {name("weight"), name("scales"), name("biases")};
  static PyObject* const bias = name("bias");
  static PyObject* const group_size = name("group_size");
  static PyObject* const bits = name("bits");
  static PyObject* const mode = name("mode");
  const nb::object known = member(module, linear);
  std::vector<Arrays> matrices;
  std::vector<mx::array> added;
  for (int i = 0; i < 3; ++i) {
    const nb::object& layer = layers[i];
    if (!layer.type().is(known) || !is_called_by_patch(layer)) {
      return std::nullopt;
    }
    const bool is_alike = i == 0 || (attribute(layer, group_size).equal(attribute(layers[0], group_size)) &&
                                     attribute(layer, bits).equal(attribute(layers[0], bits)) &&
                                     attribute(layer, mode).equal(attribute(layers[0], mode)));
    if (!is_alike) {
      return std::nullopt;
    }
    const auto held = nb::borrow<nb::dict>(layer);
    Arrays& matrix = matrices.emplace_back();
    for (PyObject* part : parts) {
      if (const auto found = array(held, part)) {
        matrix.push_back(*found);
      }
    }
    if (const auto found = array(held, bias)) {
      added.push_back(*found);
    }
    if (matrix.size() < 2 || (!added.empty() && added.size() != matrices.size())) {
      return std::nullopt;
    }
  }
  try {
    return try_products_of_norm(x, matrices, attribute<std::optional<int>>(layers[0], group_size),
                                attribute<std::optional<int>>(layers[0], bits), attribute<std::string>(layers[0], mode),
                                added.empty() ? std::nullopt : std::optional(added), {});
  } catch (const std::invalid_argument&) {  // which the layers are to say
    return std::nullopt;
  }
}

nb::object attempt(const nb::dict& layer, nb::handle input, nb::handle mask, nb::handle cache, const Parts& parts) {
  static PyObject* const query_heads = name("n_heads");
  static PyObject* const scale = name("scale");
  static PyObject* const inputs[] = {name("q_proj"), name("k_proj"), name("v_proj")};
  const mx::array* x = as_array(input);
  if (!x || x->ndim() != 3 || x->shape(1) != 1 || x->is_tracer() || !mask.is_none()) {
    return nb::none();
  }
  auto held = LayerCache::of(cache);
  auto rotary = held && comes_to_patch(layer, cache, held->packing().bits != 0) ? rotary_of(layer) : std::nullopt;
  if (!rotary) {
    return nb::none();
  }
  const mx::Dtype dtype = held->dtype();
  const mx::Stream stream = checks::checked_stream("attention layer", {});
  const int heads = attribute<int>(layer, query_heads);
  const bool has_norms = parts.norms[0];
  auto attention = attention_of_token(*held, heads, attribute<float>(layer, scale), has_norms, stream);
  const int width = held->keys().back();
  if (!attention || (has_norms && !read_norms(layer, parts.norms, *rotary, dtype, width))) {
    return nb::none();
  }
  nb::object layers[4];
  for (int i = 0; i < 4; ++i) {
    layers[i] = nb::borrow(entry(layer, i < 3 ? inputs[i] : parts.output));
    if (!layers[i].is_valid()) {
      return nb::none();
    }
  }
  auto fresh = products_in_one(layers, *x);
  if (!fresh) {
    fresh.emplace();
    for (int i = 0; i < 3; ++i) {
      const nb::object made = layers[i](input);
      const mx::array* found = as_array(made);
      if (!found) {
        return nb::none();
      }
      fresh->push_back(*found);
    }
  }
  for (const mx::array& found : *fresh) {
    if (found.ndim() != 3) {
      return nb::none();
    }
  }
  if (fresh->front().shape(2) != heads * width) {
    return nb::none();
  }
  auto y = attend(*held, std::move(attention), fresh->at(0), fresh->at(1), fresh->at(2), *rotary, stream);
  return y ? layers[3](*std::move(y)) : nb::none();
}

nb::object try_attention_layer(const nb::dict& layer, nb::handle x, nb::handle mask, nb::handle cache) {
  static const Parts parts = {name("o_proj"), {}};
  return attempt(layer, x, mask, cache, parts);
}

nb::object try_normed_attention_layer(const nb::dict& layer, nb::handle x, nb::handle mask, nb::handle cache) {
  static const Parts parts = {name("o_proj"), {name("q_norm"), name("k_norm")}};
  return attempt(layer, x, mask, cache, parts);
}

nb::object try_lfm2_attention_layer(const nb::dict& layer, nb::handle x, nb::handle mask, nb::handle cache) {
  static const Parts parts = {name("out_proj"), {name("q_layernorm"), name("k_layernorm")}};
  return attempt(layer, x, mask, cache, parts);
}

void bind(nb::module_& module) {
  module.def("try_attention_layer", &try_attention_layer, "layer"_a, "x"_a, "mask"_a.none() = nb::none(),
             "cache"_a.none() = nb::none(), "mlx_lm.models.llama.Attention, and what is built like it.");
  module.def("try_normed_attention_layer", &try_normed_attention_layer, "layer"_a, "x"_a, "mask"_a.none() = nb::none(),
             "cache"_a.none() = nb::none(), "mlx_lm.models.qwen3.Attention, and what is built like it.");
  module.def("try_lfm2_attention_layer", &try_lfm2_attention_layer, "layer"_a, "x"_a, "mask"_a.none() = nb::none(),
             "cache"_a.none() = nb::none(), "mlx_lm.models.lfm2.Attention, and what is built like it.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
