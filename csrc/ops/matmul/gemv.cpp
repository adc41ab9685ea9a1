// The ops matmul and gemv.
#include <algorithm>
#include <bit>
#include <numeric>
#include <optional>

#include <nanobind/nanobind.h>

#include "cpu/matmul/gemv.h"
#include "mlx/ops.h"
#include "ops/matmul/gemv.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/splitk.h"
#include "params/matmul.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/numerics.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "gemv";
constexpr const char* matmul_op = "matmul";  // the same with x first

mx::array product(const char* called, const mx::array& x, const mx::array& w, bool transpose, mx::Stream stream);

const Name file = "matmul/gemv.metal";
const Name tiles_file = "matmul/gemv_tiles.metal";
const Name short_file = "matmul/nvidia/gemv_short.metal";
const Name prompts_file = "matmul/apple/matmul_tiles.metal";

// x [.., columns], w [outputs, columns] or, not transposed, [columns, outputs], and bias [outputs], if there is one
// -> y [.., outputs].
class Gemv : public KernelPrimitive {
 public:
  // inputs: of its first call; later calls may split the columns only if this one does. called: the op that it is
  // counted as.
  Gemv(mx::Stream stream, bool transpose, const Arrays& inputs, const char* called)
      : KernelPrimitive(stream), called_(called), transpose_(transpose), may_split_(true) {
    may_split_ = splits_of(inputs) > 1;
  }

  static mx::array apply(Arrays inputs, bool transpose, const char* called, mx::Stream stream) {
    auto primitive = std::make_shared<Gemv>(stream, transpose, inputs, called);
    return first_output(std::move(primitive), std::move(inputs));
  }

  const char* name() const override {
    return called_ == matmul_op ? "MittensMatmul" : "MittensGemv";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& gemv = static_cast<const Gemv&>(other);
    return called_ == gemv.called_ && transpose_ == gemv.transpose_ && may_split_ == gemv.may_split_ &&
           exact_ == gemv.exact_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const ProductSizes sizes = sizes_of(inputs);
    const mx::Shape shape = with_columns(inputs[0].shape(), static_cast<int>(sizes.outputs));
    if (!may_split_) {
      return {shape};
    }
    return {shape, workspace_shape(splits_of(inputs), uint64_t(sizes.rows) * sizes.outputs)};
  }

