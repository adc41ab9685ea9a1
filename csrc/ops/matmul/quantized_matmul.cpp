#include "ops/matmul/quantized_matmul.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "mlx/ops.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/matmul/exact.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/quantized_matmul_primitive.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/numerics.h"
#include "runtime/op_binding.h"
#include "runtime/strict.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "quantized_matmul";
constexpr const QuantizedKernels& kernels = quantized_matmul_kernels;

// The shapes to which the axes before the last two of x and of w broadcast. Axes at the end along which w does not
// change stay 1 there: the primitive takes these axes of x for rows.
struct BatchShapes {
  mx::Shape x;
  mx::Shape w;
};

BatchShapes batch_shapes(const mx::array& x, const mx::array& w) {
  const mx::Shape x_batch(x.shape().begin(), x.shape().end() - 2);
  const mx::Shape w_batch(w.shape().begin(), w.shape().end() - 2);
  BatchShapes shapes;
  shapes.x = mx::broadcast_shapes(x_batch, w_batch);
  shapes.w = shapes.x;
  const int missing = static_cast<int>(shapes.x.size() - w_batch.size());
  for (int d = static_cast<int>(shapes.x.size()) - 1; d >= 0 && (d < missing || w_batch[d - missing] == 1); --d) {
    shapes.w[d] = 1;
  }
  return shapes;
}

mx::array with_batch(const mx::array& array, mx::Shape shape, mx::Stream stream) {
  shape.push_back(array.shape(-2));
  shape.push_back(array.shape(-1));
  return array.shape() == shape ? array : mx::broadcast_to(array, shape, stream);
}

// exact: each of several rows has the result of a call of this row alone, by one and the same matrix.
std::optional<mx::array> try_product(const mx::array& x, const mx::array& w, const mx::array& scales,
                                     const std::optional<mx::array>& biases, bool transpose,
                                     std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                                     const std::optional<mx::array>& bias, bool exact, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const QuantizedFormat format = quantized_format(op, group_size, bits, transpose, mode);
  const QuantizedShape shape = check_quantized(op, x, w, scales, biases, format);
  if (bias && (bias->ndim() != 1 || bias->shape(0) != shape.outputs)) {
    checks::fail(op, "bias has shape ", bias->shape(), ": expected one dimension with ", shape.outputs, " elements");
  }
  const bool affine = format.has_biases();
  const mx::Dtype dtype =
      affine ? checks::kernel_dtype(op, {{"x", x}, {"bias", bias}, {"scales", scales}, {"biases", *biases}})
             : checks::kernel_dtype(op, {{"x", x}, {"bias", bias}});
  if (x.ndim() <= 2 && leading_size(w, 2) == 0) {
    checks::fail(op, "w has shape ", w.shape(), ", x has shape ", x.shape(), ": expected at least one matrix");
  }
  if (w.ndim() > 2 && x.ndim() <= 2) {
    return fallback(op, "an x of fewer than three dimensions with a stack of matrices");
  }

  Arrays inputs;
  inputs.reserve(5);
  inputs.push_back(in_dtype(x, dtype, stream));
  inputs.push_back(w);
  inputs.push_back(affine ? in_dtype(scales, dtype, stream) : scales);
  inputs.push_back(affine ? in_dtype(*biases, dtype, stream) : scales);
  if (exact) {
    const int rows = static_cast<int>(leading_size(x, 1));
    inputs[0] = mx::reshape(inputs[0], {rows, 1, x.shape(-1)}, stream);
    for (int i = 1; i < 4; ++i) {
      inputs[i] = with_batch(inputs[i], {rows}, stream);
    }
  } else if (w.ndim() > 2) {
    const BatchShapes batch = batch_shapes(x, w);
    inputs[0] = with_batch(inputs[0], batch.x, stream);
    for (int i = 1; i < 4; ++i) {
      inputs[i] = with_batch(inputs[i], batch.w, stream);
    }
  }
  const size_t matrices = leading_size(inputs[1], 2);
  const size_t rows = matrices == 0 ? 0 : leading_size(inputs[0], 1) / matrices;
  if (const char* reason = why_not_covered(format)) {
    return fallback(op, reason);
  }
  if (const uint32_t most = most_quantized_rows(kernels, stream); rows > most) {
    return fallback(op, "more than " + std::to_string(most) + " rows of x for a matrix");
  }
  if (matrices > most_matrices) {
    return fallback(op, "more than " + std::to_string(most_matrices) + " matrices");
  }
  const ProductSizes sizes{exact ? 1 : static_cast<uint32_t>(matrices), static_cast<uint32_t>(rows),
                           static_cast<uint32_t>(shape.columns), static_cast<uint32_t>(shape.outputs)};
  const Problem problem = product_problem(op, dtype, format_number(format), sizes);
  if (!exact && numerics().int8 && multiplies_int8(format, sizes, stream)) {
    if (is_switched_off(op)) {
      return std::nullopt;
    }
  } else if (const char* reason = why_mx_quantized(kernels, format, dtype, sizes, stream);
             format.transpose ? prefer_mx_product(problem, reason, stream) : prefer_mx(problem, reason, stream)) {
    return std::nullopt;
  }
  if (bias) {
    inputs.push_back(in_dtype(*bias, dtype, stream));
  }
  const mx::array y = quantized_matmul_by_kernels(std::move(inputs), format, exact, stream);
  if (!exact) {
    return y;
  }
  mx::Shape shape_of_y = x.shape();
  shape_of_y.back() = shape.outputs;
  return mx::reshape(y, std::move(shape_of_y), stream);
}

}  // namespace

