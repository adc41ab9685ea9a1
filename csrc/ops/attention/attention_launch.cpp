#include "ops/attention/attention_launch.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>

#include "backends/memory.h"
#include "ops/attention/plan.h"
#include "params/attention.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

const Name decode_file = "attention/attention_decode.metal";
const Name decode_tiles_file = "attention/attention_mma.metal";
const Name decode_packed_file = "attention/attention_decode_packed.metal";
const Name combine_file = "attention/attention_combine.metal";
const Name prefill_file = "attention/attention_prefill.metal";

constexpr int widths[] = {64, 72, 80, 96, 128, 192, 256};

// Binds a view of any strides and says where its first element is from the lowest that is read.
int64_t bind_view(Launch& launch, const mx::array& view) {
  const Span span = span_of(view);
  launch.input(view, span.offset, span.bytes);
  return -span.offset / static_cast<int64_t>(view.itemsize());
}

// Whether rows and all that is before them start on multiples of so many bytes, a power of two.
bool has_aligned_rows(const mx::array& view, int64_t bytes) {
  const int64_t past = bytes - 1;
  const int64_t item = view.itemsize();
  if (view.flags().row_contiguous && ((view.offset() | view.shape(-1) * item) & past) == 0) {
    return true;
  }
  bool aligned = (view.offset() & past) == 0;
  for (int d = 0; d + 1 < static_cast<int>(view.ndim()); ++d) {
    aligned = aligned && (view.shape(d) == 1 || (view.strides(d) * item & past) == 0);
  }
  return aligned;
}

void set_strides(int64_t* strides, const mx::array& array, int count) {
  std::copy_n(array.strides().begin(), count, strides);
}

// A view of keys or values, of which the strides of batch, head and token are wanted.
int64_t bind_rows(Launch& launch, const mx::array& rows, int64_t (&strides)[2], int32_t& stride) {
  set_strides(strides, rows, 2);
  stride = static_cast<int32_t>(rows.strides(2));
  return bind_view(launch, rows);
}

AttentionParams params_of(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype) {
  constexpr double log2e = 1.4426950408889634;
  AttentionParams params{};
  params.batches = sizes.batches;
  params.heads = sizes.heads;
  params.key_heads = sizes.key_heads;
  params.ratio = sizes.ratio();
  params.queries = sizes.queries;
  params.keys = sizes.keys;
  params.width = sizes.width;
  params.first_key = first_key(sizes, options);
  params.window = std::max(options.window, 0);
  params.causal = options.causal || params.window > 0;
  params.every_row_sees = params.causal && !options.has_mask && sizes.queries <= sizes.keys;
  params.has_sinks = options.has_sinks;
  params.scale = dtype == mx::float32 ? options.scale : static_cast<float>(options.scale * log2e);
  return params;
}

// Binds queries, keys, values, mask and sinks in the order of the kernels' arguments; the queries stand in for what is
// not there.
void bind_inputs(Launch& launch, const std::vector<mx::array>& inputs, const AttentionOptions& options,
                 AttentionParams& params) {
  const mx::array& queries = inputs[0];
  size_t next = 1;
  params.query_start = bind_view(launch, queries);
  set_strides(params.query_strides, queries, 3);
  params.queries_aligned = has_aligned_rows(queries, 16);
  params.aligned = true;
  if (options.bits == 0) {
    const mx::array& keys = inputs[next++];
    const mx::array& values = inputs[next++];
    params.key_start = bind_rows(launch, keys, params.key_strides, params.key_stride);
    params.value_start = bind_rows(launch, values, params.value_strides, params.value_stride);
    params.aligned = has_aligned_rows(keys, 16) && has_aligned_rows(values, 16);
  } else {
    params.group_shift = std::countr_zero(static_cast<uint32_t>(options.group_size));
    for (int i = 1; i <= 6; ++i) {
      params.aligned = params.aligned && has_aligned_rows(inputs[i], i % 3 == 1 ? 16 : 4);  // of scales and biases two
    }
    params.key_start = bind_rows(launch, inputs[next++], params.key_strides, params.key_stride);
    params.key_scales_start = bind_rows(launch, inputs[next++], params.key_scales_strides, params.key_scales_stride);
    params.key_biases_start = bind_rows(launch, inputs[next++], params.key_biases_strides, params.key_biases_stride);
    params.value_start = bind_rows(launch, inputs[next++], params.value_strides, params.value_stride);
    params.value_scales_start =
        bind_rows(launch, inputs[next++], params.value_scales_strides, params.value_scales_stride);
    params.value_biases_start =
        bind_rows(launch, inputs[next++], params.value_biases_strides, params.value_biases_stride);
  }
  if (options.has_mask) {
    const mx::array& mask = inputs[next++];
    params.mask = mask.dtype() == mx::bool_ ? bool_mask : additive_mask;
    params.mask_start = bind_view(launch, mask);
    set_strides(params.mask_strides, mask, 4);
  } else {
    launch.stand_in(queries);
  }
  options.has_sinks ? launch.input(inputs[next]) : launch.stand_in(queries);
}

