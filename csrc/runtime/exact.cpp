#include "runtime/exact.h"

#include <atomic>

#include <nanobind/nanobind.h>

#include "python/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

std::atomic<bool> exact = false;
thread_local int of_thread = -1;  // 0 or 1 in the place of the above

void bind(nb::module_& module) {
  module.def("set_exact", [](bool value) { exact = value; }, "value"_a, "What mlx_mittens.patch(exact=True) asks for.");
}

const Register registered(bind);

}  // namespace

bool is_exact() {
  return of_thread < 0 ? exact.load() : of_thread == 1;
}

Exactness::Exactness(bool value) : before_(of_thread) {
  of_thread = value ? 1 : 0;
}

Exactness::~Exactness() {
  of_thread = before_;
}

}  // namespace mittens
