// Bindings register themselves: an op's file holds `static Register _(bind);` and module.cpp names no op.
#pragma once

#include <nanobind/nanobind.h>

#include "python/array_caster.h"

namespace mittens {

using Binding = void (*)(nanobind::module_&);

class Register {
 public:
  explicit Register(Binding binding);
  static void bind_all(nanobind::module_& module);
};

}  // namespace mittens
