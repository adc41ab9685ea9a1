#include "ops/norm/norm_vjp.h"

#include <algorithm>
#include <deque>
#include <numeric>

#include "cpu/norm/layer_norm.h"
#include "cpu/norm/norm_vjp_vjp.h"
#include "cpu/norm/rms_norm.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "ops/norm/norms.h"
#include "ops/norm/plan.h"
#include "params/norm.h"
#include "runtime/array_util.h"
#include "runtime/cpu_types.h"

namespace mittens {

namespace {

constexpr uint32_t simdgroup = 32;
constexpr uint32_t sum_simdgroups = 16;  // at most, in a threadgroup that adds up the blocks' shares

const Name file = "norm/norm_vjp.metal";

// The gradients of sum(u * dx) + sum(v * dweight) + sum(b * dbias) by x, by dy and, where it is asked for, by the
// weight, in native code on a CPU. Inputs are x, weight if there is one, dy, u, and v and b where these gradients are.
class NormVjpVjp : public KernelPrimitive {
 public:
  // weight_gradient: of the weight, as an output.
  NormVjpVjp(mx::Stream stream, NormVjpOptions options, bool has_weight, bool weight_gradient)
      : KernelPrimitive(stream), options_(options), has_weight_(has_weight), weight_gradient_(weight_gradient) {}

  const char* name() const override {
    return options_.centred ? "MittensLayerNormVjpVjp" : "MittensRmsNormVjpVjp";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& vjp = static_cast<const NormVjpVjp&>(other);
    return options_ == vjp.options_ && has_weight_ == vjp.has_weight_ && weight_gradient_ == vjp.weight_gradient_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes = {inputs[0].shape(), inputs[0].shape()};
    shapes.resize(2 + weight_gradient_, {inputs[0].shape(-1)});
    return shapes;
  }

  // The same in mx operations, which a GPU runs.
  Arrays composed(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::Dtype dtype = inputs[0].dtype();
    auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, s); };
    auto times = [&](const mx::array& a, const mx::array& b) { return mx::multiply(a, b, s); };
    auto minus = [&](const mx::array& a, const mx::array& b) { return mx::subtract(a, b, s); };
    auto mean = [&](const mx::array& a, const mx::array& b) { return mx::mean(times(a, b), -1, true, s); };
    auto centred = [&](const mx::array& a) { return options_.centred ? minus(a, mx::mean(a, -1, true, s)) : a; };
    const mx::array x = options_.centred ? compose_centred(wide(inputs[0]), s) : wide(inputs[0]);
    const mx::array square = compose_row_mean(mx::square(x, s), s);
    const mx::array n = mx::rsqrt(mx::add(square, mx::array(options_.eps), s), s);
    const mx::array h = times(x, n), dy = wide(inputs[dy_index()]), u = centred(wide(inputs[dy_index() + 1]));
    std::optional<mx::array> scale;
    if (has_weight_) {
      scale = mx::add(wide(inputs[1]), mx::array(options_.weight_offset), s);
    }
    const mx::array g = centred(scale ? times(dy, *scale) : dy);
    const mx::array gh = mean(g, h), uh = mean(u, h);
    const mx::array d = times(n, minus(u, times(uh, h)));
    mx::array by_dy = scale ? times(d, *scale) : d;
    const mx::array of_h = minus(times(times(mx::array(3.0f), gh), uh), mean(u, g));
    mx::array by_x = times(n, minus(times(of_h, h), mx::add(times(uh, g), times(gh, u), s)));
    size_t next = dy_index() + 2;
    if (options_.weight_gradient) {
      const mx::array v = wide(inputs[next++]), w = centred(times(dy, v));
      by_x = mx::add(by_x, minus(w, times(mean(w, h), h)), s);
      by_dy = mx::add(by_dy, times(v, h), s);
    }
    if (options_.bias_gradient) {
      by_dy = mx::add(by_dy, wide(inputs[next]), s);
    }
    Arrays outputs = {in_dtype(times(n, by_x), dtype, s), in_dtype(by_dy, dtype, s)};
    if (weight_gradient_) {
      std::vector<int> rows(x.ndim() - 1);
      std::iota(rows.begin(), rows.end(), 0);
      outputs.push_back(in_dtype(mx::sum(times(dy, d), rows, false, s), dtype, s));
    }
    return outputs;
  }

