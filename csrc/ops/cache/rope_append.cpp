#include "ops/cache/rope_append.h"

#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "ops/cache/rope_append_checks.h"
#include "ops/cache/rope_append_primitive.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "rope_append";

void check_buffer(const char* name, const mx::array& buffer, const mx::array& heads, int start) {
  if (buffer.ndim() != 4) {
    checks::fail(op, name, " has shape ", buffer.shape(), ": expected four dimensions");
  }
  if (buffer.shape(0) != heads.shape(0) || buffer.shape(3) != heads.shape(3)) {
    checks::fail(op, name, " has shape ", buffer.shape(), ", heads has shape ", heads.shape(),
                 ": expected the same batch and width");
  }
  check_room(op, name, buffer, heads, start);
}

void check(const mx::array& heads, const mx::array& keys, const mx::array& values, const Rotary& rotary, int start) {
  if (heads.ndim() != 4) {
    checks::fail(op, "heads has shape ", heads.shape(), ": expected four dimensions");
  }
  check_buffer("keys", keys, heads, start);
  check_buffer("values", values, heads, start);
  if (keys.shape(1) != values.shape(1)) {
    checks::fail(op, "keys has ", keys.shape(1), " heads, values has ", values.shape(1), ": expected as many");
  }
  if (heads.shape(1) <= 2 * keys.shape(1)) {
    checks::fail(op, "heads has ", heads.shape(1), " heads: expected more than ", 2 * keys.shape(1),
                 ", the keys' and the values'");
  }
  check_rotary(op, rotary, heads);
}

using Result = std::tuple<mx::array, mx::array, mx::array>;

Result rope_append(const mx::array& heads, const mx::array& keys, const mx::array& values, const Rotary& rotary,
                   const Offset& offset, std::optional<int> start, mx::StreamOrDevice where) {
  if (!start && std::holds_alternative<mx::array>(offset)) {
    checks::fail(op, "offset is an array and start is not given: expected where in the buffers the first token goes");
  }
  const int first = start ? *start : std::get<int>(offset);
  const mx::Stream stream = checks::checked_stream(op, where);
  auto append = rope_append_of(heads, keys, values, rotary, offset, first, stream);
  CacheStep step = append ? apply_rope_append(*std::move(append))
                          : compose_rope_append(inputs_of(heads, {keys, values}, rotary, offset, stream),
                                                rope_of(rotary, offset, first, {}, false), stream);
  return {std::move(step.result), std::move(step.buffers[0]), std::move(step.buffers[1])};
}

Rotary make_rotary(int dims, std::optional<float> base, float scale, std::optional<mx::array> freqs,
                   std::optional<mx::array> query_norm, std::optional<mx::array> key_norm, float eps,
                   bool traditional) {
  return {.dims = dims,
          .base = base,
          .scale = scale,
          .freqs = std::move(freqs),
          .query_norm = std::move(query_norm),
          .key_norm = std::move(key_norm),
          .eps = eps,
          .traditional = traditional};
}

void bind(nb::module_& module) {
  nb::class_<Rotary>(module, "Rotary", "How a layer turns its heads: what stays the same from call to call.")
      .def(nb::new_(&make_rotary), "dims"_a, "base"_a = nb::none(), "scale"_a = 1.0f, "freqs"_a = nb::none(),
           "query_norm"_a = nb::none(), "key_norm"_a = nb::none(), "eps"_a = 0.0f, "traditional"_a = false)
      .def("__deepcopy__", [](const Rotary& rotary, nb::handle) { return rotary; }, "memo"_a);
  bind_function(module, op, &rope_append, "heads"_a, "keys"_a, "values"_a, "rotary"_a, "offset"_a,
                "start"_a = nb::none(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

std::optional<Append> rope_append_of(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                     const Rotary& rotary, const Offset& offset, int start, mx::Stream stream) {
  check(heads, keys, values, rotary, start);
  check_offset(op, offset, heads);
  const mx::Dtype dtype = checks::floating(op, {{"heads", heads}});
  const char* reason = has_kernels(dtype) ? nullptr : "float64";
  for (const auto& [name, array] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    if (array->dtype() != dtype) {
      checks::floating(op, {{name, *array}});
      reason = reason ? reason : "buffers of another type than the heads'";
    }
  }
  if (rotary.query_norm && (rotary.query_norm->dtype() != dtype || rotary.key_norm->dtype() != dtype)) {
    checks::floating(op, {{"heads", heads}, {"query_norm", rotary.query_norm}, {"key_norm", rotary.key_norm}});
    reason = reason ? reason : "norms of another type than the heads'";
  }
  if (reason) {
    return fallback(op, reason);
  }
  if (prefer_mx_append(heads.shape(), dtype, rotary.query_norm.has_value(), stream)) {
    return std::nullopt;
  }
  mx::Shape queries = heads.shape();
  queries[1] -= 2 * keys.shape(1);
  return Append{rope_append_primitive(rope_of(rotary, offset, start, {}, false), stream),
                inputs_of(heads, {keys, values}, rotary, offset, stream), std::move(queries), 2};
}

}  // namespace mittens
