#include <algorithm>
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

#include "cpu/adjust_logits.h"
#include "cpu/sample.h"
#include "mlx/ops.h"
#include "mlx/random.h"
#include "ops/sampling/adjustment.h"
#include "ops/sampling/composition.h"
#include "ops/sampling/plan.h"
#include "ops/sampling/sample.h"
#include "params/sampling.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/calibration.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "sample";
const Name file = "sampling/sample.metal";
const Name logprobs_file = "sampling/sample_logprobs.metal";
const Name adjusted_file = "sampling/sample_adjusted.metal";
const Name combine_kernel = "sample_combine";

constexpr int most_columns = (1 << 20) - 1;  // more exponentials would overflow a sum of 64 bits
constexpr int partial_size = kSamplePartial;

mx::Shape without_columns(const mx::array& logits) {
  mx::Shape shape = logits.shape();
  shape.pop_back();
  return shape;
}

// The least share of 2^-32 is one: 0 would keep all.
uint32_t in_shares(double top_p) {
  return static_cast<uint32_t>(std::clamp(top_p * 0x1p32, top_p > 0 ? 1.0 : 0.0, 0x1p32 - 1));
}

using Filters = cpu::SampleFilters;

Filters filters_of(const mx::array& logits, const SampleOptions& options) {
  Filters filters{};
  if (options.has_filters()) {
    filters.top_k = options.top_k < logits.shape(-1) ? static_cast<uint32_t>(options.top_k) : 0;
    filters.top_p = in_shares(options.top_p);
    filters.has_min_p = options.min_p > 0;
    filters.log_min_p = filters.has_min_p ? rounded_to(std::log(options.min_p), logits.dtype()) : 0;
  }
  return filters;
}

uint32_t packs_of(const mx::array& logits) {
  return ceil_divide(logits.shape(-1), 16 / logits.itemsize());
}

uint32_t plan_splits(const mx::array& logits, const SampleOptions& options, mx::Stream stream) {
  const size_t rows = logits.size() / logits.shape(-1);
  return options.has_filters() ? 1 : plan_sample_splits(rows, packs_of(logits), stream);
}

// A threadgroup leaves its part of a row to another launch where others share the row, or all its logits are
// normalized.
bool needs_workspace(const mx::array& logits, const SampleOptions& options, mx::Stream stream) {
  return options.logprobs == kAllLogprobs || plan_splits(logits, options, stream) > 1;
}

// The problem for calibration: rows, columns and the operations on them.
Problem sample_problem(const mx::array& logits, const SampleOptions& options, mx::Dtype dtype) {
  const bool filters = !options.greedy;
  const bool of_tokens = options.logprobs == kTokenLogprobs, of_all = options.logprobs == kAllLogprobs;
  const uint32_t format = options.greedy | of_tokens << 1 | of_all << 5 | (filters && options.top_k > 0) << 2 |
                          (filters && options.top_p > 0) << 3 | (filters && options.min_p > 0) << 4;
  return {op, dtype, format, {problem_size(leading_size(logits, 1)), problem_size(logits.shape(-1)), 1, 1}};
}

// logits [.., columns], unless greedy key [2], and the arrays of an adjustment -> tokens [..], logarithmic
// probabilities of these or of all logits if they are asked for, a workspace, and for an adjustment the adjusted logits
// and room for counts.
class Sample : public KernelPrimitive {
 public:
  Sample(mx::Stream stream, const SampleOptions& options, bool has_workspace)
      : KernelPrimitive(stream), options_(options), has_workspace_(has_workspace) {}

  const char* name() const override {
    return "MittensSample";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& sample = static_cast<const Sample&>(other);
    return options_ == sample.options_ && has_workspace_ == sample.has_workspace_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes = {without_columns(inputs[0])};
    if (options_.logprobs != kNoLogprobs) {
      shapes.push_back(options_.logprobs == kAllLogprobs ? inputs[0].shape() : shapes[0]);
    }
    if (has_workspace_) {
      shapes.push_back(workspace_shape(inputs[0]));
    }
    shapes.insert(shapes.end(), adjust_outputs(), inputs[0].shape());
    return shapes;
  }

