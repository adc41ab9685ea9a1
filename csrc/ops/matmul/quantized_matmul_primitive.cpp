#include "ops/matmul/quantized_matmul_primitive.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>

#include "backends/memory.h"
#include "mlx/ops.h"
#include "ops/matmul/quantized_matmul.h"
#include "ops/matmul/splitk.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/cpu_types.h"
#include "runtime/numerics.h"

namespace mittens {

namespace {

constexpr const char* op = "quantized_matmul";
const Name qmv_file = "matmul/qmv.metal";
const Name rows_file = "matmul/nvidia/rows.metal";
const Name mma_row_file = "matmul/nvidia/mma_row.metal";
const Name tiles_file = "matmul/nvidia/tiles.metal";
const Name qmm_file = "matmul/qmm.metal";
const Name qmm_tiles_file = "matmul/apple/qmm_tiles.metal";
const Name int8_rows_file = "matmul/apple/m5/int8_rows.metal";
const Name qmm_int8_file = "matmul/apple/m5/qmm_int8.metal";
const Name qvm_file = "matmul/qvm.metal";
const Name qvm_tiles_file = "matmul/apple/qvm_tiles.metal";
const Name columns_file = "matmul/nvidia/columns.metal";
constexpr const QuantizedKernels& kernels = quantized_matmul_kernels;

class QuantizedMatmul : public KernelPrimitive {
 public:
  QuantizedMatmul(mx::Stream stream, QuantizedFormat format, bool exact)
      : KernelPrimitive(stream), format_(format), exact_(exact) {}

  const char* name() const override {
    return "MittensQuantizedMatmul";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& product = static_cast<const QuantizedMatmul&>(other);
    return format_ == product.format_ && exact_ == product.exact_ && alike_ == product.alike_ && int8_ == product.int8_;
  }

  const QuantizedFormat& format() const {
    return format_;
  }

  bool exact() const {
    return exact_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    if (format_.transpose) {
      return {shape_of_y(inputs)};
    }
    const ProductSizes sizes = sizes_of(inputs);
    const uint64_t elements = uint64_t(sizes.matrices) * sizes.rows * sizes.outputs;
    const QvmPlan plan = qvm_plan(inputs[0].dtype(), sizes, unlimited_splits);
    return {shape_of_y(inputs), workspace_shape(plan.splits, elements)};
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    const mx::array& dy = cotangents[0];
    if (dy.size() == 0) {
      return KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
    }
    const WithNumerics with({is_exact(), false});  // cotangents are not rounded
    Arrays gradients;
    for (int argument : argnums) {
      if (argument == 0) {
        gradients.push_back(product(dy, {primals[1], primals[2], primals[3]}, !format_.transpose));
      } else if (argument == 4) {
        std::vector<int> axes(dy.ndim() - 1);
        std::iota(axes.begin(), axes.end(), 0);
        gradients.push_back(mx::sum(dy, axes, false, stream()));
      } else {
        gradients.push_back(KernelPrimitive::vjp(primals, cotangents, {argument}, outputs)[0]);
      }
    }
    return gradients;
  }

