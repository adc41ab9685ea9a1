// The op block_matmul: products with GGUF blocks.
#include <algorithm>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cpu/matmul/gguf.h"
#include "cpu/matmul/quantized_matmul.h"
#include "mlx/ops.h"
#include "ops/matmul/exact.h"
#include "ops/matmul/gguf.h"
#include "ops/matmul/plan.h"
#include "params/matmul.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/gpu.h"
#include "runtime/numerics.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "block_matmul";
const Name file = "matmul/gguf_matmul.metal";
const Name tiles_file = "matmul/apple/gguf_tiles.metal";

Problem problem(mx::Dtype dtype, cpu::BlockKind kind, const ProductSizes& sizes) {
  return product_problem(op, dtype, static_cast<uint32_t>(kind), sizes);
}

// x [.., columns], blocks [outputs, bytes of a row] and bias [outputs], if there is one -> y [.., outputs]. exact:
// every row of x is computed as if it were alone.
class BlockMatmul : public KernelPrimitive {
 public:
  BlockMatmul(mx::Stream stream, cpu::BlockKind kind, bool exact)
      : KernelPrimitive(stream), kind_(kind), exact_(exact) {}

  const char* name() const override {
    return "MittensBlockMatmul";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& product = static_cast<const BlockMatmul&>(other);
    return kind_ == product.kind_ && exact_ == product.exact_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {with_columns(inputs[0].shape(), inputs[1].shape(0))};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    return row_contiguous(inputs, stream(), copies, 16);
  }

  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-1) == 0;
  }

  const mx::array* addend(const Arrays& inputs) const override {
    return inputs.size() > 2 ? &inputs[2] : nullptr;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    BlocksParams params{};
    params.rows = static_cast<uint32_t>(leading_size(x, 1));
    params.columns = x.shape(-1);
    params.outputs = inputs[1].shape(0);
    params.row_bytes = inputs[1].shape(1);
    params.has_bias = inputs.size() > 2;
    const ProductSizes sizes{1, params.rows, params.columns, params.outputs};
    const ProductSizes planned{1, exact_ ? 1 : params.rows, params.columns, params.outputs};
    const GgufPlan plan = plan_gguf(problem(x.dtype(), kind_, planned), kind_, sizes, exact_, stream());

    Launch launch;
    if (plan.is_by_tiles) {
      launch.file = tiles_file;
      launch.kernel = kernel_name(x.dtype(), op, "tiles_", block_kind_name(kind_), "_", plan.tiles.rows);
      share_out(launch, plan.tiles, 1);
    } else {
      launch.file = file;
      launch.kernel = kernel_name(x.dtype(), op, block_kind_name(kind_), "_", plan.rows.rows);
      share_out(launch, plan.rows, 1);
    }
    const mx::array& bias = params.has_bias ? inputs[2] : x;
    launch.input(x).input(inputs[1]).input_if(params.has_bias, bias).output(outputs[0]).params(params);
    return in_order(std::move(launch));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t rows = leading_size(inputs[0], 1);
    return [type = native_type(inputs[0].dtype()), kind = kind_, x = static_cast<const char*>(data_of(inputs[0])),
            blocks = inputs[1].data<uint8_t>(), bias = inputs.size() > 2 ? data_of(inputs[2]) : nullptr,
            y = static_cast<char*>(data_of(outputs[0])), item = inputs[0].itemsize(), rows, exact = exact_,
            columns = static_cast<size_t>(inputs[0].shape(-1)), count = static_cast<size_t>(inputs[1].shape(0))] {
      const size_t most = exact ? cpu::most_exact_rows : std::max<size_t>(rows, 1);
      for (size_t row = 0; row < rows; row += most) {
        cpu::block_matmul(type, kind, blocks, x + row * columns * item, bias, y + row * count * item,
                          std::min(most, rows - row), columns, count, exact);
      }
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array w = block_dequantize(inputs[1], block_kind_name(kind_), inputs[0].dtype(), stream());
    const mx::array y = mx::matmul(inputs[0], mx::transpose(w, stream()), stream());
    return {inputs.size() > 2 ? mx::add(y, inputs[2], stream()) : y};
  }

 private:
  cpu::BlockKind kind_;
  bool exact_;
};

mx::array block_matmul(const mx::array& x, const mx::array& blocks, const std::string& kind_name,
                       const std::optional<mx::array>& bias, bool exact, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const cpu::BlockKind kind = block_kind(op, kind_name);
  check_blocks(op, blocks, kind);
  if (blocks.ndim() != 2) {
    checks::fail(op, "blocks has shape ", blocks.shape(), ": expected two dimensions, rows and the bytes of a row");
  }
  if (x.ndim() < 1) {
    checks::fail(op, "x has no dimensions: expected at least one");
  }
  const int64_t columns = int64_t(blocks.shape(1)) / static_cast<int64_t>(cpu::block_bytes(kind)) *
                          static_cast<int64_t>(cpu::block_weights(kind));
  if (x.shape(-1) != columns) {
    checks::fail(op, "x has ", x.shape(-1), " columns, blocks has shape ", blocks.shape(), ", which is ", columns,
                 " weights of ", kind_name, " a row: expected ", columns, " columns");
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) != blocks.shape(0))) {
    checks::fail(op, "bias has shape ", bias->shape(), ": expected one dimension with ", blocks.shape(0), " elements");
  }
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"x", x}, {"bias", bias}});
  Arrays inputs = {in_dtype(x, dtype, stream), blocks};
  if (bias) {
    inputs.push_back(in_dtype(*bias, dtype, stream));
  }
  const size_t all_rows = leading_size(x, 1);
  const bool is_on_gpu = stream.device == mx::Device::gpu;
  const size_t most_exact = is_on_gpu ? most_gemv_rows : cpu::most_exact_rows;  // under the patch
  exact = all_rows > 1 && (exact || (is_exact() && all_rows <= most_exact));
  const size_t rows = exact ? 1 : all_rows;  // that have sums of their own
  const uint32_t most = most_gguf_rows(stream);
  const bool shares_few = rows <= most;
  const bool is_covered = shares_few && !(exact && is_on_gpu && all_rows > most_matrices);
  if (!shares_few) {
    fallback(op, "more than " + std::to_string(most) + " rows of x");
  } else if (!is_covered) {
    fallback(op, "more than " + std::to_string(most_matrices) + " rows of x, each multiplied alone");
  }
  const ProductSizes sizes{1, static_cast<uint32_t>(rows), static_cast<uint32_t>(columns),
                           static_cast<uint32_t>(blocks.shape(0))};
  const char* reason = why_mx_gguf(kind, dtype, sizes, stream);
  if (!is_covered || prefer_mx_product(problem(dtype, kind, sizes), reason, stream)) {
    const mx::array w = mx::transpose(block_dequantize(blocks, kind_name, dtype, stream), stream);
    const auto product = [&](const mx::array& rows) { return mx::matmul(rows, w, stream); };
    return plus_bias(exact ? row_by_row(inputs[0], stream, product) : product(inputs[0]), bias, stream);
  }
  return first_output(std::make_shared<BlockMatmul>(stream, kind, exact), std::move(inputs));
}

void bind(nb::module_& module) {
  bind_function(module, op, &block_matmul, "x"_a, "blocks"_a, "kind"_a, "bias"_a.none() = nb::none(), nb::kw_only(),
                "exact"_a = false, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