  // The call behind adjusted logits of a greedy draw, which only penalized_logits hands out.
  std::optional<std::pair<mx::array, Adjustment>> adjustment_of(const mx::array& output) const {
    const Arrays& inputs = output.inputs();
    const AdjustOptions& adjust = options_.adjust;
    if (!adjust.has_tokens || output.dtype() != inputs[0].dtype() || options_.logprobs != kNoLogprobs) {
      return std::nullopt;
    }
    Adjustment adjustment;
    const AdjustOptions::Given given = adjust.given(inputs, 1 + !options_.greedy);
    adjustment.tokens = *given.tokens;
    adjustment.contexts = adjust.contexts;
    for (size_t i = 0; i < penalties; ++i) {
      if (adjust.contexts[i] > 0) {
        adjustment.numbers[i] = adjust.values[i];
      }
    }
    return std::pair(inputs[0], std::move(adjustment));
  }

  static Arrays outputs_of(const std::shared_ptr<Sample>& primitive, const Arrays& inputs) {
    const int logprobs = primitive->options_.logprobs;
    std::vector<mx::Dtype> dtypes = {mx::uint32};
    if (logprobs != kNoLogprobs) {
      dtypes.push_back(logprobs == kAllLogprobs ? inputs[0].dtype() : mx::float32);
    }
    dtypes.resize(dtypes.size() + primitive->has_workspace_, mx::float32);
    if (primitive->options_.adjust.any()) {
      dtypes.insert(dtypes.end(), {inputs[0].dtype(), mx::uint32});
      dtypes.resize(dtypes.size() - !primitive->options_.adjust.has_tokens, mx::uint32);
    }
    return mx::array::make_arrays(primitive->output_shapes(inputs), dtypes, primitive, inputs);
  }

 protected:
  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& logits = inputs[0];
    const mx::array& tokens = outputs[0];
    const bool of_all = options_.logprobs == kAllLogprobs;
    const mx::array* logprobs = options_.logprobs != kNoLogprobs ? &outputs[1] : nullptr;
    const mx::array* workspace = has_workspace_ ? &outputs[1 + (logprobs != nullptr)] : nullptr;
    const AdjustOptions& adjust = options_.adjust;
    const mx::array* adjusted = adjust.any() ? &outputs[outputs.size() - adjust_outputs()] : nullptr;
    const uint32_t packs = packs_of(logits);
    const uint32_t rows = logits.size() / logits.shape(-1);
    const bool greedy = options_.greedy;
    const Filters filters = filters_of(logits, options_);
    SampleParams params{
        .columns = static_cast<uint32_t>(logits.shape(-1)),
        .size = static_cast<uint32_t>(logits.size()),
        .phase = adjusted ? 0 : phase_of(logits),
        .splits = workspace ? static_cast<uint32_t>(workspace->shape(1)) : 1,
        .packs_per_split = packs,
        .greedy = greedy,
        .splits_key = options_.splits_key,
        .logprobs = static_cast<uint32_t>(options_.logprobs),
        .top_k = filters.top_k,
        .top_p = filters.top_p,
        .has_min_p = filters.has_min_p,
        .log_min_p = filters.log_min_p,
        .inverse_temperature = options_.inverse_temperature,
    };
    params.packs_per_split = ceil_divide(packs, params.splits);
    constexpr uint32_t simdgroup = 32;

