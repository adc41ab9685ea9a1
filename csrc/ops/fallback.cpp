#include "ops/fallback.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "ops/registry.h"

namespace nb = nanobind;

namespace mittens {

namespace {

std::atomic<bool>& strict() {
  static std::atomic<bool> value = [] {
    const char* variable = std::getenv("MLX_MITTENS_STRICT");
    return variable && std::string(variable) == "1";
  }();
  return value;
}

void bind(nb::module_& module) {
  module.def("strict", [] { return strict().load(); }, "Whether handing over to mx is an error.");
  module.def("set_strict", [](bool value) { strict() = value; }, nb::arg("value"),
             "Whether handing over to mx is to be an error.");
}

const Register registered(bind);

}  // namespace

void send_to_mx(const char* op, const std::string& reason) {
  if (strict()) {
    throw std::runtime_error("[" + std::string(op) + "] strict mode: no kernel of mlx_mittens covers " + reason);
  }
}

}  // namespace mittens
