#include <algorithm>
#include <bit>
#include <numeric>
#include <optional>

#include <nanobind/nanobind.h>

#include "cpu/gemv.h"
#include "mlx/ops.h"
#include "ops/matmul/gemv.h"
#include "ops/matmul/row_products.h"
#include "ops/matmul/splitk.h"
#include "params/matmul.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "gemv";
const Name file = "matmul/gemv.metal";
const Name tiles_file = "matmul/gemv_tiles.metal";
const Name short_file = "matmul/nvidia/gemv_short.metal";

// How a kernel on rows of weights divides its work.
struct RowsShape {
  uint32_t outputs;  // of a threadgroup
  uint32_t chunk;  // columns that a simdgroup takes at once
  uint32_t steps;  // chunks that keep it busy
  uint32_t shares;  // so many times as much make a split worth its second kernel, which adds the splits up
  uint32_t rows;  // of x that a threadgroup takes
  // Tiles: simdgroups that a core of an H200 is counted on to hold at once, no more than its registers allow; else 0.
  uint32_t held_by_core;
};

// matmul/gemv.metal. pack: elements of a lane's load where whole packs can be loaded.
RowsShape rows_shape(uint32_t rows, uint32_t pack) {
  const uint32_t together = std::min<uint32_t>(std::bit_ceil(std::max(rows, 1u)), most_gemv_rows);
  return {together > 8 ? 2u : 4u, 32 * pack, 2, 2, together, 0};
}

// matmul/gemv_tiles.metal. Many outputs let a threadgroup have 32, so that less of x is loaded beside the weights; 16
// rows in float32 leave no registers for them.
RowsShape tiles_shape(mx::Dtype dtype, uint32_t rows, uint32_t outputs) {
  constexpr uint32_t many_outputs = 8192;
  const uint32_t run = dtype == mx::float32 ? 32 : 64;
  constexpr uint32_t held_by_core = 16;
  if (outputs >= many_outputs && (rows <= 8 || dtype != mx::float32)) {
    return {32, run, 256 / run, 4, rows > 8 ? 16u : 8u, held_by_core};
  }
  return rows > 8 ? RowsShape{16, run, 256 / run, 4, 16, held_by_core}
                  : RowsShape{16, 2 * run, 128 / run, 4, 8, held_by_core};
}

struct RowsPlan {
  uint32_t simdgroups;  // that share the columns
  uint32_t splits;
  uint32_t columns_per_split;
};

RowsPlan plan_gemv_rows(RowsShape shape, uint32_t rows, uint32_t columns, uint32_t outputs, bool may_split) {
  constexpr uint32_t wanted_simdgroups = 4096;  // of a launch: a large GPU several times over
  RowsPlan plan;
  const uint32_t chunks = ceil_divide(std::max(columns, 1u), shape.chunk);
  const uint32_t shares = ceil_divide(chunks, shape.steps);
  const uint64_t groups =
      uint64_t(ceil_divide(std::max(outputs, 1u), shape.outputs)) * ceil_divide(std::max(rows, 1u), shape.rows);
  const uint32_t most = std::min(shares, uint32_t(kProductSimdgroups));
  const uint32_t fewest = std::min(shares, 4u);
  if (shape.held_by_core > 0) {
    plan.simdgroups = plan_tile_simdgroups(groups, chunks, shape.held_by_core, fewest, most);
  } else {
    plan.simdgroups = std::clamp(ceil_divide(wanted_simdgroups, groups), fewest, most);
    // Most of a GPU is idle while it runs the few that were left over.
    constexpr uint32_t resident_simdgroups = h200_cores * 28;  // simdgroups of one row
    const uint64_t launched = groups * plan.simdgroups;
    if (shape.rows == 1 && launched > resident_simdgroups && launched < 2 * resident_simdgroups &&
        plan.simdgroups < shares) {
      plan.simdgroups /= 2;
    }
  }
  const uint32_t most_splits = may_split ? ceil_divide(shares, shape.shares * plan.simdgroups) : 1;
  const uint32_t splits = std::clamp(ceil_divide(wanted_simdgroups / 4, groups * plan.simdgroups), 1u, most_splits);
  const uint32_t chunks_per_split = ceil_divide(chunks, splits);
  plan.splits = ceil_divide(chunks, chunks_per_split);
  plan.columns_per_split = chunks_per_split * shape.chunk;
  return plan;
}

