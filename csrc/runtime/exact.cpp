#include "runtime/exact.h"

#include <atomic>

#include <nanobind/nanobind.h>

#include "python/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

std::atomic<bool> exact = false;

void bind(nb::module_& module) {
  module.def("set_exact", [](bool value) { exact = value; }, "value"_a, "What mlx_mittens.patch(exact=True) asks for.");
}

const Register registered(bind);

}  // namespace

bool is_exact() {
  return exact;
}

}  // namespace mittens
