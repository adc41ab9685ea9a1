#include "ops/sampling/penalties.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "ops/sampling/sample.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"

namespace mittens {

namespace {

constexpr const char* op = "sample";

// The rows that row `row` alone is a view of; none where it is no such view.
const mx::array* rows_behind(const mx::array& view, int row) {
  if (!is_primitive(view, "Slice")) {
    return nullptr;
  }
  const mx::array& rows = view.inputs()[0];
  const auto [start, stop, strides] = static_cast<const mx::Slice&>(view.primitive()).state();
  const bool is_row = rows.ndim() == 2 && view.shape() == mx::Shape{1, rows.shape(1)} && start == mx::Shape{row, 0} &&
                      strides == mx::Shape{1, 1};
  return is_row ? &rows : nullptr;
}

// Rows with penalties of their own, which mlx-lm's batches put together again: the logits that all are views of, with
// the last tokens of each row and its numbers.
std::optional<Penalized> penalties_of_rows(const mx::array& logits) {
  if (!is_primitive(logits, "Concatenate") || logits.ndim() != 2 || logits.is_tracer() ||
      logits.primitive().stream() != checks::checked_stream(op, {})) {
    return std::nullopt;
  }
  const Arrays& parts = logits.inputs();
  const int rows = static_cast<int>(parts.size());
  std::vector<std::optional<Adjustment>> each;
  const mx::array* whole = nullptr;
  std::array<int, penalties> contexts{};
  for (int row = 0; row < rows; ++row) {
    auto penalized = penalties_of_call(parts[row]);
    const mx::array* behind = rows_behind(penalized ? penalized->first : parts[row], row);
    if (!behind || behind->shape(0) != rows || (whole && behind->id() != whole->id())) {
      return std::nullopt;
    }
    whole = behind;
    for (size_t i = 0; penalized && i < penalties; ++i) {
      contexts[i] = std::max(contexts[i], penalized->second.contexts[i]);
    }
    each.push_back(penalized ? std::optional(std::move(penalized->second)) : std::nullopt);
  }
  const int most = *std::max_element(contexts.begin(), contexts.end());
  if (!whole || most == 0 || whole->dtype() != logits.dtype()) {
    return std::nullopt;
  }
  const mx::Stream stream = checks::checked_stream(op, {});
  Arrays tokens;
  std::array<std::vector<float>, penalties> numbers;
  for (const auto& adjustment : each) {
    const int count = adjustment ? std::min(adjustment->tokens->shape(0), most) : 0;
    for (size_t i = 0; i < penalties; ++i) {
      const int context = adjustment ? adjustment->contexts[i] : 0;
      // Fewer than others count where the row has no more.
      if (context != 0 && context != contexts[i] && context != adjustment->tokens->shape(0)) {
        return std::nullopt;
      }
      numbers[i].push_back(context ? static_cast<float>(std::get<double>(adjustment->numbers[i])) : 0.0f);
    }
    if (count < most) {
      tokens.push_back(mx::full({most - count}, -1, mx::int64, stream));
    }
    if (count > 0) {
      const int all = adjustment->tokens->shape(0);
      const mx::array& given = *adjustment->tokens;
      tokens.push_back(
          mx::astype(count < all ? mx::slice(given, {all - count}, {all}, stream) : given, mx::int64, stream));
    }
  }
  Adjustment joined{{}, mx::reshape(mx::concatenate(std::move(tokens), 0, stream), {rows, most}, stream)};
  for (size_t i = 0; i < penalties; ++i) {
    if (contexts[i] > 0) {
      joined.numbers[i] = mx::array(numbers[i].data(), {rows}, mx::float32);
      joined.contexts[i] = contexts[i];
    }
  }
  return Penalized(*whole, std::move(joined));
}

}  // namespace

std::optional<Penalized> pending_penalties(const mx::array& logits) {
  auto penalized = penalties_of_call(logits);
  return penalized ? std::move(penalized) : penalties_of_rows(logits);
}

std::optional<mx::array> penalized_logits(const mx::array& logits, const mx::array& tokens, int which, double penalty,
                                          int context) {
  const mx::Dtype of_tokens = tokens.dtype();
  const bool are_tokens = of_tokens == mx::int32 || of_tokens == mx::uint32 || of_tokens == mx::int64;
  if (logits.ndim() != 2 || !has_kernels(logits.dtype()) || logits.size() == 0 ||
      logits.shape(-1) > most_sampled_columns || tokens.ndim() != 1 || tokens.size() == 0 || !are_tokens ||
      !std::isfinite(penalty) || traces_any_shape()) {
    return std::nullopt;
  }
  const mx::Stream stream = checks::checked_stream(op, {});
  auto before = penalties_of_call(logits);
  const bool joins = before && before->second.tokens->id() == tokens.id() &&
                     std::all_of(before->second.contexts.begin() + which, before->second.contexts.end(),
                                 [](int of_last) { return of_last == 0; });
  const mx::array from = joins ? before->first : logits;
  Adjustment adjustment = joins ? std::move(before->second) : Adjustment{{}, tokens};
  adjustment.numbers[which] = penalty;
  adjustment.contexts[which] = context;
  SampleOptions options{.inverse_temperature = 1, .greedy = true, .logprobs = kNoLogprobs};
  Arrays inputs = {from};
  options.adjust = add_adjustment(op, from, adjustment, inputs, stream);
  if (!options.adjust.any()) {
    return logits;
  }
  const Arrays outputs = sample_by_kernels(inputs, options, stream);
  return outputs[outputs.size() - 2];  // before the counts
}

}  // namespace mittens
