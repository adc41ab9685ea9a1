#include "ops/moe/gather.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "backends/memory.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"

namespace mittens {

mx::array as_indices(const mx::array& indices, mx::Stream stream) {
  if (indices.dtype() == mx::uint32) {
    return indices;
  }
  mx::array within = indices;
  if (indices.itemsize() == 8) {
    within = mx::minimum(within, mx::array(std::numeric_limits<uint32_t>::max(), indices.dtype()), stream);
    if (indices.dtype() == mx::int64) {
      within = mx::maximum(within, mx::array(-1, mx::int64), stream);
    }
  }
  return mx::astype(within, mx::uint32, stream);
}

namespace {

mx::Shape batch_of(const mx::array& array) {
  return {array.shape().begin(), array.shape().end() - 2};
}

// All of a batch.
mx::array all_of(const mx::Shape& batch, mx::Stream stream) {
  int size = 1;
  for (int n : batch) {
    size *= n;
  }
  return mx::reshape(mx::arange(0, size, 1, mx::uint32, stream), batch, stream);
}

// Whether pairs of one input are neighbours: the first axes are the batch's, which is 1 along the others.
bool are_neighbours(const mx::Shape& batch, const mx::Shape& pairs) {
  if (batch.size() != pairs.size()) {
    return std::all_of(batch.begin(), batch.end(), [](int n) { return n == 1; });
  }
  const auto first = std::mismatch(batch.begin(), batch.end(), pairs.begin()).first;
  return std::all_of(first, batch.end(), [](int n) { return n == 1; });
}

mx::array with_shape(const mx::array& array, const mx::Shape& shape, mx::Stream stream) {
  return array.shape() == shape ? array : mx::broadcast_to(array, shape, stream);
}

uint32_t size_of_batch(const mx::array& array) {
  return static_cast<uint32_t>(leading_size(array, 2));
}

// Whether each index is below `count`, [pairs.., 1, 1].
mx::array in_range(const mx::array& indices, uint32_t count, mx::Stream stream) {
  return mx::expand_dims(mx::less(indices, mx::array(count, mx::uint32), stream), {-2, -1}, stream);
}

mx::array clipped(const mx::array& indices, uint32_t count, mx::Stream stream) {
  return mx::minimum(indices, mx::array(count - 1, mx::uint32), stream);
}

// The pairs of each of `batch` inputs, where they have no indices of inputs.
size_t pairs_per_input(const Pairs& pairs, size_t batch) {
  return batch > 0 ? std::max<size_t>(pairs.experts.size() / batch, 1) : 1;
}

// Which input each pair has where pairs do not say it.
mx::array implied_inputs(const mx::Shape& batch, const mx::Shape& pairs, mx::Stream stream) {
  return with_shape(all_of(batch.size() == pairs.size() ? batch : mx::Shape(pairs.size(), 1), stream), pairs, stream);
}

}  // namespace

void check_indices(const char* op, const std::optional<mx::array>& lhs_indices,
                   const std::optional<mx::array>& rhs_indices) {
  for (const auto& [name, indices] : {std::pair("lhs_indices", &lhs_indices), std::pair("rhs_indices", &rhs_indices)}) {
    if (*indices && !mx::issubdtype((*indices)->dtype(), mx::integer)) {
      checks::fail<DtypeError>(op, name, " has dtype ", (*indices)->dtype(), ": expected integers");
    }
  }
}

const char* why_not_gathered(const mx::array& x, const Pairs& pairs, bool transpose, mx::Stream stream, bool by_tiles) {
  if (!transpose && stream.device == mx::Device::gpu) {
    return "experts that are not transposed";
  }
  return by_tiles ? nullptr : why_not_launched(pairs.experts.size(), x.shape(-2), stream);
}

ExpertSizes expert_sizes(const mx::array& x, const Pairs& pairs, const mx::array& stack, int outputs) {
  return {pairs.experts.size() * x.shape(-2), leading_size(stack, 2), static_cast<size_t>(x.shape(-1)),
          static_cast<size_t>(outputs)};
}

GatherQmmParams gather_params(const Arrays& stack, const QuantizedFormat& format, const mx::array& x, int outputs) {
  GatherQmmParams params{quantized_params(stack[0], stack[1], stack[2], format), {}, 1, 0, 0.0f, 0.0f};
  params.weights.rows = x.shape(-2);
  params.weights.columns = x.shape(-1);
  params.weights.outputs = outputs;
  return params;
}

void ExpertTiles::add_to(Launch& kernel) const {
  kernel.owner = arrays;
  kernel.input((*arrays)[0]);
  kernel.input((*arrays)[1]);
}

ExpertTiles expert_tiles(const PairParams& pairs, const mx::array& experts, const mx::array* inputs, uint32_t pair_rows,
                         const ExpertTilesPlan& plan, mx::Stream stream) {
  const auto rows = static_cast<uint32_t>(experts.size() * pair_rows);
  const auto arrays =
      std::make_shared<const Arrays>(Arrays{temporary({static_cast<int>(rows), 2}, mx::uint32, stream),
                                            temporary({static_cast<int>(plan.tiles), 4}, mx::uint32, stream)});
  Launch launch;
  launch.file = "moe/apple/expert_tiles.metal";
  launch.kernel = "expert_tiles";
  launch.threadgroups = {1, 1, 1};
  launch.threads = {kTiledExperts, 1, 1};
  launch.owner = arrays;
  launch.input(experts).input_if(inputs, inputs ? *inputs : experts);
  launch.output((*arrays)[0]).output((*arrays)[1]);
  launch.params(ExpertTilesParams{pairs, rows, pair_rows, plan.tile_rows, plan.tiles});
  return {plan, arrays, std::move(launch)};
}

Pairs gather_pairs(const char* op, const mx::array& x, const mx::array& stack,
                   const std::optional<mx::array>& lhs_indices, const std::optional<mx::array>& rhs_indices,
                   mx::Stream stream) {
  const mx::array experts = rhs_indices ? as_indices(*rhs_indices, stream) : all_of(batch_of(stack), stream);
  const mx::Shape batch = lhs_indices ? lhs_indices->shape() : batch_of(x);
  mx::Shape shape;
  try {
    shape = mx::broadcast_shapes(batch, experts.shape());
  } catch (const std::invalid_argument&) {
    checks::fail(op, lhs_indices ? "lhs_indices has shape " : "x has a batch of shape ", batch,
                 rhs_indices ? ", rhs_indices has shape " : ", the stack of matrices has shape ", experts.shape(),
                 ": expected shapes that broadcast");
  }
  Pairs pairs{with_shape(experts, shape, stream), std::nullopt};
  if (lhs_indices) {
    pairs.inputs = with_shape(as_indices(*lhs_indices, stream), shape, stream);
  } else if (!are_neighbours(batch, shape)) {
    pairs.inputs = with_shape(all_of(batch, stream), shape, stream);
  }
  return pairs;
}

mx::array input_indices(const Pairs& pairs, const mx::array& x, mx::Stream stream) {
  return pairs.inputs ? *pairs.inputs : implied_inputs(batch_of(x), pairs.experts.shape(), stream);
}

mx::array are_valid(const Pairs& pairs, const mx::array& x, const mx::array& stack, mx::Stream stream) {
  const mx::array valid = in_range(pairs.experts, size_of_batch(stack), stream);
  return mx::logical_and(valid, in_range(input_indices(pairs, x, stream), size_of_batch(x), stream), stream);
}

cpu::Gather native_gather(const Pairs& pairs, const mx::array& x, const mx::array& stack, int outputs) {
  const size_t batch = leading_size(x, 2);
  return {
      .matrices = pairs.experts.data<uint32_t>(),
      .inputs = pairs.inputs ? pairs.inputs->data<uint32_t>() : nullptr,
      .pairs_per_input = pairs_per_input(pairs, batch),
      .pairs = pairs.experts.size(),
      .stack = leading_size(stack, 2),
      .input_count = batch,
      .rows = static_cast<size_t>(x.shape(-2)),
      .columns = static_cast<size_t>(x.shape(-1)),
      .outputs = static_cast<size_t>(outputs),
  };
}

void check_bias_of_experts(const char* op, const char* name, const mx::array& bias, const mx::array& w) {
  const mx::Shape expected(w.shape().begin(), w.shape().end() - 1);
  if (bias.shape() != expected) {
    checks::fail(op, name, " has shape ", bias.shape(), ", w has shape ", w.shape(), ": expected shape ", expected);
  }
}

mx::array plus_bias_of_experts(const mx::array& y, const mx::array& bias, const std::optional<mx::array>& indices,
                               mx::Stream stream) {
  const int outputs = bias.shape(-1);
  const mx::Shape batch(bias.shape().begin(), bias.shape().end() - 1);
  const auto experts = static_cast<uint32_t>(leading_size(bias, 1));
  const mx::array chosen = indices ? as_indices(*indices, stream) : all_of(batch, stream);
  if (experts == 0 || outputs == 0) {
    return y;
  }
  const mx::array flat = mx::reshape(bias, {static_cast<int>(experts), outputs}, stream);
  const mx::array rows = mx::take(flat, clipped(chosen, experts, stream), 0, stream);
  return mx::add(y, mx::expand_dims(rows, -2, stream), stream);
}

mx::array guarded(
    const Pairs& pairs, const mx::array& x, const mx::array& stack, const mx::Shape& shape, mx::Dtype dtype,
    const std::function<mx::array(const std::optional<mx::array>& inputs, const mx::array& experts)>& product,
    mx::Stream stream) {
  const bool is_empty = std::count(shape.begin(), shape.end(), 0) > 0;
  if (is_empty || x.shape(-1) == 0) {
    return mx::zeros(shape, dtype, stream);
  }
  const uint32_t inputs = size_of_batch(x), experts = size_of_batch(stack);
  const mx::array nan(std::numeric_limits<float>::quiet_NaN(), dtype);
  if (inputs == 0 || experts == 0) {
    return mx::broadcast_to(nan, shape, stream);
  }
  mx::array valid = in_range(pairs.experts, experts, stream);
  std::optional<mx::array> within;
  if (pairs.inputs) {
    valid = mx::logical_and(valid, in_range(*pairs.inputs, inputs, stream), stream);
    within = clipped(*pairs.inputs, inputs, stream);
  }
  const mx::array y = product(within, clipped(pairs.experts, experts, stream));
  return mx::where(valid, mx::astype(y, dtype, stream), nan, stream);
}

std::vector<mx::Shape> GatherPrimitive::output_shapes(const Arrays& inputs) {
  const Pairs pairs = pairs_of(inputs);
  mx::Shape shape = pairs.experts.shape();
  if (!pairs.inputs && !are_neighbours(batch_of(inputs[0]), shape)) {
    checks::fail(name(), "x has a batch of shape ", batch_of(inputs[0]), ", the indices have shape ", shape,
                 ": expected the shapes that the function was compiled for");
  }
  shape.push_back(inputs[0].shape(-2));
  shape.push_back(outputs_of(inputs));
  return {shape};
}

std::vector<Launch> GatherPrimitive::native_alone(const Arrays& inputs, Arrays& outputs) {
  if (stream().device == mx::Device::gpu) {
    checks::fail<std::logic_error>(name(), "has no kernel for these experts");
  }
  mx::cpu::get_command_encoder(stream()).dispatch(native(inputs, outputs));
  return {};
}

void GatherPrimitive::add_pairs(Launch& launch, const Arrays& inputs) const {
  const mx::array& experts = inputs[1 + stacks_];
  const bool has_inputs = inputs.size() > 2 + stacks_;
  launch.input(experts);
  launch.input_if(has_inputs, has_inputs ? inputs[2 + stacks_] : experts);
}

PairParams GatherPrimitive::pair_params(const Arrays& inputs) const {
  const Pairs pairs = pairs_of(inputs);
  const size_t batch = leading_size(inputs[0], 2);
  return {static_cast<uint32_t>(leading_size(inputs[1], 2)), static_cast<uint32_t>(batch),
          static_cast<uint32_t>(pairs_per_input(pairs, batch)), pairs.inputs.has_value()};
}

GatherQmmParams GatherPrimitive::tiled_params(const Arrays& inputs, const QuantizedFormat& format) const {
  GatherQmmParams params = gather_params(stacks_of(inputs), format, inputs[0], outputs_of(inputs));
  params.pairs = pair_params(inputs);
  return params;
}

std::optional<ExpertTiles> GatherPrimitive::tiles_of(const Arrays& inputs, uint32_t tile_rows) {
  constexpr size_t most_elements = std::numeric_limits<uint32_t>::max();  // that kernels count in x
  const mx::array& x = inputs[0];
  const ExpertSizes sizes = expert_sizes(x, pairs_of(inputs), inputs[1], outputs_of(inputs));
  if (x.size() == 0 || x.size() > most_elements || !takes_expert_tiles(sizes, tiled_matrices(inputs[1]), stream())) {
    return std::nullopt;
  }
  const size_t at = 1 + stacks_;
  return expert_tiles(pair_params(inputs), inputs[at], inputs.size() > at + 1 ? &inputs[at + 1] : nullptr,
                      static_cast<uint32_t>(x.shape(-2)), plan_expert_tiles(tile_rows, sizes), stream());
}

bool GatherPrimitive::shares_pairs(const Arrays& inputs, const QuantizedFormat& format, uint32_t matrices) const {
  constexpr size_t most_elements = std::numeric_limits<uint32_t>::max();  // that kernels count in x
  const size_t elements = inputs[0].size();
  return elements > 0 && elements <= most_elements &&
         shares_experts(format, matrices, pairs_of(inputs).experts.size(), leading_size(inputs[1], 2));
}

const Arrays& GatherPrimitive::prepared(const Arrays& inputs, Arrays& copies) {
  copies = stacks_of(inputs);
  prepare_stacks(copies);
  copies.insert(copies.begin(), contiguous_rows(inputs[0], stream()));
  for (size_t i = 1 + stacks_; i < inputs.size(); ++i) {
    copies.push_back(contiguous_rows(inputs[i], stream()));
  }
  return copies;
}

GatherQmmParams GatherPrimitive::share_out_pairs(Launch& launch, const Arrays& inputs, const QuantizedFormat& format,
                                                 uint32_t simdgroup_outputs) {
  GatherQmmParams params = gather_params(stacks_of(inputs), format, inputs[0], outputs_of(inputs));
  params.pairs = pair_params(inputs);
  params.weights.matrices = static_cast<uint32_t>(pairs_of(inputs).experts.size());
  mittens::share_out_pairs(launch, sizes_of(params.weights), simdgroup_outputs, stream());
  return params;
}

Arrays GatherPrimitive::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
                            const Arrays& outputs) {
  const mx::array& x = primals[0];
  const mx::array& dy = cotangents[0];
  const Pairs pairs = pairs_of(primals);
  Arrays gradients;
  for (int argument : argnums) {
    std::optional<mx::array> of_pairs;
    if (argument == 0 && dy.size() > 0 && x.size() > 0) {
      of_pairs = transposed(dy, stacks_of(primals), pairs.experts);
    }
    if (!of_pairs) {
      gradients.push_back(KernelPrimitive::vjp(primals, cotangents, {argument}, outputs)[0]);
      continue;
    }
    // NaN stood where an index is out of range, whatever x is there.
    const int batch = static_cast<int>(size_of_batch(x)), rows = x.shape(-2), columns = x.shape(-1);
    const mx::array valid = are_valid(pairs, x, primals[1], stream());
    const mx::array wide = mx::astype(*of_pairs, mx::float32, stream());
    const mx::array terms = mx::where(valid, wide, mx::zeros_like(wide, stream()), stream());
    const int count = static_cast<int>(pairs.experts.size());
    auto sum_by_input = [&] {
      if (!pairs.inputs) {  // pairs of one input are neighbours
        const mx::array of_inputs = mx::reshape(terms, {batch, count / batch, rows, columns}, stream());
        return count == batch ? of_inputs : mx::sum(of_inputs, 1, false, stream());
      }
      return mx::scatter_add(mx::zeros({batch, rows, columns}, mx::float32, stream()),
                             mx::reshape(clipped(*pairs.inputs, batch, stream()), {count}, stream()),
                             mx::reshape(terms, {count, 1, rows, columns}, stream()), 0, stream());
    };
    const mx::array sum = sum_by_input();
    gradients.push_back(mx::astype(mx::reshape(sum, x.shape(), stream()), x.dtype(), stream()));
  }
  return gradients;
}

