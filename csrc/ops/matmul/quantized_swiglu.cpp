#include "ops/matmul/quantized_swiglu.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/matmul/exact.h"
#include "ops/matmul/normed_row.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/quantized_matmul.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/numerics.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "quantized_swiglu";
const Name file = "matmul/quantized_swiglu.metal";
const Name tiles_file = "matmul/apple/swiglu_tiles.metal";
const Name nvidia_rows_file = "matmul/nvidia/quantized_swiglu.metal";
const Name row_file = "matmul/nvidia/quantized_swiglu_mma.metal";
constexpr QuantizedKernels kernels{op, 2, 4, false, true};

// w, scales and, in affine quantization, biases.
using Triple = Arrays;

void check_triple(const char* name, const Triple& triple, const mx::array& x, const QuantizedFormat& format) {
  check_triple_size(op, name, triple, format);
  const auto biases = format.has_biases() ? std::optional(triple[2]) : std::nullopt;
  check_quantized(op, x, triple[0], triple[1], biases, format);
  if (triple[0].ndim() != 2) {
    checks::fail(op, name, "'s w has shape ", triple[0].shape(), ": expected two dimensions");
  }
}

// x [.., columns] and the triples gate and up -> y [.., outputs]. exact: every row of x is computed as if it were
// alone. One row of x may be a norm (ops/matmul/normed_row.h).
class QuantizedSwiglu : public KernelPrimitive {
 public:
  QuantizedSwiglu(mx::Stream stream, QuantizedFormat format, Activation activation, bool exact,
                  std::optional<NormOfRow> norm = {})
      : KernelPrimitive(stream), format_(format), activation_(activation), exact_(exact), norm_(norm) {}