    Launch sample;
    sample.file = adjusted ? adjusted_file : file;
    sample.kernel = adjusted ? kernel_name(logits.dtype(), op, "adjusted") : kernel_name(logits.dtype(), op);
    sample.threadgroups = {rows * params.splits, 1, 1};
    sample.threads = {std::min(ceil_divide(packs, simdgroup) * simdgroup, uint32_t(kSampleThreads)), 1, 1};
    sample.input(logits).input_if(!greedy, inputs[greedy ? 0 : 1]);
    if (!workspace) {
      sample.output(tokens).output_if(logprobs, logits).stand_in(logits);
    } else {
      sample.stand_in(logits).stand_in(logits).output(*workspace);
    }
    if (adjusted) {
      const AdjustOptions::Given given = adjust.given(inputs, 1 + !greedy);
      sample.output(*adjusted);
      add_counts(sample, outputs);
      add_adjustment(sample, logits, given);
      sample.params(AdjustedSampleParams{adjust_params(logits, adjust, given, params.splits), params});
    } else {
      sample.params(params);
    }
    if (!workspace) {
      return in_order(std::move(sample));
    }
    Launch combine;
    if (of_all) {
      combine.file = logprobs_file;
      combine.kernel = kernel_name(logits.dtype(), op, "logprobs");
      combine.threads = sample.threads;
      combine.threadgroups = {rows, ceil_divide(packs, combine.threads.x), 1};
      combine.input(adjusted ? *adjusted : logits).input(*workspace).output(tokens).output(*logprobs).params(params);
      return in_order(std::move(sample), std::move(combine));
    }
    combine.file = file;
    combine.kernel = combine_kernel;
    combine.threadgroups = {rows, 1, 1};
    combine.threads = {simdgroup, 1, 1};
    combine.input(*workspace).output(tokens).output_if(logprobs, *workspace).params(params);
    return in_order(std::move(sample), std::move(combine));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& logits = inputs[0];
    const size_t columns = logits.shape(-1);
    const cpu::SampleOptions options{filters_of(logits, options_), options_.inverse_temperature, options_.greedy,
                                     options_.splits_key};
    const AdjustOptions& adjust = options_.adjust;
    const AdjustOptions::Given given = adjust.given(inputs, 1 + !options.greedy);
    const cpu::Adjustment adjustment = adjust.any() ? native_adjustment(logits, adjust, given) : cpu::Adjustment{};
    void* adjusted = adjust.any() ? data_of(outputs[outputs.size() - adjust_outputs()]) : nullptr;
    return [options, adjustment, adjusted, columns, type = native_type(logits.dtype()), x = data_of(logits),
            key = options.greedy ? nullptr : inputs[1].data<uint32_t>(), tokens = outputs[0].data<uint32_t>(),
            logprobs = options_.logprobs == kTokenLogprobs ? outputs[1].data<float>() : nullptr,
            all = options_.logprobs == kAllLogprobs ? data_of(outputs[1]) : nullptr, rows = logits.size() / columns,
            counts = adjust.has_tokens ? outputs.back().data<uint32_t>() : nullptr] {
      if (adjusted) {
        cpu::adjust_logits(type, x, adjusted, counts, rows, columns, adjustment);
      }
      cpu::sample(type, adjusted ? adjusted : x, key, tokens, logprobs, all, rows, columns, options);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const auto key = options_.greedy ? std::nullopt : std::optional(inputs[1]);
    const AdjustOptions& adjust = options_.adjust;
    const mx::array logits = compose_adjusted(inputs[0], adjust, adjust.given(inputs, 1 + !options_.greedy), stream());
    Arrays outputs = compose_sample(logits, key, options_, stream());
    if (has_workspace_) {
      outputs.push_back(mx::zeros(workspace_shape(inputs[0]), mx::float32, stream()));
    }
    if (adjust.any()) {
      outputs.push_back(logits);
    }
    if (adjust.has_tokens) {
      outputs.push_back(mx::zeros(logits.shape(), mx::uint32, stream()));
    }
    return outputs;
  }

 private:
  // The adjusted logits, and counts of tokens.
  size_t adjust_outputs() const {
    return options_.adjust.any() + options_.adjust.has_tokens;
  }

