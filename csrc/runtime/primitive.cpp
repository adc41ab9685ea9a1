#include "runtime/primitive.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>

#include "backends/memory.h"
#include "backends/metal.h"
#include "cpu/dispatch.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "python/registry.h"
#include "runtime/calibration.h"
#include "runtime/checks.h"
#include "runtime/contiguous.h"
#include "runtime/nested_evaluation.h"
#include "runtime/stats.h"

namespace mittens {

namespace {

bool all_empty(const Arrays& arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const mx::array& a) { return a.size() == 0; });
}

bool is_empty(const mx::Shape& shape) {
  return std::count(shape.begin(), shape.end(), 0) > 0;
}

Arrays chosen(const Arrays& arrays, const std::vector<int>& indices) {
  Arrays result;
  for (int i : indices) {
    result.push_back(arrays[i]);
  }
  return result;
}

// How deep compositions run on the CPU in the place of native code, which tests compare with them.
std::atomic<int>& preferred_depth() {
  static std::atomic<int> value = 0;
  return value;
}

// The compositions that this thread is running, one inside another. A composition may call ops of this package; these
// run their native code.
thread_local int composition_depth = 0;
struct Composing {
  Composing() {
    ++composition_depth;
  }
  ~Composing() {
    --composition_depth;
  }
};

// As stats() names them.
constexpr const char* simulator_executor = "simulator";
constexpr const char* native_executor = "native";
const Name composed_kernel = "composed";

const char* gpu_executor() {
  return metal::built() ? "metal" : "cuda";
}

Arrays stand_ins(const Arrays& arrays) {
  Arrays all;
  for (const mx::array& array : arrays) {
    all.push_back(stand_in(array.shape(), array.dtype()));
  }
  return all;
}

// A composition that is deeper than this calls its own op: others are one or two deep.
constexpr int max_composition_depth = 8;

void bind(nanobind::module_& module) {
  module.def(
      "prefer_composed",
      [](bool value, bool nested) { preferred_depth() = value ? (nested ? max_composition_depth + 1 : 1) : 0; },
      nanobind::arg("value"), nanobind::arg("nested") = false,
      "Whether ops on the CPU run what they are composed of in mx, in the place of native code; nested: also the ops "
      "that compositions call.");
}

const Register registered(bind);

}  // namespace

const Arrays& KernelPrimitive::prepared(const Arrays& inputs, Arrays& copies) {
  return row_contiguous(inputs, stream(), copies);
}

void KernelPrimitive::allocate(const Arrays&, Arrays& outputs) {
  for (auto& output : outputs) {
    allocate_output(output, stream());
  }
}

bool KernelPrimitive::write_trivial(const Arrays& inputs, Arrays& outputs) {
  if (all_empty(outputs)) {
    return true;
  }
  if (!sums_nothing(inputs)) {
    return false;
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    fill_rows(outputs[i], i == 0 ? addend(inputs) : nullptr, stream());
  }
  return true;
}

bool KernelPrimitive::prefers_native() const {
  return composition_depth >= preferred_depth();
}

void KernelPrimitive::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  allocate(inputs, outputs);
  if (write_trivial(inputs, outputs)) {
    return;
  }
  Arrays copies;
  for (const auto& launch : launches(prepared(inputs, copies), outputs)) {
    record_launch(launch);
    run_on_gpu(launch, stream());
    stats::count_run(name(), gpu_executor(), launch.kernel);
  }
}

void KernelPrimitive::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(inputs, outputs);
  if (write_trivial(inputs, outputs)) {
    return;
  }
  Arrays copies;
  const Arrays& ready = prepared(inputs, copies);
  std::function<void()> task;
  if (simulator_enabled()) {
    const auto all = launches(ready, outputs);
    run_in_simulator(all, stream());
    for (const auto& launch : all) {
      record_launch(launch);
      stats::count_run(name(), simulator_executor, launch.kernel);
    }
  } else if (prefers_native() && (task = native(ready, outputs))) {
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
    stats::count_run(name(), native_executor, cpu::isa_name());
  } else {
    run_composed(ready, outputs);
    stats::count_run(name(), native_executor, composed_kernel);
  }
}

void KernelPrimitive::plan(const Arrays& inputs, const Arrays& outputs, CallPlan& plan) {
  if (all_empty(outputs) || sums_nothing(inputs)) {
    return;
  }
  const AllocatingStandIns allocating;
  const Arrays given = stand_ins(inputs);
  Arrays results = stand_ins(outputs);
  const bool on_gpu = stream().device == mx::Device::gpu;
  if (on_gpu || simulator_enabled()) {
    for (const auto& launch : launches(given, results)) {
      plan.runs.push_back({name(), on_gpu ? gpu_executor() : simulator_executor, launch.kernel});
    }
  } else if (prefers_native() && native(given, results)) {
    plan.runs.push_back({name(), native_executor, cpu::isa_name()});
  } else {
    plan.runs.push_back({name(), native_executor, composed_kernel});
    const Composing composing;
    plan_evaluation(composed(given), plan);
  }
}

