#include "patch/cache_buffers.h"

#include "mlx/ops.h"
#include "patch/deferred_rope.h"

namespace mittens::cache_buffers {

namespace {

bool has_room(const mx::array& buffer, const mx::array& fresh, int first) {
  if (buffer.ndim() != 4 || fresh.ndim() != 4 || first < 0) {
    return false;
  }
  for (int d : {0, 1, 3}) {
    if (buffer.shape(d) != fresh.shape(d)) {
      return false;
    }
  }
  return fresh.shape(tokens_axis) <= buffer.shape(tokens_axis) - first;
}

void replace(mx::array& keys, mx::array& values, const mx::array& new_keys, const mx::array& new_values) {
  keys.overwrite_descriptor(new_keys);
  values.overwrite_descriptor(new_values);
}

mx::Stream stream_of(const mx::array& array) {
  return array.has_primitive() ? array.primitive().stream() : mx::to_stream({});
}

// A buffer's tokens from `first` to `end`.
mx::array tokens_between(const mx::array& buffer, int first, int end, mx::Stream stream) {
  mx::Shape start(4, 0), stop = buffer.shape();
  start[tokens_axis] = first;
  stop[tokens_axis] = end;
  return mx::slice(buffer, start, stop, stream);
}

}  // namespace

PyObject* offset_name() {
  static PyObject* const offset = name("offset");
  return offset;
}

PyObject* const* buffer_names() {
  static PyObject* const names[] = {name("keys"), name("values")};
  return names;
}

bool is_cache(nb::handle cache, PyObject* kind) {
  static PyObject* const module = name("mlx_lm.models.cache");
  return cache.type().is(member(module, kind));
}

bool are_heads(const mx::array& new_keys, const mx::array& new_values) {
  return new_keys.ndim() == 4 && new_values.ndim() == 4 && new_keys.shape(tokens_axis) > 0 &&
         new_keys.shape(tokens_axis) == new_values.shape(tokens_axis);
}

mx::array tokens_until(const mx::array& buffer, int end) {
  mx::Shape stop = buffer.shape();
  stop[tokens_axis] = end;
  return mx::slice(buffer, mx::Shape(4, 0), stop);
}

mx::array appended(const mx::array& buffer, const mx::array& fresh, int first) {
  mx::Shape start(4, 0);
  mx::Shape stop = buffer.shape();
  start[tokens_axis] = first;
  stop[tokens_axis] = first + fresh.shape(tokens_axis);
  return mx::slice_update(buffer, fresh, start, stop);
}

void replace(mx::array& keys, mx::array& values, const CacheStep& step) {
  replace(keys, values, step.buffers[0], step.buffers[1]);
}

std::optional<Seen> put_into_cache(mx::array& keys, mx::array& values, const mx::array& new_keys,
                                   const mx::array& new_values, int first, int end) {
  if (!has_room(keys, new_keys, first) || !has_room(values, new_values, first)) {
    return std::nullopt;
  }
  if (const auto step = append_with_rope({keys, values}, {}, new_keys, new_values, first)) {
    replace(keys, values, *step);
    return Seen{tokens_until(keys, end), tokens_until(values, end)};
  }
  const mx::array all_keys = appended(keys, new_keys, first), all_values = appended(values, new_values, first);
  replace(keys, values, all_keys, all_values);
  return Seen{tokens_until(all_keys, end), tokens_until(all_values, end)};
}

std::optional<Seen> put_into_new(nb::handle cache, const Arrays& buffers, const Arrays& held, const mx::array& new_keys,
                                 const mx::array& new_values, int first, int end) {
  const auto step = append_with_rope(buffers, {}, new_keys, new_values, first, held);
  if (!step) {
    return std::nullopt;
  }
  for (int i : {0, 1}) {
    nb::setattr(cache, nb::handle(buffer_names()[i]), nb::cast(step->buffers[i]));
  }
  return Seen{tokens_until(step->buffers[0], end), tokens_until(step->buffers[1], end)};
}

std::optional<Arrays> held_by(nb::handle cache) {
  const nb::object keys = attribute(cache, buffer_names()[0]), values = attribute(cache, buffer_names()[1]);
  if (keys.is_none() && values.is_none()) {
    return Arrays();
  }
  if (!as_array(keys) || !as_array(values)) {
    return std::nullopt;
  }
  return Arrays{*as_array(keys), *as_array(values)};
}

std::optional<Held> held_triple(nb::handle triple) {
  if (!nb::isinstance<nb::tuple>(triple) && !nb::isinstance<nb::list>(triple)) {
    return std::nullopt;
  }
  const auto sequence = nb::borrow<nb::sequence>(triple);
  Held held{};
  if (nb::len(sequence) != held.size()) {
    return std::nullopt;
  }
  for (size_t i = 0; i < held.size(); ++i) {
    held[i] = as_array(nb::object(sequence[i]));  // which the sequence keeps
    if (!held[i]) {
      return std::nullopt;
    }
  }
  return held;
}

mx::array room_for(const mx::array& fresh, int tokens, const Item& item, bool is_all_written) {
  mx::Shape shape = {fresh.shape(0), fresh.shape(1), tokens, item.columns};
  const mx::Stream stream = stream_of(fresh);
  return is_all_written ? unwritten_buffer(std::move(shape), item.dtype, stream) : mx::zeros(shape, item.dtype, stream);
}

bool holds(const mx::array& buffer, const mx::array& fresh, const Item& item) {
  return buffer.ndim() == 4 && buffer.shape(0) == fresh.shape(0) && buffer.shape(1) == fresh.shape(1) &&
         buffer.shape(3) == item.columns && buffer.dtype() == item.dtype;
}

mx::array with_room(const mx::array& buffer, const Runs& runs, const mx::array& fresh, int more, const Item& item) {
  const mx::Stream stream = stream_of(fresh);
  Arrays parts;
  for (const auto& [first, end] : runs) {
    if (first < end) {
      parts.push_back(tokens_between(buffer, first, end, stream));
    }
  }
  if (more > 0 || parts.empty()) {
    parts.push_back(room_for(fresh, more, item, parts.empty() && more == fresh.shape(tokens_axis)));
  }
  return parts.size() == 1 ? parts[0] : mx::concatenate(std::move(parts), tokens_axis, stream);
}

std::optional<Arrays> grown_by_steps(nb::handle cache, const Arrays& held, const Arrays& fresh,
                                     const std::vector<Item>& items, int first) {
  static PyObject* const step_name = name("step");
  const int step = attribute<int>(cache, step_name), tokens = fresh[0].shape(tokens_axis);
  if (step <= 0 || first < 0 || tokens <= 0 || (held.empty() && first != 0)) {
    return std::nullopt;
  }
  const int more = (step + tokens - 1) / step * step;
  Arrays buffers;
  for (size_t i = 0; i < items.size(); ++i) {
    const int size = held.empty() ? 0 : held[i].ndim() == 4 ? held[i].shape(tokens_axis) : -1;
    if (size < 0 || first > size || (!held.empty() && !holds(held[i], fresh[i], items[i]))) {
      return std::nullopt;
    }
    const int kept = first % step != 0 ? first : size;
    buffers.push_back(held.empty() ? room_for(fresh[i], more, items[i], more == tokens)
                                   : with_room(held[i], {{0, kept}}, fresh[i], more, items[i]));
  }
  return buffers;
}

}  // namespace mittens::cache_buffers