  // The kernel sets the counts of its tokens alone.
  void add_counts(Launch& launch, Arrays& outputs) {
    if (options_.adjust.has_tokens) {
      launch.update(outputs.back());
    } else {
      launch.stand_in(outputs.back());
    }
  }

  mx::Shape workspace_shape(const mx::array& logits) {
    const int rows = static_cast<int>(logits.size() / std::max(logits.shape(-1), 1));
    return {rows, static_cast<int>(rows == 0 ? 1 : plan_splits(logits, options_, stream())), partial_size};
  }

  SampleOptions options_;
  bool has_workspace_;
};

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
  const bool too_large = logits.shape(-1) > most_columns || logits.size() > std::numeric_limits<uint32_t>::max();
  if (!has_kernels(dtype) || too_large) {
    fallback(op, too_large ? "too many logits" : "float64");
    return by_mx();
  }
  if (!adjust.any() && prefer_mx(sample_problem(logits, options, dtype), nullptr, stream)) {
    return by_mx();
  }
  const bool has_workspace = needs_workspace(logits, options, stream);
  return sampled(Sample::outputs_of(std::make_shared<Sample>(stream, options, has_workspace), inputs), logprobs);
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

namespace {

using Penalized = std::pair<mx::array, Adjustment>;

std::optional<Penalized> penalties_of_call(const mx::array& logits) {
  if (!is_primitive(logits, "MittensSample") || logits.primitive().stream() != checks::checked_stream(op, {})) {
    return std::nullopt;
  }
  return static_cast<const Sample&>(logits.primitive()).adjustment_of(logits);
}

// The rows that row `row` alone is a view of; none where it is no such view.
const mx::array* rows_behind(const mx::array& view, int row) {
  if (!is_primitive(view, "Slice")) {
    return nullptr;
  }
  const mx::array& rows = view.inputs()[0];
  const auto [start, stop, strides] = static_cast<const mx::Slice&>(view.primitive()).state();
  const bool is_row = rows.ndim() == 2 && view.shape() == mx::Shape{1, rows.shape(1)} && start == mx::Shape{row, 0} &&
                      strides == mx::Shape{1, 1};
  return is_row ? &rows : nullptr;
}

// Rows with penalties of their own, which mlx-lm's batches put together again: the logits that all are views of, with
// the last tokens of each row and its numbers.
std::optional<Penalized> penalties_of_rows(const mx::array& logits) {
  if (!is_primitive(logits, "Concatenate") || logits.ndim() != 2 || logits.is_tracer() ||
      logits.primitive().stream() != checks::checked_stream(op, {})) {
    return std::nullopt;
  }
  const Arrays& parts = logits.inputs();
  const int rows = static_cast<int>(parts.size());
  std::vector<std::optional<Adjustment>> each;
  const mx::array* whole = nullptr;
  std::array<int, penalties> contexts{};
  for (int row = 0; row < rows; ++row) {
    auto penalized = penalties_of_call(parts[row]);
    const mx::array* behind = rows_behind(penalized ? penalized->first : parts[row], row);
    if (!behind || behind->shape(0) != rows || (whole && behind->id() != whole->id())) {
      return std::nullopt;
    }
    whole = behind;
    for (size_t i = 0; penalized && i < penalties; ++i) {
      contexts[i] = std::max(contexts[i], penalized->second.contexts[i]);
    }
    each.push_back(penalized ? std::optional(std::move(penalized->second)) : std::nullopt);
  }
  const int most = *std::max_element(contexts.begin(), contexts.end());
  if (!whole || most == 0 || whole->dtype() != logits.dtype()) {
    return std::nullopt;
  }
  const mx::Stream stream = checks::checked_stream(op, {});
  Arrays tokens;
  std::array<std::vector<float>, penalties> numbers;
  for (const auto& adjustment : each) {
    const int count = adjustment ? std::min(adjustment->tokens->shape(0), most) : 0;
    for (size_t i = 0; i < penalties; ++i) {
      const int context = adjustment ? adjustment->contexts[i] : 0;
      // Fewer than others count where the row has no more.
      if (context != 0 && context != contexts[i] && context != adjustment->tokens->shape(0)) {
        return std::nullopt;
      }
      numbers[i].push_back(context ? static_cast<float>(std::get<double>(adjustment->numbers[i])) : 0.0f);
    }
    if (count < most) {
      tokens.push_back(mx::full({most - count}, -1, mx::int64, stream));
    }
    if (count > 0) {
      const int all = adjustment->tokens->shape(0);
      const mx::array& given = *adjustment->tokens;
      tokens.push_back(
          mx::astype(count < all ? mx::slice(given, {all - count}, {all}, stream) : given, mx::int64, stream));
    }
  }
  Adjustment joined{{}, mx::reshape(mx::concatenate(std::move(tokens), 0, stream), {rows, most}, stream)};
  for (size_t i = 0; i < penalties; ++i) {
    if (contexts[i] > 0) {
      joined.numbers[i] = mx::array(numbers[i].data(), {rows}, mx::float32);
      joined.contexts[i] = contexts[i];
    }
  }
  return Penalized(*whole, std::move(joined));
}

}  // namespace

