#include <memory>
#include <utility>

#include <nanobind/nanobind.h>

#include "mlx/ops.h"
#include "params/chosen_keys.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "index_scores";
const Name file = "cache/index_scores.metal";

// The op in mx operations, in float32 or wider.
mx::array compose(const Arrays& inputs, float scale, mx::Stream s) {
  const mx::Dtype dtype = mx::promote_types(inputs[0].dtype(), mx::float32);
  const auto wide = [&](const mx::array& a) { return mx::astype(a, dtype, s); };
  const mx::array& q = inputs[0];
  const int batch = q.shape(0), heads = q.shape(1), queries = q.shape(2), keys = inputs[1].shape(1);
  const mx::array rows = mx::reshape(mx::swapaxes(wide(q), 1, 2, s), {batch, queries * heads, q.shape(3)}, s);
  const mx::array transposed = mx::swapaxes(wide(inputs[1]), 1, 2, s);
  const mx::array scores = mx::maximum(mx::matmul(rows, transposed, s), mx::array(0.0f, dtype), s);
  const mx::array weights = mx::multiply(wide(inputs[2]), mx::array(scale, dtype), s);
  const mx::array y =
      mx::matmul(mx::expand_dims(weights, 2, s), mx::reshape(scores, {batch, queries, heads, keys}, s), s);
  return mx::astype(mx::squeeze(y, 2, s), q.dtype(), s);
}

// The result's shape. mx.compile(shapeless=True) runs the same primitive on other shapes: then it asks again.
mx::Shape checked_shape(const mx::array& q, const mx::array& k, const mx::array& weights) {
  if (q.ndim() != 4) {
    checks::fail(op, "q has shape ", q.shape(), ": expected four dimensions");
  }
  if (k.ndim() != 3 || k.shape(0) != q.shape(0) || k.shape(2) != q.shape(3)) {
    checks::fail(op, "k has shape ", k.shape(), ", q has shape ", q.shape(), ": expected [batch, keys, width]");
  }
  if (weights.shape() != mx::Shape{q.shape(0), q.shape(2), q.shape(1)}) {
    checks::fail(op, "weights has shape ", weights.shape(), ", q has shape ", q.shape(),
                 ": expected [batch, queries, heads]");
  }
  return {q.shape(0), q.shape(2), k.shape(1)};
}

bool has_kernel_of(int width) {
  return width == 64 || width == 128;
}

// q [batch, heads, queries, width], k [batch, keys, width], weights [batch, queries, heads] -> y [batch, queries,
// keys].
class IndexScores : public KernelPrimitive {
 public:
  IndexScores(mx::Stream stream, float scale) : KernelPrimitive(stream), scale_(scale) {}

  const char* name() const override {
    return "MittensIndexScores";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return scale_ == static_cast<const IndexScores&>(other).scale_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {checked_shape(inputs[0], inputs[1], inputs[2])};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      copies.push_back(with_rows(inputs[i], i < 2 ? 16 : 1, stream()));
    }
    return copies;
  }

  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(1) == 0;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array &q = inputs[0], &k = inputs[1], &weights = inputs[2];
    IndexScoresParams params{
        .query_strides = {q.strides(0), q.strides(1), q.strides(2)},
        .key_strides = {k.strides(0), k.strides(1)},
        .weight_strides = {weights.strides(0), weights.strides(1)},
        .heads = static_cast<uint32_t>(q.shape(1)),
        .queries = static_cast<uint32_t>(q.shape(2)),
        .keys = static_cast<uint32_t>(k.shape(1)),
        .scale = scale_,
    };
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(q.dtype(), op, q.shape(3));
    launch.threadgroups = {ceil_divide(params.keys, kChosenKeysSimdgroups * 8), params.queries,
                           static_cast<uint32_t>(q.shape(0))};
    launch.threads = {32 * kChosenKeysSimdgroups, 1, 1};
    add_view(launch, q);
    add_view(launch, k);
    add_view(launch, weights);
    return in_order(launch.output(outputs[0]).params(params));
  }

  Arrays composed(const Arrays& inputs) override {
    return {compose(inputs, scale_, stream())};
  }

 private:
  float scale_;
};

mx::array index_scores(const mx::array& q, const mx::array& k, const mx::array& weights, float scale,
                       mx::StreamOrDevice where) {
  mx::Shape shape = checked_shape(q, k, weights);
  const mx::Dtype dtype = checks::floating(op, {{"q", q}, {"k", k}, {"weights", weights}});
  const mx::Stream stream = checks::checked_stream(op, where);
  // Sums of nothing. Gradients of mx's operations crash now and then there.
  if (q.size() == 0 || k.size() == 0) {
    return mx::zeros(shape, dtype, stream);
  }
  Arrays inputs;
  for (const mx::array* array : {&q, &k, &weights}) {
    inputs.push_back(in_dtype(*array, dtype, stream));
  }
  const bool is_narrow = has_kernels(dtype), is_covered = is_narrow && has_kernel_of(q.shape(3));
  if (!is_covered) {
    fallback(op, is_narrow ? "heads of other than 64 or 128 columns" : "float64");
  }
  if (!is_covered || is_switched_off(op)) {
    return compose(inputs, scale, stream);
  }
  return only_output(std::move(shape), std::make_shared<IndexScores>(stream, scale), std::move(inputs));
}

void bind(nb::module_& module) {
  bind_function(module, op, &index_scores, "q"_a, "k"_a, "weights"_a, nb::kw_only(), "scale"_a = 1.0f,
                "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
