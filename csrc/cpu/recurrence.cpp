#include "cpu/recurrence.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(recurrence)
MITTENS_VERSIONS(recurrence_vjp)
MITTENS_VERSIONS(state_space)
MITTENS_VERSIONS(gated_delta_token)

void recurrence(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, void* y, float* state) {
  recurrence_versions[isa_index()](type, shape, inputs, y, state);
}

void recurrence_vjp(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, const void* dy,
                    const float* dstate, const RecurrenceGradients& gradients) {
  recurrence_vjp_versions[isa_index()](type, shape, inputs, dy, dstate, gradients);
}

void state_space(Type type, const Recurrence& shape, const StateSpaceInputs& inputs, Type y_type, void* y,
                 float* state) {
  state_space_versions[isa_index()](type, shape, inputs, y_type, y, state);
}

void gated_delta_token(Type type, const GatedDeltaToken& shape, const GatedDeltaTokenInputs& inputs, void* y,
                       float* state) {
  gated_delta_token_versions[isa_index()](type, shape, inputs, y, state);
}

}  // namespace mittens::cpu