  // y is linear in x, and in scales and biases together.
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    const WithNumerics with({is_exact(), false});
    std::vector<std::optional<mx::array>> tangent(5);
    for (size_t i = 0; i < argnums.size(); ++i) {
      tangent[argnums[i]] = tangents[i];
    }
    auto product = [&](const mx::array& x, const mx::array& scales, const mx::array& biases) {
      return quantized_matmul_by_kernels({x, primals[1], scales, biases}, format_, exact_, stream());
    };
    mx::array sum = tangent[0] ? product(*tangent[0], primals[2], primals[3])
                               : mx::zeros(output_shapes(primals)[0], primals[0].dtype(), stream());
    if (tangent[2] || tangent[3]) {
      const mx::array none = mx::zeros_like(primals[2], stream());
      sum = mx::add(sum, product(primals[0], tangent[2].value_or(none), tangent[3].value_or(none)), stream());
    }
    if (tangent[4]) {
      sum = mx::add(sum, *tangent[4], stream());
    }
    return with_workspace(sum, primals);
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const WithNumerics with({is_exact(), int8_});
    Arrays batched;
    int size = 0;
    bool weights = false;
    for (size_t i = 0; i < inputs.size(); ++i) {
      batched.push_back(axes[i] >= 0 ? mx::moveaxis(inputs[i], axes[i], 0, stream()) : inputs[i]);
      size = axes[i] >= 0 ? batched[i].shape(0) : size;
      weights = weights || (axes[i] >= 0 && i > 0 && i < 4);
    }
    auto broadcast = [&](size_t i) {
      if (axes[i] < 0) {
        mx::Shape shape = inputs[i].shape();
        shape.insert(shape.begin(), size);
        batched[i] = mx::broadcast_to(batched[i], shape, stream());
      }
    };
    broadcast(0);
    std::optional<mx::array> bias;
    if (inputs.size() > 4) {
      bias = batched[4];
      batched.pop_back();
    }
    mx::Shape shape = batched[0].shape();
    if (weights) {
      for (size_t i = 1; i < 4; ++i) {
        broadcast(i);
      }
      if (batched[1].ndim() == 3) {  // a matrix for each of them: all else of x is rows
        const int rows = std::accumulate(shape.begin() + 1, shape.end() - 1, 1, std::multiplies<int>());
        batched[0] = mx::reshape(batched[0], {size, rows, shape.back()}, stream());
      }
    }
    mx::array y = product(batched[0], {batched[1], batched[2], batched[3]}, format_.transpose);
    shape.back() = y.shape(-1);
    y = mx::reshape(y, shape, stream());
    if (bias) {
      if (axes[4] >= 0) {
        mx::Shape each(shape.size(), 1);
        each.front() = size;
        each.back() = shape.back();
        bias = mx::reshape(*bias, each, stream());
      }
    }
    return {{plus_bias(y, bias, stream())}, {0}};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    if (is_contiguous(inputs[0]) && is_prepared_triple(inputs[1], inputs[2], inputs[3]) &&
        (inputs.size() < 5 || is_contiguous(inputs[4]))) {
      return inputs;
    }
    copies = prepared_triple(inputs[1], inputs[2], inputs[3], stream());
    copies.insert(copies.begin(), contiguous_rows(inputs[0], stream()));
    if (inputs.size() > 4) {
      copies.push_back(contiguous_rows(inputs[4], stream()));
    }
    return copies;
  }

  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-1) == 0;
  }

  const mx::array* addend(const Arrays& inputs) const override {
    return inputs.size() > 4 ? &inputs[4] : nullptr;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    const ProductSizes sizes = sizes_of(inputs);
    QuantizedParams params = quantized_params(inputs[1], inputs[2], inputs[3], format_);
    params.rows = sizes.rows;
    params.columns = sizes.columns;
    params.outputs = sizes.outputs;
    params.has_bias = inputs.size() > 4;
    params.splits = 1;
    const mx::array& bias = params.has_bias ? inputs[4] : x;
    auto launch = [&](Name file, Name kernel, const mx::array& bias, mx::array& y) {
      Launch launch;
      launch.file = file;
      launch.kernel = kernel;
      launch.input(x);
      add_view(launch, inputs[1]);
      add_view(launch, inputs[2]);
      add_view(launch, inputs[3]);
      return launch.input_if(params.has_bias, bias).output(y).params(params);
    };

    if (int8_ && multiplies_int8(format_, sizes, stream())) {
      return int8_launches(inputs, sizes, bias, outputs[0]);
    }
    if (format_.transpose) {
      const bool is_exact = alike_ && sizes.matrices == 1 && are_few_exact(sizes.rows);
      const QuantizedPlan plan = is_exact ? plan_quantized_exact(kernels, format_, x.dtype(), sizes, stream())
                                          : plan_quantized(kernels, format_, x.dtype(), planned(sizes), stream());
      params.outputs_per_group = plan.outputs_per_group;
      auto by_groups = [&](Name file, Name kernel) {
        Launch groups = launch(file, kernel, bias, outputs[0]);
        groups.threadgroups = {ceil_divide(sizes.outputs, plan.outputs_per_group), ceil_divide(sizes.rows, plan.rows),
                               sizes.matrices};
        groups.threads = {32 * plan.simdgroups, 1, 1};
        return in_order(std::move(groups));
      };
      switch (plan.kernel) {
        case QuantizedKernel::mma_row:
          return by_groups(mma_row_file, kernel_name(x.dtype(), op, "row_4bit"));
        case QuantizedKernel::tiles:
          return by_groups(tiles_file,
                           kernel_name(x.dtype(), op, "tiles_", format_.bits, "bit_", plan.rows, "_by", plan.run));
        case QuantizedKernel::rows:
          return by_groups(rows_file, kernel_name(x.dtype(), op, "rows_", format_.bits, "bit_", plan.rows));
        case QuantizedKernel::qmm_tiles: {
          const uint32_t splits = plan.by_tiles.splits;
          params.splits = splits;
          params.columns_per_split = plan.by_tiles.columns_per_split;
          const auto sums = splits == 1 ? nullptr
                                        : std::make_shared<mx::array>(temporary(
                                              workspace_shape(splits, outputs[0].size()), mx::float32, stream()));
          Launch tiles = launch(qmm_tiles_file,
                                kernel_name(x.dtype(), op, "qmm_tiles_", format_name(format_), "_", plan.by_tiles.rows),
                                bias, sums ? *sums : outputs[0]);
          share_out(tiles, plan.by_tiles, sizes.matrices * splits);
          tiles.owner = sums;
          if (!sums) {
            return in_order(std::move(tiles));
          }
          Launch sum = split_sum_launch(*sums, bias, params.has_bias, outputs[0], splits);
          sum.owner = sums;
          return in_order(std::move(tiles), std::move(sum));
        }
        case QuantizedKernel::qmm: {
          Launch matrices =
              launch(qmm_file, kernel_name(x.dtype(), op, "qmm_", format_name(format_)), bias, outputs[0]);
          share_out(matrices, plan.by_matrices, sizes.matrices);
          return in_order(std::move(matrices));
        }
        case QuantizedKernel::qmv: {
          Launch rows =
              launch(qmv_file, kernel_name(x.dtype(), op, "qmv_", format_name(format_), "_", plan.shared.rows), bias,
                     outputs[0]);
          share_out(rows, plan.shared, sizes.matrices);
          return in_order(std::move(rows));
        }
      }
    }
    const QvmPlan plan = qvm_plan(x.dtype(), sizes, splits_of_workspace(outputs));
    params.lanes = plan.columns.lanes;
    params.splits = plan.splits;
    params.columns_per_split = plan.columns_per_split;
    mx::array& sums = outputs[plan.splits > 1 ? 1 : 0];
    Launch columns;
    switch (plan.kernel) {
      case QvmKernel::qvm_tiles:
        columns =
            launch(qvm_tiles_file,
                   kernel_name(x.dtype(), op, "qvm_tiles_", format_name(format_), "_", plan.by_tiles.rows), bias, sums);
        share_out(columns, plan.by_tiles, sizes.matrices);
        break;
      case QvmKernel::qvm:
        columns = launch(qvm_file, kernel_name(x.dtype(), op, "qvm_", format_name(format_)), bias, sums);
        columns.threadgroups = {plan.output_groups, plan.row_blocks * plan.splits, sizes.matrices};
        columns.threads = {32 * plan.sharers, plan.blocks, 1};
        break;
      case QvmKernel::columns: {
        const ColumnsPlan& by_columns = plan.columns;
        columns = launch(columns_file, kernel_name(x.dtype(), op, "columns_", format_.bits, "bit_", by_columns.rows),
                         bias, sums);
        columns.threadgroups = {by_columns.tiles, by_columns.row_blocks * plan.splits, sizes.matrices};
        columns.threads = {by_columns.threads, 1, 1};
        break;
      }
    }
    if (plan.splits == 1) {
      return in_order(std::move(columns));
    }
    return in_order(std::move(columns), split_sum_launch(outputs[1], bias, params.has_bias, outputs[0], plan.splits));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const ProductSizes sizes = sizes_of(inputs);
    const size_t item = inputs[0].itemsize();
    return [type = native_type(inputs[0].dtype()), x = static_cast<const char*>(data_of(inputs[0])),
            y = static_cast<char*>(data_of(outputs[0])),
            weights = native_quantized(inputs[1], inputs[2], inputs[3], format_),
            bias = inputs.size() > 4 ? data_of(inputs[4]) : nullptr, sizes, together = planned(sizes).matrices, item,
            mode = cpu::ProductMode{alike_, int8_}] {
      for (size_t i = 0; i < sizes.matrices; i += together) {
        const size_t rows = i * sizes.rows;
        cpu::quantized_matmul(type, weights.data() + i, x + rows * sizes.columns * item, bias,
                              y + rows * sizes.outputs * item, together, sizes.rows, sizes.columns, sizes.outputs,
                              mode);
      }
    };
  }

  Arrays composed(const Arrays& inputs) override {
    mx::array y = quantized_matmul_of_mx(inputs[0], inputs[1], inputs[2], biases_of(inputs[3]), format_.transpose,
                                         format_.group_size, format_.bits, mode_name(format_), stream());
    return with_workspace(inputs.size() > 4 ? mx::add(y, inputs[4], stream()) : y, inputs);
  }

 private:
  // Of a triple: nothing where scales stand in their place.
  std::optional<mx::array> biases_of(const mx::array& biases) const {
    return format_.has_biases() ? std::optional(biases) : std::nullopt;
  }

  mx::array product(const mx::array& x, const Arrays& triple, bool transpose) {
    return quantized_matmul(x, triple[0], triple[1], biases_of(triple[2]), transpose, format_.group_size, format_.bits,
                            mode_name(format_), std::nullopt, stream());
  }

  ProductSizes sizes_of(const Arrays& inputs) const {
    const mx::array& x = inputs[0];
    const mx::array& w = inputs[1];
    ProductSizes sizes{};
    sizes.matrices = static_cast<uint32_t>(leading_size(w, 2));
    sizes.columns = x.shape(-1);
    sizes.rows = sizes.matrices == 0 ? 0 : static_cast<uint32_t>(leading_size(x, 1) / sizes.matrices);
    sizes.outputs = format_.transpose ? w.shape(-2) : static_cast<uint32_t>(int64_t(w.shape(-1)) * 32 / format_.bits);
    return sizes;
  }

  mx::Shape shape_of_y(const Arrays& inputs) const {
    return with_columns(inputs[0].shape(), static_cast<int>(sizes_of(inputs).outputs));
  }

  QvmPlan qvm_plan(mx::Dtype dtype, const ProductSizes& sizes, uint32_t most_splits) {
    const Problem problem = product_problem(op, dtype, format_number(format_), planned(sizes));
    return plan_qvm(problem, format_, planned(sizes), most_splits, stream());
  }

  // Rounds x, and multiplies its integers. The workspace is x's integers, and of each group a scale and a sum.
  std::vector<Launch> int8_launches(const Arrays& inputs, const ProductSizes& sizes, const mx::array& bias,
                                    mx::array& y) {
    constexpr uint32_t columns_each = 8;  // of a thread of int8_rows
    struct Workspace {
      mx::array integers;
      mx::array scales;
    };
    const mx::Dtype dtype = y.dtype();
    Int8Params params{};
    params.rows = sizes.rows;
    params.padded_rows = ceil_divide(sizes.rows, uint32_t(kInt8Tile)) * kInt8Tile;
    params.columns = sizes.columns;
    params.outputs = sizes.outputs;
    params.weight_stride = static_cast<uint32_t>(inputs[1].strides(-2));
    params.scales_stride = static_cast<uint32_t>(inputs[2].strides(-2));
    params.biases_stride = static_cast<uint32_t>(inputs[3].strides(-2));
    params.has_bias = inputs.size() > 4;
    const int rows = static_cast<int>(params.padded_rows), columns = static_cast<int>(sizes.columns);
    const auto workspace = std::make_shared<Workspace>(
        Workspace{temporary({rows, columns}, mx::int8, stream()),
                  temporary({columns / format_.group_size, rows, 2}, mx::float32, stream())});

    Launch round;
    round.file = int8_rows_file;
    round.kernel = kernel_name(dtype, op, "int8_rows_", format_.group_size);
    round.threadgroups = {ceil_divide(sizes.columns, columns_each * kInt8RowThreads), params.padded_rows, 1};
    round.threads = {kInt8RowThreads, 1, 1};
    round.input(inputs[0]).output(workspace->integers).output(workspace->scales).params(params);
    round.owner = workspace;

    Launch multiply;
    multiply.file = qmm_int8_file;
    multiply.kernel = kernel_name(dtype, op, "qmm_int8_", format_.group_size);
    multiply.threadgroups = {params.padded_rows / kInt8Tile, ceil_divide(sizes.outputs, uint32_t(kInt8Tile)), 1};
    multiply.threads = {128, 1, 1};
    multiply.input(workspace->integers).input(workspace->scales);
    for (int i = 1; i < 4; ++i) {
      add_view(multiply, inputs[i]);
    }
    multiply.input_if(params.has_bias, bias).output(y).params(params);
    multiply.owner = workspace;
    return in_order(std::move(round), std::move(multiply));
  }

  ProductSizes planned(ProductSizes sizes) const {
    sizes.matrices = exact_ ? std::min(sizes.matrices, 1u) : sizes.matrices;
    return sizes;
  }

  QuantizedFormat format_;
  bool exact_;
  bool alike_ = is_exact();  // rows of a product sum as a row alone does
  bool int8_ = numerics().int8;  // x may be rounded on a CPU, and on matrix units
};

}  // namespace