std::optional<mx::array> penalized_logits(const mx::array& logits, const mx::array& tokens, int which, double penalty,
                                          int context) {
  const mx::Dtype of_tokens = tokens.dtype();
  const bool are_tokens = of_tokens == mx::int32 || of_tokens == mx::uint32 || of_tokens == mx::int64;
  if (logits.ndim() != 2 || !has_kernels(logits.dtype()) || logits.size() == 0 || logits.shape(-1) > most_columns ||
      tokens.ndim() != 1 || tokens.size() == 0 || !are_tokens || !std::isfinite(penalty) || traces_any_shape()) {
    return std::nullopt;
  }
  const mx::Stream stream = checks::checked_stream(op, {});
  auto before = penalties_of_call(logits);
  const bool joins = before && before->second.tokens->id() == tokens.id() &&
                     std::all_of(before->second.contexts.begin() + which, before->second.contexts.end(),
                                 [](int of_last) { return of_last == 0; });
  const mx::array from = joins ? before->first : logits;
  Adjustment adjustment = joins ? std::move(before->second) : Adjustment{{}, tokens};
  adjustment.numbers[which] = penalty;
  adjustment.contexts[which] = context;
  SampleOptions options{.inverse_temperature = 1, .greedy = true, .logprobs = kNoLogprobs};
  Arrays inputs = {from};
  options.adjust = add_adjustment(op, from, adjustment, inputs, stream);
  if (!options.adjust.any()) {
    return logits;
  }
  const auto primitive = std::make_shared<Sample>(stream, options, needs_workspace(from, options, stream));
  const Arrays outputs = Sample::outputs_of(primitive, inputs);
  return outputs[outputs.size() - 2];  // before the counts
}

std::pair<mx::array, mx::array> sample_with_logprobs(const mx::array& logits, double temperature, int top_k,
                                                     double top_p, double min_p, mx::StreamOrDevice where) {
  auto penalized = penalties_of_call(logits);
  if (!penalized) {
    penalized = penalties_of_rows(logits);
  }
  return std::get<1>(sample_with(penalized ? penalized->first : logits, std::nullopt, temperature, top_k, top_p, min_p,
                                 penalized ? penalized->second : Adjustment{}, kAllLogprobs, where));
}

mx::array sample_tokens(const mx::array& logits, double temperature, int top_k, double top_p, double min_p,
                        mx::StreamOrDevice where) {
  return std::get<0>(sample_with(logits, std::nullopt, temperature, top_k, top_p, min_p, {}, kNoLogprobs, where));
}

}  // namespace mittens
