#include "ops/recurrence/layer_inputs.h"

#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>

#include "cpu/recurrence/token_layers.h"
#include "mlx/ops.h"
#include "ops/recurrence/state_params.h"
#include "ops/recurrence/token_layer.h"
#include "params/recurrence.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/ready_inputs.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"

namespace mittens {

namespace {

constexpr const char* kernel = "layer_inputs";
const Name file = "recurrence/layer_inputs.metal";
constexpr int kParts = 3;

// Blocks of channels of a part: where they are in a view, in a state that has the channels of all, and in the next one.
struct Blocks {
  int blocks;
  int width;
  int input_at;
  int next_at;
};

// The inputs by name.
struct Named {
  const mx::array* views;
  const mx::array* states;
  const mx::array* weights;
  const mx::array *bias, *a, *b, *a_log, *dt_bias, *mask, *lengths;
  const LayerInputsOptions& options;

  Named(const Arrays& inputs, const LayerInputsOptions& all) : options(all) {
    const mx::array* next = inputs.data();
    const auto take = [&](size_t n) { return std::exchange(next, next + n); };
    const auto take_if = [&](bool present) { return present ? take(1) : nullptr; };
    views = take(all.views);
    states = take(all.states);
    weights = take(all.weights);
    bias = take_if(all.has_bias);
    a = take_if(all.has_gates);
    b = take_if(all.has_gates);
    a_log = take_if(all.has_gates);
    dt_bias = take_if(all.has_gates);
    mask = take_if(all.has_mask);
    lengths = take_if(all.has_lengths);
  }

  const mx::array& view(int part) const {
    return views[options.views == kParts ? part : 0];
  }
  // Null: zeros.
  const mx::array* state(int part) const {
    return options.states == 0 ? nullptr : &states[options.states == kParts ? part : 0];
  }
  const mx::array& weight(int part) const {
    return weights[options.weights == kParts ? part : 0];
  }
  int batch() const {
    return views[0].shape(0);
  }
  int steps() const {
    return views[0].shape(1);
  }
  int taps() const {
    return weights[0].shape(1);
  }
  int channels() const {
    const Blocks last = blocks(kParts - 1);
    return last.next_at + last.blocks * last.width;
  }
  int key_heads() const {
    return options.has_gates ? views[0].shape(2) : 0;
  }
  int heads_of_key() const {
    return options.has_gates ? views[2].shape(3) : 0;
  }
  int heads() const {
    return key_heads() * heads_of_key();
  }
  int gates() const {
    return options.has_gates && a->ndim() == 5 ? a->shape(4) : 1;
  }
  bool is_normalized(int part) const {
    return options.has_gates && part < 2;
  }
  Blocks blocks(int part) const {
    if (options.views == 1) {
      const int shared = (views[0].shape(2) - options.inner) / 2;
      const int at = part == 0 ? 0 : options.inner + (part - 1) * shared;
      return {1, part == 0 ? options.inner : shared, at, at};
    }
    const int columns = views[0].shape(3), width = part == 2 ? heads_of_key() * views[2].shape(4) : columns;
    return {key_heads(), width, 0, part * key_heads() * columns};
  }
  // Where a part's channels begin in its state or in its weights.
  int first_of(int part, size_t count) const {
    return count == kParts ? 0 : blocks(part).next_at;
  }
  float scale(int part) const {
    return part == 0 ? 1 / std::sqrt(static_cast<float>(blocks(0).width)) : 1.0f;
  }
  mx::Shape out_shape(int part) const {
    if (options.views == 1) {
      return {batch(), steps(), blocks(part).width};
    }
    return part < 2 ? views[part].shape() : mx::Shape{batch(), steps(), heads(), views[2].shape(4)};
  }
};

// Elements from step to step and from block to block: blocks of one view are its rows.
int64_t block_stride(const mx::array& view) {
  return view.ndim() > 3 ? view.strides(2) : 0;
}

StepStrides step_strides(const mx::array& view) {
  return {view.strides(0), view.strides(1), view.strides(2), view.strides(3)};
}

class LayerInputs : public KernelPrimitive {
 public:
  LayerInputs(mx::Stream stream, const LayerInputsOptions& options) : KernelPrimitive(stream), options_(options) {}

