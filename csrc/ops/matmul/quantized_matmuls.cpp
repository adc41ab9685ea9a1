#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "mlx/ops.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/matmul/normed_row.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/quantized_matmul.h"
#include "params/matmul.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "quantized_matmuls";
const Name file = "matmul/qmv_several.metal";

// w, scales and, in affine quantization, biases.
using Triple = Arrays;
using Bias = std::optional<std::vector<mx::array>>;

// x [.., columns] of one row, a triple for each matrix, and a bias [outputs] for each, if there are any -> y [.., all
// outputs]. x may be a norm (ops/matmul/normed_row.h).
class QuantizedMatmuls : public KernelPrimitive {
 public:
  QuantizedMatmuls(mx::Stream stream, QuantizedFormat format, size_t count, std::optional<NormOfRow> norm = {})
      : KernelPrimitive(stream), format_(format), count_(count), norm_(norm) {}

  const char* name() const override {
    return "MittensQuantizedMatmuls";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& products = static_cast<const QuantizedMatmuls&>(other);
    return format_ == products.format_ && count_ == products.count_ && norm_ == products.norm_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = 0;
    for (size_t i = 0; i < count_; ++i) {
      shape.back() += inputs[1 + 3 * i].shape(-2);
    }
    return {shape};
  }

 protected:
  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-1) == 0;
  }

  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    copies = inputs;
    copies[0] = contiguous_rows(inputs[0], stream());
    for (size_t i = 1 + 3 * count_; i < inputs.size(); ++i) {
      copies[i] = contiguous_rows(inputs[i], stream());
    }
    bool are_alike = true;  // one stride from row to row serves all
    for (size_t i = 0; i < count_; ++i) {
      const auto of = inputs.begin() + static_cast<ptrdiff_t>(1 + 3 * i);
      are_alike = are_alike && is_prepared_triple(of[0], of[1], of[2]);
      for (size_t j = 0; j < 3; ++j) {
        are_alike = are_alike && of[static_cast<ptrdiff_t>(j)].strides() == inputs[1 + j].strides();
      }
    }
    for (size_t i = 1; !are_alike && i < 1 + 3 * count_; ++i) {
      copies[i] = contiguous_rows(inputs[i], stream());
    }
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    const bool has_bias = this->has_bias(inputs);
    QuantizedMatmulsParams params{};
    params.weights = quantized_params(inputs[1], inputs[2], inputs[3], format_);
    params.weights.columns = static_cast<uint32_t>(x.shape(-1));
    params.weights.rows = 1;
    params.weights.has_bias = has_bias;
    params.count = static_cast<uint32_t>(count_);
    uint32_t blocks = 0, output = 0;
    for (size_t i = 0; i < kMostTogether; ++i) {
      const uint32_t own = i < count_ ? static_cast<uint32_t>(inputs[1 + 3 * i].shape(-2)) : 0;
      params.first_block[i] = blocks;
      params.first_output[i] = output;
      params.outputs[i] = own;
      blocks += own < kRowOutputs ? own : ceil_divide(own, kRowOutputs);
      output += own;
    }
    const RowsPlan plan = plan_rows({1, 1, params.weights.columns, output}, kRowOutputs, stream());
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(norm_ ? norm_->dtype : x.dtype(), op, norm_ ? "normed_" : "", format_name(format_));
    launch.threadgroups = {ceil_divide(blocks, plan.blocks), 1, 1};
    launch.threads = {32 * plan.sharers, plan.blocks, 1};
    launch.input(x);
    for (size_t i = 0; i < kMostTogether; ++i) {
      for (size_t j = 0; j < 3; ++j) {
        if (i < count_) {
          add_view(launch, inputs[1 + 3 * i + j]);
        } else {
          launch.stand_in(inputs[1 + j]);
        }
      }
    }
    for (size_t i = 0; i < kMostTogether; ++i) {
      const bool is_there = has_bias && i < count_;
      launch.input_if(is_there, is_there ? inputs[1 + 3 * count_ + i] : x);
    }
    if (norm_) {
      params.norm = norm_params(*norm_, inputs.back());
      launch.input(inputs.back());
    }
    return in_order(launch.output(outputs[0]).params(params));
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array x = norm_ ? compose_row(inputs, *norm_, stream()) : inputs[0];
    Arrays products;
    for (size_t i = 0; i < count_; ++i) {
      const auto of = inputs.begin() + static_cast<ptrdiff_t>(1 + 3 * i);
      const auto biases = format_.has_biases() ? std::optional(of[2]) : std::nullopt;
      const auto bias = has_bias(inputs) ? std::optional(inputs[1 + 3 * count_ + i]) : std::nullopt;
      products.push_back(mittens::quantized_matmul(x, of[0], of[1], biases, true, format_.group_size, format_.bits,
                                                   mode_name(format_), bias, stream()));
    }
    return {mx::concatenate(products, -1, stream())};
  }

 private:
  bool has_bias(const Arrays& inputs) const {
    return inputs.size() > 1 + 3 * count_ + (norm_ ? 1 : 0);
  }

  QuantizedFormat format_;
  size_t count_;
  std::optional<NormOfRow> norm_;
};