// From how many rows of x on 8x8 matrices pay. On NVIDIA these are the tensor cores', which take a product in float32
// apart into three.
uint32_t fewest_tile_rows(mx::Dtype dtype, mx::Stream stream) {
  return !has_nvidia_rules(stream) ? 5 : dtype == mx::float32 ? 4 : 3;
}

// The loads of a lane that cover a row of so many packs of columns, 0 where matmul/nvidia/gemv_short.metal has no
// kernel for it.
uint32_t short_loads(uint32_t packs) {
  for (uint32_t loads : {4u, 5u, 8u}) {
    if (packs <= 32 * loads) {
      return loads;
    }
  }
  return 0;
}

// x [.., columns], w [outputs, columns] or, not transposed, [columns, outputs], and bias [outputs], if there is one
// -> y [.., outputs].
class Gemv : public KernelPrimitive {
 public:
  // inputs: those that it is first applied to. It may split the columns later only if it does so for these.
  Gemv(mx::Stream stream, bool transpose, const Arrays& inputs)
      : KernelPrimitive(stream), transpose_(transpose), may_split_(true) {
    may_split_ = splits_of(inputs) > 1;
  }

  static mx::array apply(Arrays inputs, bool transpose, mx::Stream stream) {
    auto primitive = std::make_shared<Gemv>(stream, transpose, inputs);
    return first_output(std::move(primitive), std::move(inputs));
  }

  const char* name() const override {
    return "MittensGemv";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& gemv = static_cast<const Gemv&>(other);
    return transpose_ == gemv.transpose_ && may_split_ == gemv.may_split_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const Sizes sizes = sizes_of(inputs);
    mx::Shape shape = inputs[0].shape();
    shape.back() = static_cast<int>(sizes.outputs);
    if (!may_split_) {
      return {shape};
    }
    return {shape, workspace_shape(splits_of(inputs), uint64_t(sizes.rows) * sizes.outputs)};
  }

