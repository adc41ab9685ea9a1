#include "cpu/token_layers.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(layer_inputs)
MITTENS_VERSIONS(short_conv_token)
MITTENS_VERSIONS(ssm_token)

void layer_inputs(Type type, const LayerInputs& all) {
  layer_inputs_versions[isa_index()](type, all);
}

void short_conv_token(Type type, const ShortConvToken& shape, const void* projected,
                      const TokenConvolution& convolution, void* y) {
  short_conv_token_versions[isa_index()](type, shape, projected, convolution, y);
}

void ssm_token(Type type, const SsmToken& shape, const SsmTokenInputs& inputs, void* y, float* state) {
  ssm_token_versions[isa_index()](type, shape, inputs, y, state);
}

}  // namespace mittens::cpu
