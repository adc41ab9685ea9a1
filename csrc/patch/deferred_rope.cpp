#include "patch/deferred_rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx_internals/buffer_ownership.h"
#include "mlx_internals/known.h"
#include "ops/cache/rope_append.h"
#include "ops/norm/norms.h"
#include "python/registry.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

// A call of mx.fast.rope. It holds nothing: a model may go.
struct DeferredRope {
  WeakArray y;
  WeakArray x;
  int dims;
  bool traditional;
  std::optional<float> base;
  float scale;
  std::variant<int, WeakArray> offset;
  std::optional<WeakArray> freqs;
  mx::Stream stream;
  float factor = 1.0f;  // of the turned columns
  std::optional<WeakArray> before = std::nullopt;  // of keys, the columns before the turned ones; of queries, both
  int begin = 0;  // how many columns are before

  bool turns_as(const DeferredRope& other) const {
    const auto f = frequencies(), g = other.frequencies();
    const bool same_freqs = f ? g && f->id() == g->id() : !g;
    return dims == other.dims && begin == other.begin && traditional == other.traditional && base == other.base &&
           scale == other.scale && has_offset_of(other) && same_freqs && stream == other.stream;
  }

  // None where the array of the offsets has gone.
  std::optional<Offset> first_position() const {
    if (const int* position = std::get_if<int>(&offset)) {
      return *position;
    }
    auto offsets = std::get<WeakArray>(offset).lock();
    return offsets ? std::optional<Offset>(*std::move(offsets)) : std::nullopt;
  }

  bool has_offset_of(const DeferredRope& other) const {
    const auto a = first_position(), b = other.first_position();
    if (!a || !b || a->index() != b->index()) {
      return false;
    }
    const auto* offsets = std::get_if<mx::array>(&*a);
    return offsets ? offsets->id() == std::get<mx::array>(*b).id() : std::get<int>(*a) == std::get<int>(*b);
  }

  std::optional<mx::array> frequencies() const {
    return freqs ? freqs->lock() : std::nullopt;
  }
};

// A thread's last two calls, in turns.
struct Calls {
  std::array<std::optional<DeferredRope>, 2> of;
  int next = 0;
};
thread_local Calls calls;

bool is_covered_by_kernels(const mx::array& y, std::optional<float> base, float scale) {
  const bool is_finite = std::isfinite(scale) && (!base || (std::isfinite(*base) && *base > 0));
  return mlx_internals::is_known() && is_finite && y.ndim() == 4 && has_kernels(y.dtype()) && is_pending(y) &&
         !y.is_tracer() && y.siblings().empty();
}

// Whether an array is computed of one that is itself still to be computed: a view of a weight is not.
bool is_of_pending(const mx::array& array) {
  return is_pending(array) && std::any_of(array.inputs().begin(), array.inputs().end(), is_pending);
}

// An array, its input, that one's input, and so on: up to one whose inputs have values, or that has several inputs
// without values.
struct Line {
  static constexpr size_t most = 12;
  std::array<std::uintptr_t, most> ids;
  size_t count = 0;
  bool is_whole = false;  // it depends on nothing else that is computed of pending arrays

  explicit Line(const mx::array& array) {
    const mx::array* at = &array;
    while (count < most) {
      ids[count++] = at->id();
      const mx::array* next = nullptr;
      if (is_pending(*at)) {
        for (const mx::array& input : at->inputs()) {
          if (is_of_pending(input)) {
            if (next) {
              return;
            }
            next = &input;
          }
        }
      }
      if (!next) {
        is_whole = true;
        return;
      }
      at = next;
    }
  }

  bool has(const mx::array& array) const {
    return std::find(ids.begin(), ids.begin() + count, array.id()) != ids.begin() + count;
  }

  // Whether it is known not to depend on `result`, which is computed of the other's first array.
  bool comes_before(const mx::array& result, const Line& other) const {
    const bool meets = std::find_first_of(ids.begin(), ids.begin() + count, other.ids.begin(),
                                          other.ids.begin() + other.count) != ids.begin() + count;
    return (is_whole || meets) && !has(result);
  }
};

// Heads as they were before a norm that came before their axes changed places, and the norm.
std::optional<PendingRmsNorm> unnormed(const mx::array& heads) {
  if (auto norm = pending_rms_norm(heads)) {
    return norm;
  }
  if (!is_primitive(heads, "Transpose")) {
    return std::nullopt;
  }
  const auto axes = static_cast<const mx::Transpose&>(heads.primitive()).state();
  auto norm = axes.back() == 3 ? pending_rms_norm(heads.inputs()[0]) : std::nullopt;
  if (norm) {
    norm->x = mx::transpose(norm->x, axes, heads.primitive().stream());
  }
  return norm;
}

bool has_weight_of(const PendingRmsNorm& norm) {
  return norm.weight && norm.weight->dtype() == norm.x.dtype() && norm.weight->shape() == mx::Shape{norm.x.shape(-1)};
}