  const char* name() const override {
    return options_.has_gates ? "MittensGatedDeltaInputs" : "MittensSsmInputs";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const LayerInputs&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const Named named(inputs, options_);
    if (options_.views == 1) {  // functions for all shapes keep `inner`
      check_inner("ssm_inputs", options_.inner, named.views[0].shape(2));
    }
    std::vector<mx::Shape> shapes;
    for (int part = 0; part < kParts; ++part) {
      shapes.push_back(named.out_shape(part));
    }
    shapes.push_back({named.batch(), named.taps() - 1, named.channels()});
    if (options_.has_gates) {
      mx::Shape of_heads = {named.batch(), named.steps(), named.heads()}, of_gates = of_heads;
      if (named.a->ndim() == 5) {
        of_gates.push_back(named.gates());
      }
      shapes.push_back(of_gates);
      shapes.push_back(of_heads);
    }
    return shapes;
  }

  // The composition, for callers of the op.
  Arrays in_operations(const Arrays& inputs) {
    return composed(inputs);
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    return ready_inputs(inputs, stream(), copies, [&](size_t i) { return is_ready(inputs, i); });
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const Named named(inputs, options_);
    const mx::array& some = named.views[0];
    LayerInputsParams params{};  // simulators compare its padding too
    const auto count = [](int n) { return static_cast<uint32_t>(n); };
    params.steps = count(named.steps());
    params.taps = count(named.taps());
    params.channels = count(named.channels());
    params.has_state = options_.states > 0;
    params.has_bias = options_.has_bias;
    params.has_mask = options_.has_mask;
    params.has_lengths = options_.has_lengths;
    params.heads_of_key = 1;
    uint32_t units = 0;
    for (int part = 0; part < kParts; ++part) {
      params.parts[part] = part_of(named, part);
      units += params.parts[part].units;
    }
    if (options_.has_gates) {
      params.a = step_strides(*named.a);
      params.b = step_strides(*named.b);
      params.heads = count(named.heads());
      params.heads_of_key = count(named.heads_of_key());
      params.gates = count(named.gates());
      params.a_log_type = number_type(named.a_log->dtype());
      params.dt_bias_type = number_type(named.dt_bias->dtype());
      params.key_eps = options_.key_eps;
      units += ceil_divide(params.heads * params.gates, 32u) + ceil_divide(params.heads, 32u);
    }
    Launch launch;
    launch.arguments.reserve(23);
    launch.file = file;
    launch.kernel =
        has_short_kernel(named) ? kernel_name(some.dtype(), kernel) : kernel_name(some.dtype(), kernel, "any");
    launch.threadgroups = {ceil_divide(units, uint32_t(kInputSimdgroups)),
                           ceil_divide(params.steps, uint32_t(kInputSteps)), count(named.batch())};
    launch.threads = {32 * kInputSimdgroups, 1, 1};
    const auto view_if = [&](const mx::array* view) {
      if (view) {
        add_view(launch, *view);
      } else {
        launch.stand_in(some);
      }
    };
    for (int part = 0; part < kParts; ++part) {
      view_if(&named.view(part));
    }
    view_if(named.a);
    view_if(named.b);
    for (int part = 0; part < kParts; ++part) {
      const mx::array* state = named.state(part);
      view_if(state && state->size() > 0 ? state : nullptr);
    }
    for (int part = 0; part < kParts; ++part) {
      launch.input(named.weight(part));
    }
    for (const mx::array* array : {named.bias, named.a_log, named.dt_bias, named.mask, named.lengths}) {
      launch.input_if(array != nullptr, array ? *array : some);
    }
    for (int i = 0; i < kParts + 1; ++i) {
      launch.output(outputs[i]);
    }
    launch.output_if(options_.has_gates ? &outputs[4] : nullptr, some);
    launch.output_if(options_.has_gates ? &outputs[5] : nullptr, some);
    return in_order(launch.params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const Named named(inputs, options_);
    const auto size = [](int n) { return static_cast<size_t>(n); };
    cpu::LayerInputs all{};
    all.batch = size(named.batch());
    all.steps = size(named.steps());
    all.taps = size(named.taps());
    all.channels = size(named.channels());
    all.mask = named.mask ? named.mask->data<bool>() : nullptr;
    all.lengths = named.lengths ? named.lengths->data<int32_t>() : nullptr;
    const auto at = [item = named.views[0].itemsize()](const void* p, int elements) -> const void* {
      return static_cast<const std::byte*>(p) + static_cast<size_t>(elements) * item;
    };
    for (int part = 0; part < kParts; ++part) {
      const Blocks blocks = named.blocks(part);
      const mx::array &view = named.view(part), *state = named.state(part), &weight = named.weight(part);
      const int of_weight = named.first_of(part, options_.weights);
      all.parts[part] = {at(data_of(view), blocks.input_at),
                         view.strides(0),
                         view.strides(1),
                         block_stride(view),
                         state ? at(data_of(*state), named.first_of(part, options_.states)) : nullptr,
                         state ? state->strides(0) : 0,
                         state ? state->strides(1) : 0,
                         at(data_of(weight), of_weight * named.taps()),
                         named.bias ? at(data_of(*named.bias), of_weight) : nullptr,
                         size(blocks.blocks),
                         size(blocks.width),
                         named.is_normalized(part),
                         named.scale(part),
                         data_of(outputs[part]),
                         const_cast<void*>(at(data_of(outputs[3]), blocks.next_at))};
    }
    if (options_.has_gates) {
      const auto put = [](const mx::array& view, int64_t (&strides)[4]) {
        for (int i = 0; i < 4; ++i) {
          strides[i] = view.strides(i);
        }
      };
      all.heads = size(named.heads());
      all.heads_of_key = size(named.heads_of_key());
      all.gates = size(named.gates());
      all.key_eps = options_.key_eps;
      all.a = data_of(*named.a);
      put(*named.a, all.a_strides);
      all.b = data_of(*named.b);
      put(*named.b, all.b_strides);
      all.a_log = native_numbers(*named.a_log);
      all.dt_bias = native_numbers(*named.dt_bias);
      all.gates_out = outputs[4].data<float>();
      all.rates_out = outputs[5].data<float>();
    }
    return [type = native_type(named.views[0].dtype()), all] { cpu::layer_inputs(type, all); };
  }

  Arrays composed(const Arrays& inputs) override {
    const Named named(inputs, options_);
    const mx::Stream s = stream();
    const int batch = named.batch(), steps = named.steps(), past = named.taps() - 1;
    const mx::Dtype dtype = named.views[0].dtype();
    const auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, s); };
    const mx::array none = mx::array(0.0f, dtype);
    Arrays results, states;
    for (int part = 0; part < kParts; ++part) {
      const Blocks blocks = named.blocks(part);
      const int size = blocks.blocks * blocks.width;
      const auto channels_of = [&](const mx::array& a, int first) {
        return mx::slice(a, {0, 0, first}, {a.shape(0), a.shape(1), first + size}, s);
      };
      mx::array x = options_.views == 1 ? channels_of(named.view(part), blocks.input_at)
                                        : mx::reshape(named.view(part), {batch, steps, size}, s);
      if (named.mask) {
        x = mx::where(mx::expand_dims(*named.mask, 2, s), x, none, s);
      }
      const int of_state = named.first_of(part, options_.states), of_weight = named.first_of(part, options_.weights);
      const mx::array before =
          named.state(part) ? channels_of(*named.state(part), of_state) : mx::zeros({batch, past, size}, dtype, s);
      const mx::array window = mx::concatenate({before, x}, 1, s);
      states.push_back(end_of(window, named, size));
      const mx::array weight = wide(mx::slice(named.weight(part), {of_weight, 0}, {of_weight + size, past + 1}, s));
      mx::array sum = mx::zeros({batch, steps, size}, mx::float32, s);
      for (int j = 0; j <= past; ++j) {
        const mx::array row = wide(mx::slice(window, {0, j, 0}, {batch, j + steps, size}, s));
        const mx::array factor = mx::slice(weight, {0, j}, {size, j + 1}, s);
        sum = mx::add(sum, mx::multiply(row, mx::reshape(factor, {size}, s), s), s);
      }
      if (named.bias) {
        sum = mx::add(sum, wide(mx::slice(*named.bias, {of_weight}, {of_weight + size}, s)), s);
      }
      mx::array c = mx::reshape(mx::multiply(sum, mx::sigmoid(sum, s), s), named.out_shape(part), s);
      if (named.is_normalized(part)) {
        const mx::array square = mx::sum(mx::square(c, s), -1, true, s);
        const mx::array inverse = mx::rsqrt(mx::add(square, mx::array(options_.key_eps), s), s);
        c = mx::multiply(mx::multiply(c, inverse, s), mx::array(named.scale(part)), s);
      }
      results.push_back(in_dtype(c, dtype, s));
    }
    results.push_back(mx::concatenate(states, 2, s));
    if (options_.has_gates) {
      const std::vector<mx::Shape> shapes = output_shapes(inputs);
      const mx::array biased = mx::add(mx::reshape(wide(*named.a), shapes[4], s), wide(*named.dt_bias), s);
      mx::array decay = mx::exp(wide(*named.a_log), s);
      if (named.a->ndim() == 5) {
        decay = mx::expand_dims(decay, 1, s);
      }
      const mx::array time = mx::logaddexp(biased, mx::array(0.0f), s);
      results.push_back(mx::exp(mx::negative(mx::multiply(decay, time, s), s), s));
      results.push_back(mx::sigmoid(mx::reshape(wide(*named.b), shapes[5], s), s));
    }
    return results;
  }

