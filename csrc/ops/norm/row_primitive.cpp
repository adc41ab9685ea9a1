#include "ops/norm/row_primitive.h"

#include <algorithm>

#include "mlx/ops.h"
#include "runtime/array_util.h"

namespace mittens {

mx::array RowPrimitive::result_of(std::shared_ptr<RowPrimitive> primitive, Arrays inputs) {
  if (primitive->has_workspace_) {
    return first_output(std::move(primitive), std::move(inputs));
  }
  mx::Shape shape = inputs[0].shape();
  return only_output(std::move(shape), std::move(primitive), std::move(inputs));
}

Arrays RowPrimitive::outputs_of(const std::shared_ptr<RowPrimitive>& primitive, const Arrays& inputs) {
  std::vector<mx::Dtype> dtypes(primitive->layout_.results, inputs[0].dtype());
  if (primitive->has_workspace_) {
    dtypes.push_back(mx::float32);
  }
  return mx::array::make_arrays(primitive->output_shapes(inputs), dtypes, primitive, inputs);
}

std::vector<mx::Shape> RowPrimitive::output_shapes(const Arrays& inputs) {
  std::vector<mx::Shape> shapes(layout_.results, inputs[0].shape());
  if (has_workspace_) {
    shapes.push_back(shape_of_workspace(inputs[0]));
  }
  return shapes;
}

std::pair<Arrays, std::vector<int>> RowPrimitive::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  Arrays batched = inputs;
  for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
    const bool is_batched = axes[i] >= 0;
    if (is_batched != (i < layout_.row_inputs)) {
      return KernelPrimitive::vmap(inputs, axes);
    }
    if (is_batched) {
      batched[i] = mx::moveaxis(inputs[i], axes[i], 0, stream());
    }
  }
  Arrays outputs = outputs_of(like(batched[0]), batched);
  outputs.erase(outputs.begin() + layout_.results, outputs.end());
  std::vector<int> output_axes(outputs.size(), 0);
  if (has_workspace_) {
    output_axes.push_back(-1);
  }
  return {with_workspace(std::move(outputs)), std::move(output_axes)};
}

mx::Shape RowPrimitive::shape_of_workspace(const mx::array& x) {
  return workspace_shape(plan_row_op(x, stream(), plan_options(no_limit)), layout_.workspace);
}

void RowPrimitive::allocate(const Arrays& inputs, Arrays& outputs) {
  take_or_allocate(outputs[0], inputs[0], stream());
  for (size_t i = 1; i < outputs.size(); ++i) {
    allocate_output(outputs[i], stream());
  }
}

std::vector<Launch> RowPrimitive::row_launches(Name file, const Arrays& inputs, std::initializer_list<Weight> weights,
                                               const Arrays& outputs, float eps, const char* kind) {
  const mx::array& x = inputs[0];
  RowPlan plan = plan_row_op(x, stream(), plan_options(has_workspace_ ? splits_of_workspace(outputs.back()) : 1));
  const auto first_result = outputs.begin();
  const auto results_end = first_result + layout_.results;
  plan.params.whole = std::all_of(inputs.begin(), inputs.end(), has_whole_rows) &&
                      std::all_of(first_result, results_end, has_whole_rows);
  RowOpParams params{};
  params.row = plan.params;
  for (int i = 0; i < layout_.row_inputs; ++i) {
    params.row_phases[i] = phase_of(inputs[i]);
  }
  int weight_index = 0;
  for (const Weight& weight : weights) {
    params.has_weights[weight_index] = weight.input >= 0;
    params.weight_offsets[weight_index] = weight.offset;
    params.weight_phases[weight_index++] = weight.input >= 0 ? phase_of(inputs[weight.input]) : 0;
  }
  for (int i = 0; i < layout_.results; ++i) {
    params.y_phases[i] = phase_of(outputs[i]);
  }
  params.eps = eps;

  // All variants have the same arguments; x stands in for unused ones.
  enum class Step { whole, sums, write };
  auto launch = [&](const char* variant, Step step) {
    Launch launch = row_launch(file, op_, kind, variant, plan, x.dtype());
    const bool writes = step != Step::sums;
    // Of several results the last is written with the sums, and then read in place of the inputs.
    const bool rereads = step == Step::write && layout_.results > 1;
    for (int i = 0; i < layout_.row_inputs; ++i) {
      launch.input_if(!rereads, inputs[i]);
    }
    for (const Weight& weight : weights) {
      launch.input_if(writes && weight.input >= 0, inputs[std::max(weight.input, 0)]);
    }
    launch.output_if(writes ? &outputs[0] : nullptr, x);
    for (int i = 1; i < layout_.results; ++i) {
      rereads ? launch.input(outputs[i]) : launch.output(outputs[i]);
    }
    if (layout_.workspace > 0) {
      const mx::array& partials = step == Step::whole ? x : outputs.back();
      step == Step::sums ? launch.output(partials) : launch.input_if(step == Step::write, partials);
    }
    return launch.params(params);
  };
  if (plan.kernel != RowKernel::split) {
    return in_order(launch(plan.variant, Step::whole));
  }
  return in_order(launch("split_sums", Step::sums), launch("split_write", Step::write));
}

Arrays RowPrimitive::with_workspace(Arrays results) {
  if (has_workspace_) {
    results.push_back(mx::zeros(shape_of_workspace(results[0]), mx::float32, stream()));
  }
  return results;
}

}  // namespace mittens