  // On the CPU the gradients are products of the same kind, which training needs to be fast.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    if (stream().device == mx::Device::gpu || primals[0].size() == 0 || cotangents[0].size() == 0) {
      return KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
    }
    auto matrix = [&](const mx::array& a) { return mx::reshape(a, {-1, a.shape(-1)}, stream()); };
    auto transposed = [&](const mx::array& a) { return mx::transpose(a, stream()); };
    const mx::array& dy = cotangents[0];
    Arrays gradients;
    for (int argument : argnums) {
      if (argument == 0) {
        gradients.push_back(apply({dy, primals[1]}, !transpose_, stream()));
      } else if (argument == 1) {
        const mx::array& rows = transpose_ ? dy : primals[0];
        const mx::array& columns = transpose_ ? primals[0] : dy;
        gradients.push_back(apply({transposed(matrix(rows)), matrix(columns)}, false, stream()));
      } else {
        gradients.push_back(mx::sum(matrix(dy), 0, false, stream()));
      }
    }
    return gradients;
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    return with_workspace(KernelPrimitive::jvp(primals, tangents, argnums)[0], primals);
  }

  // With more rows of x it is the same op.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const bool only_x = axes[0] >= 0 && std::all_of(axes.begin() + 1, axes.end(), [](int axis) { return axis < 0; });
    if (!only_x || stream().device == mx::Device::gpu) {
      return KernelPrimitive::vmap(inputs, axes);
    }
    Arrays batched = inputs;
    batched[0] = mx::moveaxis(inputs[0], axes[0], 0, stream());
    return {{apply(batched, transpose_, stream())}, {0}};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    const int64_t item = inputs[1].itemsize();
    if (is_contiguous(inputs[0]) && has_rows(inputs[1], item) && (inputs.size() < 3 || is_contiguous(inputs[2]))) {
      return inputs;
    }
    copies = {contiguous_rows(inputs[0], stream()), with_rows(inputs[1], item, stream())};
    if (inputs.size() > 2) {
      copies.push_back(contiguous_rows(inputs[2], stream()));
    }
    return copies;
  }

  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-1) == 0;
  }

  const mx::array* addend(const Arrays& inputs) const override {
    return inputs.size() > 2 ? &inputs[2] : nullptr;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    const mx::array& w = inputs[1];
    const bool has_bias = inputs.size() > 2;
    const mx::array& bias = has_bias ? inputs[2] : x;
    const Sizes sizes = sizes_of(inputs);
    const bool packs = has_rows(w, 16) && w.shape(-1) * w.itemsize() % 16 == 0;
    const uint32_t pack = pack_elements(x);
    if (transpose_ && packs && sizes.rows == 1 && has_nvidia_rules(stream())) {
      if (const uint32_t loads = short_loads(ceil_divide(sizes.columns, pack))) {
        return in_order(short_launch(inputs, outputs[0], sizes, loads));
      }
    }
    GemvParams params{};
    params.rows = sizes.rows;
    params.columns = sizes.columns;
    params.outputs = sizes.outputs;
    params.weight_stride = static_cast<uint32_t>(w.strides(0));
    params.has_bias = has_bias;

    Launch launch;
    launch.file = file;
    const char* access = packs ? "_pack_" : "_single_";
    if (transpose_) {
      RowsShape shape = shape_of(x, sizes);
      RowsPlan plan = rows_plan(shape, sizes);
      uint32_t blocks = 1;  // of outputs in a threadgroup
      params.splits = plan.splits;
      params.columns_per_split = plan.columns_per_split;
      // Tiles count elements between their rows of weights in 32 bits, and have all of their outputs.
      if (wants_tiles(x, sizes) && packs && params.weight_stride < (1u << 27) && sizes.outputs >= shape.outputs) {
        launch.file = tiles_file;
        params.rounds = ceil_divide(plan.columns_per_split, plan.simdgroups * shape.chunk);
        params.round_mask = std::bit_floor(params.rounds) - 1;
        launch.kernel = kernel_name(x.dtype(), op, "tiles_", shape.rows, "x", shape.outputs);
      } else {
        if (wants_tiles(x, sizes)) {
          access = "_single_";
          shape = rows_shape(sizes.rows, pack);
          plan = plan_gemv_rows(shape, sizes.rows, params.columns_per_split, sizes.outputs, false);
        }
        constexpr uint32_t fewest_simdgroups = 3;  // of a threadgroup, which takes time to start
        blocks = ceil_divide(fewest_simdgroups, plan.simdgroups);
        params.sharers = plan.simdgroups;
        launch.kernel = kernel_name(x.dtype(), op, "rows", access, shape.rows, "x", shape.outputs);
      }
      launch.threadgroups = {ceil_divide(sizes.outputs, shape.outputs * blocks), ceil_divide(sizes.rows, shape.rows),
                             params.splits};
      launch.threads = {32 * plan.simdgroups, blocks, 1};
    } else {
      const ColumnsPlan plan = columns_plan(sizes, packs ? pack : 1, pack);
      params.splits = plan.splits;
      params.columns_per_split = plan.columns_per_split;
      params.lanes = plan.lanes;
      launch.kernel = kernel_name(x.dtype(), op, "columns", access, plan.rows);
      launch.threadgroups = {plan.tiles, plan.row_blocks, plan.splits};
      launch.threads = {plan.threads, 1, 1};
    }
    launch.input(x);
    add_view(launch, w);
    launch.input_if(has_bias, bias).output(outputs[params.splits > 1 ? 1 : 0]).params(params);
    if (params.splits == 1) {
      return in_order(std::move(launch));
    }
    return in_order(std::move(launch), split_sum_launch(outputs[1], bias, has_bias, outputs[0], params.splits));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    return [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]), w = data_of(inputs[1]),
            stride = static_cast<size_t>(inputs[1].strides(0)), bias = inputs.size() > 2 ? data_of(inputs[2]) : nullptr,
            y = data_of(outputs[0]), transpose = transpose_, sizes = sizes_of(inputs)] {
      cpu::gemv(type, w, stride, transpose, x, bias, y, sizes.rows, sizes.columns, sizes.outputs);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array w = transpose_ ? mx::transpose(inputs[1], stream()) : inputs[1];
    const mx::array y = mx::matmul(inputs[0], w, stream());
    return with_workspace(inputs.size() > 2 ? mx::add(y, inputs[2], stream()) : y, inputs);
  }

 private:
  struct Sizes {
    uint32_t rows;  // of x
    uint32_t columns;
    uint32_t outputs;
  };

  Sizes sizes_of(const Arrays& inputs) const {
    const mx::array& w = inputs[1];
    return {static_cast<uint32_t>(leading_size(inputs[0], 1)), static_cast<uint32_t>(inputs[0].shape(-1)),
            static_cast<uint32_t>(w.shape(transpose_ ? 0 : 1))};
  }

  static uint32_t pack_elements(const mx::array& x) {
    return 16 / x.itemsize();
  }

  bool wants_tiles(const mx::array& x, const Sizes& sizes) {
    return sizes.rows >= fewest_tile_rows(x.dtype(), stream());
  }

  RowsShape shape_of(const mx::array& x, const Sizes& sizes) {
    return wants_tiles(x, sizes) ? tiles_shape(x.dtype(), sizes.rows, sizes.outputs)
                                 : rows_shape(sizes.rows, pack_elements(x));
  }

  // As if whole packs can be loaded, which shows only when the arrays are there: the splits are the same either way.
  RowsPlan rows_plan(const RowsShape& shape, const Sizes& sizes) const {
    return plan_gemv_rows(shape, sizes.rows, sizes.columns, sizes.outputs, may_split_);
  }

  static Launch short_launch(const Arrays& inputs, mx::array& y, const Sizes& sizes, uint32_t loads) {
    const mx::array& x = inputs[0];
    const mx::array& w = inputs[1];
    const bool has_bias = inputs.size() > 2;
    const mx::array& bias = has_bias ? inputs[2] : x;
    Launch launch;
    launch.file = short_file;
    launch.kernel = kernel_name(x.dtype(), op, "short_", loads);
    launch.threadgroups = {ceil_divide(sizes.outputs, kShortSimdgroups), 1, 1};
    launch.threads = {32, kShortSimdgroups, 1};
    launch.input(x);
    add_view(launch, w);
    launch.input_if(has_bias, bias).output(y);
    return launch.params(GemvShortParams{sizes.columns, sizes.outputs, static_cast<uint32_t>(w.strides(0)), has_bias});
  }

  ColumnsPlan columns_plan(const Sizes& sizes, uint32_t elements, uint32_t pack) const {
    return plan_columns(sizes.rows, sizes.columns, sizes.outputs, 1, elements, pack, most_gemv_rows, may_split_);
  }

  uint32_t splits_of(const Arrays& inputs) {
    const Sizes sizes = sizes_of(inputs);
    const uint32_t pack = pack_elements(inputs[0]);
    return transpose_ ? rows_plan(shape_of(inputs[0], sizes), sizes).splits : columns_plan(sizes, pack, pack).splits;
  }

  bool transpose_;
  bool may_split_;
};