  // On the CPU the gradients are products of the same kind, which training needs to be fast.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    const bool is_empty = primals[0].size() == 0 || cotangents[0].size() == 0;
    if (stream().device == mx::Device::gpu || is_empty) {
      Arrays gradients = KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
      const ProductSizes sizes = sizes_of({cotangents[0], primals[1]}, !transpose_);
      if (!is_empty && has_dense_tiles(sizes, !transpose_, primals[0].dtype(), stream())) {
        for (size_t i = 0; i < argnums.size(); ++i) {
          if (argnums[i] == 0) {
            gradients[i] = product(called_, cotangents[0], primals[1], !transpose_, stream());
          }
        }
      }
      return gradients;
    }
    auto matrix = [&](const mx::array& a) { return mx::reshape(a, {-1, a.shape(-1)}, stream()); };
    auto transposed = [&](const mx::array& a) { return mx::transpose(a, stream()); };
    const mx::array& dy = cotangents[0];
    Arrays gradients;
    for (int argument : argnums) {
      if (argument == 0) {
        gradients.push_back(apply({dy, primals[1]}, !transpose_, called_, stream()));
      } else if (argument == 1) {
        const mx::array& rows = transpose_ ? dy : primals[0];
        const mx::array& columns = transpose_ ? primals[0] : dy;
        gradients.push_back(apply({transposed(matrix(rows)), matrix(columns)}, false, called_, stream()));
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
    return {{apply(batched, transpose_, called_, stream())}, {0}};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    const int64_t item = is_by_tiles(inputs) ? 16 : inputs[1].itemsize();
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
    const ProductSizes sizes = sizes_of(inputs);
    const bool packs = has_rows(w, 16) && w.shape(-1) * w.itemsize() % 16 == 0;
    GemvParams params{};
    params.rows = sizes.rows;
    params.columns = sizes.columns;
    params.outputs = sizes.outputs;
    params.weight_stride = static_cast<uint32_t>(w.strides(0));
    params.has_bias = has_bias;

    Launch launch;
    launch.file = file;
    if (is_by_tiles(inputs) && uint64_t(params.weight_stride) * w.shape(0) < (uint64_t(1) << 32)) {
      const TilesPlan plan = plan_dense_tiles(sizes, transpose_, x.dtype());
      launch.file = prompts_file;
      launch.kernel = kernel_name(x.dtype(), "matmul", transpose_ ? "tiles_" : "columns_tiles_", plan.rows);
      share_out(launch, plan, 1);
      params.splits = 1;
    } else if (transpose_) {
      // Tiles count elements between their rows of weights in 32 bits.
      const GemvWeights weights{packs, params.weight_stride < (1u << 27)};
      const uint32_t most_splits = splits_of_workspace(outputs);
      const GemvPlan plan = is_exact_of(sizes) ? plan_gemv_exact(sizes, x.dtype(), most_splits, stream())
                                               : plan_gemv(sizes, x.dtype(), weights, most_splits, stream());
      if (plan.kernel == GemvKernel::short_row) {
        return in_order(short_launch(inputs, outputs[0], sizes, plan.loads));
      }
      uint32_t blocks = 1;  // of outputs in a threadgroup
      params.splits = plan.splits;
      params.columns_per_split = plan.columns_per_split;
      if (plan.kernel == GemvKernel::tiles) {
        launch.file = tiles_file;
        params.rounds = ceil_divide(plan.columns_per_split, plan.simdgroups * plan.chunk);
        params.round_mask = std::bit_floor(params.rounds) - 1;
        launch.kernel = kernel_name(x.dtype(), op, "tiles_", plan.rows, "x", plan.outputs_per_group);
      } else {
        constexpr uint32_t most_pack_rows = 8;  // of x, in kernels that load whole packs
        constexpr uint32_t fewest_simdgroups = 3;  // of a threadgroup, which takes time to start
        blocks = ceil_divide(fewest_simdgroups, plan.simdgroups);
        params.sharers = plan.simdgroups;
        const char* access = packs && plan.rows <= most_pack_rows ? "_pack_" : "_single_";
        launch.kernel = kernel_name(x.dtype(), op, "rows", access, plan.rows, "x", plan.outputs_per_group);
      }
      launch.threadgroups = {ceil_divide(sizes.outputs, plan.outputs_per_group * blocks),
                             ceil_divide(sizes.rows, plan.rows), params.splits};
      launch.threads = {32 * plan.simdgroups, blocks, 1};
    } else {
      const ColumnsPlan plan = columns_plan(x, sizes, packs, splits_of_workspace(outputs));
      params.splits = plan.splits;
      params.columns_per_split = plan.columns_per_split;
      params.lanes = plan.lanes;
      launch.kernel = kernel_name(x.dtype(), op, "columns", packs ? "_pack_" : "_single_", plan.rows);
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
            y = data_of(outputs[0]), transpose = transpose_, sizes = sizes_of(inputs), exact = exact_] {
      cpu::gemv(type, &w, stride, transpose, x, bias, y, 1, sizes.rows, sizes.columns, sizes.outputs, exact);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array w = transpose_ ? mx::transpose(inputs[1], stream()) : inputs[1];
    const mx::array y = mx::matmul(inputs[0], w, stream());
    return with_workspace(inputs.size() > 2 ? mx::add(y, inputs[2], stream()) : y, inputs);
  }

 private:
  static ProductSizes sizes_of(const Arrays& inputs, bool transpose) {
    const mx::array& w = inputs[1];
    return {1, static_cast<uint32_t>(leading_size(inputs[0], 1)), static_cast<uint32_t>(inputs[0].shape(-1)),
            static_cast<uint32_t>(w.shape(transpose ? 0 : 1))};
  }

  ProductSizes sizes_of(const Arrays& inputs) const {
    return sizes_of(inputs, transpose_);
  }

  bool is_exact_of(const ProductSizes& sizes) const {
    return exact_ && are_few_exact(sizes.rows);
  }

  bool is_by_tiles(const Arrays& inputs) {
    return has_dense_tiles(sizes_of(inputs), transpose_, inputs[0].dtype(), stream());
  }

  static uint32_t pack_elements(const mx::array& x) {
    return 16 / x.itemsize();
  }

  static Launch short_launch(const Arrays& inputs, mx::array& y, const ProductSizes& sizes, uint32_t loads) {
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

  ColumnsPlan columns_plan(const mx::array& x, const ProductSizes& sizes, bool packs, uint32_t most_splits) {
    const uint32_t pack = pack_elements(x);
    const ColumnsKernels kernels{packs ? pack : 1, pack, kGemvColumnsRows};
    const bool is_exact = is_exact_of(sizes);
    const ProductSizes planned = is_exact ? ProductSizes{1, 1, sizes.columns, sizes.outputs} : sizes;
    const Problem problem = product_problem(op, x.dtype(), false, planned);
    ColumnsPlan plan = plan_columns(problem, planned, kernels, most_splits, stream());
    if (!is_exact) {
      return plan;
    }
    plan.rows = std::min<uint32_t>(std::bit_ceil(std::max(sizes.rows, 1u)), kGemvColumnsRows);
    plan.row_blocks = ceil_divide(sizes.rows, plan.rows);
    return plan;
  }

  uint32_t splits_of(const Arrays& inputs) {
    if (is_by_tiles(inputs)) {
      return 1;
    }
    const ProductSizes sizes = sizes_of(inputs);
    const uint32_t most = may_split_ ? unlimited_splits : 1;
    if (transpose_ && is_exact_of(sizes)) {
      return plan_gemv_exact(sizes, inputs[0].dtype(), most, stream()).splits;
    }
    // As if whole packs can be loaded, which shows only when the arrays are there.
    return transpose_ ? plan_gemv(sizes, inputs[0].dtype(), {}, most, stream()).splits
                      : columns_plan(inputs[0], sizes, true, most).splits;
  }

  const char* called_;
  bool transpose_;
  bool may_split_;
  bool exact_ = is_exact();
};

// Whether a matrix that is there lies by columns, as the transpose of another does.
bool lies_by_columns(const mx::array& w) {
  return w.status() != mx::array::Status::unscheduled && w.shape(0) > 1 && w.shape(1) > 1 && w.strides(0) == 1 &&
         w.strides(1) >= w.shape(0);
}

// called: the op named in errors and statistics.
std::optional<mx::array> try_product(const char* called, const mx::array& x, const mx::array& w,
                                     const std::optional<mx::array>& bias, bool transpose, mx::StreamOrDevice where) {
  if (x.ndim() < 1) {
    checks::fail(called, "x has no dimensions: expected at least one");
  }
  const int columns = w.shape(transpose ? 1 : 0);
  const int outputs = w.shape(transpose ? 0 : 1);
  if (x.shape(-1) != columns) {
    checks::fail(called, "x has ", x.shape(-1), " columns, w has shape ", w.shape(),
                 " with transpose=", transpose ? "True" : "False", ": expected ", columns, " columns");
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) != outputs)) {
    checks::fail(called, "bias has shape ", bias->shape(), ": expected one dimension with ", outputs, " elements");
  }
  const mx::Dtype dtype = checks::floating(called, {{"x", x}, {"w", w}, {"bias", bias}});
  const mx::Stream stream = checks::checked_stream(called, where);
  if (!has_kernels(dtype)) {
    return fallback(called, "float64");
  }
  // Read as it lies; exact products are of rows.
  if (lies_by_columns(w) && (!is_exact() || stream.device == mx::Device::gpu)) {
    return try_product(called, x, mx::transpose(w, stream), bias, !transpose, stream);
  }
  const size_t rows = leading_size(x, 1);
  const ProductSizes sizes{1, static_cast<uint32_t>(rows), static_cast<uint32_t>(columns),
                           static_cast<uint32_t>(outputs)};
  if (stream.device == mx::Device::gpu && rows > most_gemv_rows && !has_dense_tiles(sizes, transpose, dtype, stream)) {
    return fallback(called, "more than " + std::to_string(most_gemv_rows) + " rows of x");
  }
  const char* reason = why_mx_gemv(sizes, transpose, dtype, stream);
  if (prefer_mx_product(product_problem(op, dtype, transpose, sizes), reason, stream, called)) {
    return std::nullopt;
  }
  Arrays inputs = {in_dtype(x, dtype, stream), in_dtype(w, dtype, stream)};
  if (bias) {
    inputs.push_back(in_dtype(*bias, dtype, stream));
  }
  return Gemv::apply(std::move(inputs), transpose, called, stream);
}

mx::array product_of_mx(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias, bool transpose,
                        mx::Stream stream) {
  const mx::array y = mx::matmul(x, transpose ? mx::swapaxes(w, -1, -2, stream) : w, stream);
  return plus_bias(y, bias, stream);
}

mx::array product(const char* called, const mx::array& x, const mx::array& w, bool transpose, mx::Stream stream) {
  if (auto y = try_product(called, x, w, std::nullopt, transpose, stream)) {
    return *std::move(y);
  }
  return product_of_mx(x, w, std::nullopt, transpose, stream);
}

}  // namespace