  const char* name() const override {
    return "MittensQuantizedSwiglu";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& swiglu = static_cast<const QuantizedSwiglu&>(other);
    return format_ == swiglu.format_ && activation_ == swiglu.activation_ && exact_ == swiglu.exact_ &&
           alike_ == swiglu.alike_ && int8_ == swiglu.int8_ && norm_ == swiglu.norm_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {with_columns(inputs[0].shape(), inputs[1].shape(0))};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    // One set of strides serves both triples.
    bool as_is = is_contiguous(inputs[0]) && is_prepared_triple(inputs[1], inputs[2], inputs[3]) &&
                 is_prepared_triple(inputs[4], inputs[5], inputs[6]);
    for (int i = 1; i < 4; ++i) {
      as_is = as_is && inputs[i].strides(0) == inputs[i + 3].strides(0);
    }
    as_is = as_is && (!norm_ || is_contiguous(inputs.back()));
    return as_is ? inputs : row_contiguous(inputs, stream(), copies, 16);
  }

  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-1) == 0;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    QuantizedParams params = quantized_params(inputs[1], inputs[2], inputs[3], format_);
    params.rows = static_cast<uint32_t>(leading_size(x, 1));
    params.columns = x.shape(-1);
    params.outputs = inputs[1].shape(0);
    params.gate_alpha = activation_.alpha;
    params.gate_beta = activation_.beta;
    Launch launch;
    const ProductSizes sizes{1, exact_ ? 1 : params.rows, params.columns, params.outputs};
    if (norm_) {
      launch.file = file;
      launch.kernel = kernel_name(norm_->dtype, op, "normed_", format_name(format_));
      share_out(launch, plan_rows(sizes, kRowOutputs / 2, stream()), 1);
      launch.input(x);
      for (int i = 1; i < 7; ++i) {
        add_view(launch, inputs[i]);
      }
      launch.input(inputs.back()).output(outputs[0]);
      return in_order(launch.params(NormedSwigluParams{params, norm_params(*norm_, inputs.back())}));
    }
    const QuantizedPlan plan = alike_ && are_few_exact(params.rows)
                                   ? plan_quantized_exact(kernels, format_, x.dtype(), sizes, stream())
                                   : plan_quantized(kernels, format_, x.dtype(), sizes, stream());
    if (plan.kernel == QuantizedKernel::qmv) {
      launch.file = file;
      launch.kernel = kernel_name(x.dtype(), op, "qmv_", format_name(format_), "_", plan.shared.rows);
      share_out(launch, plan.shared, 1);
    } else if (plan.kernel == QuantizedKernel::qmm_tiles) {
      launch.file = tiles_file;
      launch.kernel = kernel_name(x.dtype(), op, "qmm_tiles_", format_name(format_), "_", plan.by_tiles.rows);
      share_out(launch, plan.by_tiles, 1);
    } else if (plan.kernel == QuantizedKernel::qmm) {
      launch.file = file;
      launch.kernel = kernel_name(x.dtype(), op, "qmm_", format_name(format_));
      share_out(launch, plan.by_matrices, 1);
    } else {
      const bool by_matrices = plan.kernel == QuantizedKernel::mma_row;
      launch.file = by_matrices ? row_file : nvidia_rows_file;
      launch.kernel = by_matrices ? kernel_name(x.dtype(), op, "row_4bit")
                                  : kernel_name(x.dtype(), op, format_.bits, "bit_", plan.rows);
      params.outputs_per_group = plan.outputs_per_group;
      launch.threadgroups = {ceil_divide(params.outputs, plan.outputs_per_group), ceil_divide(params.rows, plan.rows),
                             1};
      launch.threads = {32 * plan.simdgroups, 1, 1};
    }
    if (exact_) {
      launch.threadgroups.y = params.rows;
    }
    launch.input(x);
    for (int i = 1; i < 7; ++i) {
      add_view(launch, inputs[i]);
    }
    return in_order(launch.output(outputs[0]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    if (norm_) {  // made for a GPU
      return nullptr;
    }
    const size_t rows = leading_size(inputs[0], 1);
    return [type = native_type(inputs[0].dtype()), activation = cpu::Activation{activation_.alpha, activation_.beta},
            x = static_cast<const char*>(data_of(inputs[0])), y = static_cast<char*>(data_of(outputs[0])),
            item = inputs[0].itemsize(), gate = native_quantized(inputs[1], inputs[2], inputs[3], format_)[0],
            up = native_quantized(inputs[4], inputs[5], inputs[6], format_)[0], rows, together = exact_ ? 1 : rows,
            columns = static_cast<size_t>(inputs[0].shape(-1)), count = static_cast<size_t>(inputs[1].shape(0)),
            mode = cpu::ProductMode{alike_, int8_}] {
      for (size_t row = 0; row < rows; row += together) {
        cpu::quantized_swiglu(type, activation, &gate, &up, x + row * columns * item, y + row * count * item, 1,
                              together, columns, count, mode);
      }
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array x = norm_ ? compose_row(inputs, *norm_, stream()) : inputs[0];
    auto product = [&](int first) {
      const auto biases = format_.has_biases() ? std::optional(inputs[first + 2]) : std::nullopt;
      return quantized_matmul(x, inputs[first], inputs[first + 1], biases, true, format_.group_size, format_.bits,
                              mode_name(format_), std::nullopt, stream());
    };
    return {gated(product(1), product(4), activation_, stream())};
  }

 private:
  QuantizedFormat format_;
  Activation activation_;
  bool exact_;
  std::optional<NormOfRow> norm_;
  bool alike_ = is_exact();  // rows sum as a row alone does
  bool int8_ = numerics().int8;  // on a CPU x may be rounded
};

// The product of x by inputs of QuantizedSwiglu; takes in the norm that gives x, if x has at most `holders`.
mx::array swiglu_of(const mx::array& x, long holders, const QuantizedFormat& format, const Activation& activation,
                    Arrays inputs, mx::Stream stream) {
  const bool may_take = inputs[0].id() == x.id() && has_common_kernels(format) && leading_size(x, 1) == 1 &&
                        x.size() > 0 && shares_norm(stream);
  if (const auto row = may_take ? take_normed_row(x, holders, stream) : std::nullopt) {
    inputs[0] = row->scaled;
    inputs.push_back(row->squares);
    auto primitive = std::make_shared<QuantizedSwiglu>(stream, format, activation, false, row->norm);
    mx::Shape shape = primitive->output_shapes(inputs)[0];
    return mx::array(std::move(shape), row->norm.dtype, std::move(primitive), std::move(inputs));
  }
  return first_output(std::make_shared<QuantizedSwiglu>(stream, format, activation, false), std::move(inputs));
}

mx::array quantized_swiglu(const mx::array& x, const Triple& gate, const Triple& up, std::optional<int> group_size,
                           std::optional<int> bits, const std::string& mode, const std::string& activation_name,
                           bool exact, bool takes_norm, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Activation& activation = activation_of(op, activation_name, false);
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  check_triple("gate", gate, x, format);
  check_triple("up", up, x, format);
  const int outputs = gate[0].shape(0);
  if (up[0].shape(0) != outputs) {
    checks::fail(op, "up's w has ", up[0].shape(0), " rows, gate's has ", outputs, ": expected the same number");
  }
  const bool affine = format.has_biases();
  const mx::Dtype dtype = affine ? checks::kernel_dtype(op, {{"x", x},
                                                             {"gate's scales", gate[1]},
                                                             {"gate's biases", gate[2]},
                                                             {"up's scales", up[1]},
                                                             {"up's biases", up[2]}})
                                 : checks::kernel_dtype(op, {{"x", x}});
  auto typed = [&](const mx::array& array) { return in_dtype(array, dtype, stream); };
  Arrays inputs;
  inputs.reserve(7);
  inputs.push_back(typed(x));
  for (const Triple* triple : {&gate, &up}) {
    inputs.push_back((*triple)[0]);
    inputs.push_back(affine ? typed((*triple)[1]) : (*triple)[1]);
    inputs.push_back(affine ? typed((*triple)[2]) : (*triple)[1]);
  }
  auto biases_of = [&](int first) { return affine ? std::optional(inputs[first + 2]) : std::nullopt; };
  auto product_of_rows = [&](const mx::array& x) {
    auto product = [&](int first) {
      return quantized_matmul_of_mx(x, inputs[first], inputs[first + 1], biases_of(first), true, format.group_size,
                                    format.bits, mode, stream);
    };
    return gated(product(1), product(4), activation, stream);
  };
  const size_t all_rows = leading_size(x, 1);
  const bool by_plan = exact && is_exact_by_plan(all_rows, stream);
  const bool apart = exact && !by_plan && all_rows > 1;  // each row as a matrix of its own
  const WithNumerics exact_plan(by_plan ? Numerics{true, false} : numerics());
  auto products_of_mx = [&] {
    return exact && all_rows > 1 ? row_by_row(inputs[0], stream, product_of_rows) : product_of_rows(inputs[0]);
  };
  auto by_mx = [&](const std::string& reason) {
    fallback(op, reason);
    return products_of_mx();
  };
  const size_t rows = apart ? 1 : all_rows;  // that share their work
  if (const char* reason = why_not_covered(format)) {
    return by_mx(reason);
  }
  auto own_products = [&] {
    auto product = [&](int first) {  // which may be ours
      return quantized_matmul(inputs[0], inputs[first], inputs[first + 1], biases_of(first), true, format.group_size,
                              format.bits, mode, std::nullopt, stream);
    };
    return gated(product(1), product(4), activation, stream);
  };
  if (const uint32_t most = most_quantized_rows(kernels, stream); rows > most) {
    fallback(op, "more than " + std::to_string(most) + " rows of x");
    return own_products();
  }
  if (is_exact() && !gates_exact_rows(stream)) {
    return own_products();
  }
  if (apart && stream.device == mx::Device::gpu && all_rows > most_matrices) {
    return by_mx("more than " + std::to_string(most_matrices) + " rows of x, each multiplied alone");
  }
  const ProductSizes sizes{1, static_cast<uint32_t>(rows), static_cast<uint32_t>(x.shape(-1)),
                           static_cast<uint32_t>(outputs)};
  if (!exact && numerics().int8 && multiplies_int8(format, sizes, stream)) {
    return own_products();
  }
  const char* reason = why_mx_quantized(kernels, format, dtype, sizes, stream);
  if (prefer_mx_product(product_problem(op, dtype, format_number(format), sizes), reason, stream)) {
    return products_of_mx();
  }
  if (takes_norm) {
    constexpr long holders = 2;  // the caller and the inputs
    return swiglu_of(x, holders, format, activation, std::move(inputs), stream);
  }
  return first_output(std::make_shared<QuantizedSwiglu>(stream, format, activation, apart), std::move(inputs));
}

}  // namespace