// Where mx's products of matrices are ahead of ours on an H200 (bench/results/h200.json and h200-repeated.md). Of few
// rows in half types they are where outputs are many and w is [columns, outputs], which has no kernel of matrices.
bool tensor_cores_win(size_t rows, size_t weights, size_t outputs, bool transpose, mx::Dtype dtype) {
  if (rows > 8) {
    return weights > (1 << 22);
  }
  return !transpose && dtype != mx::float32 && rows > 2 && outputs > 4096;
}

// Where mx goes over to an Apple GPU's matrix units, but for rows so few that reading the weights takes longer. It has
// kernels without them for up to 15 rows in half types.
bool matrix_units_win(size_t rows, int columns, bool transpose, mx::Dtype dtype) {
  const bool is_gemv_wide = transpose && dtype != mx::float32 && columns % 4 == 0 && rows <= 15;
  return rows > 8 && !is_gemv_wide;
}

// What mx's products of matrices run on where they are ahead of ours; null where they are not.
const char* faster_units(size_t rows, const mx::array& w, bool transpose, mx::Dtype dtype, mx::Stream stream) {
  if (has_nvidia_rules(stream)) {
    return tensor_cores_win(rows, w.size(), w.shape(transpose ? 0 : 1), transpose, dtype) ? "tensor cores" : nullptr;
  }
  const bool win = matrix_units_win(rows, w.shape(transpose ? 1 : 0), transpose, dtype);
  return win && mlx_uses_matrix_units(stream, dtype) ? "matrix units" : nullptr;
}

}  // namespace