 private:
  bool is_ready(const Arrays& inputs, size_t i) const {
    const mx::array& array = inputs[i];
    const size_t a = options_.views + options_.states + options_.weights + (options_.has_bias ? 1 : 0);
    if (i < options_.views) {  // heads of a key head are one block
      return has_rows(array, 1) && (array.ndim() < 5 || array.shape(3) == 1 || array.strides(3) == array.shape(4));
    }
    const bool is_view = i < options_.views + options_.states || (options_.has_gates && (i == a || i == a + 1));
    return is_view ? has_rows(array, 1) : is_row_contiguous(array);
  }

  // Whether four taps stay in registers, and each norm is of channels that one simdgroup has at once.
  static bool has_short_kernel(const Named& named) {
    return named.taps() == 4 && (!named.is_normalized(0) || named.blocks(0).width <= kInputChannels);
  }

  InputPart part_of(const Named& named, int part) const {
    const Blocks blocks = named.blocks(part);
    const mx::array &view = named.view(part), *state = named.state(part);
    InputPart of_part{};
    of_part.sequence = view.strides(0);
    of_part.step = view.strides(1);
    of_part.block = block_stride(view);
    of_part.state_sequence = state ? state->strides(0) : 0;
    of_part.state_tap = state ? state->strides(1) : 0;
    of_part.blocks = static_cast<uint32_t>(blocks.blocks);
    of_part.width = static_cast<uint32_t>(blocks.width);
    of_part.is_normalized = named.is_normalized(part);
    of_part.units = of_part.blocks * (of_part.is_normalized ? 1 : ceil_divide(of_part.width, uint32_t(kInputChannels)));
    of_part.input_at = static_cast<uint32_t>(blocks.input_at);
    of_part.weight_at = static_cast<uint32_t>(named.first_of(part, options_.weights));
    of_part.state_at = static_cast<uint32_t>(named.first_of(part, options_.states));
    of_part.next_at = static_cast<uint32_t>(blocks.next_at);
    of_part.scale = named.scale(part);
    bool packs = true;
    for (int64_t n : {of_part.sequence, of_part.step, of_part.block, of_part.state_sequence, of_part.state_tap}) {
      packs = packs && n % 4 == 0;
    }
    for (uint32_t n : {of_part.width, of_part.input_at, of_part.state_at, of_part.next_at,
                       static_cast<uint32_t>(named.channels())}) {
      packs = packs && n % 4 == 0;
    }
    const auto is_aligned = [](const mx::array& a) { return a.offset() % (4 * a.itemsize()) == 0; };
    of_part.packs = packs && is_aligned(view) && (!state || is_aligned(*state));
    return of_part;
  }