std::pair<Arrays, std::vector<int>> GatherPrimitive::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  int size = 0;
  Arrays batched = inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) {
      batched[i] = mx::moveaxis(inputs[i], axes[i], 0, stream());
      size = batched[i].shape(0);
    }
  }
  auto broadcast = [&](const mx::array& array, bool is_batched) {
    if (is_batched) {
      return array;
    }
    mx::Shape shape = array.shape();
    shape.insert(shape.begin(), size);
    return mx::broadcast_to(array, shape, stream());
  };
  // Element b's indices begin at b times `count`. Indices out of range stay out of range.
  auto moved = [&](const mx::array& indices, uint32_t count) {
    mx::Shape shape(indices.ndim(), 1);
    shape[0] = size;
    const mx::array first = mx::multiply(mx::reshape(mx::arange(0, size, 1, mx::uint32, stream()), shape, stream()),
                                         mx::array(count, mx::uint32), stream());
    const mx::array valid = mx::less(indices, mx::array(count, mx::uint32), stream());
    return mx::where(valid, mx::add(indices, first, stream()),
                     mx::array(std::numeric_limits<uint32_t>::max(), mx::uint32), stream());
  };
  const size_t at = 1 + stacks_;
  const bool of_x = axes[0] >= 0, of_inputs = inputs.size() > at + 1 && axes[at + 1] >= 0;
  bool of_stacks = false;
  for (size_t i = 1; i < at; ++i) {
    of_stacks = of_stacks || axes[i] >= 0;
  }
  Pairs pairs{broadcast(batched[at], axes[at] >= 0), std::nullopt};
  if (inputs.size() > at + 1) {
    pairs.inputs = broadcast(batched[at + 1], of_inputs);
  } else {
    mx::Shape batch = inputs[0].shape(), shape = inputs[at].shape();
    if (of_x) {
      batch.erase(batch.begin() + axes[0]);
    }
    if (axes[at] >= 0) {
      shape.erase(shape.begin() + axes[at]);
    }
    batch.resize(batch.size() - 2);
    pairs.inputs = broadcast(implied_inputs(batch, shape, stream()), false);
  }
  if (of_x) {
    uint32_t count = 1;
    for (size_t d = 1; d + 2 < batched[0].ndim(); ++d) {
      count *= static_cast<uint32_t>(batched[0].shape(static_cast<int>(d)));
    }
    pairs.inputs = moved(*pairs.inputs, count);
  }
  Arrays stacks = {batched.begin() + 1, batched.begin() + static_cast<ptrdiff_t>(at)};
  if (of_stacks) {
    for (size_t i = 0; i < stacks_; ++i) {
      stacks[i] = broadcast(stacks[i], axes[1 + i] >= 0);
    }
    pairs.experts = moved(pairs.experts, size > 0 ? size_of_batch(stacks[0]) / size : 0);
  }
  const Problem batch = problem(batched[0], stacks, pairs);
  const uint32_t matrices = tiled_matrices(stacks[0]);
  const bool by_tiles = takes_expert_tiles(sizes_of(batch), matrices, stream());
  const bool is_covered = !why_not_gathered(batched[0], pairs, true, stream(), by_tiles);
  if (!is_covered || prefer_mx_experts(batch, matrices, stream())) {
    return {composed(gather_inputs(batched[0], stacks, pairs)), {0}};
  }
  return {{apply(batched[0], stacks, pairs)}, {0}};
}

Arrays gather_inputs(const mx::array& x, Arrays stacks, const Pairs& pairs) {
  stacks.insert(stacks.begin(), x);
  stacks.push_back(pairs.experts);
  if (pairs.inputs) {
    stacks.push_back(*pairs.inputs);
  }
  return stacks;
}

}  // namespace mittens
