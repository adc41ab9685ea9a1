#include "ops/primitive.h"

#include <algorithm>

#include "launch/memory.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "ops/contiguous.h"

namespace mittens {

namespace {

bool all_empty(const Arrays& arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const mx::array& a) { return a.size() == 0; });
}

}  // namespace

void KernelPrimitive::allocate(const Arrays&, Arrays& outputs) {
  for (auto& output : outputs) {
    allocate_output(output, stream());
  }
}

void KernelPrimitive::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  allocate(inputs, outputs);
  if (all_empty(outputs)) {
    return;
  }
  Arrays copies;
  for (const auto& launch : launches(row_contiguous(inputs, stream(), copies), outputs)) {
    run_on_gpu(launch, stream());
  }
}

void KernelPrimitive::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(inputs, outputs);
  if (all_empty(outputs)) {
    return;
  }
  Arrays copies;
  const Arrays& ready = row_contiguous(inputs, stream(), copies);
  if (simulator_enabled()) {
    run_in_simulator(launches(ready, outputs), stream());
  } else {
    mx::cpu::get_command_encoder(stream()).dispatch(native(ready, outputs));
  }
}

Arrays KernelPrimitive::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
                            const Arrays&) {
  const auto gradients =
      mx::vjp([this](const Arrays& inputs) { return composed(inputs); }, primals, cotangents).second;
  Arrays selected;
  for (int argument : argnums) {
    selected.push_back(gradients[argument]);
  }
  return selected;
}

Arrays KernelPrimitive::jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) {
  Arrays all_tangents;
  for (const auto& primal : primals) {
    all_tangents.push_back(mx::zeros_like(primal, stream()));
  }
  for (size_t i = 0; i < argnums.size(); ++i) {
    all_tangents[argnums[i]] = tangents[i];
  }
  return mx::jvp([this](const Arrays& inputs) { return composed(inputs); }, primals, all_tangents).second;
}

std::pair<Arrays, std::vector<int>> KernelPrimitive::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  auto outputs = mx::vmap([this](const Arrays& in) { return composed(in); }, axes)(inputs);
  std::vector<int> output_axes(outputs.size(), 0);
  return {std::move(outputs), std::move(output_axes)};
}

}  // namespace mittens