// A factor of all elements; nullopt where it is several, or not computed yet.
std::optional<float> known_factor(const mx::array& factor) {
  const mx::array& array = behind(factor, "Broadcast");
  if (array.size() != 1 || array.status() != mx::array::Status::available) {
    return std::nullopt;
  }
  switch (array.dtype()) {
    case mx::float32:
      return *array.data<float>();
    case mx::float16:
      return static_cast<float>(*array.data<mx::float16_t>());
    case mx::bfloat16:
      return static_cast<float>(*array.data<mx::bfloat16_t>());
    default:
      return std::nullopt;
  }
}

// Takes the norm, and a factor behind it, out of values that are the latents of a layer.
void take_value_norm(mx::array& values, Rotary& rotary) {
  const mx::array* latents = &behind(values, "ExpandDims");
  float scale = 1.0f;
  if (is_primitive(*latents, "Multiply")) {
    const auto factor = known_factor(latents->inputs()[1]);
    if (!factor) {
      return;
    }
    scale = *factor;
    latents = &latents->inputs()[0];
  }
  const auto norm = pending_rms_norm(*latents);
  if (norm && has_weight_of(*norm) && !rotary.query_norm && norm->x.ndim() == 3 && values.ndim() == 4 &&
      values.shape(1) == 1) {
    rotary.value_norm = norm->weight;
    rotary.value_scale = scale;
    rotary.eps = norm->eps;
    rotary.weight_offset = norm->weight_offset;
    values = mx::expand_dims(norm->x, 1, latents->primitive().stream());
  }
}

// Takes norms of both out of heads, for the kernel to apply.
void take_norms(mx::array& queries, mx::array& keys, Rotary& rotary) {
  const auto of_queries = unnormed(queries), of_keys = unnormed(keys);
  if (of_queries && of_keys && of_queries->eps == of_keys->eps && of_queries->weight_offset == of_keys->weight_offset &&
      has_weight_of(*of_queries) && has_weight_of(*of_keys)) {
    queries = of_queries->x;
    keys = of_keys->x;
    rotary.query_norm = of_queries->weight;
    rotary.key_norm = of_keys->weight;
    rotary.eps = of_keys->eps;
    rotary.weight_offset = of_keys->weight_offset;
  }
}

}  // namespace

mx::array mx_rope(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale,
                  const std::variant<int, mx::array>& offset, const std::optional<mx::array>& freqs,
                  mx::StreamOrDevice where) {
  if (const int* position = std::get_if<int>(&offset)) {
    return mx::fast::rope(x, dims, traditional, base, scale, *position, freqs, where);
  }
  return mx::fast::rope(x, dims, traditional, base, scale, std::get<mx::array>(offset), freqs, where);
}

std::optional<mx::array> try_rope(const mx::array& x, int dims, bool traditional, std::optional<float> base,
                                  float scale, const std::variant<int, mx::array>& offset,
                                  const std::optional<mx::array>& freqs, mx::StreamOrDevice where) {
  mx::array y = mx_rope(x, dims, traditional, base, scale, offset, freqs, where);
  if (is_covered_by_kernels(y, base, scale)) {
    const int* position = std::get_if<int>(&offset);
    calls.of[calls.next] =
        DeferredRope{WeakArray(y),
                     WeakArray(x),
                     dims,
                     traditional,
                     base,
                     scale,
                     position ? std::variant<int, WeakArray>(*position) : WeakArray(std::get<mx::array>(offset)),
                     freqs ? std::optional(WeakArray(*freqs)) : std::nullopt,
                     mx::to_stream(where)};
    calls.next = 1 - calls.next;
  }
  return y;
}