 protected:
  // It has no kernel: the native code runs where the simulator is on.
  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    mx::cpu::get_command_encoder(stream()).dispatch(native(inputs, outputs));
    return {};
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t columns = inputs[0].shape(-1), at = dy_index();
    const bool has_v = options_.weight_gradient, has_b = options_.bias_gradient;
    const cpu::NormVjpVjp of{
        .x = data_of(inputs[0]),
        .weight = has_weight_ ? data_of(inputs[1]) : nullptr,
        .dy = data_of(inputs[at]),
        .u = data_of(inputs[at + 1]),
        .v = has_v ? data_of(inputs[at + 2]) : nullptr,
        .b = has_b ? data_of(inputs[at + 2 + has_v]) : nullptr,
        .by_x = data_of(outputs[0]),
        .by_dy = data_of(outputs[1]),
        .by_weight = weight_gradient_ ? data_of(outputs[2]) : nullptr,
        .rows = inputs[0].size() / columns,
        .columns = columns,
        .eps = options_.eps,
        .weight_offset = options_.weight_offset,
        .centred = options_.centred,
    };
    return [type = native_type(inputs[0].dtype()), of] { cpu::norm_vjp_vjp(type, of); };
  }

 private:
  size_t dy_index() const {
    return has_weight_ ? 2 : 1;
  }

  NormVjpOptions options_;
  bool has_weight_;
  bool weight_gradient_;
};

class NormVjp : public KernelPrimitive {
 public:
  NormVjp(mx::Stream stream, NormVjpOptions options, bool has_weight, bool has_dsum)
      : KernelPrimitive(stream), options_(options), has_weight_(has_weight), has_dsum_(has_dsum) {}

  const char* name() const override {
    return options_.centred ? "MittensLayerNormVjp" : "MittensRmsNormVjp";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& vjp = static_cast<const NormVjp&>(other);
    return options_ == vjp.options_ && has_weight_ == vjp.has_weight_ && has_dsum_ == vjp.has_dsum_;
  }

