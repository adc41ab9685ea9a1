#include "ops/attention/row_keys.h"

#include <limits>

#include "mlx/ops.h"
#include "runtime/checks.h"

namespace mittens {

namespace {

// Starts or ends as [batch, 1, queries or 1, 1].
mx::array as_column(const mx::array& rows, mx::Stream s) {
  return mx::reshape(rows, {rows.shape(0), 1, rows.ndim() == 2 ? rows.shape(1) : 1, 1}, s);
}

AttentionOptions masked(AttentionOptions options) {
  options.causal = false;
  options.window = 0;
  options.has_starts = options.has_ends = false;
  options.has_mask = true;
  return options;
}

}  // namespace

mx::array seen_by_rows(const AttentionOptions& options, const std::optional<mx::array>& starts,
                       const std::optional<mx::array>& ends, int queries, int keys, mx::Stream s) {
  const mx::array key = mx::reshape(mx::arange(0, keys, mx::int32, s), {1, 1, 1, keys}, s);
  const mx::array end = ends ? as_column(*ends, s) : mx::array(keys);
  mx::array seen = mx::less(key, end, s);
  if (options.causal || options.window) {
    const mx::array index = mx::reshape(mx::arange(0, queries, mx::int32, s), {1, 1, queries, 1}, s);
    const mx::array query = mx::add(mx::subtract(end, mx::array(queries), s), index, s);
    seen = mx::logical_and(seen, mx::less_equal(key, query, s), s);
    if (options.window) {
      const mx::array last = mx::add(key, mx::array(options.window), s);
      seen = mx::logical_and(seen, mx::greater(last, query, s), s);
    }
  }
  return starts ? mx::logical_and(seen, mx::greater_equal(key, as_column(*starts, s), s), s) : seen;
}

mx::array with_seen(const std::optional<mx::array>& mask, const mx::array& seen, mx::Stream s) {
  return !mask                        ? seen
         : mask->dtype() == mx::bool_ ? mx::logical_and(*mask, seen, s)
                                      : mx::where(seen, *mask, mx::array(-INFINITY, mask->dtype()), s);
}

void take_row_keys(const char* op, AttentionCall& call, const std::optional<mx::array>& starts,
                   const std::optional<mx::array>& ends, mx::Stream stream) {
  if (!starts && !ends) {
    return;
  }
  if (call.starts) {
    checks::fail(op,
                 "mask is one of rows that start at different keys, and there are starts or ends besides: expected "
                 "one of them");
  }
  const mx::Shape scores = call.scores_shape();
  for (const auto& [name, given] : {std::pair("starts", &starts), std::pair("ends", &ends)}) {
    if (*given && (*given)->dtype() != mx::int32) {
      checks::fail<DtypeError>(op, name, " has dtype ", (*given)->dtype(),
                               ": expected int32; convert it by .astype(mx.int32)");
    }
  }
  const mx::Shape rows = {scores[0]}, queries = {scores[0], scores[2]};
  if (starts && starts->shape() != rows && starts->shape() != queries) {
    checks::fail(op, "starts has shape ", starts->shape(), ": expected ", rows,
                 ", a key for each row of the batch, or ", queries, ", one for each query");
  }
  if (ends && ends->shape() != rows) {
    checks::fail(op, "ends has shape ", ends->shape(), ": expected ", rows, ", a key for each row of the batch");
  }
  if (starts && starts->ndim() == 2 && call.options.exact) {
    checks::fail(op, "exact is True and starts has shape ", starts->shape(), ": expected ", rows,
                 "; keys that begin at different places are added up in another order");
  }
  call.starts = starts;
  call.ends = ends;
  call.options.has_starts = starts.has_value();
  call.options.has_ends = ends.has_value();
}

AttentionCall with_mask_of_rows(const AttentionCall& call, mx::Stream s) {
  AttentionCall result = call;
  const mx::Shape scores = call.scores_shape();
  result.mask = with_seen(call.mask, seen_by_rows(call.options, call.starts, call.ends, scores[2], scores[3], s), s);
  result.starts = result.ends = std::nullopt;
  result.options = masked(call.options);
  return result;
}

DenseAttention with_mask_of_rows(const DenseAttention& call, const std::optional<mx::array>& starts,
                                 const std::optional<mx::array>& ends, mx::Stream s) {
  DenseAttention result = call;
  const int queries = call.queries.shape(2), keys = call.keys.shape(2);
  result.mask = with_seen(call.mask, seen_by_rows(call.options, starts, ends, queries, keys, s), s);
  result.options = masked(call.options);
  return result;
}

mx::array or_nan(const mx::array& results, const std::optional<mx::array>& starts, const std::optional<mx::array>& ends,
                 int keys, mx::Stream s) {
  mx::array y = results;
  for (const auto* rows : {&starts, &ends}) {
    if (!*rows) {
      continue;
    }
    mx::array at = as_column(**rows, s);
    at = results.ndim() == 3 ? mx::squeeze(at, -1, s) : at;
    const mx::array is_key =
        mx::logical_and(mx::greater_equal(at, mx::array(0), s), mx::less_equal(at, mx::array(keys), s), s);
    y = mx::where(is_key, y, mx::array(std::numeric_limits<float>::quiet_NaN(), y.dtype()), s);
  }
  return y;
}

}  // namespace mittens
