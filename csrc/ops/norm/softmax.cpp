#include <limits>
#include <numeric>
#include <variant>

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "cpu/norm/softmax.h"
#include "mlx/ops.h"
#include "ops/norm/row_primitive.h"
#include "params/norm.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "softmax";
const Name file = "norm/softmax.metal";
const Name vjp_file = "norm/softmax_vjp.metal";

// y [.., columns] = softmax of x along the last axis.
class Softmax : public RowPrimitive {
 public:
  Softmax(mx::Stream stream, const mx::array& x) : RowPrimitive(stream, op, {1, 1, 2}, x) {}

  const char* name() const override {
    return "MittensSoftmax";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return has_workspace() == static_cast<const Softmax&>(other).has_workspace();
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override;

 protected:
  std::shared_ptr<RowPrimitive> like(const mx::array& x) override {
    return std::make_shared<Softmax>(stream(), x);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    return row_launches(file, inputs, {}, outputs);
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t columns = inputs[0].shape(-1);
    return [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]), y = data_of(outputs[0]),
            rows = inputs[0].size() / columns, columns] { cpu::softmax(type, x, y, rows, columns); };
  }

  Arrays composed(const Arrays& inputs) override {
    return with_workspace({mx::softmax(inputs[0], -1, true, stream())});
  }
};

// dx = y * (dy - sum(y * dy) / sum(y)), all [.., columns]. The Jacobian is symmetric: it serves vjp and jvp.
class SoftmaxVjp : public RowPrimitive {
 public:
  SoftmaxVjp(mx::Stream stream, const mx::array& y) : RowPrimitive(stream, "softmax_vjp", {2, 1, 2}, y) {}

  static mx::array apply(const mx::array& y, const mx::array& dy, mx::Stream stream) {
    return result_of(std::make_shared<SoftmaxVjp>(stream, y), {y, dy});
  }

  const char* name() const override {
    return "MittensSoftmaxVjp";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return has_workspace() == static_cast<const SoftmaxVjp&>(other).has_workspace();
  }

 protected:
  std::shared_ptr<RowPrimitive> like(const mx::array& y) override {
    return std::make_shared<SoftmaxVjp>(stream(), y);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    return row_launches(vjp_file, inputs, {}, outputs);
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t columns = inputs[0].shape(-1);
    return [type = native_type(inputs[0].dtype()), y = data_of(inputs[0]), dy = data_of(inputs[1]),
            dx = data_of(outputs[0]), rows = inputs[0].size() / columns,
            columns] { cpu::softmax_vjp(type, y, dy, dx, rows, columns); };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array y = mx::astype(inputs[0], mx::float32, s);
    const mx::array dy = mx::astype(inputs[1], mx::float32, s);
    const mx::array dot = mx::sum(mx::multiply(y, dy, s), -1, true, s);
    // Of a row so long that all y round to zero the mean is zero, as in the kernels, and so is its derivative, which
    // has the square of this.
    const mx::array smallest(0x1p-60f);
    const mx::array mean = mx::divide(dot, mx::maximum(mx::sum(y, -1, true, s), smallest, s), s);
    const mx::array dx = mx::multiply(y, mx::subtract(dy, mean, s), s);
    return with_workspace({mx::astype(dx, inputs[0].dtype(), s)});
  }
};

Arrays Softmax::vjp(const Arrays&, const Arrays& cotangents, const std::vector<int>&, const Arrays& outputs) {
  return {SoftmaxVjp::apply(outputs[0], cotangents[0], stream())};
}

Arrays Softmax::jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>&) {
  const mx::array y = result_of(like(primals[0]), primals);
  return with_workspace({SoftmaxVjp::apply(y, tangents[0], stream())});
}

using Axis = std::variant<std::monostate, int, std::vector<int>>;