Launch combine_launch(const mx::array& partials, const mx::array& sinks, const mx::array& y,
                      const AttentionSizes& sizes, uint32_t splits, bool has_sinks) {
  AttentionCombineParams params{};
  params.rows = static_cast<uint32_t>(sizes.rows());
  params.heads = sizes.heads;
  params.queries = sizes.queries;
  params.width = sizes.width;
  params.splits = splits;
  params.has_sinks = has_sinks;
  Launch launch;
  launch.file = combine_file;
  launch.kernel = kernel_name(y.dtype(), "attention", "combine");
  constexpr uint32_t columns = 32;  // of a threadgroup
  launch.threadgroups = {params.rows, ceil_divide(sizes.width, columns), 1};
  launch.threads = {256, 1, 1};
  launch.input(partials);
  return launch.input_if(has_sinks, sinks).output(y).params(params);
}

std::vector<Launch> decode_launches(const std::vector<mx::array>& inputs, const mx::array& y,
                                    const AttentionSizes& sizes, const AttentionOptions& options,
                                    const AttentionPlan& plan, mx::Stream stream) {
  const bool by_matrices = plan.kernel == AttentionKernel::mma;
  AttentionParams params = params_of(sizes, options, inputs[0].dtype());
  params.splits = plan.splits;
  params.keys_per_split = plan.keys_per_split;

  Launch launch;
  const mx::Dtype dtype = inputs[0].dtype();
  if (options.bits == 0) {
    launch.file = by_matrices ? decode_tiles_file : decode_file;
    launch.kernel =
        kernel_name(dtype, "attention", by_matrices ? "decode_tiles_" : "decode_", plan.width, "_", plan.rows);
  } else {
    launch.file = decode_packed_file;
    launch.kernel = by_matrices
                        ? kernel_name(dtype, "attention", "decode_tiles_", options.bits, "bit_by",
                                      std::min(options.group_size, 64), "_", plan.width, "_", plan.rows)
                        : kernel_name(dtype, "attention", "decode_", options.bits, "bit_", plan.width, "_", plan.rows);
  }
  launch.threadgroups = {plan.row_blocks, plan.splits, sizes.batches * sizes.key_heads};  // x may be the largest
  launch.threads = {32 * kDecodeSimdgroups, 1, 1};
  bind_inputs(launch, inputs, options, params);
  params.skips = sizes.is_prompt() && plan.splits == 1 &&
                 (params.mask == bool_mask || (params.mask == no_mask && params.causal && !params.every_row_sees));
  if (plan.splits == 1) {
    return in_order(launch.output(y).params(params));
  }
  const mx::Shape shape = {static_cast<int>(plan.splits), static_cast<int>(sizes.rows()),
                           static_cast<int>(sizes.width + 2)};
  const auto partials = std::make_shared<mx::array>(temporary(shape, mx::float32, stream));
  const mx::array& sinks = options.has_sinks ? inputs.back() : inputs[0];
  Launch combine = combine_launch(*partials, sinks, y, sizes, plan.splits, options.has_sinks);
  launch.owner = combine.owner = partials;
  return in_order(launch.output(*partials).params(params), std::move(combine));
}

std::vector<Launch> prefill_launches(const std::vector<mx::array>& inputs, const mx::array& y,
                                     const AttentionSizes& sizes, const AttentionOptions& options,
                                     const AttentionPlan& plan) {
  AttentionParams params = params_of(sizes, options, inputs[0].dtype());
  Launch launch;
  launch.file = prefill_file;
  launch.kernel = kernel_name(inputs[0].dtype(), "attention", "prefill_", sizes.width);
  launch.threadgroups = {plan.row_blocks, sizes.heads, sizes.batches};
  launch.threads = {32 * kPrefillSimdgroups, 1, 1};
  bind_inputs(launch, inputs, options, params);
  return in_order(launch.output(y).params(params));
}

}  // namespace

std::string attention_not_covered(const mx::Shape& queries, const mx::Shape& values) {
  const int width = queries[3];
  if (std::find(std::begin(widths), std::end(widths), width) == std::end(widths)) {
    return "heads of width " + std::to_string(width);
  }
  if (values[3] != width) {
    return "values of another width than the keys";
  }
  return "";
}

std::vector<Launch> attention_launches(const std::vector<mx::array>& inputs, const mx::array& y,
                                       const AttentionOptions& options, mx::Stream stream) {
  const AttentionSizes sizes = attention_sizes(inputs[0].shape(), inputs[1].shape());
  const AttentionPlan plan = plan_attention(sizes, options, inputs[0].dtype(), stream);
  if (plan.kernel == AttentionKernel::prefill) {
    return prefill_launches(inputs, y, sizes, options, plan);
  }
  return decode_launches(inputs, y, sizes, options, plan, stream);
}

}  // namespace mittens