std::optional<CacheStep> append_with_rope(const Arrays& buffers, const Packing& packing, const mx::array& new_keys,
                                          const mx::array& new_values, int first, const Arrays& made_of) {
  const auto& [a, b] = calls.of;
  if (!a || !b || !a->turns_as(*b)) {
    return std::nullopt;
  }
  // A layer of latents calls latents its keys and the turned columns its values; the append's order is the reverse.
  const auto is_turned = [&](const mx::array& fresh) { return a->y.is(fresh) || b->y.is(fresh); };
  const bool has_latents = !is_turned(new_keys) && packing.bits == 0;
  const mx::array& turned_keys = has_latents ? new_values : new_keys;
  mx::array others = has_latents ? new_keys : new_values;
  if (!is_turned(turned_keys)) {
    return std::nullopt;
  }
  const DeferredRope& of_keys = a->y.is(turned_keys) ? *a : *b;
  const DeferredRope& of_queries = a->y.is(turned_keys) ? *b : *a;
  const auto turned_queries = of_queries.y.lock();
  const auto before = [](const DeferredRope& call) { return call.before ? call.before->lock() : call.x.lock(); };
  auto queries = before(of_queries), heads = before(of_keys);
  if (!turned_queries || !queries || !heads || !is_pending(turned_keys) || of_keys.factor != 1.0f) {
    return std::nullopt;
  }
  // The queries become a result of the append, so none of its inputs may depend on them.
  const Line line(*queries);
  const auto may_be_input = [&](const mx::array& array) { return Line(array).comes_before(*turned_queries, line); };
  const auto may_be_held = [&](const mx::array& array) {
    return may_be_input(array) || is_of_few_but(array, *turned_queries);
  };
  if (!is_of_pending(*turned_queries) || !std::all_of(made_of.begin(), made_of.end(), may_be_held) ||
      !may_be_input(*heads) || !may_be_input(others)) {
    return std::nullopt;
  }
  Rotary rotary{.begin = of_keys.begin,
                .dims = of_keys.dims,
                .base = of_keys.base,
                .scale = of_keys.scale,
                .freqs = of_keys.frequencies(),
                .traditional = of_keys.traditional,
                .query_scale = of_queries.factor};
  if (rotary.freqs && !is_of_few_but(*rotary.freqs, *turned_queries)) {
    return std::nullopt;
  }
  const auto offset = of_keys.first_position();
  const auto* offsets = offset ? std::get_if<mx::array>(&*offset) : nullptr;
  if (!offset || (offsets && !may_be_held(*offsets))) {
    return std::nullopt;
  }
  if (rotary.begin > 0) {
    rotary.shared_key = of_keys.x.lock();
    if (!rotary.shared_key || !may_be_input(*rotary.shared_key)) {
      return std::nullopt;
    }
  } else {
    take_norms(*queries, *heads, rotary);
  }
  Arrays targets = buffers;
  if (has_latents) {
    take_value_norm(others, rotary);
    std::swap(targets[0], targets[1]);
  }
  auto append = rope_append_of(*queries, *heads, others, targets, packing, rotary, *offset, first, of_keys.stream);
  if (!append || !may_be_a_step(*append)) {
    return std::nullopt;
  }
  calls = {};  // another cache that these keys go to appends them as they are: the queries are this step's
  CacheStep step = cache_step(*std::move(append), std::nullopt, *turned_queries);
  if (has_latents) {
    std::swap(step.buffers[0], step.buffers[1]);
  }
  return step;
}

mx::array times_turned(const mx::array& turned, float factor) {
  const mx::Stream stream = turned.has_primitive() ? turned.primitive().stream() : mx::to_stream({});
  mx::array y = mx::multiply(turned, mx::array(factor, turned.dtype()), stream);
  for (auto& call : calls.of) {
    if (call && call->y.is(turned) && !y.is_tracer()) {
      call->y = WeakArray(y);
      call->factor *= factor;
    }
  }
  return y;
}

mx::array before_turned(const mx::array& columns, const mx::array& turned, const std::optional<mx::array>& whole,
                        const std::optional<mx::array>& part) {
  const mx::Stream stream = turned.has_primitive() ? turned.primitive().stream() : mx::to_stream({});
  mx::Shape shape = columns.shape();
  shape.back() = turned.shape(-1);
  mx::array y = mx::concatenate({columns, mx::broadcast_to(turned, shape, stream)}, -1, stream);
  const int begin = columns.shape(-1);
  for (auto& call : calls.of) {
    const bool is_whole = call && call->y.is(turned) && call->dims == turned.shape(-1) && call->begin == 0;
    // An embedding may scale its columns: then they differ from those in `whole`.
    const bool is_of_whole = is_whole && (!whole || (part && call->x.is(*part)));
    if (is_of_whole && begin > 0 && !y.is_tracer()) {
      call->y = WeakArray(y);
      call->before = WeakArray(whole ? *whole : columns);
      call->begin = begin;
    }
  }
  return y;
}

std::optional<CacheStep> append_with_rope(const Arrays& buffers, const Packing& packing, const mx::array& new_keys,
                                          const mx::array& new_values, int first) {
  return append_with_rope(buffers, packing, new_keys, new_values, first, buffers);
}

void turn_as_append_does(mx::array& new_keys, mx::array& new_values) {
  const mx::Stream stream = new_keys.has_primitive() ? new_keys.primitive().stream() : mx::to_stream({});
  const Arrays buffers = {unwritten_buffer(new_keys.shape(), new_keys.dtype(), stream),
                          unwritten_buffer(new_values.shape(), new_values.dtype(), stream)};
  if (const auto step = append_with_rope(buffers, {}, new_keys, new_values, 0, {})) {
    new_keys.overwrite_descriptor(step->buffers[0]);
    new_values.overwrite_descriptor(step->buffers[1]);
  }
}

namespace {

void bind(nb::module_& module) {
  module.def("before_turned", &before_turned, "columns"_a, "turned"_a, "whole"_a.none() = nb::none(),
             "part"_a.none() = nb::none(),
             "Columns of heads, and behind them those that mx.fast.rope has turned: an append to a cache may do both.");
  module.def("try_rope", lenient("rope", &try_rope, &mx_rope), "a"_a, "dims"_a, nb::kw_only(), "traditional"_a,
             "base"_a.none(), "scale"_a, "offset"_a, "freqs"_a.none() = nb::none(), "stream"_a = nb::none());
  module.def(
      "times_turned", &times_turned, "turned"_a, "factor"_a,
      "Heads that mx.fast.rope has turned times a factor, which an append to a cache may multiply queries with.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
