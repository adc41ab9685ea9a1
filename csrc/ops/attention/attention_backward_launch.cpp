#include "ops/attention/attention_backward_launch.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <memory>
#include <utility>

#include "backends/memory.h"
#include "params/attention_backward.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

const Name file = "attention/attention_backward.metal";

constexpr int widths[] = {64, 128, 256};

AttentionBackwardParams params_of(const mx::array& queries, const mx::array& keys, const mx::array& values,
                                  const mx::array* mask, const AttentionOptions& options) {
  AttentionBackwardParams params{};
  params.queries = token_rows(queries);
  params.keys = token_rows(keys);
  params.values = token_rows(values);
  if (mask) {
    params.mask = mask->dtype() == mx::bool_ ? bool_mask : additive_mask;
    params.mask_start = -span_of(*mask).offset / static_cast<int64_t>(mask->itemsize());
    std::copy_n(mask->strides().begin(), 2, params.mask_strides);
    params.mask_row_bytes = mask->strides(2) * static_cast<int64_t>(mask->itemsize());
    params.mask_key = static_cast<int32_t>(mask->strides(3));
  }
  params.batches = queries.shape(0);
  params.heads = queries.shape(1);
  params.key_heads = keys.shape(1);
  params.ratio = params.heads / params.key_heads;
  params.rows = queries.shape(2);
  params.columns = keys.shape(2);
  params.width = queries.shape(3);
  const bool causal = options.causal || options.window > 0;
  params.seen_end = static_cast<int32_t>(causal ? params.columns - params.rows + 1 : params.columns);
  params.seen_begin = options.window > 0 ? params.seen_end - options.window : -static_cast<int32_t>(params.rows);
  params.has_sinks = options.has_sinks;
  params.scale = options.scale;
  return params;
}

Launch launch_of(Name kernel, Size3 threadgroups, uint32_t threads = 32 * kBackwardSimdgroups) {
  Launch launch;
  launch.file = file;
  launch.kernel = kernel;
  launch.threadgroups = threadgroups;
  launch.threads = {threads, 1, 1};
  return launch;
}

void add_mask(Launch& launch, const mx::array* mask, const mx::array& other) {
  mask ? add_view(launch, *mask) : (void)launch.stand_in(other);
}

}  // namespace

int attention_backward_width(const mx::Shape& queries, const mx::Shape& values) {
  const int width = std::max(queries[3], values[3]);
  const auto* fitting = std::find_if(std::begin(widths), std::end(widths), [&](int w) { return w >= width; });
  return fitting == std::end(widths) ? 0 : *fitting;
}

mx::array with_near_rows(const mx::array& rows, mx::Stream stream) {
  const int64_t furthest = std::max(rows.shape(2) - 1, 0) * rows.strides(2) + rows.shape(3);
  return furthest > std::numeric_limits<int32_t>::max() ? contiguous(rows, stream) : with_rows(rows, 16, stream);
}