std::optional<mx::array> try_swiglu(const mx::array& gate, const mx::array& up, const Activation& activation) {
  const auto format = pending_product(gate);
  if (!format || pending_product(up) != format || gate.shape() != up.shape()) {
    return std::nullopt;
  }
  const mx::Stream stream = gate.primitive().stream();
  const Arrays& inputs = gate.inputs();
  const size_t rows = leading_size(inputs[0], 1);
  const bool by_tiles = rows > most_gemv_rows && rows <= most_quantized_rows(kernels, stream);
  if (gate.is_tracer() || (is_exact() && !gates_exact_rows(stream)) || up.primitive().stream() != stream ||
      up.inputs()[0].id() != inputs[0].id() ||
      (stream.device == mx::Device::gpu && rows > kernels.most_rows && !by_tiles)) {
    return std::nullopt;
  }
  const mx::array& w = inputs[1];
  const ProductSizes sizes{1, static_cast<uint32_t>(rows), static_cast<uint32_t>(inputs[0].shape(-1)),
                           static_cast<uint32_t>(w.shape(0))};
  if ((numerics().int8 && multiplies_int8(*format, sizes, stream)) ||
      prefer_mx(product_problem(op, gate.dtype(), format_number(*format), sizes), nullptr, stream)) {
    return std::nullopt;
  }
  Arrays all = inputs;
  all.insert(all.end(), up.inputs().begin() + 1, up.inputs().end());
  constexpr long holders = 4;  // the caller, both products, and all inputs
  return swiglu_of(inputs[0], holders, *format, activation, std::move(all), stream);
}

namespace {

mx::array bound_quantized_swiglu(const mx::array& x, const Triple& gate, const Triple& up,
                                 std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                                 const std::string& activation, bool exact, mx::StreamOrDevice where) {
  return quantized_swiglu(x, gate, up, group_size, bits, mode, activation, exact, false, where);
}

mx::array swiglu_of_norm(const mx::array& x, const Triple& gate, const Triple& up, std::optional<int> group_size,
                         std::optional<int> bits, const std::string& mode, const std::string& activation,
                         mx::StreamOrDevice where) {
  return quantized_swiglu(x, gate, up, group_size, bits, mode, activation, false, true, where);
}

void bind(nb::module_& module) {
  bind_function(module, op, &bound_quantized_swiglu, "x"_a, "gate"_a, "up"_a, "group_size"_a.none() = nb::none(),
                "bits"_a.none() = nb::none(), "mode"_a = "affine", nb::kw_only(), "activation"_a = "swiglu",
                "exact"_a = false, "stream"_a = nb::none());
  module.def("swiglu_of_norm", for_any_shape(op, &swiglu_of_norm), "x"_a, "gate"_a, "up"_a,
             "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(), "mode"_a = "affine", nb::kw_only(),
             "activation"_a = "swiglu", "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
