#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/recurrence/plan.h"
#include "ops/recurrence/state_params.h"
#include "ops/recurrence/token_layer.h"
#include "params/recurrence.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "gated_delta_token";
const Name file = "recurrence/gated_delta_token.metal";

using Outputs = std::tuple<mx::array, mx::array, mx::array>;

struct TokenOptions {
  float eps;
  float key_eps;

  bool operator==(const TokenOptions&) const = default;
};

// The inputs by name: the first eight have one dtype, the state float32.
struct TokenArrays {
  const mx::array &q, &k, &v, &z, &a, &b, &conv_state, &conv_weight, &a_log, &dt_bias, &norm_weight, &state;

  explicit TokenArrays(const Arrays& inputs)
      : q(inputs[0]),
        k(inputs[1]),
        v(inputs[2]),
        z(inputs[3]),
        a(inputs[4]),
        b(inputs[5]),
        conv_state(inputs[6]),
        conv_weight(inputs[7]),
        a_log(inputs[8]),
        dt_bias(inputs[9]),
        norm_weight(inputs[10]),
        state(inputs[11]) {}

  int batch() const {
    return q.shape(0);
  }
  int key_heads() const {
    return q.shape(1);
  }
  int heads() const {
    return v.shape(1) * v.shape(2);
  }
  int rows() const {
    return v.shape(3);
  }
  int columns() const {
    return q.shape(2);
  }
  int taps() const {
    return conv_weight.shape(1);
  }
  cpu::Recurrence sizes() const {
    const auto size = [](int n) { return static_cast<size_t>(n); };
    return {size(batch()), 1, size(heads()), size(key_heads()), size(rows()), size(columns()), false, true};
  }
};

constexpr size_t views = 6;  // inputs that are read by strides
constexpr size_t state_index = 11;  // of the inputs

template <typename Strides>
Strides strides_of(const mx::array& view, bool has_rows) {
  const int heads = view.ndim() - (has_rows ? 2 : 1);  // the last axis of heads
  return {view.strides(0), view.strides(1), heads > 1 ? view.strides(heads) : 0};
}

cpu::HeadRows native_rows(const mx::array& view, bool has_rows) {
  const auto strides = strides_of<HeadStrides>(view, has_rows);
  return {data_of(view), strides.sequence, strides.key_head, strides.head};
}

class GatedDeltaToken : public HeadsOfToken {
 public:
  GatedDeltaToken(mx::Stream stream, const TokenOptions& options)
      : HeadsOfToken(stream, state_index), options_(options) {}

  const char* name() const override {
    return "MittensGatedDeltaToken";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const GatedDeltaToken&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const TokenArrays arrays(inputs);
    return {{arrays.batch(), arrays.heads(), arrays.rows()}, arrays.conv_state.shape(), arrays.state.shape()};
  }

