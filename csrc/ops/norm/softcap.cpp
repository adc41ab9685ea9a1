#include <cmath>
#include <optional>

#include <nanobind/nanobind.h>

#include "cpu/norm/softcap.h"
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

// A launch in which each thread takes a pack of x.
Launch launch_over(const mx::array& x, const char* kernel) {
  constexpr uint32_t threads = 256;
  Launch launch;
  launch.file = file;
  launch.kernel = kernel_name(x.dtype(), kernel);
  launch.threadgroups = {ceil_divide(x.size(), threads * (16 / x.itemsize())), 1, 1};
  launch.threads = {threads, 1, 1};
  return launch;
}

// x, dy -> dx of their shape. The Jacobian is diagonal: it serves vjp and jvp.
class SoftcapVjp : public KernelPrimitive {
 public:
  SoftcapVjp(mx::Stream stream, float cap) : KernelPrimitive(stream), cap_(cap) {}

  static mx::array apply(const mx::array& x, const mx::array& dy, float cap, mx::Stream stream) {
    return only_output(x.shape(), std::make_shared<SoftcapVjp>(stream, cap), {x, dy});
  }

  const char* name() const override {
    return "MittensSoftcapVjp";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return cap_ == static_cast<const SoftcapVjp&>(other).cap_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

 protected:
  void allocate(const Arrays& inputs, Arrays& outputs) override {
    take_or_allocate(outputs[0], inputs[1], stream());
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array &x = inputs[0], &dy = inputs[1], &dx = outputs[0];
    Launch launch = launch_over(x, "softcap_vjp");
    launch.input(x)
        .input(dy)
        .output(outputs[0])
        .params(SoftcapVjpParams{x.size(), phase_of(x), phase_of(dy), phase_of(dx), cap_});
    return in_order(std::move(launch));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    return [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]), dy = data_of(inputs[1]),
            dx = data_of(outputs[0]), size = inputs[0].size(),
            cap = cap_] { cpu::softcap_vjp(type, x, dy, dx, size, cap); };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const auto wide = [&](const mx::array& array) { return mx::astype(array, mx::float32, s); };
    const mx::array size = mx::abs(mx::divide(wide(inputs[0]), mx::array(cap_), s), s);
    const mx::array e = mx::exp(mx::multiply(mx::array(-2.0f), size, s), s);
    const mx::array slope =
        mx::divide(mx::multiply(mx::array(4.0f), e, s), mx::square(mx::add(mx::array(1.0f), e, s), s), s);
    return {mx::astype(mx::multiply(wide(inputs[1]), slope, s), inputs[0].dtype(), s)};
  }

 private:
  float cap_;
};

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

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>&, const Arrays&) override {
    return {SoftcapVjp::apply(primals[0], cotangents[0], cap_, stream())};
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>&) override {
    return {SoftcapVjp::apply(primals[0], tangents[0], cap_, stream())};
  }

 protected:
  void allocate(const Arrays& inputs, Arrays& outputs) override {
    take_or_allocate(outputs[0], inputs[0], stream());
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    Launch launch = launch_over(x, op);
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
    fallback(op, "float64");
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
