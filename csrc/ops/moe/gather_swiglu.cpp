#include <functional>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/matmul/affine.h"
#include "ops/moe/gather.h"
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

constexpr const char* op = "gather_swiglu";
const Name file = "moe/gather_swiglu.metal";

using Triple = std::tuple<mx::array, mx::array, mx::array>;

// silu(x[lhs] @ gate[rhs].T) * (x[lhs] @ up[rhs].T) of mx operations, the products ours where they are covered.
mx::array of_products(const mx::array& x, const Arrays& stacks, const std::optional<mx::array>& lhs,
                      const std::optional<mx::array>& rhs, const AffineFormat& format, bool sorted, mx::Stream stream) {
  auto product = [&](size_t first) {
    return mittens::gather_qmm(x, stacks[first], stacks[first + 1], stacks[first + 2], lhs, rhs, true,
                               format.group_size, format.bits, "affine", std::nullopt, sorted, stream);
  };
  const mx::array gate = product(0);
  return mx::multiply(mx::multiply(gate, mx::sigmoid(gate, stream), stream), product(3), stream);
}

class GatherSwiglu : public GatherPrimitive {
 public:
  GatherSwiglu(mx::Stream stream, AffineFormat format) : GatherPrimitive(stream, 6), format_(format) {}

  const char* name() const override {
    return "MittensGatherSwiglu";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return format_ == static_cast<const GatherSwiglu&>(other).format_;
  }

 protected:
  int outputs_of(const Arrays& inputs) const override {
    return inputs[1].shape(-2);
  }

  mx::array apply(const mx::array& x, const Arrays& stacks, const Pairs& pairs) override {
    return first_output(std::make_shared<GatherSwiglu>(stream(), format_), gather_inputs(x, stacks, pairs));
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(inputs[0].dtype(), op, format_.bits, "bit");
    const GatherQmmParams params = share_out_pairs(launch, inputs, format_, kRowOutputs / 2);
    launch.input(inputs[0]);
    for (int i = 1; i < 7; ++i) {
      add_view(launch, inputs[i]);
    }
    add_pairs(launch, inputs);
    return in_order(launch.output(outputs[0]).params(params));
  }

  void prepare_stacks(Arrays& stacks) override {
    // One set of strides serves both triples.
    bool are_alike = true;
    for (size_t i = 0; i < 3; ++i) {
      are_alike = are_alike && stacks[i].strides() == stacks[i + 3].strides();
    }
    if (!are_alike) {
      for (mx::array& stack : stacks) {
        stack = contiguous_rows(stack, stream());
      }
      return;
    }
    for (size_t first : {0, 3}) {
      if (!is_prepared_affine(stacks[first], stacks[first + 1], stacks[first + 2])) {
        const Arrays ready = prepared_affine(stacks[first], stacks[first + 1], stacks[first + 2], stream());
        std::copy(ready.begin(), ready.end(), stacks.begin() + static_cast<ptrdiff_t>(first));
      }
    }
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    return [type = native_type(inputs[0].dtype()), gate = native_affine(inputs[1], inputs[2], inputs[3], format_),
            up = native_affine(inputs[4], inputs[5], inputs[6], format_), gather = native_gather(inputs),
            x = data_of(inputs[0]),
            y = data_of(outputs[0])] { cpu::gather_swiglu(type, gate.data(), up.data(), gather, x, y); };
  }

  Arrays composed(const Arrays& inputs) override {
    const Pairs pairs = pairs_of(inputs);
    return {of_products(inputs[0], stacks_of(inputs), input_indices(pairs, inputs[0], stream()), pairs.experts, format_,
                        false, stream())};
  }

 private:
  AffineFormat format_;
};

mx::array gather_swiglu(const mx::array& x, const Triple& gate, const Triple& up,
                        const std::optional<mx::array>& lhs_indices, const std::optional<mx::array>& rhs_indices,
                        std::optional<int> group_size, std::optional<int> bits, bool sorted_indices,
                        mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const AffineFormat format = affine_format(op, group_size, bits, true);
  if (x.ndim() < 2) {
    checks::fail(op, "x has shape ", x.shape(), ": expected at least two dimensions");
  }
  check_indices(op, lhs_indices, rhs_indices);
  Arrays stacks;
  for (const Triple* triple : {&gate, &up}) {
    const auto& [w, scales, biases] = *triple;
    check_affine(op, x, w, scales, biases, format);
    stacks.insert(stacks.end(), {w, scales, biases});
  }
  if (stacks[3].shape() != stacks[0].shape()) {
    checks::fail(op, "up's w has shape ", stacks[3].shape(), ", gate's has shape ", stacks[0].shape(),
                 ": expected the same shape");
  }
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"x", x},
                                                    {"gate's scales", stacks[1]},
                                                    {"gate's biases", stacks[2]},
                                                    {"up's scales", stacks[4]},
                                                    {"up's biases", stacks[5]}});
  auto by_mx = [&](const std::string& reason) {
    fall_back(op, reason);
    return of_products(x, stacks, lhs_indices, rhs_indices, format, sorted_indices, stream);
  };
  if (!has_affine_kernels(format)) {
    return by_mx(std::to_string(format.bits) + " bits");
  }
  const Pairs pairs = gather_pairs(op, x, stacks[0], lhs_indices, rhs_indices, stream);
  if (const char* reason = why_mx_gather(x, pairs, true, stream)) {
    return by_mx(reason);
  }
  for (size_t i : {1, 2, 4, 5}) {
    stacks[i] = in_dtype(stacks[i], dtype, stream);
  }
  return first_output(std::make_shared<GatherSwiglu>(stream, format),
                      gather_inputs(in_dtype(x, dtype, stream), stacks, pairs));
}

}  // namespace

std::optional<mx::array> try_gather_swiglu(const mx::array& gate, const mx::array& up) {
  const auto format = pending_gather(gate);
  if (!format || pending_gather(up) != format || gate.shape() != up.shape() || gate.is_tracer()) {
    return std::nullopt;
  }
  const mx::Stream stream = gate.primitive().stream();
  const Arrays& inputs = gate.inputs();
  const Arrays& others = up.inputs();
  bool are_alike = up.primitive().stream() == stream && others.size() == inputs.size() &&
                   others[0].id() == inputs[0].id() && others[1].shape() == inputs[1].shape();
  for (size_t i = 4; are_alike && i < inputs.size(); ++i) {  // the indices
    are_alike = others[i].id() == inputs[i].id();
  }
  if (!are_alike) {
    return std::nullopt;
  }
  Arrays all(inputs.begin(), inputs.begin() + 4);
  all.insert(all.end(), others.begin() + 1, others.begin() + 4);
  all.insert(all.end(), inputs.begin() + 4, inputs.end());
  return first_output(std::make_shared<GatherSwiglu>(stream, *format), std::move(all));
}

namespace {

void bind(nb::module_& module) {
  bind_function(module, op, &gather_swiglu, "x"_a, "gate"_a, "up"_a, "lhs_indices"_a.none() = nb::none(),
                "rhs_indices"_a.none() = nb::none(), "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(),
                nb::kw_only(), "sorted_indices"_a = false, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
