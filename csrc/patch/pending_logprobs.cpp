// mlx-lm's samplers, which get logits - logsumexp(logits) that nothing has computed yet.
#include <optional>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "mlx_internals/buffer_ownership.h"
#include "ops/sampling/sample.h"
#include "python/array_caster.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

// The logits behind logarithmic probabilities that nobody has asked for yet.
std::optional<mx::array> logits_of(const mx::array& logprobs) {
  if (logprobs.is_tracer() || logprobs.ndim() == 0 || !is_primitive(logprobs, "Subtract") ||
      logprobs.primitive().stream() != checks::checked_stream("sample", {}) || !is_held_alone(logprobs)) {
    return std::nullopt;
  }
  const mx::array& logits = logprobs.inputs()[0];
  const mx::array& sum = behind(logprobs.inputs()[1], "Broadcast");
  mx::Shape of_rows = logits.shape();
  of_rows.back() = 1;
  const bool is_sum = is_primitive(sum, "LogSumExp") && sum.inputs()[0].id() == logits.id() && sum.shape() == of_rows;
  return is_sum && logits.dtype() == logprobs.dtype() && logits.shape() == logprobs.shape() &&
                 has_kernels(logits.dtype())
             ? std::optional(logits)
             : std::nullopt;
}

// Tokens, whose launches also compute the logarithmic probabilities: the op's output replaces their array.
mx::array sample_logprobs(mx::array& logprobs, double temperature, int top_k, double top_p, double min_p) {
  const auto logits = logits_of(logprobs);
  if (!logits) {
    return sample_tokens(logprobs, temperature, top_k, top_p, min_p, {});
  }
  const auto [tokens, all] = sample_with_logprobs(*logits, temperature, top_k, top_p, min_p, {});
  logprobs.overwrite_descriptor(all);
  return tokens;
}

void bind(nb::module_& module) {
  module.def("sample_logprobs", &sample_logprobs, "logprobs"_a, "temperature"_a, "top_k"_a = 0, "top_p"_a = 0.0,
             "min_p"_a = 0.0);
  module.def("penalized_logits", &penalized_logits, "logits"_a, "tokens"_a, "which"_a, "penalty"_a, "context"_a);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
