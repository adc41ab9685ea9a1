#include "ops/matmul/activation.h"

#include <cmath>
#include <limits>

#include "mlx/ops.h"
#include "runtime/checks.h"

namespace mittens {

namespace {

constexpr float unlimited = std::numeric_limits<float>::infinity();

}  // namespace

const Activation swiglu_activation{"swiglu", 1.0f, 0.0f, unlimited, 0.0f};
// 2 * sqrt(2 / pi), and 0.044715 times that: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
const Activation geglu_activation{"geglu", 1.5957691216057308f, 0.07135481627159676f, unlimited, 0.0f};
const Activation clipped_activation{"clipped", 1.702f, 0.0f, 7.0f, 1.0f};  // gpt-oss

bool Activation::is_clipped() const {
  return std::isfinite(limit);
}

const Activation& activation_of(const char* op, const std::string& name, bool may_be_clipped) {
  for (const Activation* known : {&swiglu_activation, &geglu_activation, &clipped_activation}) {
    if (name == known->name && (may_be_clipped || !known->is_clipped())) {
      return *known;
    }
  }
  checks::fail(op, "activation is '", name, "': expected ",
               may_be_clipped ? "swiglu, geglu or clipped" : "swiglu or geglu");
}

mx::array gated(mx::array gate, mx::array up, const Activation& activation, mx::Stream stream) {
  if (activation == swiglu_activation) {
    return mx::multiply(mx::multiply(gate, mx::sigmoid(gate, stream), stream), up, stream);
  }
  const mx::Dtype dtype = gate.dtype();
  const auto number = [](float value) { return mx::array(value); };
  const auto times = [&](const mx::array& a, const mx::array& b) { return mx::multiply(a, b, stream); };
  gate = mx::astype(gate, mx::float32, stream);
  up = mx::astype(up, mx::float32, stream);
  if (activation.is_clipped()) {
    gate = mx::minimum(gate, number(activation.limit), stream);
    up = mx::clip(up, number(-activation.limit), number(activation.limit), stream);
  }
  mx::array slope = number(activation.alpha);
  if (activation.beta != 0) {
    slope = mx::add(slope, times(number(activation.beta), mx::square(gate, stream)), stream);
  }
  gate = times(gate, mx::sigmoid(times(gate, slope), stream));
  return mx::astype(times(gate, mx::add(up, number(activation.offset), stream)), dtype, stream);
}

}  // namespace mittens