std::vector<int> named_axes(const Axis& axis, const mx::array& a) {
  if (const int* single = std::get_if<int>(&axis)) {
    return {*single};
  }
  if (const auto* several = std::get_if<std::vector<int>>(&axis)) {
    return *several;
  }
  std::vector<int> all(a.ndim());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// As most calls have it; the rest makes a list of axes.
bool is_last_axis(const Axis& axis, const mx::array& a) {
  const int dimensions = a.ndim();
  const int* single = std::get_if<int>(&axis);
  return single && dimensions > 0 && (*single == -1 || *single == dimensions - 1);
}

// Counted from the front and sorted.
std::vector<int> checked_axes(std::vector<int> axes, const mx::array& a) {
  const int dimensions = a.ndim();
  for (int& axis : axes) {
    if (axis < -dimensions || axis >= dimensions) {
      checks::fail(op, "axis ", axis, " is out of range for an array with ", dimensions, " dimensions");
    }
    axis += axis < 0 ? dimensions : 0;
  }
  std::sort(axes.begin(), axes.end());
  if (const auto twice = std::adjacent_find(axes.begin(), axes.end()); twice != axes.end()) {
    checks::fail(op, "axis ", *twice, " is named twice: expected each axis once");
  }
  return axes;
}

// Along the last axis of a row contiguous array.
mx::array softmax_rows(mx::array a, mx::Stream stream) {
  Arrays inputs;
  inputs.push_back(std::move(a));
  auto primitive = std::make_shared<Softmax>(stream, inputs[0]);
  return RowPrimitive::result_of(std::move(primitive), std::move(inputs));
}

// Moves the axes, of `columns` elements in all, to the end, makes them one, and moves them back.
mx::array softmax_axes(const mx::array& a, const std::vector<int>& axes, int columns, mx::Stream stream) {
  std::vector<int> order;
  mx::Shape rows_shape;
  for (int i = 0; i < static_cast<int>(a.ndim()); ++i) {
    if (!std::binary_search(axes.begin(), axes.end(), i)) {
      order.push_back(i);
      rows_shape.push_back(a.shape(i));
    }
  }
  order.insert(order.end(), axes.begin(), axes.end());
  rows_shape.push_back(columns);
  const mx::array moved = mx::transpose(a, order, stream);
  const mx::array y = softmax_rows(mx::reshape(moved, rows_shape, stream), stream);
  std::vector<int> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    back[order[i]] = i;
  }
  return mx::transpose(mx::reshape(y, moved.shape(), stream), back, stream);
}

std::optional<mx::array> try_softmax(const mx::array& a, const Axis& axis, bool precise, mx::StreamOrDevice where) {
  const bool is_last = is_last_axis(axis, a);
  const std::vector<int> axes = is_last ? std::vector<int>() : checked_axes(named_axes(axis, a), a);
  if (a.size() == 0) {
    return a;
  }
  const mx::Stream stream = checks::checked_stream(op, where);
  const bool last_only = is_last || (axes.size() == 1 && axes[0] == static_cast<int>(a.ndim()) - 1);
  const bool integer = !has_kernels(a.dtype()) && !mx::issubdtype(a.dtype(), mx::inexact);
  // mx makes integers float32 along the last axis; along others it rounds the result back to integers.
  const mx::Dtype dtype = integer ? mx::float32 : a.dtype();
  if (!has_kernels(dtype) || (integer && !last_only)) {
    std::ostringstream reason;
    reason << a.dtype() << (last_only ? "" : " along other axes than the last");
    return fallback(op, reason.str());
  }
  if (last_only && prefer_mx(row_problem(op, a, dtype), nullptr, stream)) {
    return std::nullopt;
  }
  size_t columns = 1;
  for (int i : axes) {
    columns *= static_cast<size_t>(a.shape(i));
  }
  if (columns > static_cast<size_t>(std::numeric_limits<int>::max())) {
    return fallback(op, "2**31 elements or more along several axes");
  }
  mx::array x = in_dtype(a, dtype, stream);
  return last_only ? softmax_rows(std::move(x), stream) : softmax_axes(x, axes, static_cast<int>(columns), stream);
}

mx::array softmax(const mx::array& a, const Axis& axis, bool precise, mx::StreamOrDevice where) {
  auto y = try_softmax(a, axis, precise, where);
  return y ? *std::move(y) : mx::softmax(a, named_axes(axis, a), precise, where);
}

void bind(nb::module_& module) {
  define(module, op, &try_softmax, &softmax, nb::arg(), "axis"_a = nb::none(), nb::kw_only(), "precise"_a = false,
         "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
