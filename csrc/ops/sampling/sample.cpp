#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "ops/sampling/adjustment.h"
#include "ops/sampling/sample_composed.h"
#include "ops/sampling/penalties.h"
#include "ops/sampling/sample.h"
#include "ops/sampling/sample_primitive.h"
#include "params/sampling.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/calibration.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "sample";

// The problem for calibration: rows, columns and the operations on them.
Problem sample_problem(const mx::array& logits, const SampleOptions& options, mx::Dtype dtype) {
  const bool filters = !options.greedy;
  const bool of_tokens = options.logprobs == kTokenLogprobs, of_all = options.logprobs == kAllLogprobs;
  const uint32_t format = options.greedy | of_tokens << 1 | of_all << 5 | (filters && options.top_k > 0) << 2 |
                          (filters && options.top_p > 0) << 3 | (filters && options.min_p > 0) << 4;
  return {op, dtype, format, {problem_size(leading_size(logits, 1)), problem_size(logits.shape(-1)), 1, 1}};
}

// The key that mx.random splits for its next number, after which it goes on to the one after that.
mx::array next_state() {
  if (asked_plan()) {
    return stand_in({2}, mx::uint32);  // mx.random does not go on for who only asks
  }
  const nb::object random = nb::module_::import_("mlx.core").attr("random");
  const mx::array state = nb::cast<mx::array>(random.attr("state")[0]);
  random.attr("uniform")();
  return state;
}

void check_key(const mx::array& key) {
  if (key.dtype() != mx::uint32) {
    checks::fail<DtypeError>(op, "key has dtype ", key.dtype(), ": expected uint32, as mx.random.key gives");
  }
  if (key.shape() != mx::Shape{2}) {
    checks::fail(op, "key has shape ", key.shape(), ": expected (2), as mx.random.key gives");
  }
}

void check_share(const char* name, double value) {
  if (!(value >= 0 && value <= 1)) {
    checks::fail(op, name, " is ", value, ": expected a number from 0 to 1");
  }
}

using Sampled = std::variant<mx::array, std::pair<mx::array, mx::array>>;

Sampled sampled(Arrays outputs, int logprobs) {
  if (logprobs != kNoLogprobs) {
    return std::pair(std::move(outputs[0]), std::move(outputs[1]));
  }
  return std::move(outputs[0]);
}

mx::Dtype checked_dtype(const mx::array& logits) {
  if (logits.ndim() == 0) {
    checks::fail(op, "logits has no dimensions: expected at least one, the last of which is the vocabulary");
  }
  if (logits.shape(-1) == 0) {
    checks::fail(op, "logits has shape ", logits.shape(), ": expected at least one logit in a row");
  }
  return checks::floating(op, {{"logits", logits}});
}

float inverse_of(double temperature) {
  return temperature == 0 ? 1 : static_cast<float>(1 / temperature);
}

// drawn_by: the key of the tokens, or the state that is split for it; none where temperature is 0.
Sampled sample_by(const mx::array& logits, const std::optional<mx::array>& drawn_by, bool splits_key,
                  double temperature, int top_k, double top_p, double min_p, const Adjustment& adjustment, int logprobs,
                  mx::StreamOrDevice where) {
  const mx::Dtype dtype = checked_dtype(logits);
  const mx::Stream stream = checks::checked_stream(op, where);
  Arrays inputs = {logits};
  if (drawn_by) {
    inputs.push_back(*drawn_by);
  }
  const size_t before = inputs.size();
  const AdjustOptions adjust = add_adjustment(op, logits, adjustment, inputs, stream);
  const SampleOptions options{
      .inverse_temperature = inverse_of(temperature),
      .top_k = top_k,
      .top_p = top_p < 1 ? top_p : 0,
      .min_p = min_p,
      .greedy = temperature == 0,
      .logprobs = logprobs,
      .splits_key = splits_key,
      .adjust = adjust,
  };
  if (logits.size() == 0) {
    const mx::Shape shape = without_columns(logits);
    const mx::array none =
        logprobs == kAllLogprobs ? mx::zeros_like(logits, stream) : mx::zeros(shape, mx::float32, stream);
    return sampled({mx::zeros(shape, mx::uint32, stream), none}, logprobs);
  }
  const auto by_mx = [&] {
    const mx::array adjusted = compose_adjusted(logits, adjust, adjust.given(inputs, before), stream);
    return sampled(compose_sample(adjusted, drawn_by, options, stream), logprobs);
  };
  const bool too_large =
      logits.shape(-1) > most_sampled_columns || logits.size() > std::numeric_limits<uint32_t>::max();
  if (!has_kernels(dtype) || too_large) {
    fallback(op, too_large ? "too many logits" : "float64");
    return by_mx();
  }
  if (!adjust.any() && prefer_mx(sample_problem(logits, options, dtype), nullptr, stream)) {
    return by_mx();
  }
  return sampled(sample_by_kernels(inputs, options, stream), logprobs);
}

