#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "mlx/ops.h"
#include "ops/recurrence/convolved.h"
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

using Outputs = std::tuple<mx::array, Convolved, mx::array>;

enum Part { kQ, kK, kV, kParts };

struct TokenOptions {
  float eps;
  float key_eps;
  bool is_sigmoid;  // the gate of the result, else SiLU
  bool is_apart;  // the convolution has three states
  bool in_place;  // they may be moved on where they lie

  bool operator==(const TokenOptions&) const = default;

  constexpr size_t states() const {
    return is_apart ? kParts : 1;
  }
};

constexpr size_t views = 6;  // inputs that are read by strides
constexpr size_t conv_index = views;  // of the first state of the convolution
size_t state_index(const TokenOptions& options) {
  return conv_index + 2 * options.states() + 3;
}

// The inputs by name: all up to the weights have one dtype, the state float32.
struct TokenArrays {
  const mx::array &q, &k, &v, &z, &a, &b;
  const mx::array* conv_state;  // as many as options say
  const mx::array* conv_weight;
  const mx::array &a_log, &dt_bias, &norm_weight, &state;
  size_t states;

  TokenArrays(const Arrays& inputs, const TokenOptions& options)
      : q(inputs[0]),
        k(inputs[1]),
        v(inputs[2]),
        z(inputs[3]),
        a(inputs[4]),
        b(inputs[5]),
        conv_state(&inputs[conv_index]),
        conv_weight(&inputs[conv_index + options.states()]),
        a_log(inputs.end()[-4]),
        dt_bias(inputs.end()[-3]),
        norm_weight(inputs.end()[-2]),
        state(inputs.end()[-1]),
        states(options.states()) {}

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
    return conv_weight[0].shape(1);
  }
  bool gate_per_column() const {
    return a.ndim() == 4;
  }
  int channels(int part) const {
    return part == kV ? heads() * rows() : key_heads() * columns();
  }
  // Where a part's channels begin in the state that has them.
  int first_channel(int part) const {
    return states == kParts ? 0 : part * channels(kQ);
  }
  const mx::array& state_of(int part) const {
    return conv_state[states == kParts ? part : 0];
  }
  const mx::array& weight_of(int part) const {
    return conv_weight[states == kParts ? part : 0];
  }
  cpu::Recurrence sizes() const {
    const auto size = [](int n) { return static_cast<size_t>(n); };
    return {size(batch()), 1, size(heads()), size(key_heads()), size(rows()), size(columns()), false, true};
  }
};

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
      : HeadsOfToken(stream, state_index(options), options.in_place ? conv_index : 0), options_(options) {}

  const char* name() const override {
    return "MittensGatedDeltaToken";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const GatedDeltaToken&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const TokenArrays arrays(inputs, options_);
    std::vector<mx::Shape> shapes = {{arrays.batch(), arrays.heads(), arrays.rows()}};
    for (size_t i = 0; i < arrays.states; ++i) {
      shapes.push_back(arrays.conv_state[i].shape());
    }
    shapes.push_back(arrays.state.shape());
    return shapes;
  }

 protected:
  bool is_ready(const Arrays& inputs, size_t i) const override {
    return i < views ? has_rows(inputs[i], 1) : HeadsOfToken::is_ready(inputs, i);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const TokenArrays arrays(inputs, options_);
    GatedDeltaTokenApartParams apart{};  // simulators compare its padding too
    GatedDeltaTokenParams& params = apart.token;
    params.q = strides_of<HeadStrides>(arrays.q, true);
    params.k = strides_of<HeadStrides>(arrays.k, true);
    params.v = strides_of<HeadStrides>(arrays.v, true);
    params.z = strides_of<HeadStrides>(arrays.z, true);
    params.a = strides_of<HeadStrides>(arrays.a, arrays.gate_per_column());
    params.b = strides_of<HeadStrides>(arrays.b, false);
    params.state = token_params(arrays.sizes());
    params.taps = static_cast<uint32_t>(arrays.taps());
    params.a_log_type = number_type(arrays.a_log.dtype());
    params.dt_bias_type = number_type(arrays.dt_bias.dtype());
    params.norm_type = number_type(arrays.norm_weight.dtype());
    params.key_eps = options_.key_eps;
    params.eps = options_.eps;
    apart.gate_per_column = arrays.gate_per_column();
    apart.is_sigmoid = options_.is_sigmoid;
    Launch launch;
    launch.arguments.reserve(22);
    launch.file = file;
    launch.kernel = options_.is_apart ? kernel_name(arrays.q.dtype(), op, "apart") : kernel_name(arrays.q.dtype(), op);
    share_out_heads(launch, params.state, arrays.batch());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (i < views) {
        add_view(launch, inputs[i]);
      } else {
        launch.input(inputs[i]);
      }
    }
    for (const mx::array& output : outputs) {
      launch.output(output);
    }
    if (options_.is_apart) {
      launch.params(apart);
    } else {
      launch.params(params);
    }
    return in_order(std::move(launch));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const TokenArrays arrays(inputs, options_);
    cpu::GatedDeltaTokenInputs data = {native_rows(arrays.q, true),
                                       native_rows(arrays.k, true),
                                       native_rows(arrays.v, true),
                                       native_rows(arrays.z, true),
                                       native_rows(arrays.a, arrays.gate_per_column()),
                                       native_rows(arrays.b, false),
                                       {},
                                       native_numbers(arrays.a_log),
                                       native_numbers(arrays.dt_bias),
                                       native_numbers(arrays.norm_weight),
                                       arrays.state.data<float>()};
    for (int part = 0; part < kParts; ++part) {
      const mx::array& before = arrays.state_of(part);
      mx::array& after = outputs[options_.is_apart ? 1 + part : 1];
      const size_t item = before.itemsize(), first = arrays.first_channel(part);
      const auto at = [](const void* p, size_t bytes) { return static_cast<const std::byte*>(p) + bytes; };
      data.parts[part] = {at(data_of(before), first * item),
                          before.strides(0),
                          before.strides(1),
                          at(data_of(arrays.weight_of(part)), first * item * static_cast<size_t>(arrays.taps())),
                          static_cast<std::byte*>(data_of(after)) + first * item,
                          after.strides(0),
                          after.strides(1)};
    }
    const cpu::Recurrence all = arrays.sizes();
    const cpu::GatedDeltaToken sizes = {all.batch,          all.key_heads, all.heads / all.key_heads,
                                        all.rows,           all.columns,   static_cast<size_t>(arrays.taps()),
                                        options_.key_eps,   options_.eps,  arrays.gate_per_column(),
                                        options_.is_sigmoid};
    return [type = native_type(arrays.q.dtype()), sizes, data, y = data_of(outputs[0]),
            state = outputs.back().data<float>()] { cpu::gated_delta_token(type, sizes, data, y, state); };
  }

  Arrays composed(const Arrays& inputs) override {
    const TokenArrays arrays(inputs, options_);
    const mx::Stream s = stream();
    const int batch = arrays.batch(), key_heads = arrays.key_heads(), heads = arrays.heads(), rows = arrays.rows();
    const int columns = arrays.columns(), taps = arrays.taps(), group = arrays.v.shape(2);
    const auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, s); };
    const auto number = [](float v) { return mx::array(v); };
    const auto silu = [&](const mx::array& x) { return mx::multiply(x, mx::sigmoid(x, s), s); };
    const mx::array* const fresh[] = {&arrays.q, &arrays.k, &arrays.v};
    Arrays convolved, last;
    for (int part = 0; part < kParts; ++part) {
      const int begin = arrays.first_channel(part), size = arrays.channels(part);
      const mx::array past = mx::slice(arrays.state_of(part), {0, 0, begin}, {batch, taps - 1, begin + size}, s);
      const mx::array window = mx::concatenate({past, mx::reshape(*fresh[part], {batch, 1, size}, s)}, 1, s);
      const mx::array weight = mx::slice(arrays.weight_of(part), {begin, 0}, {begin + size, taps}, s);
      const mx::array products = mx::multiply(wide(window), mx::transpose(wide(weight), s), s);
      convolved.push_back(silu(mx::sum(products, 1, false, s)));
      last.push_back(mx::slice(window, {0, 1, 0}, {batch, taps, size}, s));
    }
    // [batch, key heads, 1, 1, columns]
    const auto normalized = [&](int part) {
      const mx::array x = mx::reshape(convolved[part], {batch, key_heads, 1, 1, columns}, s);
      const mx::array square = mx::sum(mx::square(x, s), -1, true, s);
      return mx::multiply(x, mx::rsqrt(mx::add(square, number(options_.key_eps), s), s), s);
    };
    const mx::array q = mx::multiply(normalized(kQ), number(1 / std::sqrt(static_cast<float>(columns))), s);
    const mx::array k = normalized(kK);
    const mx::array v = mx::reshape(convolved[kV], {batch, key_heads, group, rows, 1}, s);
    const int gates = arrays.gate_per_column() ? columns : 1;
    const auto by_head = [&](const mx::array& a, int each) {
      return mx::reshape(wide(a), {1, key_heads, group, 1, each}, s);
    };
    const auto by_sequence = [&](const mx::array& a, int each) {
      return mx::reshape(wide(a), {batch, key_heads, group, 1, each}, s);
    };
    const mx::array biased = mx::add(by_sequence(arrays.a, gates), by_head(arrays.dt_bias, gates), s);
    const mx::array time = mx::logaddexp(biased, number(0), s);
    const mx::array rates = mx::exp(by_head(arrays.a_log, 1), s);
    const mx::array gate = mx::exp(mx::negative(mx::multiply(rates, time, s), s), s);
    const mx::array rate = mx::sigmoid(by_sequence(arrays.b, 1), s);
    mx::array state = mx::reshape(arrays.state, {batch, key_heads, group, rows, columns}, s);
    state = mx::multiply(state, gate, s);
    const mx::array predicted = mx::sum(mx::multiply(state, k, s), -1, true, s);
    state = mx::add(state, mx::multiply(mx::multiply(rate, mx::subtract(v, predicted, s), s), k, s), s);
    mx::array y = mx::sum(mx::multiply(state, q, s), -1, false, s);
    const mx::array square = mx::mean(mx::square(y, s), -1, true, s);
    y = mx::multiply(y, mx::rsqrt(mx::add(square, number(options_.eps), s), s), s);
    const mx::array z = wide(arrays.z);
    const mx::array gating = options_.is_sigmoid ? mx::sigmoid(z, s) : silu(z);
    y = mx::multiply(mx::multiply(y, wide(arrays.norm_weight), s), gating, s);
    Arrays outputs = {in_dtype(mx::reshape(y, {batch, heads, rows}, s), arrays.q.dtype(), s)};
    if (options_.is_apart) {
      outputs.insert(outputs.end(), last.begin(), last.end());
    } else {
      outputs.push_back(mx::concatenate(last, 2, s));
    }
    outputs.push_back(mx::reshape(state, arrays.state.shape(), s));
    return outputs;
  }

 private:
  TokenOptions options_;
};