struct Call {
  Arrays inputs;
  QuantizedFormat format;
};

Call checked(const mx::array& x, const std::vector<Triple>& matrices, std::optional<int> group_size,
             std::optional<int> bits, const std::string& mode, const Bias& bias, mx::Stream stream) {
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  const bool affine = format.has_biases();
  if (matrices.empty()) {
    checks::fail(op, "matrices has no triples: expected at least one");
  }
  if (bias && bias->size() != matrices.size()) {
    checks::fail(op, "bias has ", bias->size(), " arrays, matrices has ", matrices.size(),
                 ": expected one for each matrix");
  }
  mx::Dtype dtype = checks::kernel_dtype(op, {{"x", x}});
  Arrays triples;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Triple& triple = matrices[i];
    check_triple_size(op, "matrix " + std::to_string(i), triple, format);
    if (triple[0].ndim() != 2) {
      checks::fail(op, "matrix ", i, "'s w has shape ", triple[0].shape(), ": expected [outputs, words]");
    }
    const auto biases = affine ? std::optional(triple[2]) : std::nullopt;
    const QuantizedShape shape = check_quantized(op, x, triple[0], triple[1], biases, format);
    if (affine) {
      dtype =
          mx::promote_types(dtype, checks::kernel_dtype(op, {{"x", x}, {"scales", triple[1]}, {"biases", triple[2]}}));
    }
    if (bias) {
      const mx::array& own = (*bias)[i];
      if (own.ndim() != 1 || own.shape(0) != shape.outputs) {
        checks::fail(op, "bias ", i, " has shape ", own.shape(), ": expected one dimension with ", shape.outputs,
                     " elements");
      }
      dtype = mx::promote_types(dtype, checks::kernel_dtype(op, {{"x", x}, {"bias", own}}));
    }
    triples.insert(triples.end(), {triple[0], triple[1], triple[affine ? 2 : 1]});
  }
  const auto typed = [&](const mx::array& a) { return in_dtype(a, dtype, stream); };
  Arrays inputs = {typed(x)};
  for (size_t i = 0; i < triples.size(); ++i) {
    inputs.push_back(affine && i % 3 != 0 ? typed(triples[i]) : triples[i]);
  }
  for (size_t i = 0; bias && i < bias->size(); ++i) {
    inputs.push_back(typed((*bias)[i]));
  }
  return {std::move(inputs), format};
}

// One row, on GPUs for whose single products matmul/qmv.metal serves.
bool has_kernel(const Call& call, size_t least, size_t count, mx::Stream stream) {
  const mx::array& x = call.inputs[0];
  const auto is_empty = [](const mx::array& a) { return a.size() == 0; };
  return multiplies_several(stream) && has_common_kernels(call.format) && count >= least && count <= kMostTogether &&
         leading_size(x, 1) == 1 && std::none_of(call.inputs.begin(), call.inputs.end(), is_empty);
}

std::vector<mx::array> parts_of(const mx::array& y, const std::vector<Triple>& matrices, mx::Stream stream) {
  std::vector<mx::array> parts;
  mx::Shape start(y.ndim(), 0), stop = y.shape();
  for (const Triple& triple : matrices) {
    stop.back() = start.back() + triple[0].shape(-2);
    parts.push_back(mx::slice(y, start, stop, stream));
    start.back() = stop.back();
  }
  return parts;
}

