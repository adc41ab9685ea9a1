// Identities of arrays, for Python: an assignment in place makes another array of the same Python object.
#include <nanobind/nanobind.h>

#include "mlx_internals/buffer_ownership.h"
#include "python/array_caster.h"
#include "python/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

void bind(nb::module_& module) {
  nb::class_<WeakArray>(module, "WeakArray", "An array, which it does not hold.")
      .def(
          "__init__", [](WeakArray* self, const mx::array& array) { new (self) WeakArray(array); }, "array"_a)
      .def("is_", &WeakArray::is, "array"_a);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
