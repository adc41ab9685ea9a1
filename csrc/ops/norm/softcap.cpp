#include <cmath>
#include <optional>

#include <nanobind/nanobind.h>

#include "cpu/softcap.h"
#include "mlx/ops.h"
#include "params/norm.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/calibration.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "softcap";
const Name file = "norm/softcap.metal";

mx::array compose_softcap(const mx::array& x, float cap, mx::Stream s) {
  const bool is_wide = x.dtype() == mx::float64;
  const mx::array wide = is_wide ? x : mx::astype(x, mx::float32, s);
  const mx::array limit(cap, wide.dtype());
  return mx::astype(mx::multiply(mx::tanh(mx::divide(wide, limit, s), s), limit, s), x.dtype(), s);
}

// x -> y of its shape.
class Softcap : public KernelPrimitive {
 public:
  Softcap(mx::Stream stream, float cap) : KernelPrimitive(stream), cap_(cap) {}

  const char* name() const override {
    return "MittensSoftcap";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return cap_ == static_cast<const Softcap&>(other).cap_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    return {{only_output(inputs[0].shape(), std::make_shared<Softcap>(stream(), cap_), inputs)}, axes};
  }

 protected:
  void allocate(const Arrays& inputs, Arrays& outputs) override {
    take_or_allocate(outputs[0], inputs[0], stream());
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    constexpr uint32_t threads = 256;  // each of which takes a pack
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(x.dtype(), op);
    launch.threadgroups = {ceil_divide(x.size(), threads * (16 / x.itemsize())), 1, 1};
    launch.threads = {threads, 1, 1};
    launch.input(x).output(outputs[0]).params(SoftcapParams{x.size(), phase_of(x), phase_of(outputs[0]), cap_});
    return in_order(std::move(launch));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    return [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]), y = data_of(outputs[0]),
            size = inputs[0].size(), cap = cap_] { cpu::softcap(type, x, y, size, cap); };
  }

  Arrays composed(const Arrays& inputs) override {
    return {compose_softcap(inputs[0], cap_, stream())};
  }

 private:
  float cap_;
};

mx::array softcap(const mx::array& logits, float cap, mx::StreamOrDevice where) {
  if (!std::isfinite(cap) || cap <= 0) {
    checks::fail(op, "cap is ", cap, ": expected a finite positive number");
  }
  const mx::Dtype dtype = checks::floating(op, {{"logits", logits}});
  const mx::Stream stream = checks::checked_stream(op, where);
  if (!has_kernels(dtype)) {
    fall_back(op, "float64");
  }
  if (!has_kernels(dtype) || prefer_mx({op, dtype, 0, {problem_size(logits.size()), 1, 1, 1}}, nullptr, stream)) {
    return compose_softcap(logits, cap, stream);
  }
  return only_output(logits.shape(), std::make_shared<Softcap>(stream, cap), {logits});
}

void bind(nb::module_& module) {
  bind_function(module, op, &softcap, "logits"_a, "cap"_a, nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