std::vector<Launch> attention_backward_launches(const BackwardArrays& arrays, const std::vector<mx::array>& outputs,
                                                const AttentionOptions& options, const WantedGradients& wanted,
                                                mx::Stream stream) {
  const mx::Dtype dtype = arrays.queries.dtype();
  const uint32_t width = arrays.queries.shape(3);
  AttentionBackwardParams params = params_of(arrays.queries, arrays.keys, arrays.values, arrays.mask, options);
  params.y = token_rows(arrays.y);
  params.dy = token_rows(arrays.dy);
  size_t next = 0;
  const auto take = [&](bool is_wanted) { return is_wanted ? &outputs[next++] : nullptr; };
  const mx::array *dq = take(wanted.queries), *dk = take(wanted.keys), *dv = take(wanted.values),
                  *dmask = take(wanted.mask), *dsinks = take(wanted.sinks);
  if (dmask) {
    std::copy_n(dmask->shape().begin(), 4, params.mask_sizes);
  }

  // Arrays that the launches write for each other, or that nobody wants.
  const auto own = std::make_shared<std::vector<mx::array>>();
  own->reserve(5);
  const auto take_own = [&](const mx::Shape& shape, mx::Dtype of) -> const mx::array& {
    own->push_back(temporary(shape, of, stream));
    return own->back();
  };
  const mx::array& statistics = take_own({2 * static_cast<int>(arrays.logsumexp.size())}, mx::float32);
  std::vector<Launch> launches;
  const auto add = [&](Launch launch) {
    launch.owner = own;
    launches.push_back(std::move(launch));
  };
  // A hidden weight of 0 times infinity or NaN would be NaN.
  const bool hides = arrays.mask || options.causal || options.window > 0;
  const auto finite = [&](const mx::array& rows) -> const mx::array& {
    if (!hides) {
      return rows;
    }
    const mx::array& copy = take_own(rows.shape(), dtype);
    const uint32_t count = rows.shape(2), packs = rows.shape(3) * rows.itemsize() / 16;
    Launch launch = launch_of(kernel_name(dtype, "attention", "finite"),
                              {ceil_divide(count, kBackwardSimdgroups), static_cast<uint32_t>(rows.shape(1)),
                               static_cast<uint32_t>(rows.shape(0))});
    add_view(launch, rows);
    launch.output(copy);
    launch.params(token_rows(rows));
    add(launch.params(std::array<uint32_t, 2>{count, packs}));
    return copy;
  };
  const mx::array& finite_keys = dq ? finite(arrays.keys) : arrays.keys;
  params.finite_keys = token_rows(finite_keys);
  const mx::array& finite_queries = dk ? finite(arrays.queries) : arrays.queries;
  params.finite_queries = token_rows(finite_queries);
  const auto with_inputs = [&](const char* name, uint32_t of_width, Size3 threadgroups) {
    Launch launch = launch_of(kernel_name(dtype, "attention", name, of_width), threadgroups);
    for (const mx::array* rows : {&arrays.queries, &arrays.keys, &arrays.values, &arrays.dy}) {
      add_view(launch, *rows);
    }
    add_mask(launch, arrays.mask, arrays.queries);
    launch.input(statistics);
    return launch;
  };

  const uint32_t batches = params.batches, heads = params.heads;
  Launch sums = launch_of(kernel_name(dtype, "attention", "statistics"),
                          {ceil_divide(params.rows, kBackwardSimdgroups), heads, batches});
  add_view(sums, arrays.y);
  add_view(sums, arrays.dy);
  sums.input(arrays.logsumexp);
  sums.output(statistics);
  sums.params(params);
  add(std::move(sums));
  constexpr uint32_t row_block = kBackwardSimdgroups * kQueryRows;
  constexpr uint32_t key_block = kBackwardSimdgroups * kKeyRows;
  if (dq) {
    Launch launch = with_inputs("dq_", width, {ceil_divide(params.rows, row_block), heads, batches});
    add_view(launch, finite_keys);
    launch.output(*dq);
    add(launch.params(params));
  }
  const Size3 key_blocks = {ceil_divide(params.columns, key_block), params.key_heads, batches};
  const auto add_dkv = [&](const char* name, const mx::array* keys, const mx::array* values) {
    Launch launch = with_inputs(name, width, key_blocks);
    add_view(launch, finite_queries);
    launch.output_if(keys, arrays.keys).output_if(values, arrays.values);
    add(launch.params(params));
  };
  if (width < 256 && (dk || dv)) {
    add_dkv("dkv_", dk ? dk : &take_own(arrays.keys.shape(), dtype), dv ? dv : &take_own(arrays.values.shape(), dtype));
  } else {
    if (dk) {
      add_dkv("dk_", dk, nullptr);
    }
    if (dv) {
      add_dkv("dv_", nullptr, dv);
    }
  }
  if (dmask) {
    const uint32_t* sizes = params.mask_sizes;
    Launch launch = with_inputs("dmask_", width,
                                {ceil_divide(sizes[3], kMaskBlocks * key_block),
                                 ceil_divide(sizes[2], uint32_t(kQueryRows)), sizes[0] * sizes[1]});
    launch.output(*dmask);
    add(launch.params(params));
  }
  if (dsinks) {
    Launch launch = launch_of(kernel_name(dtype, "attention", "dsinks"), {heads, 1, 1}, 256);
    launch.input(*arrays.sinks);
    launch.input(arrays.logsumexp);
    launch.input(statistics);
    launch.output(*dsinks);
    add(launch.params(params));
  }
  return launches;
}

}  // namespace mittens
