// Shared by the attention ops: the checks of their arguments, and the primitive.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <variant>

#include "cpu/attention/ragged_attention.h"
#include "mlx/utils.h"
#include "ops/attention/attention_launch.h"
#include "runtime/primitive.h"

namespace mittens {

using MaskArgument = std::variant<std::monostate, std::string, mx::array>;

// The shape of keys or values packed at `bits` an element; 0: not packed.
mx::Shape unpacked(const mx::array& rows, int bits);

// A call whose arguments fit together. Keys and values are one array, or packed words, scales and biases.
struct AttentionCall {
  mx::array queries;  // [batch, heads, queries, width]
  Arrays keys;  // [batch, key heads, keys, width]
  Arrays values;  // [batch, key heads, keys, value width]
  std::optional<mx::array> mask;  // four dimensions that broadcast to [batch, heads, queries, keys]
  std::optional<mx::array> sinks;  // [heads]
  std::optional<mx::array> starts;  // [batch] or [batch, queries]
  std::optional<mx::array> ends;  // [batch]
  AttentionOptions options;
  bool force_fused = false;  // mx's option: by one kernel, or an error

  int value_width() const;
  mx::Shape scores_shape() const;
};

// Checks and adds the other arguments of both ops; the shapes of queries, keys and values have been checked.
void take_mask(const char* op, AttentionCall& call, const MaskArgument& mask, std::optional<int> window,
               mx::Stream stream);
void take_sinks(const char* op, AttentionCall& call, const std::optional<mx::array>& sinks, mx::Stream stream);

// Checks heads and batches of queries against keys and values.
void check_heads(const char* op, const mx::Shape& queries, const mx::Shape& keys, const mx::Shape& values);

// Words, scales and biases of keys or values.
using PackedRows = std::tuple<mx::array, mx::array, mx::array>;

// The shape of packed keys or values, with as many columns as they have integers.
mx::Shape check_packed_rows(const char* op, const char* name, const PackedRows& rows, int group_size, int bits);

// The keys that causal and window leave to each query, [queries, keys] of bool, for some of the queries; nothing where
// these are all.
std::optional<mx::array> seen_keys(const AttentionOptions& options, int first, int last, int queries, int keys,
                                   mx::Stream stream);

// Which keys a mask of bool or of numbers shows, of bool.
mx::array shown_by(const mx::array& mask, mx::Stream stream);

// Which rows of [.., queries, keys] of bool have a key that is seen, as one column.
mx::array any_of_row(const mx::array& seen, mx::Stream stream);

// Which queries see a key, of bool, broadcasting to the result; nothing where all do. For the others mx's result
// depends on the device.
std::optional<mx::array> seeing_queries(const AttentionCall& call, mx::Stream stream);

// How often mx.vmap maps.
int mapped_size(const Arrays& inputs, const std::vector<int>& axes);

// An input with the axis that mx.vmap maps, or repeated if that is negative, as a part of its batch.
mx::array joined_batch(const mx::array& input, int axis, int size, int batch, mx::Stream stream);

// A view of the scores' shape, with strides of 0 where the mask is broadcast.
mx::array broadcast_mask(const mx::array& mask, const mx::Shape& scores, mx::Stream stream);

// The inputs of the primitive: queries, keys, values, and whichever of mask, sinks, starts and ends the call has.
Arrays attention_inputs(AttentionCall call);

// A call of native code over such inputs, whose outputs are yet to be filled in, and the keys of its rows.
cpu::Attention native_attention(const Arrays& inputs, const AttentionOptions& options);
cpu::RaggedKeys native_keys(const Arrays& inputs, const AttentionOptions& options);

mx::array apply_attention(AttentionCall call, mx::Stream stream);

// The same, and the logsumexp of each row of scores.
Arrays apply_attention_with_logsumexp(AttentionCall call, mx::Stream stream);
std::shared_ptr<mx::Primitive> attention_primitive(const AttentionOptions& options, mx::Stream stream);

// A call's result, or the call itself where it is left to mx.
using AttentionResult = std::variant<mx::array, AttentionCall>;

AttentionResult attend(const char* op, AttentionCall call, mx::Stream stream);

// How mx computes a call.
using ByMx = mx::array (*)(const AttentionCall&, mx::Stream);

// Of keys and values that are not packed.
mx::array attention_by_mx(const AttentionCall& call, mx::Stream stream);

// The result, if need be by mx.
mx::array finished(AttentionResult result, ByMx by_mx, mx::Stream stream);

// The result, if there is one. A call that has to be exact is not left to mx's own function.
std::optional<mx::array> found_in(AttentionResult result, ByMx by_mx, mx::Stream stream);

// The result of an op: y, or y and the logsumexp [batch, heads, queries].
using AttentionWithLogsumexp = std::tuple<mx::array, mx::array>;
using AttentionOutput = std::variant<mx::array, AttentionWithLogsumexp>;

// y and the logsumexp, by whatever computes the call.
AttentionOutput with_logsumexp(const char* op, AttentionCall call, ByMx by_mx, mx::Stream stream);

// The same without kernels.
AttentionWithLogsumexp with_logsumexp_by_mx(const AttentionCall& call, ByMx by_mx, mx::Stream stream);

// A call over keys and values as they are. op: who calls, for errors.
AttentionCall checked_attention(const char* op, const mx::array& q, const mx::array& k, const mx::array& v, float scale,
                                const MaskArgument& mask, const std::optional<mx::array>& sinks,
                                std::optional<int> window, bool force_fused, bool exact,
                                const std::optional<mx::array>& starts, const std::optional<mx::array>& ends,
                                mx::Stream stream);

// Whether a call has no keys or no results.
bool is_of_nothing(const AttentionCall& call);

// Its logsumexp: of no score, or of the sinks alone.
mx::array logsumexp_of_nothing(const AttentionCall& call, mx::Stream stream);

// Why no kernel covers a call that has keys and results; empty where one does.
std::string attention_missing(const AttentionCall& call, mx::Stream stream);

// The primitive of a call without mask and sinks, of queries, keys and values of these shapes, as if they were not
// packed; none where no kernel covers it or there is nothing to do.
std::shared_ptr<mx::Primitive> try_attention_primitive(const mx::Shape& q, const mx::Shape& k, const mx::Shape& v,
                                                       mx::Dtype dtype, AttentionOptions options, mx::Stream stream);

}  // namespace mittens