std::optional<mx::array> try_quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                                              const std::optional<mx::array>& biases, bool transpose,
                                              std::optional<int> group_size, std::optional<int> bits,
                                              const std::string& mode, const std::optional<mx::array>& bias,
                                              mx::StreamOrDevice where) {
  return try_product(x, w, scales, biases, transpose, group_size, bits, mode, bias, false, where);
}

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                           std::optional<int> bits, const std::string& mode, const std::optional<mx::array>& bias,
                           mx::StreamOrDevice where) {
  if (auto y = try_quantized_matmul(x, w, scales, biases, transpose, group_size, bits, mode, bias, where)) {
    return *std::move(y);
  }
  const mx::array y = quantized_matmul_of_mx(x, w, scales, biases, transpose, group_size, bits, mode, where);
  return plus_bias(y, bias, where);
}

namespace {

// The product of a model's head with a norm that x is, which it takes in; nothing for any other.
std::optional<mx::array> try_head(const mx::array& x, const mx::array& w, const mx::array& scales,
                                  const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                                  std::optional<int> bits, const std::string& mode,
                                  const std::optional<mx::array>& bias, mx::StreamOrDevice where) {
  const bool is_candidate = transpose && w.ndim() == 2 && x.ndim() > 0 && is_head(w.shape(0), x.shape(-1)) &&
                            leading_size(x, 1) == 1 && is_pending(x);
  if (!is_candidate) {
    return std::nullopt;
  }
  Arrays matrix = {w, scales};
  if (biases) {
    matrix.push_back(*biases);
  }
  const auto added = bias ? std::optional(std::vector<mx::array>{*bias}) : std::nullopt;
  auto products = try_products_of_norm(x, {matrix}, group_size, bits, mode, added, where);
  return products ? std::optional(std::move(products->front())) : std::nullopt;
}

}  // namespace

std::optional<mx::array> try_product_of_model(const mx::array& x, const mx::array& w, const mx::array& scales,
                                              const std::optional<mx::array>& biases, bool transpose,
                                              std::optional<int> group_size, std::optional<int> bits,
                                              const std::string& mode, const std::optional<mx::array>& bias,
                                              mx::StreamOrDevice where) {
  if (auto y = try_head(x, w, scales, biases, transpose, group_size, bits, mode, bias, where)) {
    return y;
  }
  return try_quantized_matmul(x, w, scales, biases, transpose, group_size, bits, mode, bias, where);
}

namespace {

mx::array bound_quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                                 const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                                 std::optional<int> bits, const std::string& mode, const std::optional<mx::array>& bias,
                                 bool exact, const std::optional<std::string>& activations, mx::StreamOrDevice where) {
  const WithNumerics with(with_activations(op, activations));
  if (activations) {
    check_int8_activations(op, checks::checked_stream(op, where));
  }
  const auto product = [&](const mx::array& rows) {
    return quantized_matmul(rows, w, scales, biases, transpose, group_size, bits, mode, bias, where);
  };
  if (!exact) {
    auto y = try_head(x, w, scales, biases, transpose, group_size, bits, mode, bias, where);
    return y ? *std::move(y) : product(x);
  }
  check_quantized(op, x, w, scales, biases, quantized_format(op, group_size, bits, transpose, mode));
  if (w.ndim() != 2) {
    checks::fail(op, "w has shape ", w.shape(), ": exact=True expects one matrix, of two dimensions");
  }
  const size_t rows = leading_size(x, 1);
  const bool by_plan = transpose && is_exact_by_plan(rows, checks::checked_stream(op, where));
  if (rows == 0 || (rows == 1 && !by_plan)) {
    return product(x);
  }
  const auto together = [&] {
    const WithNumerics exact_plan(by_plan ? Numerics{true, false} : numerics());
    return try_product(x, w, scales, biases, transpose, group_size, bits, mode, bias, !by_plan, where);
  };
  auto y = together();
  return y ? *std::move(y) : row_by_row(x, where, product);
}

// For the patch, which goes on to mx.quantized_matmul where it gets nothing: rows that share a matrix become one
// product of mx before.
std::optional<mx::array> try_by_rows(const mx::array& x, const mx::array& w, const mx::array& scales,
                                     const std::optional<mx::array>& biases, bool transpose,
                                     std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                                     const std::optional<mx::array>& bias, mx::StreamOrDevice where) {
  auto y = try_product_of_model(x, w, scales, biases, transpose, group_size, bits, mode, bias, where);
  if (y || x.ndim() <= 2 || w.ndim() != 2 || has_strict_patch()) {
    return y;
  }
  return plus_bias(quantized_matmul_of_mx(x, w, scales, biases, transpose, group_size, bits, mode, where), bias, where);
}

void bind(nb::module_& module) {
  bind_function(module, op, &bound_quantized_matmul, nb::arg(), nb::arg(), "scales"_a, "biases"_a.none() = nb::none(),
                "transpose"_a = true, "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(),
                "mode"_a = "affine", nb::kw_only(), "bias"_a.none() = nb::none(), "exact"_a = false,
                "activations"_a.none() = nb::none(), "stream"_a = nb::none());
  module.def(
      "check_int8_activations",
      [](const std::string& who) { check_int8_activations(who.c_str(), mx::default_stream(mx::default_device())); },
      "who"_a, "Raises ValueError where kernels run on a GPU that does not multiply integers of 8 bits.");
  module.def("try_quantized_matmul", lenient(op, &try_by_rows, &quantized_matmul), nb::arg(), nb::arg(), "scales"_a,
             "biases"_a.none() = nb::none(), "transpose"_a = true, "group_size"_a.none() = nb::none(),
             "bits"_a.none() = nb::none(), "mode"_a = "affine", nb::kw_only(), "bias"_a.none() = nb::none(),
             "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