bool is_sigmoid(const std::string& gate) {
  if (gate != "silu" && gate != "sigmoid") {
    checks::fail(op, "gate is '", gate, "': expected 'silu' or 'sigmoid'");
  }
  return gate == "sigmoid";
}

// Splits channels into q's, k's and v's.
Arrays split_channels(const mx::array& all, int of_keys, int axis, mx::Stream stream) {
  return mx::split(all, mx::Shape{of_keys, 2 * of_keys}, axis, stream);
}

Outputs gated_delta_token(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& z,
                          const mx::array& a, const mx::array& b, const Convolved& conv_state,
                          const Convolved& conv_weight, const mx::array& a_log, const mx::array& dt_bias,
                          const mx::array& norm_weight, const mx::array& state, float eps, float key_eps,
                          const std::string& gate, mx::StreamOrDevice where) {
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
  const bool per_column = a.ndim() == 4;
  mx::Shape of_gates = per_head, of_biases = {heads};
  if (per_column) {
    of_gates.push_back(columns);
    of_biases.push_back(columns);
  }
  check_shape(op, "z", z, v.shape());
  check_shape(op, "a", a, of_gates);
  check_shape(op, "b", b, per_head);
  const int of_keys = q.shape(1) * columns, of_values = heads * rows;
  Arrays states = arrays_of(conv_state), weights = arrays_of(conv_weight);
  const size_t given = states.size();
  if (weights.size() != given) {
    checks::fail(op, "conv_state has ", given, " parts, conv_weight has ", weights.size(),
                 ": expected the same number");
  }
  for (size_t i = 0; i < given; ++i) {
    const int channels = given == 1 ? 2 * of_keys + of_values : i == kV ? of_values : of_keys;
    const std::string of_weight = name_of_part("conv_weight", i, given),
                      of_state = name_of_part("conv_state", i, given);
    weights[i] = taps_of_channels(op, weights[i], channels, stream, of_weight.c_str());
    if (weights[i].shape(1) != weights[0].shape(1)) {
      checks::fail(op, "conv_weight has ", weights[0].shape(1), " and ", weights[i].shape(1),
                   " taps: expected the same number in all parts");
    }
    check_shape(op, of_state.c_str(), states[i], {batch, weights[0].shape(1) - 1, channels});
    checks::kernel_dtype(op, {{of_weight.c_str(), weights[i]}});
    checks::kernel_dtype(op, {{of_state.c_str(), states[i]}});
  }
  check_shape(op, "A_log", a_log, {heads});
  check_shape(op, "dt_bias", dt_bias, of_biases);
  check_shape(op, "norm_weight", norm_weight, {rows});
  check_shape(op, "state", state, {batch, heads, rows, columns});
  checks::epsilon(op, eps);
  checks::epsilon(op, key_eps);
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"q", q}, {"k", k}, {"v", v}, {"z", z}, {"a", a}, {"b", b}});
  for (const auto& [name, array] : {std::pair("A_log", &a_log), std::pair("dt_bias", &dt_bias),
                                    std::pair("norm_weight", &norm_weight), std::pair("state", &state)}) {
    checks::kernel_dtype(op, {{name, *array}});
  }
  const bool sigmoid_gate = is_sigmoid(gate);
  // One kernel has gates of heads, SiLU and a state of all channels; another all else.
  const bool is_apart = given == kParts || per_column || sigmoid_gate;
  if (is_apart && given == 1) {
    states = split_channels(states[0], of_keys, 2, stream);
    weights = split_channels(weights[0], of_keys, 0, stream);
  }
  Arrays inputs;
  inputs.reserve(views + 2 * states.size() + 4);
  const auto add = [&](const mx::array& array) { inputs.push_back(in_dtype(array, dtype, stream)); };
  for (const mx::array* array : {&q, &k, &v, &z, &a, &b}) {
    add(*array);
  }
  std::for_each(states.begin(), states.end(), add);
  std::for_each(weights.begin(), weights.end(), add);
  inputs.insert(inputs.end(), {a_log, dt_bias, norm_weight, in_dtype(state, mx::float32, stream)});
  const TokenOptions options{eps, key_eps, sigmoid_gate, is_apart, is_apart && v.shape(2) == 1};
  const cpu::Recurrence sizes = TokenArrays(inputs, options).sizes();
  const auto primitive = std::make_shared<GatedDeltaToken>(stream, options);
  const bool by_mx = token_goes_to_mx(op, dtype, sizes, q.size() == 0 || v.size() == 0, stream);
  std::vector<mx::Dtype> dtypes(2 + states.size(), dtype);
  dtypes.back() = mx::float32;
  const Arrays all = by_mx ? primitive->in_operations(inputs) : results_of(primitive, std::move(inputs), dtypes);
  Arrays last(all.begin() + 1, all.end() - 1);
  if (given < last.size()) {
    last = {mx::concatenate(last, 2, stream)};
  }
  for (size_t i = 0; i < last.size(); ++i) {
    last[i] = in_dtype(last[i], states[i].dtype(), stream);  // parts have the type of the whole
  }
  return {all[0], convolved_of(last), in_dtype(all.back(), state.dtype(), stream)};
}

void bind(nb::module_& module) {
  bind_function(module, op, &gated_delta_token, "q"_a, "k"_a, "v"_a, "z"_a, "a"_a, "b"_a, "conv_state"_a,
                "conv_weight"_a, "A_log"_a, "dt_bias"_a, "norm_weight"_a, "state"_a, nb::kw_only(), "eps"_a = 1e-6,
                "key_eps"_a = 1e-6, "gate"_a = "silu", "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