 protected:
  bool is_ready(const Arrays& inputs, size_t i) const override {
    return i < views ? has_rows(inputs[i], 1) : HeadsOfToken::is_ready(inputs, i);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const TokenArrays arrays(inputs);
    GatedDeltaTokenParams params{};  // simulators compare its padding too
    params.q = strides_of<HeadStrides>(arrays.q, true);
    params.k = strides_of<HeadStrides>(arrays.k, true);
    params.v = strides_of<HeadStrides>(arrays.v, true);
    params.z = strides_of<HeadStrides>(arrays.z, true);
    params.a = strides_of<HeadStrides>(arrays.a, false);
    params.b = strides_of<HeadStrides>(arrays.b, false);
    params.state = token_params(arrays.sizes());
    params.taps = static_cast<uint32_t>(arrays.taps());
    params.a_log_type = number_type(arrays.a_log.dtype());
    params.dt_bias_type = number_type(arrays.dt_bias.dtype());
    params.norm_type = number_type(arrays.norm_weight.dtype());
    params.key_eps = options_.key_eps;
    params.eps = options_.eps;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(arrays.q.dtype(), op);
    share_out_heads(launch, params.state, arrays.batch());
    for (size_t i = 0; i < views; ++i) {
      add_view(launch, inputs[i]);
    }
    for (size_t i = views; i < inputs.size(); ++i) {
      launch.input(inputs[i]);
    }
    return in_order(launch.output(outputs[0]).output(outputs[1]).output(outputs[2]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const TokenArrays arrays(inputs);
    const cpu::GatedDeltaTokenInputs data = {
        native_rows(arrays.q, true),    native_rows(arrays.k, true),        native_rows(arrays.v, true),
        native_rows(arrays.z, true),    native_rows(arrays.a, false),       native_rows(arrays.b, false),
        data_of(arrays.conv_state),     data_of(arrays.conv_weight),        native_numbers(arrays.a_log),
        native_numbers(arrays.dt_bias), native_numbers(arrays.norm_weight), arrays.state.data<float>()};
    const cpu::Recurrence all = arrays.sizes();
    const cpu::GatedDeltaToken sizes = {all.batch,        all.key_heads, all.heads / all.key_heads,
                                        all.rows,         all.columns,   static_cast<size_t>(arrays.taps()),
                                        options_.key_eps, options_.eps};
    return
        [type = native_type(arrays.q.dtype()), sizes, data, y = data_of(outputs[0]), conv_state = data_of(outputs[1]),
         state = outputs[2].data<float>()] { cpu::gated_delta_token(type, sizes, data, y, conv_state, state); };
  }

  Arrays composed(const Arrays& inputs) override {
    const TokenArrays arrays(inputs);
    const mx::Stream s = stream();
    const int batch = arrays.batch(), key_heads = arrays.key_heads(), heads = arrays.heads(), rows = arrays.rows();
    const int columns = arrays.columns(), taps = arrays.taps(), group = arrays.v.shape(2);
    const auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, s); };
    const auto number = [](float v) { return mx::array(v); };
    const auto silu = [&](const mx::array& x) { return mx::multiply(x, mx::sigmoid(x, s), s); };
    const int of_keys = key_heads * columns, of_values = heads * rows;
    const auto flat = [&](const mx::array& a, int size) { return mx::reshape(a, {batch, 1, size}, s); };
    const Arrays parts = {flat(arrays.q, of_keys), flat(arrays.k, of_keys), flat(arrays.v, of_values)};
    const mx::array mixed = mx::concatenate(parts, 2, s);
    const mx::array window = mx::concatenate({arrays.conv_state, mixed}, 1, s);
    const mx::array weight = mx::transpose(wide(arrays.conv_weight), s);
    const mx::array c = silu(mx::sum(mx::multiply(wide(window), weight, s), 1, false, s));
    const auto channels = [&](int begin, int end, mx::Shape shape) {
      return mx::reshape(mx::slice(c, {0, begin}, {batch, end}, s), std::move(shape), s);
    };
    // [batch, key heads, 1, 1, columns]
    const auto normalized = [&](int begin) {
      const mx::array x = channels(begin, begin + of_keys, {batch, key_heads, 1, 1, columns});
      const mx::array square = mx::sum(mx::square(x, s), -1, true, s);
      return mx::multiply(x, mx::rsqrt(mx::add(square, number(options_.key_eps), s), s), s);
    };
    const mx::array q = mx::multiply(normalized(0), number(1 / std::sqrt(static_cast<float>(columns))), s);
    const mx::array k = normalized(of_keys);
    const mx::array v = channels(2 * of_keys, 2 * of_keys + of_values, {batch, key_heads, group, rows, 1});
    const auto by_head = [&](const mx::array& a) { return mx::reshape(wide(a), {1, key_heads, group, 1, 1}, s); };
    const auto by_sequence = [&](const mx::array& a) {
      return mx::reshape(wide(a), {batch, key_heads, group, 1, 1}, s);
    };
    const mx::array time = mx::logaddexp(mx::add(by_sequence(arrays.a), by_head(arrays.dt_bias), s), number(0), s);
    const mx::array gate = mx::exp(mx::negative(mx::multiply(mx::exp(by_head(arrays.a_log), s), time, s), s), s);
    const mx::array rate = mx::sigmoid(by_sequence(arrays.b), s);
    mx::array state = mx::reshape(arrays.state, {batch, key_heads, group, rows, columns}, s);
    state = mx::multiply(state, gate, s);
    const mx::array predicted = mx::sum(mx::multiply(state, k, s), -1, true, s);
    state = mx::add(state, mx::multiply(mx::multiply(rate, mx::subtract(v, predicted, s), s), k, s), s);
    mx::array y = mx::sum(mx::multiply(state, q, s), -1, false, s);
    const mx::array square = mx::mean(mx::square(y, s), -1, true, s);
    y = mx::multiply(y, mx::rsqrt(mx::add(square, number(options_.eps), s), s), s);
    y = mx::multiply(mx::multiply(y, wide(arrays.norm_weight), s), silu(wide(arrays.z)), s);
    const mx::Dtype dtype = arrays.q.dtype();
    const mx::array last = mx::slice(window, {0, 1, 0}, {batch, taps, window.shape(2)}, s);
    return {in_dtype(mx::reshape(y, {batch, heads, rows}, s), dtype, s), last,
            mx::reshape(state, arrays.state.shape(), s)};
  }