  // The last rows of a window, or the rows at the end of lengths.
  mx::array end_of(const mx::array& window, const Named& named, int channels) {
    const mx::Stream s = stream();
    const int past = named.taps() - 1, steps = named.steps();
    if (!named.lengths) {
      return mx::slice(window, {0, steps, 0}, {named.batch(), steps + past, channels}, s);
    }
    const mx::array ends = mx::clip(*named.lengths, mx::array(0), mx::array(steps), s);
    const mx::array rows = mx::add(mx::reshape(ends, {named.batch(), 1, 1}, s),
                                   mx::reshape(mx::arange(0, past, mx::int32, s), {1, past, 1}, s), s);
    return mx::take_along_axis(window, mx::broadcast_to(rows, {named.batch(), past, channels}, s), 1, s);
  }

  LayerInputsOptions options_;
};

}  // namespace

void check_inner(const char* op, int inner, int channels) {
  if (inner < 0 || inner > channels || (channels - inner) % 2 != 0) {
    checks::fail(op, "inner is ", inner, ", conv_weight has ", channels, " channels: expected inner <= channels, and ",
                 "an even number of channels behind these for B and C");
  }
}

void check_steps(const char* op, const std::optional<mx::array>& mask, const std::optional<mx::array>& lengths,
                 int batch, int steps) {
  if (mask) {
    check_shape(op, "mask", *mask, {batch, steps});
    if (mask->dtype() != mx::bool_) {
      checks::fail<DtypeError>(op, "mask has dtype ", mask->dtype(), ": expected bool");
    }
  }
  if (lengths) {
    check_shape(op, "lengths", *lengths, {batch});
    if (!mx::issubdtype(lengths->dtype(), mx::integer)) {
      checks::fail<DtypeError>(op, "lengths has dtype ", lengths->dtype(), ": expected an integer type");
    }
  }
}