  // dx, dweight and dbias where they are asked for, and the kernels' intermediate results: each output costs the host
  // time.
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::array& x = inputs[0];
    std::vector<mx::Shape> shapes = {x.shape()};
    shapes.resize(1 + parameters(), {x.shape(-1)});
    shapes.push_back({static_cast<int>(workspace_of(plan_norm_vjp(x, options_)).end)});
    return shapes;
  }

  std::vector<mx::Dtype> output_dtypes(mx::Dtype dtype) const {
    std::vector<mx::Dtype> dtypes(1 + parameters(), dtype);
    dtypes.push_back(mx::float32);
    return dtypes;
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    if (primals[0].size() == 0) {
      return KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
    }
    const bool weight_gradient = has_weight_ && contains(argnums, 1);
    Arrays inputs(primals.begin(), primals.begin() + dy_index() + 1);
    inputs.insert(inputs.end(), cotangents.begin(), cotangents.end() - 1);  // the last is the workspace's
    const auto primitive = std::make_shared<NormVjpVjp>(stream(), options_, has_weight_, weight_gradient);
    Arrays of;
    if (stream().device == mx::Device::gpu) {
      of = primitive->composed(inputs);
    } else {
      std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
      const std::vector<mx::Dtype> dtypes(shapes.size(), primals[0].dtype());
      of = mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
    }
    Arrays gradients;
    for (int argument : argnums) {
      if (argument == 0) {
        gradients.push_back(of[0]);
      } else if (has_weight_ && argument == 1) {
        gradients.push_back(of[2]);
      } else {
        gradients.push_back(argument == dy_index() ? of[1] : cotangents[0]);  // of dsum, which is added to dx
      }
    }
    return gradients;
  }

 protected:
  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].size() == 0;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    const NormVjpPlan plan = plan_norm_vjp(x, options_);
    const NormVjpParams params = params_of(inputs, outputs, plan);
    const char* const op = options_.centred ? "layer_norm_vjp" : "rms_norm_vjp";

    const auto parts = std::make_shared<std::deque<mx::array>>();  // of the workspace; a deque does not move them
    std::vector<Launch> launches;
    auto add = [&](Name kernel, uint32_t threadgroups, uint32_t threads) -> Launch& {
      Launch& launch = launches.emplace_back();
      launch.file = file;
      launch.kernel = kernel;
      launch.threadgroups = {threadgroups, 1, 1};
      launch.threads = {threads, 1, 1};
      launch.owner = parts;
      return launch;
    };
    const bool sums = params.partial_sums > 0;
    const Workspace workspace = workspace_of(plan);
    auto part = [&](uint64_t begin, uint64_t end) -> const mx::array& {
      mx::array& view = parts->emplace_back(mx::Shape{static_cast<int>(end - begin)}, mx::float32, nullptr, Arrays{});
      view.copy_shared_buffer(outputs.back(), view.strides(), {true, true, true}, view.size(), begin);
      return view;
    };
    const mx::array& weight = has_weight_ ? inputs[1] : x;
    const mx::array& added = has_dsum_ ? *dsum(inputs) : x;

    const mx::array& partials = part(workspace.partials, workspace.statistics);
    const Name kernel = kernel_name(x.dtype(), op, plan.variant->name);
    if (plan.variant->kernel == NormVjpKernel::columns) {
      const mx::array& coefficients = part(0, workspace.partials);
      const mx::array& statistics = part(workspace.statistics, workspace.end);
      add(kernel_name(x.dtype(), op, "statistics"), plan.rows * plan.splits, plan.threads)
          .input(x)
          .input_if(has_weight_, weight)
          .input(dy(inputs))
          .output(statistics)
          .params(params);
      add(std::string(op) + "_coefficients", ceil_divide(plan.rows, norm_vjp_simdgroups), plan.threads)
          .input(statistics)
          .output(coefficients)
          .params(params);
      const uint32_t group_columns = plan.threads * (16 / x.itemsize());
      Launch& launch = add(kernel, plan.blocks * ceil_divide(plan.columns, group_columns), plan.threads);
      launch.input(x).input_if(has_weight_, weight).input(dy(inputs)).input_if(has_dsum_, added);
      launch.input(coefficients).output(outputs[0]);
      output_or(launch, sums, partials, x);
      launch.params(params);
    } else {
      Launch& launch = add(kernel, plan.blocks, plan.threads);
      launch.input(x).input_if(has_weight_, weight).input(dy(inputs)).input_if(has_dsum_, added).output(outputs[0]);
      output_or(launch, sums, partials, x);
      launch.params(params);
    }
    if (sums) {
      const uint32_t gradients = options_.weight_gradient + options_.bias_gradient;
      const uint32_t threadgroups = gradients * ceil_divide(plan.columns, simdgroup);
      const uint32_t threads = simdgroup * std::min(sum_simdgroups, plan.blocks);
      Launch& launch = add(kernel_name(x.dtype(), "norm_vjp", "column_sum"), threadgroups, threads);
      launch.input(partials);
      output_or(launch, options_.weight_gradient, outputs[1], x);
      output_or(launch, options_.bias_gradient, outputs[bias_index()], x);
      launch.params(ColumnSumParams{plan.blocks, plan.columns, options_.weight_gradient ? 0u : 1u});
    }
    return launches;
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x_array = inputs[0];
    const size_t columns = x_array.shape(-1);
    const size_t rows = x_array.size() / columns;
    return [type = native_type(x_array.dtype()), rows, columns, options = options_, x = data_of(x_array),
            weight = has_weight_ ? data_of(inputs[1]) : nullptr, dy = data_of(this->dy(inputs)),
            dsum = has_dsum_ ? data_of(*this->dsum(inputs)) : nullptr, dx = data_of(outputs[0]),
            dweight = options_.weight_gradient ? data_of(outputs[1]) : nullptr,
            dbias = options_.bias_gradient ? data_of(outputs[bias_index()]) : nullptr] {
      if (options.centred) {
        cpu::layer_norm_vjp(type, x, weight, dy, dx, dweight, dbias, rows, columns, options.eps);
      } else {
        cpu::rms_norm_vjp(type, x, weight, dy, dsum, dx, dweight, rows, columns, options.eps, options.weight_offset);
      }
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::Dtype dtype = inputs[0].dtype();
    auto wide = [&](const mx::array& a) { return mx::astype(a, mx::float32, s); };
    auto row_mean = [&](const mx::array& a) { return compose_row_mean(a, s); };
    auto centred = [&](const mx::array& a) { return options_.centred ? compose_centred(a, s) : a; };
    const mx::array x = centred(wide(inputs[0]));
    const mx::array gradient = wide(dy(inputs));
    const mx::array scaled =
        has_weight_ ? mx::multiply(gradient, mx::add(wide(inputs[1]), mx::array(options_.weight_offset), s), s)
                    : gradient;
    const mx::array g = centred(scaled);
    const mx::array n = mx::rsqrt(mx::add(row_mean(mx::square(x, s)), mx::array(options_.eps), s), s);
    const mx::array normed = mx::multiply(x, n, s);
    mx::array dx = mx::subtract(g, mx::multiply(normed, row_mean(mx::multiply(g, normed, s)), s), s);
    dx = mx::multiply(dx, n, s);
    if (has_dsum_) {
      dx = mx::add(dx, wide(*dsum(inputs)), s);
    }
    std::vector<int> rows(x.ndim() - 1);
    std::iota(rows.begin(), rows.end(), 0);
    auto column_sum = [&](const mx::array& a) { return mx::astype(mx::sum(a, rows, false, s), dtype, s); };
    Arrays outputs = {mx::astype(dx, dtype, s)};
    if (options_.weight_gradient) {
      outputs.push_back(column_sum(mx::multiply(gradient, normed, s)));
    }
    if (options_.bias_gradient) {
      outputs.push_back(column_sum(gradient));
    }
    outputs.push_back(mx::zeros(output_shapes(inputs).back(), mx::float32, s));
    return outputs;
  }

 private:
  static void output_or(Launch& launch, bool wanted, const mx::array& output, const mx::array& stand_in) {
    if (wanted) {
      launch.output(output);
    } else {
      launch.stand_in(stand_in);
    }
  }

  // Inputs are x, weight if there is one, dy, dsum if there is one.
  int dy_index() const {
    return has_weight_ ? 2 : 1;
  }
  const mx::array& dy(const Arrays& inputs) const {
    return inputs[dy_index()];
  }
  const mx::array* dsum(const Arrays& inputs) const {
    return has_dsum_ ? &inputs[has_weight_ ? 3 : 2] : nullptr;
  }

  int parameters() const {
    return options_.weight_gradient + options_.bias_gradient;
  }
  int bias_index() const {
    return parameters();
  }

  int partial_sums() const {
    return options_.bias_gradient ? 2 : options_.weight_gradient ? 1 : 0;
  }

  // Where the parts of the workspace begin: at 0 the coefficients of long rows, then the blocks' partial sums, both in
  // float4, then the statistics of long rows.
  struct Workspace {
    uint64_t partials;
    uint64_t statistics;
    uint64_t end;
  };

  Workspace workspace_of(const NormVjpPlan& plan) const {
    const uint64_t long_rows = plan.variant->kernel == NormVjpKernel::columns ? plan.rows : 0;
    Workspace workspace{};
    workspace.partials = long_rows * 4;
    workspace.statistics = workspace.partials + uint64_t(partial_sums()) * plan.blocks * plan.columns;
    workspace.end = workspace.statistics + long_rows * plan.splits * 5;
    return workspace;
  }

  NormVjpParams params_of(const Arrays& inputs, const Arrays& outputs, const NormVjpPlan& plan) const {
    NormVjpParams params{};
    RowOpParams& arrays = params.arrays;
    const bool whole = has_whole_rows(outputs[0]) && std::all_of(inputs.begin(), inputs.end(), has_whole_rows);
    arrays.row = {plan.rows, plan.columns, plan.splits, plan.packs_per_split, whole};
    arrays.row_phases[0] = phase_of(inputs[0]);
    arrays.row_phases[1] = phase_of(dy(inputs));
    arrays.row_phases[3] = has_dsum_ ? phase_of(*dsum(inputs)) : 0;
    arrays.has_weights[0] = has_weight_;
    arrays.weight_phases[0] = has_weight_ ? phase_of(inputs[1]) : 0;
    arrays.weight_offsets[0] = options_.weight_offset;
    arrays.y_phases[0] = phase_of(outputs[0]);
    arrays.eps = options_.eps;
    params.blocks = plan.blocks;
    params.has_dsum = has_dsum_;
    params.partial_sums = partial_sums();
    return params;
  }

  NormVjpOptions options_;
  bool has_weight_;
  bool has_dsum_;
};

}  // namespace

NormGradients norm_gradients(const mx::array& x, const std::optional<mx::array>& weight, const mx::array& dy,
                             const std::optional<mx::array>& dsum, NormVjpOptions options, mx::Stream stream) {
  Arrays inputs = {x};
  if (weight) {
    inputs.push_back(*weight);
  } else {
    options.weight_offset = no_offset;  // qk_norm has one offset for two norms, and one may lack a weight
  }
  inputs.push_back(dy);
  if (dsum) {
    inputs.push_back(*dsum);
  }
  auto primitive = std::make_shared<NormVjp>(stream, options, weight.has_value(), dsum.has_value());
  const Arrays outputs =
      mx::array::make_arrays(primitive->output_shapes(inputs), primitive->output_dtypes(x.dtype()), primitive, inputs);
  NormGradients gradients{.x = outputs[0], .weight = std::nullopt, .bias = std::nullopt};
  if (options.weight_gradient) {
    gradients.weight = outputs[1];
  }
  if (options.bias_gradient) {
    gradients.bias = outputs[options.weight_gradient ? 2 : 1];
  }
  return gradients;
}

}  // namespace mittens
