#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>

#include <nanobind/nanobind.h>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "ops/moe/gather.h"
#include "ops/moe/plan.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "gather_mm";
const Name file = "moe/gather_mm.metal";
const Name tiles_file = "moe/apple/gather_mm_tiles.metal";

// A matrix [.., columns, outputs] of b as the native code reads it: rows that lie in memory as they are, of columns (as
// mlx-lm's experts have them) or of outputs.
enum class Rows { none, of_columns, of_outputs };

Rows rows_of(const mx::array& b) {
  auto are_rows = [&](int along, int across) {
    return (b.shape(along) <= 1 || b.strides(along) == 1) && (b.shape(across) <= 1 || b.strides(across) >= 0);
  };
  return are_rows(-2, -1) ? Rows::of_columns : are_rows(-1, -2) ? Rows::of_outputs : Rows::none;
}

// Whether the kernel can read b where it lies: rows of columns, and one stride from matrix to matrix. Of no matrices
// it reads nothing.
bool has_matrices(const mx::array& b) {
  const bool are_apart = b.ndim() < 3 || (b.ndim() == 3 && b.strides(0) >= 0);
  return b.size() == 0 || (rows_of(b) == Rows::of_columns && are_apart);
}

// Whether tiles read it where it lies: rows start on 16 bytes, and offsets in a matrix fit 32 bits.
bool has_tile_rows(const mx::array& b) {
  const auto pack = static_cast<int64_t>(16 / b.itemsize());
  const int64_t matrix_stride = b.ndim() < 3 ? 0 : b.strides(-3), row_stride = b.strides(-1);
  return has_matrices(b) && row_stride % pack == 0 && matrix_stride % pack == 0 && b.offset() % 16 == 0 &&
         row_stride < (int64_t(1) << 32) / b.shape(-1);
}

// Whether an evaluated stack lies by rows of outputs: tiles would copy it.
bool lies_by_outputs(const mx::array& b) {
  return b.status() != mx::array::Status::unscheduled && rows_of(b) == Rows::of_outputs;
}

// Whether mx may be told that indices of experts are sorted: its gradient by b takes pairs along one axis then, each
// with an input of its own, and is wrong or raises for others.
bool may_be_told(const mx::array& x, const Pairs& pairs) {
  return !pairs.inputs && x.ndim() == 3 && pairs.experts.shape() == mx::Shape{x.shape(0)};
}

// In float32: mx has no other on a CPU.
mx::array compose(const mx::array& x, const mx::array& b, const Pairs& pairs, const mx::Shape& shape, bool sorted,
                  mx::Stream stream) {
  auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, stream); };
  return guarded(
      pairs, x, b, shape, x.dtype(),
      [&](const std::optional<mx::array>& lhs, const mx::array& rhs) {
        return mx::gather_mm(wide(x), wide(b), lhs, rhs, sorted && may_be_told(x, pairs), stream);
      },
      stream);
}

Problem problem_of(const mx::array& x, const mx::array& b, const Pairs& pairs, bool sorted, mx::Dtype dtype) {
  return experts_problem(op, dtype, 0, sorted, expert_sizes(x, pairs, b, b.shape(-1)));
}

class GatherMm : public GatherPrimitive {
 public:
  GatherMm(mx::Stream stream, bool sorted) : GatherPrimitive(stream, 1), sorted_(sorted) {}

