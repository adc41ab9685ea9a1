#include "ops/sampling/sample_primitive.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "cpu/sampling/adjust_logits.h"
#include "cpu/sampling/sample.h"
#include "mlx/ops.h"
#include "ops/sampling/plan.h"
#include "params/sampling.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/primitive.h"

namespace mittens {

mx::Shape without_columns(const mx::array& logits) {
  mx::Shape shape = logits.shape();
  shape.pop_back();
  return shape;
}

namespace {

constexpr const char* op = "sample";
const Name file = "sampling/sample.metal";
const Name logprobs_file = "sampling/sample_logprobs.metal";
const Name adjusted_file = "sampling/sample_adjusted.metal";
const Name combine_kernel = "sample_combine";

constexpr int partial_size = kSamplePartial;

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

}  // namespace

Arrays sample_by_kernels(const Arrays& inputs, const SampleOptions& options, mx::Stream stream) {
  const bool has_workspace = needs_workspace(inputs[0], options, stream);
  return Sample::outputs_of(std::make_shared<Sample>(stream, options, has_workspace), inputs);
}

std::optional<Penalized> penalties_of_call(const mx::array& logits) {
  if (!is_primitive(logits, "MittensSample") || logits.primitive().stream() != checks::checked_stream(op, {})) {
    return std::nullopt;
  }
  return static_cast<const Sample&>(logits.primitive()).adjustment_of(logits);
}

}  // namespace mittens