mx::array quantized_matmul_by_kernels(Arrays inputs, const QuantizedFormat& format, bool exact, mx::Stream stream) {
  auto primitive = std::make_shared<QuantizedMatmul>(stream, format, exact);
  if (!format.transpose) {
    return first_output(std::move(primitive), std::move(inputs));
  }
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return only_output(std::move(shapes[0]), std::move(primitive), std::move(inputs));
}

std::optional<QuantizedFormat> pending_product(const mx::array& y) {
  if (!is_pending(y) || y.inputs().size() != 4 || y.inputs()[1].ndim() != 2) {
    return std::nullopt;
  }
  const auto* product = dynamic_cast<const QuantizedMatmul*>(&y.primitive());
  return product && product->format().transpose ? std::optional(product->format()) : std::nullopt;
}

std::optional<QuantizedFormat> pending_row_product(const mx::array& y) {
  const auto* product = is_pending(y) ? dynamic_cast<const QuantizedMatmul*>(&y.primitive()) : nullptr;
  const bool is_row = product && product->format().transpose && !product->exact() && y.inputs()[1].ndim() == 2 &&
                      y.size() > 0 && y.inputs()[0].size() > 0 && leading_size(y, 1) == 1;
  return is_row ? std::optional(product->format()) : std::nullopt;
}

}  // namespace mittens