  const char* name() const override {
    return "MittensGatherMm";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& product = static_cast<const GatherMm&>(other);
    return sorted_ == product.sorted_ && numerics_ == product.numerics_;
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;

  // y is linear in a, and in b. Indices have no tangents, though mx passes some.
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    const Pairs pairs = pairs_of(primals);
    mx::array sum = mx::zeros(output_shapes(primals)[0], primals[0].dtype(), stream());
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] == 0) {
        sum = mx::add(sum, apply(tangents[i], {primals[1]}, pairs), stream());
      } else if (argnums[i] == 1) {
        sum = mx::add(sum, apply(primals[0], {tangents[i]}, pairs), stream());
      }
    }
    return {sum};
  }

 protected:
  int outputs_of(const Arrays& inputs) const override {
    return inputs[1].shape(-1);
  }

  Problem problem(const mx::array& x, const Arrays& stacks, const Pairs& pairs) const override {
    return problem_of(x, stacks[0], pairs, false, x.dtype());
  }

  mx::array apply(const mx::array& x, const Arrays& stacks, const Pairs& pairs) override {
    return first_output(std::make_shared<GatherMm>(stream(), sorted_), gather_inputs(x, stacks, pairs));
  }

  std::optional<mx::array> transposed(const mx::array& dy, const Arrays& stacks, const mx::array& experts) override {
    const Arrays turned = {mx::swapaxes(stacks[0], -1, -2, stream())};
    const Pairs pairs{experts, std::nullopt};
    // A kernel sums along rows.
    return stream().device == mx::Device::gpu ? composed(gather_inputs(dy, turned, pairs))[0]
                                              : apply(dy, turned, pairs);
  }

  uint32_t tiled_matrices(const mx::array& stack) const override {
    return has_dense_expert_tiles(stack.shape(-2), stack.shape(-1), stack.dtype()) ? 1 : 0;
  }

  void prepare_stacks(Arrays& stacks) override {
    if (stacks[0].size() > 0 && rows_of(stacks[0]) == Rows::none) {
      stacks[0] = contiguous(stacks[0], stream());
    }
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const WithNumerics with(numerics_);
    const mx::array& x = inputs[0];
    auto tiles = tiles_of(inputs, dense_expert_tile_rows);
    const bool is_read = tiles ? has_tile_rows(inputs[1]) : has_matrices(inputs[1]);
    const auto copied = is_read ? nullptr : std::make_shared<const mx::array>(copy_of(inputs[1]));
    const mx::array& b = copied ? *copied : inputs[1];
    if (tiles) {
      Launch launch = tiled_launch(*tiles, inputs, b, outputs[0]);
      launch.owner = std::make_shared<const Owned>(tiles->arrays, copied);
      return in_order(std::move(tiles->launch), std::move(launch));
    }
    const auto pack = static_cast<int64_t>(16 / x.itemsize());
    const bool one_matrix = b.ndim() < 3;
    GatherMmParams params{};
    params.pairs = pair_params(inputs);
    params.matrix_stride = one_matrix ? 0 : b.strides(-3);
    params.row_stride = static_cast<uint32_t>(b.shape(-1) > 1 ? b.strides(-1) : 0);
    params.rows = x.shape(-2);
    params.columns = x.shape(-1);
    params.outputs = b.shape(-1);
    params.packs = params.columns % pack == 0 && params.row_stride % pack == 0 && params.matrix_stride % pack == 0 &&
                   b.offset() % 16 == 0;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(x.dtype(), op);
    const auto pairs = static_cast<uint32_t>(pairs_of(inputs).experts.size());
    share_out_dense(launch, {pairs, params.rows, params.columns, params.outputs});
    launch.owner = copied;
    launch.input(x);
    add_view(launch, b);
    add_pairs(launch, inputs);
    return in_order(launch.output(outputs[0]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& b = inputs[1];
    const bool transpose = rows_of(b) == Rows::of_columns;
    std::vector<const void*> stack(leading_size(b, 2));
    const char* first = static_cast<const char*>(data_of(b));
    for (size_t i = 0; i < stack.size(); ++i) {
      int64_t offset = 0;
      size_t rest = i;
      for (int d = static_cast<int>(b.ndim()) - 3; d >= 0; rest /= b.shape(d), --d) {
        offset += static_cast<int64_t>(rest % b.shape(d)) * b.strides(d);
      }
      stack[i] = first + offset * static_cast<int64_t>(b.itemsize());
    }
    const cpu::Gather gather = native_gather(inputs);
    return [type = native_type(b.dtype()), stack = std::move(stack),
            stride = static_cast<size_t>(b.strides(transpose ? -1 : -2)), transpose, gather, x = data_of(inputs[0]),
            y = data_of(outputs[0]), exact = native_mode(numerics_, gather.pairs * gather.rows).exact] {
      cpu::gather_dense(type, stack.data(), stride, transpose, gather, x, y, exact);
    };
  }

  // The arrays that a launch of tiles reads besides its inputs.
  using Owned = std::pair<std::shared_ptr<const Arrays>, std::shared_ptr<const mx::array>>;

  Launch tiled_launch(const ExpertTiles& tiles, const Arrays& inputs, const mx::array& b, mx::array& y) const {
    GatherQmmParams params{};
    params.pairs = pair_params(inputs);
    QuantizedParams& weights = params.weights;
    std::fill(std::begin(weights.batch.shape), std::end(weights.batch.shape), 1u);
    if (b.ndim() > 2) {
      weights.batch.axes = 1;
      weights.batch.shape[0] = params.pairs.matrices;
      weights.weight_strides[0] = b.strides(-3);
    }
    weights.weight_stride = static_cast<uint32_t>(b.strides(-1));
    weights.columns = b.shape(-2);
    weights.outputs = b.shape(-1);
    Launch launch;
    launch.file = tiles_file;
    launch.kernel = kernel_name(b.dtype(), op, "tiles_", tiles.plan.tile_rows);
    share_out_tiles(launch, tiles.plan, weights.outputs, 1);
    launch.input(inputs[0]);
    add_view(launch, b);
    tiles.add_to(launch);
    return launch.output(y).params(params);
  }

  // [stack, columns, outputs] in memory of [stack, outputs, columns].
  mx::array copy_of(const mx::array& b) {
    const int columns = b.shape(-2), outputs = b.shape(-1);
    const mx::array swapped = with_last_axes_swapped(b, b.shape());
    const mx::array rows = contiguous(swapped, stream());
    const int matrices = static_cast<int>(leading_size(b, 2));
    mx::array view({matrices, columns, outputs}, b.dtype(), nullptr, {});
    view.copy_shared_buffer(rows, {int64_t(columns) * outputs, 1, columns}, {}, rows.data_size());
    return view;
  }

  static mx::array with_last_axes_swapped(const mx::array& b, mx::Shape shape) {
    mx::Strides strides = b.strides();
    std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
    std::swap(strides[strides.size() - 1], strides[strides.size() - 2]);
    mx::array view(std::move(shape), b.dtype(), nullptr, {});
    view.copy_shared_buffer(b, strides, {}, b.data_size());
    return view;
  }

  Arrays composed(const Arrays& inputs) override {
    return {compose(inputs[0], inputs[1], pairs_of(inputs), output_shapes(inputs)[0], sorted_, stream())};
  }

 private:
  bool sorted_;  // the indices of experts, as the caller promised
};

// The gradient of GatherMm by b on a CPU. Inputs are x, the cotangent of y, b for its shape, the indices of experts,
// and of inputs if there are any; the output is [.., outputs, columns], as mlx-lm's experts lie.
class GatherMmVjp : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;

  static mx::array apply(const mx::array& x, const mx::array& dy, const mx::array& b, const Pairs& pairs,
                         mx::Stream stream) {
    return first_output(std::make_shared<GatherMmVjp>(stream), gather_inputs(x, {dy, b}, pairs));
  }

  const char* name() const override {
    return "MittensGatherMmVjp";
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[2].shape();
    std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
    return {shape};
  }

  // sum(output * cotangent) = sum(dy * y), where y is the op's for b = the cotangent.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) override {
    const mx::array& x = primals[0];
    const mx::array& dy = primals[1];
    const Pairs pairs = pairs_of(primals);
    const mx::array b = mx::swapaxes(cotangents[0], -1, -2, stream());
    auto product = [&](const mx::array& x) {
      const auto primitive = std::make_shared<GatherMm>(stream(), false);
      const mx::array y = first_output(primitive, gather_inputs(x, {b}, pairs));
      const mx::array none = mx::zeros_like(y, stream());
      return mx::where(are_valid(pairs, x, b, stream()), y, none, stream());
    };
    Arrays gradients;
    for (int argument : argnums) {
      if (argument == 0) {
        gradients.push_back(mx::vjp([&](const Arrays& a) { return Arrays{product(a[0])}; }, {x}, {dy}).second[0]);
      } else {
        gradients.push_back(argument == 1 ? product(x) : mx::zeros_like(primals[argument], stream()));
      }
    }
    return gradients;
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    const Pairs pairs = pairs_of(primals);
    mx::array sum = mx::zeros(output_shapes(primals)[0], primals[0].dtype(), stream());
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] == 0) {
        sum = mx::add(sum, apply(tangents[i], primals[1], primals[2], pairs, stream()), stream());
      } else if (argnums[i] == 1) {
        sum = mx::add(sum, apply(primals[0], tangents[i], primals[2], pairs, stream()), stream());
      }
    }
    return {sum};
  }

  // mx's gather, which the composition has, is not for vmap.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    int size = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      size = axes[i] >= 0 ? inputs[i].shape(axes[i]) : size;
    }
    if (size == 0) {
      return KernelPrimitive::vmap(inputs, axes);
    }
    Arrays gradients;
    for (int element = 0; element < size; ++element) {
      Arrays its = inputs;
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (axes[i] >= 0) {
          its[i] = mx::take(inputs[i], element, axes[i], stream());
        }
      }
      gradients.push_back(apply(its[0], its[1], its[2], pairs_of(its), stream()));
    }
    return {{mx::stack(gradients, 0, stream())}, {0}};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    for (const mx::array& input : inputs) {
      copies.push_back(copies.size() == 2 ? input : contiguous_rows(input, stream()));
    }
    return copies;
  }

  // It has no kernel: the native code runs where the simulator is on.
  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    mx::cpu::get_command_encoder(stream()).dispatch(native(inputs, outputs));
    return {};
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& b = inputs[2];
    return [type = native_type(inputs[0].dtype()), gather = native_gather(pairs_of(inputs), inputs[0], b, b.shape(-1)),
            x = data_of(inputs[0]), dy = data_of(inputs[1]),
            dw = data_of(outputs[0])] { cpu::gather_dense_vjp(type, gather, x, dy, dw); };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array& x = inputs[0];
    const mx::array& dy = inputs[1];
    const Pairs pairs = pairs_of(inputs);
    auto product = [&](const Arrays& b) { return Arrays{compose(x, b[0], pairs, dy.shape(), false, stream())}; };
    return {mx::swapaxes(mx::vjp(product, {inputs[2]}, {dy}).second[0], -1, -2, stream())};
  }

 private:
  static Pairs pairs_of(const Arrays& inputs) {
    return {inputs[3], inputs.size() > 4 ? std::optional(inputs[4]) : std::nullopt};
  }
};

