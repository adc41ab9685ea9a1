#include "ops/recurrence/recurrence_primitive.h"

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "runtime/array_util.h"
#include "runtime/ready_inputs.h"
#include "runtime/gpu.h"

namespace mittens {

Arrays RecurrencePrimitive::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
                                const Arrays& outputs) {
  if (runs_kernels(stream()) || outputs[0].size() == 0) {
    return KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
  }
  const Parts whole = parts(primals);
  const size_t differentiable = whole.inputs.size() - (whole.options.has_mask ? 1 : 0);
  const mx::array dy = in_dtype(cotangents[0], whole.inputs[0].dtype(), stream());
  Arrays gradients = recurrence_vjp(whole.inputs, {dy, cotangents[1]}, whole.options, stream());
  gradients.resize(differentiable, dy);
  if (whole.added) {
    gradients.push_back(cotangents[0]);
  }
  Arrays chosen;
  for (int argument : argnums) {
    chosen.push_back(primals[argument]);
  }
  const auto of_parts = [&](const Arrays& these) {
    Arrays inputs = primals;
    for (size_t i = 0; i < argnums.size(); ++i) {
      inputs[argnums[i]] = these[i];
    }
    Parts some = parts(inputs);
    some.inputs.resize(differentiable, dy);
    if (some.added) {
      some.inputs.push_back(*some.added);
    }
    return some.inputs;
  };
  return mx::vjp(of_parts, chosen, gradients).second;
}

const Arrays& RecurrencePrimitive::prepared(const Arrays& inputs, Arrays& copies) {
  return ready_inputs(inputs, stream(), copies, [&](size_t i) {
    return is_row_contiguous(inputs[i], is_read_in_packs(i) || i == state_index() ? 16 : 1);
  });
}

// Each row of the state is read before it is written, by the same threads.
void RecurrencePrimitive::allocate(const Arrays& inputs, Arrays& outputs) {
  allocate_output(outputs[0], stream());
  const auto state = state_index();
  if (state && inputs[*state].offset() % 16 == 0) {  // as it is written
    take_or_allocate(outputs[1], inputs[*state], stream(), 2);
  } else {
    allocate_output(outputs[1], stream());
  }
}

Arrays RecurrencePrimitive::composed(const Arrays& inputs) {
  const Parts all = parts(inputs);
  Arrays results = recurrence_composed(all.inputs, all.options, stream());
  if (all.added) {
    results[0] = mx::add(results[0], *all.added, stream());
  }
  results[0] = in_dtype(results[0], y_dtype(inputs), stream());
  return results;
}

}  // namespace mittens