void KernelPrimitive::run_composed(const Arrays& inputs, Arrays& outputs) {
  const Composing composing;
  if (composition_depth > max_composition_depth) {
    checks::fail<std::logic_error>(name(),
                                   "composed() calls the op itself, which has no native code: expected "
                                   "operations of mx, or ops that have native code");
  }
  evaluate_inside(name(), "composed()", composed(inputs), outputs, stream());
}

Arrays KernelPrimitive::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
                            const Arrays&) {
  const Arrays arguments = chosen(primals, argnums);
  if (all_empty(cotangents) || all_empty(arguments)) {
    Arrays gradients;
    for (const mx::array& argument : arguments) {
      gradients.push_back(mx::zeros_like(argument, stream()));
    }
    return gradients;
  }
  return mx::vjp(composed_of(primals, argnums), arguments, cotangents).second;
}

Arrays KernelPrimitive::jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) {
  // Integers have no tangents, though mx passes some where they were computed from numbers that have.
  std::vector<int> some;
  Arrays of_some;
  for (size_t i = 0; i < argnums.size(); ++i) {
    if (mx::issubdtype(primals[argnums[i]].dtype(), mx::inexact)) {
      some.push_back(argnums[i]);
      of_some.push_back(tangents[i]);
    }
  }
  return mx::jvp(composed_of(primals, some), chosen(primals, some), of_some).second;
}

// mx's reductions are not for arrays without elements, so that none is composed.
Arrays KernelPrimitive::composition(const Arrays& inputs) {
  const std::vector<mx::Shape> shapes = output_shapes(inputs);
  if (!sums_nothing(inputs) && !std::all_of(shapes.begin(), shapes.end(), is_empty)) {
    return composed(inputs);
  }
  const mx::array* added = addend(inputs);
  Arrays outputs;
  for (const mx::Shape& shape : shapes) {
    const bool first = outputs.empty();
    outputs.push_back(first && added ? mx::broadcast_to(*added, shape, stream())
                                     : mx::zeros(shape, inputs[0].dtype(), stream()));
  }
  return outputs;
}

Arrays KernelPrimitive::with_workspace(const mx::array& y, const Arrays& inputs) {
  const std::vector<mx::Shape> shapes = output_shapes(inputs);
  if (shapes.size() == 1) {
    return {y};
  }
  return {y, mx::zeros(shapes[1], mx::float32, stream())};
}

std::function<Arrays(const Arrays&)> KernelPrimitive::composed_of(const Arrays& primals,
                                                                  const std::vector<int>& argnums) {
  return [this, primals, argnums](const Arrays& these) {
    Arrays inputs = primals;
    for (size_t i = 0; i < argnums.size(); ++i) {
      inputs[argnums[i]] = these[i];
    }
    return composition(inputs);
  };
}

std::pair<Arrays, std::vector<int>> KernelPrimitive::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  const bool over_nothing = std::any_of(axes.begin(), axes.end(), [&, i = 0](int axis) mutable {
    const mx::array& input = inputs[i++];
    return axis >= 0 && input.shape(axis) == 0;
  });
  Arrays outputs;
  if (over_nothing) {
    outputs = outputs_of_nothing(inputs, axes);
  } else {  // the new axes in front: mx's own vmap, as of expand_dims, is wrong for some axes elsewhere
    Arrays moved = inputs;
    std::vector<int> in_front = axes;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (axes[i] > 0) {
        moved[i] = mx::moveaxis(inputs[i], axes[i], 0, stream());
        in_front[i] = 0;
      }
    }
    outputs = mx::vmap([this](const Arrays& in) { return composition(in); }, in_front)(moved);
  }
  std::vector<int> output_axes(outputs.size(), 0);
  return {std::move(outputs), std::move(output_axes)};
}

Arrays KernelPrimitive::outputs_of_nothing(const Arrays& inputs, const std::vector<int>& axes) {
  Arrays one;  // for their shapes and dtypes
  for (size_t i = 0; i < inputs.size(); ++i) {
    mx::Shape shape = inputs[i].shape();
    if (axes[i] >= 0) {
      shape.erase(shape.begin() + axes[i]);
    }
    one.emplace_back(std::move(shape), inputs[i].dtype(), nullptr, Arrays{});
  }
  Arrays outputs;
  for (const mx::array& output : composition(one)) {
    mx::Shape shape = output.shape();
    shape.insert(shape.begin(), 0);
    outputs.push_back(mx::zeros(shape, output.dtype(), stream()));
  }
  return outputs;
}

}  // namespace mittens
