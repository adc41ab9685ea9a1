#include "ops/attention/attention_launch.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <span>

#include "backends/memory.h"
#include "ops/attention/plan.h"
#include "params/attention.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

const Name dense_file = "attention/attention.metal";
const Name packed_file = "attention/attention_packed.metal";
const Name dense_ahead_file = "attention/nvidia/attention_ahead.metal";
const Name packed_ahead_file = "attention/nvidia/attention_packed_ahead.metal";
const Name dense_ragged_file = "attention/attention_ragged.metal";
const Name packed_ragged_file = "attention/attention_packed_ragged.metal";
const Name dense_paged_file = "attention/attention_paged.metal";
const Name packed_paged_file = "attention/attention_packed_paged.metal";
const Name combine_file = "attention/attention_combine.metal";
const Name cascade_file = "attention/attention_cascade.metal";

struct Widths {
  int keys;
  int values;
};
constexpr Widths dense_widths[] = {{32, 32},   {48, 48},   {64, 64},   {72, 72},   {80, 80},   {96, 64},   {96, 96},
                                   {112, 112}, {128, 128}, {192, 128}, {192, 192}, {256, 256}, {512, 512}, {576, 512}};
constexpr Widths packed_widths[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
constexpr Widths paged_widths[] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}};
constexpr Widths packed_paged_widths[] = {{64, 64}, {96, 96}, {128, 128}};  // of 8 bits

TokenRows bind_rows(Launch& launch, const mx::array& rows) {
  add_view(launch, rows);
  return token_rows(rows);
}

AttentionParams params_of(const AttentionSizes& sizes, const AttentionOptions& options, const AttentionPlan& plan,
                          mx::Dtype dtype) {
  constexpr double log2e = 1.4426950408889634;
  AttentionParams params{};
  params.batches = sizes.batches;
  params.key_heads = sizes.key_heads;
  params.ratio = sizes.ratio();
  params.queries = sizes.queries;
  params.keys = sizes.keys;
  params.value_width = sizes.value_width;
  params.first_key = plan.first_key;
  params.window = std::max(options.window, 0);
  params.causal = options.causal || params.window > 0;
  params.has_sinks = options.has_sinks;
  params.splits = plan.splits;
  params.keys_per_split = plan.keys_per_split;
  params.scale = dtype == mx::float32 ? options.scale : static_cast<float>(options.scale * log2e);
  return params;
}

// Binds queries, keys, values, mask and sinks in the order of the kernels' arguments; the queries stand in for absent
// ones.
void bind_inputs(Launch& launch, const std::vector<mx::array>& inputs, const AttentionOptions& options,
                 AttentionParams& params) {
  const mx::array& queries = inputs[0];
  size_t next = 1;
  params.query = bind_rows(launch, queries);
  if (options.bits == 0) {
    params.key = bind_rows(launch, inputs[next++]);
    params.value = bind_rows(launch, inputs[next++]);
  } else {
    params.group_shift = std::countr_zero(static_cast<uint32_t>(options.group_size));
    for (TokenRows* rows :
         {&params.key, &params.key_scale, &params.key_bias, &params.value, &params.value_scale, &params.value_bias}) {
      *rows = bind_rows(launch, inputs[next++]);
    }
  }
  if (options.has_mask) {
    const mx::array& mask = inputs[next++];
    params.mask_kind = mask.dtype() == mx::bool_ ? bool_mask : additive_mask;
    params.mask = bind_rows(launch, mask);
    params.mask_key = mask.strides(3);
  } else {
    launch.stand_in(queries);
  }
  launch.input_if(options.has_sinks, options.has_sinks ? inputs[next++] : queries);
  if (options.is_paged) {
    launch.input(inputs[next]);
    add_view(launch, inputs[next + 1]);
  } else if (options.is_ragged()) {
    launch.input_if(options.has_starts, options.has_starts ? inputs[next++] : queries);
    launch.input_if(options.has_ends, options.has_ends ? inputs[next] : queries);
  }
}

