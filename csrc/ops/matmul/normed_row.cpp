#include "ops/matmul/normed_row.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "mlx/ops.h"
#include "mlx_internals/buffer_ownership.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/quantized_matmul.h"
#include "ops/norm/norms.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

constexpr const char* op = "quantized_matmul";
const Name file = "matmul/qmv.metal";

// x [.., columns] of one row, a triple, a bias [outputs], if there is one, a residual [.., outputs] and the weight
// [outputs] of a norm -> the sum of product and residual, that times the weight in float32, and squares [blocks].
class QuantizedMatmulSum : public KernelPrimitive, public HandsRowOn {
 public:
  QuantizedMatmulSum(mx::Stream stream, QuantizedFormat format) : KernelPrimitive(stream), format_(format) {}

  const char* name() const override {
    return "MittensQuantizedMatmulSum";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return format_ == static_cast<const QuantizedMatmulSum&>(other).format_;
  }

  const mx::array* weight_of_row(const Arrays& inputs) const override {
    return &inputs.back();
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape& shape = residual_of(inputs).shape();
    return {shape, shape, {square_blocks(shape.back())}};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    const bool as_is = is_contiguous(inputs[0]) && is_prepared_triple(inputs[1], inputs[2], inputs[3]) &&
                       std::all_of(inputs.begin() + 4, inputs.end(), is_contiguous);
    return as_is ? inputs : row_contiguous(inputs, stream(), copies, 16);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    QuantizedParams params = quantized_params(inputs[1], inputs[2], inputs[3], format_);
    params.rows = 1;
    params.columns = static_cast<uint32_t>(x.shape(-1));
    params.outputs = static_cast<uint32_t>(inputs[1].shape(0));
    params.has_bias = has_bias(inputs);
    params.splits = 1;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(x.dtype(), op, "sum_", format_name(format_));
    share_out(launch, plan_rows({1, 1, params.columns, params.outputs}, kRowOutputs, stream()), 1);
    launch.input(x);
    for (int i = 1; i < 4; ++i) {
      add_view(launch, inputs[i]);
    }
    launch.input_if(params.has_bias, params.has_bias ? inputs[4] : x);
    launch.input(residual_of(inputs));
    launch.input(inputs.back());
    for (const mx::array& output : outputs) {
      launch.output(output);
    }
    return in_order(launch.params(params));
  }

  Arrays composed(const Arrays& inputs) override {
    const auto biases = format_.has_biases() ? std::optional(inputs[3]) : std::nullopt;
    const auto bias = has_bias(inputs) ? std::optional(inputs[4]) : std::nullopt;
    const mx::array product = quantized_matmul(inputs[0], inputs[1], inputs[2], biases, true, format_.group_size,
                                               format_.bits, mode_name(format_), bias, stream());
    return compose_sum(product, residual_of(inputs), inputs.back(), stream());
  }

 private:
  static bool has_bias(const Arrays& inputs) {
    return inputs.size() > 6;
  }
  static const mx::array& residual_of(const Arrays& inputs) {
    return inputs[inputs.size() - 2];
  }

  QuantizedFormat format_;
};

// Gives a pending array the place of the first output of a primitive: whoever holds it sees that.
void become(mx::array array, mx::array output) {
  Arrays siblings = output.siblings();
  for (mx::array& sibling : siblings) {
    for (mx::array& other : sibling.siblings()) {
      if (other.id() == output.id()) {
        other.overwrite_descriptor(array);
      }
    }
  }
  output.siblings().clear();
  array.primitive_ptr() = output.primitive_ptr();
  array.inputs() = output.inputs();
  array.set_siblings(std::move(siblings), 0);
}

// The sum of a product with a residual, and its squares for a norm, if the product has no other reader.
std::optional<Arrays> summed(const mx::array& product, const mx::array& residual, const mx::array& weight,
                             mx::Stream stream) {
  // The inputs of norm and sum, who looks, the caller, since a model names its parts, and outputs beside the product.
  const long most_holders = 4 + static_cast<long>(product.siblings().size());
  if (!is_pending(product) || product.is_tracer() || product.primitive().stream() != stream ||
      product.shape() != residual.shape() || !has_holders(product, most_holders)) {
    return std::nullopt;
  }
  if (auto* other = dynamic_cast<SummedProduct*>(&product.primitive())) {
    return product.outputs()[0].id() == product.id() ? other->with_sum(product.inputs(), residual, weight)
                                                     : std::nullopt;
  }
  const auto format = pending_row_product(product);
  if (!format || !has_common_kernels(*format)) {
    return std::nullopt;
  }
  auto primitive = std::make_shared<QuantizedMatmulSum>(stream, *format);
  Arrays inputs = product.inputs();
  inputs.push_back(residual);
  inputs.push_back(weight);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return mx::array::make_arrays(std::move(shapes), {product.dtype(), mx::float32, mx::float32}, std::move(primitive),
                                inputs);
}

}  // namespace

