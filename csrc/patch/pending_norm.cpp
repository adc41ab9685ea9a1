#include "patch/pending_norm.h"

#include <algorithm>

#include <nanobind/nanobind.h>

#include "mlx_internals/buffer_ownership.h"
#include "ops/norm/norms.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

// Whether a sum that nothing has computed or asked for yet can be computed with its norm. A sum with one row for all is
// none: it would have to be copied.
bool is_pending_sum(const mx::array& sum, mx::Stream stream) {
  if (!is_primitive(sum, "Add") || sum.primitive().stream() != stream || sum.is_tracer() || !is_held_alone(sum)) {
    return false;
  }
  const auto is_whole = [&](const mx::array& part) {
    return part.dtype() == sum.dtype() && part.shape() == sum.shape() && !is_primitive(part, "Broadcast");
  };
  return std::all_of(sum.inputs().begin(), sum.inputs().end(), is_whole);
}

// The norm that a term of a sum is, where the sum alone needs it and one kernel can apply both norms.
std::optional<PendingRmsNorm> norm_of_term(const mx::array& term, const mx::array& sum, float eps) {
  auto norm = is_held_alone(term) && !term.is_tracer() ? pending_rms_norm(term) : std::nullopt;
  const bool is_one_kernel = norm && norm->eps == eps && term.primitive().stream() == sum.primitive().stream();
  return is_one_kernel ? norm : std::nullopt;
}

// The parts of a sum of a residual and a norm that one kernel computes, and nothing has asked for yet.
std::optional<PendingNormAdd> pending_norm_sum(const mx::array& sum, float eps, mx::Stream stream) {
  constexpr long holders = 2;  // the caller, and the norm beside it
  const bool is_free =
      is_pending(sum) && !sum.is_tracer() && sum.primitive().stream() == stream && has_holders(sum, holders);
  auto first = is_free ? pending_norm_add(sum) : std::nullopt;
  return first && first->eps == eps ? first : std::nullopt;
}

std::pair<mx::array, mx::array> norm_of_sum(const mx::array& sum, const std::optional<mx::array>& weight, float eps,
                                            float weight_offset, mx::StreamOrDevice where) {
  for (int i : {0, 1}) {
    const mx::array& other = sum.inputs()[1 - i];
    if (const auto norm = norm_of_term(sum.inputs()[i], sum, eps)) {
      return norm_add_norm(norm->x, other, norm->weight, weight, eps, norm->weight_offset, weight_offset, false, where);
    }
  }
  return add_rms_norm(sum.inputs()[0], sum.inputs()[1], weight, eps, weight_offset, where);
}

}  // namespace

// The sum becomes the kernel's, as by mx's own assignment to a part of an array: who holds its Python object sees it.
std::optional<mx::array> try_pending_rms_norm(mx::array& x, const std::optional<mx::array>& weight, float eps,
                                              float weight_offset, mx::StreamOrDevice where) {
  const bool is_one_type = x.ndim() > 0 && has_kernels(x.dtype()) && (!weight || weight->dtype() == x.dtype());
  const bool is_traced = weight && weight->is_tracer();  // the sum outlives the trace
  const mx::Stream stream = checks::checked_stream("rms_norm", where);
  if (const auto first = is_one_type && !is_traced ? pending_norm_sum(x, eps, stream) : std::nullopt) {
    const auto [y, sum] = norm_add_norm(first->x, first->residual, first->weight, weight, eps, first->weight_offset,
                                        weight_offset, first->clips, where);
    const mx::array before = x;  // whose destructor breaks the cycle of the outputs
    x.overwrite_descriptor(sum);
    return y;
  }
  if (!is_one_type || is_traced || !is_pending_sum(x, stream)) {
    return try_rms_norm(x, weight, eps, weight_offset, where);
  }
  const auto [y, sum] = norm_of_sum(x, weight, eps, weight_offset, where);
  x.overwrite_descriptor(sum);
  return y;
}

namespace {

// mx.fast.rms_norm.
std::optional<mx::array> try_mx_rms_norm(mx::array& x, const std::optional<mx::array>& weight, float eps,
                                         mx::StreamOrDevice where) {
  return try_pending_rms_norm(x, weight, eps, 0.0f, where);
}

mx::array mx_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice where) {
  return rms_norm(x, weight, eps, 0.0f, where);
}

void bind(nb::module_& module) {
  module.def("try_pending_rms_norm", lenient("rms_norm", &try_mx_rms_norm, &mx_rms_norm), "x"_a, "weight"_a.none(),
             "eps"_a, nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
