#include "ops/sampling/sample_composed.h"

#include <cmath>
#include <limits>

#include "mlx/ops.h"
#include "mlx/random.h"

namespace mittens {

namespace {

// -inf in place of columns that are not kept.
mx::array compose_filters(mx::array x, const SampleOptions& options, mx::Stream s) {
  const mx::array nothing(-std::numeric_limits<float>::infinity(), x.dtype());
  const mx::array all = x;
  if (options.top_p > 0) {
    const mx::array sorted = mx::sort(all, -1, s);
    const mx::array wide = mx::astype(sorted, mx::float32, s);
    const mx::array e = mx::exp(mx::subtract(wide, mx::max(wide, -1, true, s), s), s);
    const mx::array from = mx::cumsum(e, -1, true, true, s);
    const mx::array total = mx::sum(e, -1, true, s);
    const mx::array above = mx::subtract(from, e, s);
    const mx::array is_dropped =
        mx::greater_equal(above, mx::multiply(mx::array(static_cast<float>(options.top_p)), total, s), s);
    const mx::array dropped = mx::sum(mx::astype(is_dropped, mx::int32, s), -1, true, s);
    x = mx::where(mx::less(all, mx::take_along_axis(sorted, dropped, -1, s), s), nothing, x, s);
  }
  if (options.min_p > 0) {
    const mx::array log_min_p(std::log(options.min_p), all.dtype());
    x = mx::where(mx::less(all, mx::add(mx::max(all, -1, true, s), log_min_p, s), s), nothing, x, s);
  }
  if (options.top_k > 0 && options.top_k < all.shape(-1)) {
    mx::Shape start(all.ndim(), 0);
    start.back() = options.top_k;
    const mx::array order = mx::argpartition(mx::negative(all, s), options.top_k - 1, -1, s);
    const mx::array rest = mx::slice(order, start, all.shape(), s);
    x = mx::put_along_axis(x, rest, nothing, -1, s);
  }
  return x;
}

}  // namespace

Arrays compose_sample(const mx::array& logits, const std::optional<mx::array>& key, const SampleOptions& options,
                      mx::Stream s) {
  const mx::array nothing(-std::numeric_limits<float>::infinity(), logits.dtype());
  const mx::array x = mx::where(mx::isnan(logits, s), nothing, logits, s);
  const mx::array kept = options.has_filters() ? compose_filters(x, options, s) : x;
  mx::array sums = kept;
  if (!options.greedy) {
    const mx::array drawn_by = options.splits_key ? mx::random::split(*key, s).second : *key;
    const mx::array scaled = mx::multiply(mx::astype(kept, mx::float32, s), mx::array(options.inverse_temperature), s);
    sums = mx::add(scaled, mx::random::gumbel(x.shape(), mx::float32, drawn_by, s), s);
  }
  const mx::array tokens = mx::argmax(sums, -1, false, s);
  if (options.logprobs == kNoLogprobs) {
    return {tokens};
  }
  if (options.logprobs == kAllLogprobs) {
    const mx::array wide = mx::astype(logits, mx::float32, s);
    const mx::array all = mx::subtract(wide, mx::logsumexp(wide, -1, true, s), s);
    return {tokens, mx::astype(all, logits.dtype(), s)};
  }
  const mx::array wide = mx::astype(x, mx::float32, s);
  const mx::array places = mx::stop_gradient(mx::expand_dims(tokens, -1, s), s);
  const mx::array drawn = mx::squeeze(mx::take_along_axis(wide, places, -1, s), -1, s);
  return {tokens, mx::subtract(drawn, mx::logsumexp(wide, -1, false, s), s)};
}

}  // namespace mittens