int square_blocks(int outputs) {
  return outputs < kRowOutputs ? outputs : static_cast<int>(ceil_divide(outputs, kRowOutputs));
}

std::optional<NormedRow> handed_on_row(const mx::array& y, mx::Stream stream) {
  if (!is_pending(y) || y.is_tracer() || y.primitive().stream() != stream) {
    return std::nullopt;
  }
  const auto norm = pending_rms_norm(y);
  const bool may_be = norm && norm->weight && norm->weight_offset == 0 && is_pending(norm->x) && !norm->x.is_tracer();
  const auto* product = may_be ? dynamic_cast<const HandsRowOn*>(&norm->x.primitive()) : nullptr;
  const mx::array* weight = product ? product->weight_of_row(norm->x.inputs()) : nullptr;
  if (!weight || weight->id() != norm->weight->id() || norm->x.dtype() != y.dtype()) {
    return std::nullopt;
  }
  const Arrays outputs = norm->x.outputs();
  return outputs[0].id() == norm->x.id() ? std::optional(NormedRow{outputs[1], outputs[2], {norm->eps, y.dtype()}})
                                         : std::nullopt;
}

std::optional<NormedRow> take_normed_row(const mx::array& y, long holders, mx::Stream stream) {
  if (auto row = handed_on_row(y, stream)) {
    return row;
  }
  if (!is_pending(y) || y.is_tracer() || y.primitive().stream() != stream ||
      !has_holders(y, holders + static_cast<long>(y.siblings().size()))) {
    return std::nullopt;
  }
  const auto norm = pending_add_rms_norm(y);
  const bool is_taken = norm && norm->weight && norm->weight_offset == 0 && norm->weight->dtype() == y.dtype() &&
                        y.siblings().size() == 1 && is_pending(norm->sum) && !norm->sum.is_tracer();
  if (!is_taken) {
    return std::nullopt;
  }
  for (int i : {0, 1}) {
    const mx::array& product = i == 0 ? norm->x : norm->residual;
    const mx::array& residual = i == 0 ? norm->residual : norm->x;
    if (const auto outputs = summed(product, residual, *norm->weight, stream)) {
      become(y, rms_norm(norm->sum, norm->weight, norm->eps, 0.0f, stream));
      become(norm->sum, outputs->at(0));
      return NormedRow{outputs->at(1), outputs->at(2), {norm->eps, y.dtype()}};
    }
  }
  return std::nullopt;
}

Arrays compose_sum(const mx::array& product, const mx::array& residual, const mx::array& weight, mx::Stream stream) {
  const mx::array sum = mx::add(product, residual, stream);
  const mx::array wide = mx::astype(sum, mx::float32, stream);
  const mx::array scaled = mx::multiply(wide, mx::astype(weight, mx::float32, stream), stream);
  const mx::array square = mx::reshape(mx::sum(mx::square(wide, stream), stream), {1}, stream);
  const mx::Shape others = {square_blocks(sum.shape(-1)) - 1};
  return {sum, scaled, mx::concatenate({square, mx::zeros(others, mx::float32, stream)}, 0, stream)};
}

mx::array compose_row(const Arrays& inputs, const NormOfRow& norm, mx::Stream stream) {
  const auto columns = static_cast<float>(inputs[0].shape(-1));
  const mx::array square = mx::divide(mx::sum(inputs.back(), stream), mx::array(columns), stream);
  const mx::array n = mx::rsqrt(mx::add(square, mx::array(norm.eps), stream), stream);
  return mx::astype(mx::multiply(inputs[0], n, stream), norm.dtype, stream);
}

NormParams norm_params(const NormOfRow& norm, const mx::array& squares) {
  return {norm.eps, static_cast<uint32_t>(squares.size())};
}

}  // namespace mittens