std::optional<mx::array> try_gemv(const mx::array& w, const mx::array& x, const std::optional<mx::array>& bias,
                                  bool transpose, mx::StreamOrDevice where) {
  if (w.ndim() != 2) {
    checks::fail(op, "w has shape ", w.shape(), ": expected two dimensions");
  }
  if (x.ndim() < 1) {
    checks::fail(op, "x has no dimensions: expected at least one");
  }
  const int columns = w.shape(transpose ? 1 : 0);
  const int outputs = w.shape(transpose ? 0 : 1);
  if (x.shape(-1) != columns) {
    checks::fail(op, "x has ", x.shape(-1), " columns, w has shape ", w.shape(),
                 " with transpose=", transpose ? "True" : "False", ": expected ", columns, " columns");
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) != outputs)) {
    checks::fail(op, "bias has shape ", bias->shape(), ": expected one dimension with ", outputs, " elements");
  }
  const mx::Dtype dtype = checks::floating(op, {{"x", x}, {"w", w}, {"bias", bias}});
  const mx::Stream stream = checks::checked_stream(op, where);
  if (!has_kernels(dtype)) {
    return fallback(op, "float64");
  }
  const size_t rows = leading_size(x, 1);
  if (stream.device == mx::Device::gpu && rows > most_gemv_rows) {
    return fallback(op, "more than " + std::to_string(most_gemv_rows) + " rows of x");
  }
  const char* units = faster_units(rows, w, transpose, dtype, stream);
  if (units && prefer_fallback(op, std::string("many rows of x where there are ") + units)) {
    return std::nullopt;
  }
  Arrays inputs = {in_dtype(x, dtype, stream), in_dtype(w, dtype, stream)};
  if (bias) {
    inputs.push_back(in_dtype(*bias, dtype, stream));
  }
  return Gemv::apply(std::move(inputs), transpose, stream);
}

namespace {

mx::array gemv(const mx::array& w, const mx::array& x, const std::optional<mx::array>& bias, bool transpose,
               mx::StreamOrDevice where) {
  if (auto y = try_gemv(w, x, bias, transpose, where)) {
    return *std::move(y);
  }
  const mx::Stream stream = checks::checked_stream(op, where);
  const mx::array y = mx::matmul(x, transpose ? mx::transpose(w, stream) : w, stream);
  return plus_bias(y, bias, stream);
}

void bind(nb::module_& module) {
  define(module, op, &try_gemv, &gemv, "w"_a, "x"_a, "bias"_a.none() = nb::none(), nb::kw_only(), "transpose"_a = true,
         "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
