// mlx-lm's swiglu and geglu of two products that nothing has computed yet, of a layer or of its chosen experts.
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "ops/matmul/quantized_swiglu.h"
#include "ops/moe/gather.h"
#include "python/array_caster.h"
#include "python/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

template <const Activation& activation>
std::optional<mx::array> try_pending(const mx::array& gate, const mx::array& up) {
  auto y = try_swiglu(gate, up, activation);
  return y ? y : try_gather_swiglu(gate, up, activation);
}

void bind(nb::module_& module) {
  module.def("try_swiglu", &try_pending<swiglu_activation>, "gate"_a, "x"_a);
  module.def("try_geglu", &try_pending<geglu_activation>, "gate"_a, "x"_a);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