 private:
  TokenOptions options_;
};

Outputs gated_delta_token(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& z,
                          const mx::array& a, const mx::array& b, const mx::array& conv_state,
                          const mx::array& conv_weight, const mx::array& a_log, const mx::array& dt_bias,
                          const mx::array& norm_weight, const mx::array& state, float eps, float key_eps,
                          mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  if (q.ndim() != 3) {
    checks::fail(op, "q has shape ", q.shape(), ": expected [batch, key heads, columns]");
  }
  check_shape(op, "k", k, q.shape());
  if (v.ndim() != 4 || v.shape(0) != q.shape(0) || v.shape(1) != q.shape(1)) {
    checks::fail(op, "v has shape ", v.shape(), ", q has shape ", q.shape(),
                 ": expected [batch, key heads, heads of each, rows]");
  }
  const int batch = q.shape(0), heads = v.shape(1) * v.shape(2), rows = v.shape(3), columns = q.shape(2);
  const mx::Shape per_head(v.shape().begin(), v.shape().end() - 1);
  check_shape(op, "z", z, v.shape());
  check_shape(op, "a", a, per_head);
  check_shape(op, "b", b, per_head);
  const int channels = 2 * q.shape(1) * columns + heads * rows;
  const mx::array weight = taps_of_channels(op, conv_weight, channels, stream);
  const int taps = conv_weight.shape(1);
  check_shape(op, "conv_state", conv_state, {batch, taps - 1, channels});
  check_shape(op, "A_log", a_log, {heads});
  check_shape(op, "dt_bias", dt_bias, {heads});
  check_shape(op, "norm_weight", norm_weight, {rows});
  check_shape(op, "state", state, {batch, heads, rows, columns});
  checks::epsilon(op, eps);
  checks::epsilon(op, key_eps);
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"q", q}, {"k", k}, {"v", v}, {"z", z}, {"a", a}, {"b", b}});
  for (const auto& [name, array] :
       {std::pair("conv_state", &conv_state), std::pair("conv_weight", &conv_weight), std::pair("A_log", &a_log),
        std::pair("dt_bias", &dt_bias), std::pair("norm_weight", &norm_weight), std::pair("state", &state)}) {
    checks::kernel_dtype(op, {{name, *array}});
  }
  const auto typed = [&](const mx::array& array) { return in_dtype(array, dtype, stream); };
  Arrays inputs = {typed(q), typed(k), typed(v),          typed(z),
                   typed(a), typed(b), typed(conv_state), typed(weight),
                   a_log,    dt_bias,  norm_weight,       in_dtype(state, mx::float32, stream)};
  const TokenArrays arrays(inputs);
  const cpu::Recurrence sizes = arrays.sizes();
  const auto primitive = std::make_shared<GatedDeltaToken>(stream, TokenOptions{eps, key_eps});
  const bool by_mx = token_goes_to_mx(op, dtype, sizes, q.size() == 0 || v.size() == 0, stream);
  const Arrays all =
      by_mx ? primitive->in_operations(inputs) : results_of(primitive, inputs, {dtype, dtype, mx::float32});
  return {all[0], in_dtype(all[1], conv_state.dtype(), stream), in_dtype(all[2], state.dtype(), stream)};
}

void bind(nb::module_& module) {
  bind_function(module, op, &gated_delta_token, "q"_a, "k"_a, "v"_a, "z"_a, "a"_a, "b"_a, "conv_state"_a,
                "conv_weight"_a, "A_log"_a, "dt_bias"_a, "norm_weight"_a, "state"_a, nb::kw_only(), "eps"_a = 1e-6,
                "key_eps"_a = 1e-6, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