std::optional<mx::array> try_gemv(const mx::array& w, const mx::array& x, const std::optional<mx::array>& bias,
                                  bool transpose, mx::StreamOrDevice where) {
  if (w.ndim() != 2) {
    checks::fail(op, "w has shape ", w.shape(), ": expected two dimensions");
  }
  return try_product(op, x, w, bias, transpose, where);
}

mx::array gemv(const mx::array& w, const mx::array& x, const std::optional<mx::array>& bias, bool transpose,
               mx::StreamOrDevice where) {
  if (auto y = try_gemv(w, x, bias, transpose, where)) {
    return *std::move(y);
  }
  return product_of_mx(x, w, bias, transpose, checks::checked_stream(op, where));
}

namespace {

// Of a stack of matrices each is multiplied with rows of its own.
std::optional<mx::array> try_matmul(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias,
                                    bool transpose, mx::StreamOrDevice where) {
  if (w.ndim() < 2) {
    checks::fail(matmul_op, "w has shape ", w.shape(), ": expected at least two dimensions");
  }
  if (w.ndim() == 2) {
    return try_product(matmul_op, x, w, bias, transpose, where);
  }
  const int columns = w.shape(transpose ? -1 : -2);
  const int outputs = w.shape(transpose ? -2 : -1);
  if (x.ndim() < 1 || x.shape(-1) != columns) {
    checks::fail(matmul_op, "x has shape ", x.shape(), ", w has shape ", w.shape(),
                 " with transpose=", transpose ? "True" : "False", ": expected ", columns, " columns of x");
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) != outputs)) {
    checks::fail(matmul_op, "bias has shape ", bias->shape(), ": expected one dimension with ", outputs, " elements");
  }
  checks::floating(matmul_op, {{"x", x}, {"w", w}, {"bias", bias}});
  return fallback(matmul_op, "a stack of matrices");
}

mx::array matmul(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias, bool transpose,
                 mx::StreamOrDevice where) {
  if (auto y = try_matmul(x, w, bias, transpose, where)) {
    return *std::move(y);
  }
  return product_of_mx(x, w, bias, transpose, checks::checked_stream(matmul_op, where));
}

void bind(nb::module_& module) {
  define(module, op, &try_gemv, &gemv, "w"_a, "x"_a, "bias"_a.none() = nb::none(), nb::kw_only(), "transpose"_a = true,
         "stream"_a = nb::none());
  bind_function(module, matmul_op, &matmul, "x"_a, "w"_a, "bias"_a.none() = nb::none(), nb::kw_only(),
                "transpose"_a = true, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
