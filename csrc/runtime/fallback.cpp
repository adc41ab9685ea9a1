#include "runtime/fallback.h"

#include <atomic>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string_view>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/registry.h"
#include "runtime/asking.h"
#include "runtime/stats.h"
#include "runtime/strict.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

thread_local std::string reason_of_last;
thread_local int tentative_depth = 0;
thread_local int uncounted_depth = 0;
std::atomic<bool> strict_patch = false;

// Null where no op is switched off. None is ever taken away: another thread may be reading it.
std::atomic<const std::set<std::string, std::less<>>*> switched_off = nullptr;

std::atomic<bool>& strict() {
  static std::atomic<bool> value = [] {
    const char* variable = std::getenv("MLX_MITTENS_STRICT");
    return variable && std::string(variable) == "1";
  }();
  return value;
}

void bind(nb::module_& module) {
  module.def("strict", [] { return strict().load(); }, "Whether handing over to mx is an error.");
  module.def(
      "set_strict", [](bool value) { strict() = value; }, nb::arg("value"),
      "Whether handing over to mx is to be an error.");
  module.def(
      "set_strict_patch", [](bool value) { strict_patch = value; }, "value"_a,
      "Whether a strict patch is on, which asks for the kernels where mx would be faster.");
  module.def(
      "switch_off",
      [](const std::vector<std::string>& ops) {
        switched_off = ops.empty() ? nullptr : new std::set<std::string, std::less<>>(ops.begin(), ops.end());
      },
      "ops"_a, "The ops that mx is to compute, and no others.");
}

const Register registered(bind);

}  // namespace

bool has_strict_patch() {
  return strict_patch;
}

Tentative::Tentative() {
  ++tentative_depth;
}

Tentative::~Tentative() {
  --tentative_depth;
}

Uncounted::Uncounted() {
  ++uncounted_depth;
}

Uncounted::~Uncounted() {
  --uncounted_depth;
}

void note_fallback(const char* op, std::string reason) {
  if (tentative_depth || uncounted_depth) {
    return;
  }
  if (CallPlan* plan = asked_plan()) {
    plan->fallbacks.push_back({op, std::move(reason)});
    return;
  }
  stats::count_mx(op, reason);
  reason_of_last = std::move(reason);
}

const std::string& last_reason() {
  return reason_of_last;
}

std::nullopt_t fallback(const char* op, std::string reason) {
  if (strict() && !tentative_depth && !asked_plan()) {
    throw std::runtime_error("[" + std::string(op) + "] strict mode: no kernel of mlx_mittens covers " + reason);
  }
  note_fallback(op, std::move(reason));
  return std::nullopt;
}

bool is_switched_off(const char* op) {
  const auto* ops = switched_off.load(std::memory_order_acquire);
  if (!ops || !ops->contains(std::string_view(op))) {
    return false;
  }
  fallback(op, "an op that MLX_MITTENS_DISABLE names");
  return true;
}

bool prefer_fallback(const char* op, std::string reason) {
  if (strict() || strict_patch) {
    return false;
  }
  note_fallback(op, std::move(reason));
  return true;
}

}  // namespace mittens
