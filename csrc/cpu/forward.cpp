// Ops that do nothing here but call the version for the machine's instruction set (cpu/isa).
#include "cpu/sampling/adjust_logits.h"
#include "cpu/attention/attention_backward.h"
#include "cpu/norm/clipped_sum.h"
#include "cpu/dispatch.h"
#include "cpu/matmul/gguf.h"
#include "cpu/norm/head_norm.h"
#include "cpu/norm/layer_norm.h"
#include "cpu/norm/norm_add_norm.h"
#include "cpu/norm/norm_vjp_vjp.h"
#include "cpu/cache/paged_append.h"
#include "cpu/matmul/quantized_embedding.h"
#include "cpu/recurrence/recurrence.h"
#include "cpu/norm/rms_norm.h"
#include "cpu/cache/rope_append.h"
#include "cpu/moe/route_top_k.h"
#include "cpu/sampling/sample.h"
#include "cpu/norm/softcap.h"
#include "cpu/norm/softmax.h"
#include "cpu/recurrence/token_layers.h"
#include "cpu/moe/weighted_sum.h"

namespace mittens::cpu {

// --- norms

MITTENS_VERSIONS(rms_norm)
void rms_norm(Type type, const void* x, const void* weight, void* y, size_t rows, size_t columns, float eps,
              float weight_offset) {
  rms_norm_versions[isa_index()](type, x, weight, y, rows, columns, eps, weight_offset);
}

MITTENS_VERSIONS(add_rms_norm)
void add_rms_norm(Type type, const void* x, const void* residual, const void* weight, void* y, void* sum, size_t rows,
                  size_t columns, float eps, float weight_offset) {
  add_rms_norm_versions[isa_index()](type, x, residual, weight, y, sum, rows, columns, eps, weight_offset);
}

MITTENS_VERSIONS(rms_norm_vjp)
void rms_norm_vjp(Type type, const void* x, const void* weight, const void* dy, const void* dsum, void* dx,
                  void* dweight, size_t rows, size_t columns, float eps, float weight_offset) {
  rms_norm_vjp_versions[isa_index()](type, x, weight, dy, dsum, dx, dweight, rows, columns, eps, weight_offset);
}

MITTENS_VERSIONS(layer_norm)
void layer_norm(Type type, const void* x, const void* weight, const void* bias, void* y, size_t rows, size_t columns,
                float eps) {
  layer_norm_versions[isa_index()](type, x, weight, bias, y, rows, columns, eps);
}

MITTENS_VERSIONS(layer_norm_vjp)
void layer_norm_vjp(Type type, const void* x, const void* weight, const void* dy, void* dx, void* dweight, void* dbias,
                    size_t rows, size_t columns, float eps) {
  layer_norm_vjp_versions[isa_index()](type, x, weight, dy, dx, dweight, dbias, rows, columns, eps);
}

MITTENS_VERSIONS(head_norm)
void head_norm(Type type, StridedRows x, const void* weight, void* y, size_t columns, float eps, float weight_offset) {
  head_norm_versions[isa_index()](type, x, weight, y, columns, eps, weight_offset);
}

MITTENS_VERSIONS(norm_add_norm)
void norm_add_norm(Type type, const void* x, const void* residual, NormScale scale, NormScale next_scale, void* y,
                   void* sum, size_t rows, size_t columns, float eps) {
  norm_add_norm_versions[isa_index()](type, x, residual, scale, next_scale, y, sum, rows, columns, eps);
}

MITTENS_VERSIONS(clipped_sum)
void clipped_sum(const void* x, const void* residual, NormScale scale, void* sum, size_t rows, size_t columns,
                 float eps) {
  clipped_sum_versions[isa_index()](x, residual, scale, sum, rows, columns, eps);
}

MITTENS_VERSIONS(norm_vjp_vjp)
void norm_vjp_vjp(Type type, const NormVjpVjp& of) {
  norm_vjp_vjp_versions[isa_index()](type, of);
}

MITTENS_VERSIONS(softmax)
void softmax(Type type, const void* x, void* y, size_t rows, size_t columns) {
  softmax_versions[isa_index()](type, x, y, rows, columns);
}

MITTENS_VERSIONS(softmax_vjp)
void softmax_vjp(Type type, const void* y, const void* dy, void* dx, size_t rows, size_t columns) {
  softmax_vjp_versions[isa_index()](type, y, dy, dx, rows, columns);
}

MITTENS_VERSIONS(softcap)
void softcap(Type type, const void* x, void* y, size_t size, float cap) {
  softcap_versions[isa_index()](type, x, y, size, cap);
}

MITTENS_VERSIONS(softcap_vjp)
void softcap_vjp(Type type, const void* x, const void* dy, void* dx, size_t size, float cap) {
  softcap_vjp_versions[isa_index()](type, x, dy, dx, size, cap);
}

// --- products

MITTENS_VERSIONS(block_dequantize)
void block_dequantize(Type type, BlockKind kind, const uint8_t* blocks, void* y, size_t count) {
  block_dequantize_versions[isa_index()](type, kind, blocks, y, count);
}

MITTENS_VERSIONS(block_quantize)
void block_quantize(Type type, BlockKind kind, const void* w, uint8_t* blocks, size_t count) {
  block_quantize_versions[isa_index()](type, kind, w, blocks, count);
}

MITTENS_VERSIONS(quantized_embedding)
void quantized_embedding(Type type, const QuantizedWeights& w, const uint32_t* indices, bool is_signed, size_t count,
                         size_t rows, size_t columns, void* y) {
  quantized_embedding_versions[isa_index()](type, w, indices, is_signed, count, rows, columns, y);
}

// --- attention

MITTENS_VERSIONS(attention_backward)
void attention_backward(const AttentionBackward& call) {
  attention_backward_versions[isa_index()](call);
}

// --- caches

MITTENS_VERSIONS(rope_append)
void rope_append(const RopeAppend& call) {
  rope_append_versions[isa_index()](call);
}

MITTENS_VERSIONS(paged_append)
void paged_append(const PagedAppend& call) {
  paged_append_versions[isa_index()](call);
}

// --- experts

MITTENS_VERSIONS(route_top_k)
void route_top_k(Type type, const Route& route, const void* logits, const float* bias, uint32_t* indices, void* weights,
                 size_t rows, size_t experts, size_t k) {
  route_top_k_versions[isa_index()](type, route, logits, bias, indices, weights, rows, experts, k);
}

MITTENS_VERSIONS(weighted_sum)
void weighted_sum(Type type, const void* x, const void* bias, const uint32_t* matrices, size_t stack,
                  const void* weights, Type weights_type, void* y, size_t sums, size_t terms, size_t columns) {
  weighted_sum_versions[isa_index()](type, x, bias, matrices, stack, weights, weights_type, y, sums, terms, columns);
}

// --- recurrences

MITTENS_VERSIONS(recurrence)
void recurrence(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, void* y, float* state) {
  recurrence_versions[isa_index()](type, shape, inputs, y, state);
}

MITTENS_VERSIONS(recurrence_vjp)
void recurrence_vjp(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, const void* dy,
                    const float* dstate, const RecurrenceGradients& gradients) {
  recurrence_vjp_versions[isa_index()](type, shape, inputs, dy, dstate, gradients);
}

MITTENS_VERSIONS(state_space)
void state_space(Type type, const Recurrence& shape, const StateSpaceInputs& inputs, Type y_type, void* y,
                 float* state) {
  state_space_versions[isa_index()](type, shape, inputs, y_type, y, state);
}

MITTENS_VERSIONS(gated_delta_token)
void gated_delta_token(Type type, const GatedDeltaToken& shape, const GatedDeltaTokenInputs& inputs, void* y,
                       float* state) {
  gated_delta_token_versions[isa_index()](type, shape, inputs, y, state);
}

MITTENS_VERSIONS(layer_inputs)
void layer_inputs(Type type, const LayerInputs& all) {
  layer_inputs_versions[isa_index()](type, all);
}

MITTENS_VERSIONS(short_conv_token)
void short_conv_token(Type type, const ShortConvToken& shape, const void* projected,
                      const TokenConvolution& convolution, void* y) {
  short_conv_token_versions[isa_index()](type, shape, projected, convolution, y);
}

MITTENS_VERSIONS(ssm_token)
void ssm_token(Type type, const SsmToken& shape, const SsmTokenInputs& inputs, void* y, float* state) {
  ssm_token_versions[isa_index()](type, shape, inputs, y, state);
}

// --- sampling

MITTENS_VERSIONS(sample)
void sample(Type type, const void* x, const uint32_t* key, uint32_t* tokens, float* logprobs, void* all, size_t rows,
            size_t columns, const SampleOptions& options) {
  sample_versions[isa_index()](type, x, key, tokens, logprobs, all, rows, columns, options);
}

MITTENS_VERSIONS(adjust_logits)
void adjust_logits(Type type, const void* x, void* y, uint32_t* counts, size_t rows, size_t columns,
                   const Adjustment& adjustment) {
  adjust_logits_versions[isa_index()](type, x, y, counts, rows, columns, adjustment);
}

}  // namespace mittens::cpu
