#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "ops/cache/rope_append_checks.h"
#include "ops/cache/rope_append_primitive.h"
#include "ops/matmul/quantized_weights.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "quantized_rope_append";

using Triple = std::tuple<mx::array, mx::array, mx::array>;
using Result = std::tuple<mx::array, Triple, Triple>;

void check_packed(const char* name, const Triple& triple, const mx::array& heads, const Packing& packing, int start) {
  const auto& [words, scales, biases] = triple;
  check_packed_heads(op, name, words, scales, biases);
  const int width = heads.shape(3);
  if (width % packing.group_size != 0) {
    checks::fail(op, "heads has shape ", heads.shape(), ": expected a width that is a multiple of the group size ",
                 packing.group_size);
  }
  mx::Shape groups = words.shape();
  groups.back() = width / packing.group_size;
  if (words.shape(0) != heads.shape(0) || words.shape(3) != width / 32 * packing.bits || scales.shape() != groups ||
      biases.shape() != groups) {
    checks::fail(op, name, " has words of shape ", words.shape(), ", scales of ", scales.shape(), " and biases of ",
                 biases.shape(), ", heads has shape ", heads.shape(), ": expected the same batch, ",
                 width / 32 * packing.bits, " words a row, and scales and biases of ", groups, " for groups of ",
                 packing.group_size, " with ", packing.bits, " bits");
  }
  check_room(op, name, words, heads, start);
}

Result quantized_rope_append(const mx::array& heads, const Triple& keys, const Triple& values, const Rotary& rotary,
                             const Offset& offset, std::optional<int> start, int group_size, int bits,
                             mx::StreamOrDevice where) {
  quantized_format(op, group_size, bits, true);
  const Packing packing{group_size, bits};
  if (!start && std::holds_alternative<mx::array>(offset)) {
    checks::fail(op, "offset is an array and start is not given: expected where in the buffers the first token goes");
  }
  const int first = start ? *start : std::get<int>(offset);
  if (heads.ndim() != 4) {
    checks::fail(op, "heads has shape ", heads.shape(), ": expected four dimensions");
  }
  check_packed("keys", keys, heads, packing, first);
  check_packed("values", values, heads, packing, first);
  const int key_heads = std::get<0>(keys).shape(1), value_heads = std::get<0>(values).shape(1);
  if (key_heads != value_heads) {
    checks::fail(op, "keys has ", key_heads, " heads, values has ", value_heads, ": expected as many");
  }
  if (heads.shape(1) <= 2 * key_heads) {
    checks::fail(op, "heads has ", heads.shape(1), " heads: expected more than ", 2 * key_heads,
                 ", the keys' and the values'");
  }
  check_rotary(op, rotary, heads);
  check_offset(op, offset, heads);
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"heads", heads}});
  const Arrays buffers = {std::get<0>(keys),   std::get<1>(keys),   std::get<2>(keys),
                          std::get<0>(values), std::get<1>(values), std::get<2>(values)};
  const char* reason = bits == 1 ? "1 bit" : nullptr;
  constexpr const char* names[] = {"keys' scales", "keys' biases", "values' scales", "values' biases"};
  for (int i : {0, 1, 2, 3}) {
    const mx::array& array = buffers[1 + i + i / 2];
    checks::floating(op, {{names[i], array}});
    reason = array.dtype() != dtype ? "buffers of another type than the heads'" : reason;
  }
  if (rotary.query_norm && (rotary.query_norm->dtype() != dtype || rotary.key_norm->dtype() != dtype)) {
    checks::floating(op, {{"heads", heads}, {"query_norm", rotary.query_norm}, {"key_norm", rotary.key_norm}});
    reason = "norms of another type than the heads'";
  }
  const mx::Stream stream = checks::checked_stream(op, where);
  const Rope rope = rope_of(rotary, offset, first, packing, false);
  Arrays inputs = inputs_of(heads, buffers, rotary, offset, stream);
  std::optional<CacheStep> step;
  if (reason) {
    fallback(op, reason);
  }
  if (reason || is_switched_off(op)) {
    step = compose_rope_append(inputs, rope, stream);
  } else {
    mx::Shape queries = heads.shape();
    queries[1] -= 2 * key_heads;
    step =
        apply_rope_append({rope_append_primitive(rope, stream), std::move(inputs), std::move(queries), buffers.size()});
  }
  const Arrays& made = step->buffers;
  return {step->result, {made[0], made[1], made[2]}, {made[3], made[4], made[5]}};
}

void bind(nb::module_& module) {
  bind_function(module, op, &quantized_rope_append, "heads"_a, "keys"_a, "values"_a, "rotary"_a, "offset"_a,
                "start"_a = nb::none(), "group_size"_a = 64, "bits"_a = 8, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
