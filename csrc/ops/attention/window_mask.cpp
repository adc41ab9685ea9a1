#include "ops/attention/window_mask.h"

#include <array>
#include <cstddef>
#include <utility>

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

// A model has one mask a chunk for each kind of its layers.
thread_local std::array<std::optional<KnownMask>, 4> noted;
thread_local size_t next = 0;

mx::array note(KnownMask known) {
  mx::array mask = known.mask;
  noted[next] = std::move(known);
  next = (next + 1) % noted.size();
  return mask;
}

}  // namespace

mx::array window_mask(int queries, int offset, int window) {
  constexpr const char* op = "window_mask";
  if (queries < 1 || offset < 0 || window < 1) {
    checks::fail(op, queries, " queries after ", offset, " keys with a window of ", window,
                 ": expected a query, no negative offset and a positive window");
  }
  const AttentionOptions options{.window = window};
  const mx::Stream stream = checks::checked_stream(op, {});
  return note({*seen_keys(options, 0, queries, queries, offset + queries, stream), window, std::nullopt});
}

mx::array row_mask(int queries, int offset, std::optional<int> window, const mx::array& starts) {
  constexpr const char* op = "row_mask";
  if (queries < 1 || offset < 0 || (window && *window < 1)) {
    checks::fail(op, queries, " queries after ", offset, " keys with a window of ", window.value_or(0),
                 ": expected a query, no negative offset and a positive window or none");
  }
  if (starts.ndim() != 1 || starts.dtype() != mx::int32) {
    checks::fail(op, "starts has shape ", starts.shape(), " and dtype ", starts.dtype(),
                 ": expected one number of int32 for each row of the batch");
  }
  const mx::Stream s = checks::checked_stream(op, {});
  const int keys = offset + queries;
  const AttentionOptions options{.causal = true, .window = window.value_or(0)};
  const mx::array seen = *seen_keys(options, 0, queries, queries, keys, s);
  const mx::array first = mx::reshape(starts, {-1, 1, 1, 1}, s);
  const mx::array mask = mx::logical_and(seen, mx::less_equal(first, mx::arange(0, keys, mx::int32, s), s), s);
  const mx::array none(0, mx::int32), all(keys, mx::int32);
  return note({mask, options.window, mx::minimum(mx::maximum(starts, none, s), all, s)});
}

std::optional<KnownMask> known_mask(const mx::array& mask) {
  for (const auto& one : noted) {
    if (one && one->mask.id() == mask.id()) {
      return one;
    }
  }
  return std::nullopt;
}

namespace {

void bind(nb::module_& module) {
  bind_function(module, "window_mask", &window_mask, "queries"_a, "offset"_a, "window"_a);
  bind_function(module, "row_mask", &row_mask, "queries"_a, "offset"_a, "window"_a.none(), "starts"_a);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