void add_params(Launch& launch, const AttentionParams& params, const AttentionOptions& options,
                const std::vector<mx::array>& inputs) {
  if (options.is_paged) {
    const mx::array& pool = inputs[1];
    const mx::array& table = inputs.back();
    launch.params(PagedAttentionParams{.blocks = static_cast<uint32_t>(pool.shape(0)),
                                       .block_shift = static_cast<uint32_t>(std::countr_zero(uint32_t(pool.shape(2)))),
                                       .table_entries = static_cast<uint32_t>(table.shape(1)),
                                       .table_row = static_cast<uint32_t>(table.shape(0) == 1 ? 0 : table.strides(0)),
                                       .attention = params});
    return;
  }
  if (!options.is_ragged()) {
    launch.params(params);
    return;
  }
  RaggedAttentionParams ragged{.has_starts = options.has_starts, .has_ends = options.has_ends, .attention = params};
  if (options.has_starts) {
    const bool of_queries = inputs[inputs.size() - 1 - options.has_ends].ndim() == 2;
    ragged.start_batch = of_queries ? params.queries : 1;
    ragged.start_query = of_queries;
  }
  launch.params(ragged);
}

Size3 combine_grid(const AttentionSizes& sizes) {
  constexpr uint32_t columns = 32;  // of a threadgroup
  return {static_cast<uint32_t>(sizes.rows()), ceil_divide(sizes.value_width, columns), 1};
}

Launch combine_launch(const mx::array& partials, const mx::array& y, const mx::array* logsumexp,
                      const AttentionSizes& sizes, uint32_t splits, uint32_t simdgroups) {
  AttentionCombineParams params{};
  params.rows = static_cast<uint32_t>(sizes.rows());
  params.width = sizes.value_width;
  params.splits = splits;
  params.has_logsumexp = logsumexp != nullptr;
  Launch launch;
  launch.file = combine_file;
  launch.kernel = kernel_name(y.dtype(), "attention", "combine_", simdgroups);
  launch.threadgroups = combine_grid(sizes);
  launch.threads = {32 * simdgroups, 1, 1};
  return launch.input(partials).output(y).output_if(logsumexp, y).params(params);
}

struct Planned {
  AttentionSizes sizes;
  AttentionPlan plan;
  AttentionParams params;
  Launch launch;
};

// A launch whose inputs are bound, its outputs and parameters not.
Planned planned(const std::vector<mx::array>& inputs, uint32_t value_width, const AttentionOptions& options,
                mx::Stream stream) {
  const mx::Dtype dtype = inputs[0].dtype();
  mx::Shape values = inputs[0].shape();
  values.back() = static_cast<int>(value_width);
  mx::Shape keys = inputs[1].shape();
  if (options.is_paged) {
    keys[2] *= inputs.back().shape(1);
  }
  Planned result{.sizes = attention_sizes(inputs[0].shape(), keys, values)};
  const AttentionSizes& sizes = result.sizes;
  result.plan = plan_attention(sizes, options, dtype, stream);
  const AttentionPlan& plan = result.plan;
  result.params = params_of(sizes, options, plan, dtype);

  Launch& launch = result.launch;
  const bool ahead = loads_ahead(plan.kernel);
  const char* const kind = options.is_paged ? "paged_" : options.is_ragged() ? "ragged_" : "";
  if (options.bits == 0) {
    launch.file = options.is_paged      ? dense_paged_file
                  : options.is_ragged() ? dense_ragged_file
                  : ahead               ? dense_ahead_file
                                        : dense_file;
    launch.kernel = kernel_name(dtype, "attention", kind, plan.name, "_", sizes.width, "_", sizes.value_width);
  } else {
    launch.file = options.is_paged      ? packed_paged_file
                  : options.is_ragged() ? packed_ragged_file
                  : ahead               ? packed_ahead_file
                                        : packed_file;
    launch.kernel = kernel_name(dtype, "attention", kind, plan.name, "_", options.bits, "bit_", sizes.width, "_",
                                sizes.value_width);
  }
  const uint32_t slices = attention_value_slices(static_cast<int>(value_width));
  // x may be the largest.
  launch.threadgroups = {plan.row_blocks, plan.splits * slices, sizes.batches * sizes.key_heads};
  launch.threads = {32 * plan.simdgroups, 1, 1};
  bind_inputs(launch, inputs, options, result.params);
  return result;
}

mx::array partials_of(const AttentionSizes& sizes, uint32_t splits, mx::Stream stream) {
  const mx::Shape shape = {static_cast<int>(splits), static_cast<int>(sizes.rows()),
                           static_cast<int>(sizes.value_width + 2)};
  return temporary(shape, mx::float32, stream);
}