void add_steps(Arrays& inputs, const std::optional<mx::array>& mask, const std::optional<mx::array>& lengths, int steps,
               mx::Stream stream) {
  if (mask) {
    inputs.push_back(*mask);
  }
  if (lengths && lengths->dtype() == mx::int32) {
    inputs.push_back(*lengths);
  } else if (lengths) {  // int32 may not hold numbers beyond the steps
    const mx::array most = mx::array(steps, mx::int64);
    const mx::array wide = mx::clip(in_dtype(*lengths, mx::int64, stream), mx::array(0, mx::int64), most, stream);
    inputs.push_back(mx::astype(wide, mx::int32, stream));
  }
}

Arrays layer_inputs(const char* op, Arrays inputs, const LayerInputsOptions& options, mx::Stream stream) {
  const auto primitive = std::make_shared<LayerInputs>(stream, options);
  bool by_mx = false;
  for (size_t i = 0; i < options.views; ++i) {
    by_mx = by_mx || inputs[i].size() == 0;
  }
  if (by_mx || is_switched_off(op)) {
    return primitive->in_operations(inputs);
  }
  std::vector<mx::Dtype> dtypes(4, inputs[0].dtype());
  if (options.has_gates) {
    dtypes.insert(dtypes.end(), 2, mx::float32);
  }
  return results_of(primitive, std::move(inputs), dtypes);
}

}  // namespace mittens
