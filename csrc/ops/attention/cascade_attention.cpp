#include <optional>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "cascade_attention";

// Results over parts of the keys, weighted by their sums of e^score. A row that sees no key of either is 0.
mx::array merged(const std::tuple<mx::array, mx::array>& first, const std::tuple<mx::array, mx::array>& second,
                 mx::Stream s) {
  const mx::array total = mx::logaddexp(std::get<1>(first), std::get<1>(second), s);
  const mx::array base = mx::where(mx::isneginf(total, s), mx::array(0.0f), total, s);
  const auto weighted = [&](const std::tuple<mx::array, mx::array>& part) {
    const auto& [y, sums] = part;
    const mx::array weights = mx::expand_dims(mx::exp(mx::subtract(sums, base, s), s), -1, s);
    return mx::multiply(mx::astype(y, mx::float32, s), weights, s);
  };
  return mx::astype(mx::add(weighted(first), weighted(second), s), std::get<0>(first).dtype(), s);
}

// [batch, heads, queries, ..] to [1, heads, batch * queries, ..] and back.
mx::array joined(const mx::array& rows, mx::Stream s) {
  return mx::expand_dims(mx::flatten(mx::swapaxes(rows, 0, 1, s), 1, 2, s), 0, s);
}
mx::array parted(const mx::array& rows, int batch, int queries, mx::Stream s) {
  return mx::swapaxes(mx::unflatten(mx::squeeze(rows, 0, s), 1, {batch, queries}, s), 0, 1, s);
}

mx::array cascade_attention(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& prefix_k,
                            const mx::array& prefix_v, float scale, const MaskArgument& mask,
                            const std::optional<mx::array>& sinks, const std::optional<mx::array>& starts,
                            const std::optional<mx::array>& ends, mx::StreamOrDevice where) {
  const mx::Stream s = checks::checked_stream(op, where);
  for (const auto& [name, array] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v),
                                    std::pair("prefix_k", &prefix_k), std::pair("prefix_v", &prefix_v)}) {
    if (array->ndim() != 4) {
      checks::fail(op, name, " has shape ", array->shape(), ": expected four dimensions");
    }
  }
  if (prefix_k.shape(0) != 1 || prefix_v.shape(0) != 1) {
    checks::fail(op, "prefix_k has shape ", prefix_k.shape(), ", prefix_v ", prefix_v.shape(),
                 ": expected a batch of one, which all rows share");
  }
  const auto own = std::get<1>(scaled_dot_product_attention_of(op, q, k, v, scale, mask, sinks, starts, ends, s));
  const auto shared = std::get<1>(scaled_dot_product_attention_of(op, joined(q, s), prefix_k, prefix_v, scale, {},
                                                                  std::nullopt, std::nullopt, std::nullopt, s));
  const int batch = q.shape(0), queries = q.shape(2);
  return merged({parted(std::get<0>(shared), batch, queries, s), parted(std::get<1>(shared), batch, queries, s)}, own,
                s);
}

void bind(nb::module_& module) {
  bind_function(module, op, &cascade_attention, "q"_a, "k"_a, "v"_a, "prefix_k"_a, "prefix_v"_a, nb::kw_only(),
                "scale"_a, "mask"_a.none() = nb::none(), "sinks"_a.none() = nb::none(), "starts"_a.none() = nb::none(),
                "ends"_a.none() = nb::none(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
