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
      batched[i] = copyable(mx::moveaxis(inputs[i], axes[i], 0, stream()), stream());
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
  return workspace_shape(plan_rows(x, stream(), plan_options(no_limit)), layout_.workspace);
}

void RowPrimitive::allocate(const Arrays& inputs, Arrays& outputs) {
  take_or_allocate(outputs[0], inputs[0], stream());
  for (size_t i = 1; i < outputs.size(); ++i) {
    allocate_output(outputs[i], stream());
  }
}

std::vector<Launch> RowPrimitive::row_launches(Name file, const Arrays& inputs, std::initializer_list<Weight> weights,
                                               const Arrays& outputs, float eps) {
  const mx::array& x = inputs[0];
  RowPlan plan = plan_rows(x, stream(), plan_options(has_workspace_ ? splits_of_workspace(outputs.back()) : 1));
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

  auto launch = [&](const char* variant) { return row_launch(file, op_, variant, plan, x.dtype()); };
  auto add_rows = [&](Launch& launch) {
    for (int i = 0; i < layout_.row_inputs; ++i) {
      launch.input(inputs[i]);
    }
  };
  auto add_weights = [&](Launch& launch) {
    for (const Weight& weight : weights) {
      launch.input_if(weight.input >= 0, inputs[std::max(weight.input, 0)]);
    }
  };
  if (plan.kernel != RowKernel::split) {
    Launch rows = launch(plan.variant);
    add_rows(rows);
    add_weights(rows);
    for (int i = 0; i < layout_.results; ++i) {
      rows.output(outputs[i]);
    }
    rows.params(params);
    return in_order(std::move(rows));
  }
  // The second kernel reads the last result of several, which the first one wrote.
  const bool rereads = layout_.results > 1;
  Launch sums = launch("split_sums");
  add_rows(sums);
  if (rereads) {
    sums.output(outputs[layout_.results - 1]);
  }
  sums.output(outputs.back()).params(params);
  Launch write = launch("split_write");
  if (rereads) {
    write.input(outputs[layout_.results - 1]);
  } else {
    add_rows(write);
  }
  add_weights(write);
  write.input(outputs.back()).output(outputs[0]).params(params);
  return in_order(std::move(sums), std::move(write));
}

Arrays RowPrimitive::with_workspace(Arrays results) {
  if (has_workspace_) {
    results.push_back(mx::zeros(shape_of_workspace(results[0]), mx::float32, stream()));
  }
  return results;
}

}  // namespace mittens