// logprobs: kNoLogprobs, kTokenLogprobs or kAllLogprobs.
Sampled sample_with(const mx::array& logits, const std::optional<mx::array>& key, double temperature, int top_k,
                    double top_p, double min_p, const Adjustment& adjustment, int logprobs, mx::StreamOrDevice where) {
  checked_dtype(logits);
  const float inverse = inverse_of(temperature);
  if (!(temperature >= 0) || !std::isfinite(inverse) || inverse == 0) {
    checks::fail(op, "temperature is ", temperature, ": expected 0 or a positive number");
  }
  if (top_k < 0) {
    checks::fail(op, "top_k is ", top_k, ": expected a positive number, or 0 to keep all");
  }
  check_share("top_p", top_p);
  check_share("min_p", min_p);
  if (key) {
    check_key(*key);
  }
  check_adjustment(op, logits, adjustment);
  checks::checked_stream(op, where);  // before mx.random goes on
  const auto by = [&](const std::optional<mx::array>& drawn_by, bool splits_key) {
    static const auto function = for_any_shape(op, &sample_by);
    return function(logits, drawn_by, splits_key, temperature, top_k, top_p, min_p, adjustment, logprobs, where);
  };
  if (temperature == 0) {
    return by(std::nullopt, false);
  }
  // mx.random goes on where a key is drawn of its state: also in a function for all shapes, once for each trace.
  return key ? by(key, false) : by(next_state(), true);
}

Sampled sample(const mx::array& logits, const std::optional<mx::array>& key, double temperature, int top_k,
               double top_p, double min_p, const std::optional<mx::array>& mask, const std::optional<mx::array>& tokens,
               const Penalty& repetition, const Penalty& presence, const Penalty& frequency,
               const std::variant<bool, std::string>& logprobs, mx::StreamOrDevice where) {
  int wanted = kNoLogprobs;
  if (const auto* name = std::get_if<std::string>(&logprobs)) {
    if (*name != "all") {
      checks::fail(op, "logprobs is \"", *name, "\": expected True, False or \"all\"");
    }
    wanted = kAllLogprobs;
  } else if (std::get<bool>(logprobs)) {
    wanted = kTokenLogprobs;
  }
  const Adjustment adjustment{mask, tokens, {repetition, presence, frequency}};
  return sample_with(logits, key, temperature, top_k, top_p, min_p, adjustment, wanted, where);
}

void bind(nb::module_& module) {
  module.def(op, &sample, "logits"_a, "key"_a = nb::none(), nb::kw_only(), "temperature"_a = 1.0, "top_k"_a = 0,
             "top_p"_a = 0.0, "min_p"_a = 0.0, "mask"_a = nb::none(), "tokens"_a = nb::none(),
             "repetition_penalty"_a = 1.0, "presence_penalty"_a = 0.0, "frequency_penalty"_a = 0.0,
             "logprobs"_a = false, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

std::pair<mx::array, mx::array> sample_with_logprobs(const mx::array& logits, double temperature, int top_k,
                                                     double top_p, double min_p, mx::StreamOrDevice where) {
  const auto penalized = pending_penalties(logits);
  return std::get<1>(sample_with(penalized ? penalized->first : logits, std::nullopt, temperature, top_k, top_p, min_p,
                                 penalized ? penalized->second : Adjustment{}, kAllLogprobs, where));
}

mx::array sample_tokens(const mx::array& logits, double temperature, int top_k, double top_p, double min_p,
                        mx::StreamOrDevice where) {
  return std::get<0>(sample_with(logits, std::nullopt, temperature, top_k, top_p, min_p, {}, kNoLogprobs, where));
}

}  // namespace mittens
