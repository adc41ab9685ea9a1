#include "runtime/numerics.h"

#include <atomic>

#include <nanobind/nanobind.h>

#include "python/registry.h"
#include "runtime/checks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

std::atomic<Numerics> of_process{Numerics{false, false}};
thread_local std::optional<Numerics> of_thread;

void bind(nb::module_& module) {
  module.def(
      "set_numerics", [](bool exact, bool int8) { of_process = Numerics{exact, int8}; }, "exact"_a, "int8"_a,
      "What mlx_mittens.patch(exact=.., activations=..) asks for.");
  module.def("is_exact", &is_exact, "Whether rows of several are to have the bits that they have alone.");
}

const Register registered(bind);

}  // namespace

Numerics numerics() {
  return of_thread ? *of_thread : of_process.load();
}

WithNumerics::WithNumerics(Numerics value) : before_(of_thread) {
  of_thread = value;
}

WithNumerics::~WithNumerics() {
  of_thread = before_;
}

Numerics with_activations(const char* op, const std::optional<std::string>& activations) {
  Numerics value = numerics();
  if (!activations) {
    return value;
  }
  if (*activations != "int8") {
    checks::fail(op, "activations is '", *activations, "': expected 'int8' or None");
  }
  value.int8 = true;
  return value;
}

}  // namespace mittens
