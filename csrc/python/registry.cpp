#include "python/registry.h"

#include <vector>

namespace mittens {

namespace {

// A function's static, so that it exists before the first Register of any translation unit.
std::vector<Binding>& bindings() {
  static std::vector<Binding> all;
  return all;
}

}  // namespace

Register::Register(Binding binding) {
  bindings().push_back(binding);
}

void Register::bind_all(nanobind::module_& module) {
  for (Binding bind : bindings()) {
    bind(module);
  }
}

}  // namespace mittens