std::optional<std::vector<mx::array>> attempt(const mx::array& x, const std::vector<Triple>& matrices,
                                              std::optional<int> group_size, std::optional<int> bits,
                                              const std::string& mode, const Bias& bias, bool takes_norm,
                                              mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  if (takes_norm && !multiplies_several(stream)) {
    return std::nullopt;
  }
  Call call = checked(x, matrices, group_size, bits, mode, bias, stream);
  if (is_switched_off(op) || !has_kernel(call, takes_norm ? 1 : 2, matrices.size(), stream)) {
    return std::nullopt;
  }
  QuantizedMatmuls plain(stream, call.format, matrices.size());
  const auto outputs = static_cast<uint32_t>(plain.output_shapes(call.inputs)[0].back());
  const ProductSizes sizes{1, 1, static_cast<uint32_t>(x.shape(-1)), outputs};
  if (prefer_mx(product_problem(op, call.inputs[0].dtype(), format_number(call.format), sizes), nullptr, stream)) {
    return std::nullopt;
  }
  constexpr long holders = 2;  // the caller and the inputs
  const bool may_take = takes_norm && call.inputs[0].id() == x.id() && shares_norm(stream);
  if (const auto row = may_take ? take_normed_row(x, holders, stream) : std::nullopt) {
    auto primitive = std::make_shared<QuantizedMatmuls>(stream, call.format, matrices.size(), row->norm);
    call.inputs[0] = row->scaled;
    call.inputs.push_back(row->squares);
    mx::Shape shape = primitive->output_shapes(call.inputs)[0];
    return parts_of(mx::array(std::move(shape), row->norm.dtype, std::move(primitive), std::move(call.inputs)),
                    matrices, stream);
  }
  if (matrices.size() == 1) {
    return std::nullopt;
  }
  auto primitive = std::make_shared<QuantizedMatmuls>(stream, call.format, matrices.size());
  return parts_of(first_output(std::move(primitive), std::move(call.inputs)), matrices, stream);
}

}  // namespace

std::optional<std::vector<mx::array>> try_quantized_matmuls(const mx::array& x, const std::vector<Triple>& matrices,
                                                            std::optional<int> group_size, std::optional<int> bits,
                                                            const std::string& mode, const Bias& bias,
                                                            mx::StreamOrDevice where) {
  return attempt(x, matrices, group_size, bits, mode, bias, false, where);
}

std::optional<std::vector<mx::array>> try_products_of_norm(const mx::array& x, const std::vector<Triple>& matrices,
                                                           std::optional<int> group_size, std::optional<int> bits,
                                                           const std::string& mode, const Bias& bias,
                                                           mx::StreamOrDevice where) {
  return attempt(x, matrices, group_size, bits, mode, bias, true, where);
}

namespace {

std::vector<mx::array> quantized_matmuls(const mx::array& x, const std::vector<Triple>& matrices,
                                         std::optional<int> group_size, std::optional<int> bits,
                                         const std::string& mode, const Bias& bias, mx::StreamOrDevice where) {
  if (auto parts = try_quantized_matmuls(x, matrices, group_size, bits, mode, bias, where)) {
    return *std::move(parts);
  }
  const mx::Stream stream = checks::checked_stream(op, where);
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  std::vector<mx::array> parts;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto biases = format.has_biases() ? std::optional(matrices[i][2]) : std::nullopt;
    parts.push_back(mittens::quantized_matmul(x, matrices[i][0], matrices[i][1], biases, true, group_size, bits, mode,
                                              bias ? std::optional((*bias)[i]) : std::nullopt, stream));
  }
  return parts;
}

void bind(nb::module_& module) {
  define(module, op, &try_quantized_matmuls, &quantized_matmuls, "x"_a, "matrices"_a,
         "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(), "mode"_a = "affine", nb::kw_only(),
         "bias"_a.none() = nb::none(), "stream"_a = nb::none());
  module.def("try_products_of_norm", lenient(op, &try_products_of_norm, &quantized_matmuls), "x"_a, "matrices"_a,
             "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(), "mode"_a = "affine", nb::kw_only(),
             "bias"_a.none() = nb::none(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