void leave_parts(Planned& part, const mx::array& partials, const AttentionOptions& options,
                 const std::vector<mx::array>& inputs) {
  part.launch.output(partials).stand_in(inputs[0]);
  add_params(part.launch, part.params, options, inputs);
}

}  // namespace

TokenRows token_rows(const mx::array& rows) {
  const int64_t start = -span_of(rows).offset / static_cast<int64_t>(rows.itemsize());
  return {start, rows.strides(0), rows.strides(1), rows.strides(2)};
}

namespace {

std::string not_among(std::span<const Widths> all, const mx::Shape& queries, const mx::Shape& values) {
  const auto has = [&](Widths widths) { return widths.keys == queries[3] && widths.values == values[3]; };
  if (std::any_of(all.begin(), all.end(), has)) {
    return "";
  }
  const std::string keys = "heads of width " + std::to_string(queries[3]);
  return values[3] == queries[3] ? keys : keys + " with values of width " + std::to_string(values[3]);
}

}  // namespace

std::string attention_not_covered(const mx::Shape& queries, const mx::Shape& values, int bits) {
  return bits == 0 ? not_among(dense_widths, queries, values) : not_among(packed_widths, queries, values);
}

std::string paged_attention_not_covered(const mx::Shape& queries, const mx::Shape& values, int bits) {
  return bits == 0 ? not_among(paged_widths, queries, values) : not_among(packed_paged_widths, queries, values);
}

std::vector<Launch> attention_launches(const std::vector<mx::array>& inputs, const mx::array& y,
                                       const mx::array* logsumexp, const AttentionOptions& options, mx::Stream stream) {
  Planned all = planned(inputs, static_cast<uint32_t>(y.shape(3)), options, stream);
  Launch& launch = all.launch;
  all.params.has_logsumexp = logsumexp != nullptr;
  if (all.plan.splits == 1) {
    launch.output(y).output_if(logsumexp, inputs[0]);
    add_params(launch, all.params, options, inputs);
    return in_order(std::move(launch));
  }
  const auto partials = std::make_shared<mx::array>(partials_of(all.sizes, all.plan.splits, stream));
  Launch combine = combine_launch(*partials, y, logsumexp, all.sizes, all.plan.splits,
                                  combine_simdgroups(all.sizes, all.plan.splits, options, stream));
  launch.owner = combine.owner = partials;
  launch.output(*partials).stand_in(inputs[0]);
  add_params(launch, all.params, options, inputs);
  return in_order(std::move(launch), std::move(combine));
}

std::vector<Launch> cascade_launches(std::vector<mx::array> prefix, const AttentionOptions& prefix_options,
                                     std::vector<mx::array> own, const AttentionOptions& own_options,
                                     const mx::array& y, mx::Stream stream) {
  struct Held {
    std::vector<mx::array> prefix;
    std::vector<mx::array> own;
    std::vector<mx::array> partials;
  };
  const auto held = std::make_shared<Held>(Held{std::move(prefix), std::move(own), {}});
  const auto width = static_cast<uint32_t>(y.shape(3));
  Planned first = planned(held->prefix, width, prefix_options, stream);
  Planned second = planned(held->own, width, own_options, stream);
  const AttentionCascadeParams params{.batches = second.sizes.batches,
                                      .heads = second.sizes.heads,
                                      .queries = second.sizes.queries,
                                      .width = width,
                                      .prefix_splits = first.plan.splits,
                                      .own_splits = second.plan.splits};
  held->partials = {partials_of(first.sizes, first.plan.splits, stream),
                    partials_of(second.sizes, second.plan.splits, stream)};
  leave_parts(first, held->partials[0], prefix_options, held->prefix);
  leave_parts(second, held->partials[1], own_options, held->own);
  const uint32_t simdgroups =
      combine_simdgroups(second.sizes, params.prefix_splits + params.own_splits, own_options, stream);
  Launch last;
  last.file = cascade_file;
  last.kernel = kernel_name(y.dtype(), "attention", "cascade_", simdgroups);
  last.threadgroups = combine_grid(second.sizes);
  last.threads = {32 * simdgroups, 1, 1};
  last.input(held->partials[0]).input(held->partials[1]).output(y).params(params);
  first.launch.owner = second.launch.owner = last.owner = held;
  return in_order(std::move(first.launch), std::move(second.launch), std::move(last));
}

}  // namespace mittens
