#include "ops/norm/row_primitive.h"

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

Arrays RowPrimitive::with_workspace(Arrays results) {
  if (has_workspace_) {
    results.push_back(mx::zeros(shape_of_workspace(results[0]), mx::float32, stream()));
  }
  return results;
}

}  // namespace mittens