Arrays GatherMm::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
                     const Arrays& outputs) {
  const mx::array& x = primals[0];
  const mx::array& b = primals[1];
  const bool is_empty = x.size() == 0 || b.size() == 0 || cotangents[0].size() == 0;
  Arrays gradients;
  for (int argument : argnums) {
    if (argument == 1 && !is_empty && stream().device != mx::Device::gpu) {
      const mx::array rows = GatherMmVjp::apply(x, cotangents[0], b, pairs_of(primals), stream());
      gradients.push_back(mx::swapaxes(rows, -1, -2, stream()));
    } else {
      gradients.push_back(GatherPrimitive::vjp(primals, cotangents, {argument}, outputs)[0]);
    }
  }
  return gradients;
}

std::optional<mx::array> try_gather_mm(const mx::array& a, const mx::array& b,
                                       const std::optional<mx::array>& lhs_indices,
                                       const std::optional<mx::array>& rhs_indices, bool sorted_indices,
                                       mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  for (const auto& [name, array] : {std::pair("a", &a), std::pair("b", &b)}) {
    if (array->ndim() < 2) {
      checks::fail(op, name, " has shape ", array->shape(), ": expected at least two dimensions");
    }
  }
  if (a.shape(-1) != b.shape(-2)) {
    checks::fail(op, "a has ", a.shape(-1), " columns, b has shape ", b.shape(), ": expected matrices of ", b.shape(-2),
                 " columns");
  }
  check_indices(op, lhs_indices, rhs_indices);
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"a", a}, {"b", b}});
  const Pairs pairs = gather_pairs(op, a, b, lhs_indices, rhs_indices, stream);
  const Problem problem = problem_of(a, b, pairs, sorted_indices, dtype);
  const bool has_tiles = has_dense_expert_tiles(b.shape(-2), b.shape(-1), dtype) && !lies_by_outputs(b);
  const uint32_t matrices = has_tiles ? 1 : 0;
  if (const char* reason =
          why_not_gathered(a, pairs, true, stream, takes_expert_tiles(sizes_of(problem), matrices, stream))) {
    return fallback(op, reason);
  }
  const bool mx_has_one = stream.device == mx::Device::gpu || dtype == mx::float32;
  if (mx_has_one ? prefer_mx_experts(problem, matrices, stream) : is_switched_off(op)) {
    return std::nullopt;
  }
  return first_output(std::make_shared<GatherMm>(stream, sorted_indices),
                      gather_inputs(in_dtype(a, dtype, stream), {in_dtype(b, dtype, stream)}, pairs));
}

}  // namespace

mx::array gather_mm(const mx::array& a, const mx::array& b, const std::optional<mx::array>& lhs_indices,
                    const std::optional<mx::array>& rhs_indices, bool sorted_indices, mx::StreamOrDevice where) {
  if (auto y = try_gather_mm(a, b, lhs_indices, rhs_indices, sorted_indices, where)) {
    return *std::move(y);
  }
  // mx's, with indices within the arrays.
  const mx::Stream stream = checks::checked_stream(op, where);
  const Pairs pairs = gather_pairs(op, a, b, lhs_indices, rhs_indices, stream);
  auto product = [&](const std::optional<mx::array>& lhs, const mx::array& rhs) {
    return mx::gather_mm(a, b, lhs, rhs, sorted_indices && may_be_told(a, pairs), stream);
  };
  const mx::array shaped = product(pairs.inputs, pairs.experts);
  return guarded(pairs, a, b, shaped.shape(), shaped.dtype(), product, stream);
}

namespace {

void bind(nb::module_& module) {
  define(module, op, &try_gather_mm, &gather_mm, nb::arg(), nb::arg(), "lhs_indices"_a.none() = nb::none(),
         "rhs_indices"_a.none() = nb::none(), nb::kw_only(), "sorted_indices"_a = false, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
