// The call of an attention layer of mlx-lm's under the patch, for one token: heads change no places, and the rotary
// embedding, the append to the cache and the attention are one primitive.
#include <nanobind/nanobind.h>

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

// Whether the layer's own call would come to the patch's functions, and to no other's that lies on them: what they do
// is done here at once.
bool comes_to_patch(const nb::dict& layer, nb::handle cache) {
  static PyObject* const home = name("__module__");
  static PyObject* const base = name("mlx_lm.models.base");
  static PyObject* const fast = name("mlx.core.fast");
  static PyObject* const attention = name("scaled_dot_product_attention");
  static PyObject* const update = name("update_and_fetch");
  const nb::object of_model = member(attribute(layer.type(), home).ptr(), attention);
  return of_model.is_valid() && of_model.is(member(base, attention)) && is_patched(member(fast, attention)) &&
         is_patched(attribute(cache.type(), update));
}

// The norms that a layer has for its heads of queries and of keys, if one kernel can apply both.
bool read_norms(const nb::dict& layer, Rotary& rotary, mx::Dtype dtype, int width) {
  static PyObject* const module = name("mlx.nn");
  static PyObject* const rms_norm = name("RMSNorm");
  static PyObject* const names[] = {name("q_norm"), name("k_norm")};
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

nb::object attempt(const nb::dict& layer, nb::handle input, nb::handle mask, nb::handle cache, bool has_norms) {
  static PyObject* const query_heads = name("n_heads");
  static PyObject* const scale = name("scale");
  static PyObject* const products[] = {name("q_proj"), name("k_proj"), name("v_proj"), name("o_proj")};
  const mx::array* x = as_array(input);
  if (!x || x->ndim() != 3 || x->shape(1) != 1 || x->is_tracer() || !mask.is_none()) {
    return nb::none();
  }
  auto held = PlainCache::of(cache);
  auto rotary = held && comes_to_patch(layer, cache) ? rotary_of(layer) : std::nullopt;
  if (!rotary) {
    return nb::none();
  }
  const mx::Dtype dtype = held->keys().dtype();
  const mx::Stream stream = checks::checked_stream("attention layer", {});
  const int heads = attribute<int>(layer, query_heads);
  auto attention = attention_of_token(*held, heads, attribute<float>(layer, scale), has_norms, stream);
  const int width = held->keys().shape(-1);
  if (!attention || (has_norms && !read_norms(layer, *rotary, dtype, width))) {
    return nb::none();
  }
  nb::object layers[4];
  for (int i = 0; i < 4; ++i) {
    layers[i] = nb::borrow(entry(layer, products[i]));
    if (!layers[i].is_valid()) {
      return nb::none();
    }
  }
  nb::object fresh[3];
  for (int i = 0; i < 3; ++i) {
    fresh[i] = layers[i](input);
    const mx::array* found = as_array(fresh[i]);
    if (!found || found->ndim() != 3 || (i == 0 && found->shape(2) != heads * width)) {
      return nb::none();
    }
  }
  auto y = attend(*held, std::move(attention), *as_array(fresh[0]), *as_array(fresh[1]), *as_array(fresh[2]), *rotary,
                  stream);
  return y ? layers[3](*std::move(y)) : nb::none();
}

nb::object try_attention_layer(const nb::dict& layer, nb::handle x, nb::handle mask, nb::handle cache) {
  return attempt(layer, x, mask, cache, false);
}

nb::object try_normed_attention_layer(const nb::dict& layer, nb::handle x, nb::handle mask, nb::handle cache) {
  return attempt(layer, x, mask, cache, true);
}

void bind(nb::module_& module) {
  module.def("try_attention_layer", &try_attention_layer, "layer"_a, "x"_a, "mask"_a.none() = nb::none(),
             "cache"_a.none() = nb::none(), "mlx_lm.models.llama.Attention, and what is built like it.");
  module.def("try_normed_attention_layer", &try_normed_attention_layer, "layer"_a, "x"_a, "mask"_a.none() = nb::none(),
             "cache"_a.none() = nb::none(), "mlx_lm.models.qwen3.Attention, and what is built like it.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
