#include "ops/attention/window_mask.h"

#include <array>
#include <cstddef>

#include <nanobind/nanobind.h>

#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

struct Noted {
  mx::array mask;
  int window;
};

// A model has one mask a chunk for each kind of its layers.
thread_local std::array<std::optional<Noted>, 4> noted;
thread_local size_t next = 0;

}  // namespace

mx::array window_mask(int queries, int offset, int window) {
  constexpr const char* op = "window_mask";
  if (queries < 1 || offset < 0 || window < 1) {
    checks::fail(op, queries, " queries after ", offset, " keys with a window of ", window,
                 ": expected a query, no negative offset and a positive window");
  }
  const AttentionOptions options{.window = window};
  mx::array mask = *seen_keys(options, 0, queries, queries, offset + queries, checks::checked_stream(op, {}));
  noted[next] = Noted{mask, window};
  next = (next + 1) % noted.size();
  return mask;
}

std::optional<int> window_of(const mx::array& mask) {
  for (const auto& one : noted) {
    if (one && one->mask.id() == mask.id()) {
      return one->window;
    }
  }
  return std::nullopt;
}

namespace {

void bind(nb::module_& module) {
  bind_function(module, "window_mask", &window_mask, "queries"_a, "offset"_a, "window"_a);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
