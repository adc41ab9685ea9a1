#include "ops/attention/attention_composed.h"

#include <algorithm>
#include <limits>

#include "mlx/ops.h"
#include "ops/attention/attention.h"

namespace mittens {

namespace {

constexpr int64_t most_scores = 1 << 23;  // of the queries that are taken at once

// Some queries of all heads in float32: heads as [key heads, ratio], [batch, key heads, ratio * queries, ..] where
// matrices are multiplied.
struct Chunk {
  mx::array queries;  // scaled
  std::optional<mx::array> visible;  // which scores a row sees; broadcasts to the shape that split() gives
  mx::array weights;  // softmax of the scores, of the keys alone
  std::optional<mx::array> sink_weights;
};

class Composition {
 public:
  // apart: keys and values that are not finite stay out of the products that have derivatives, since derivatives that
  // mx makes of products multiply hidden values by 0. Their terms in rows that see them are constants.
  Composition(const DenseAttention& call, mx::Stream stream, bool apart = false)
      : call_(call),
        s_(stream),
        apart_(apart && hides(call)),
        batch_(call.queries.shape(0)),
        heads_(call.queries.shape(1)),
        key_heads_(call.keys.shape(1)),
        ratio_(heads_ / key_heads_),
        queries_(call.queries.shape(2)),
        keys_(call.keys.shape(2)),
        k_(mx::astype(call.keys, mx::float32, s_)),
        v_(mx::astype(call.values, mx::float32, s_)),
        finite_k_(hides(call) ? finite_or_zero(k_) : k_),
        finite_v_(apart_ ? finite_or_zero(v_) : v_) {}

  int queries() const {
    return queries_;
  }

  int step() const {
    const int64_t row = std::max<int64_t>(int64_t(batch_) * heads_ * keys_, 1);
    return static_cast<int>(std::clamp<int64_t>(most_scores / row, 1, std::max(queries_, 1)));
  }

  // before: arrays to wait for, so that chunks run one after the other.
  Chunk chunk(int first, int last, const Arrays& before) const {
    const mx::array part = mx::astype(rows_of(call_.queries, first, last), mx::float32, s_);
    mx::array q = grouped(mx::multiply(part, mx::array(call_.options.scale), s_));
    if (!before.empty()) {
      q = mx::depends({q}, before)[0];
    }
    mx::array scores = scores_of(q, apart_ ? finite_k_ : k_);
    if (apart_) {
      const mx::array finite = mx::all(mx::isfinite(k_, s_), -1, false, s_);
      // mx's vmap of expand_dims over several axes is wrong for some axes.
      const mx::array of_all_rows = mx::reshape(finite, {batch_, key_heads_, 1, 1, keys_}, s_);
      scores = mx::where(of_all_rows, scores, mx::stop_gradient(scores_of(q, k_), s_), s_);
    }
    std::optional<mx::array> visible = seen_keys(call_.options, first, last, queries_, keys_, s_);
    if (call_.mask) {
      mx::array mask = grouped_mask(first, last);
      if (mask.dtype() != mx::bool_) {
        scores = mx::add(scores, mx::astype(mask, mx::float32, s_), s_);
      }
      mask = shown_by(mask, s_);
      visible = visible ? mx::logical_and(*visible, mask, s_) : mask;
    }
    if (visible) {
      scores = mx::where(*visible, scores, mx::array(-std::numeric_limits<float>::infinity()), s_);
    }
    // Rows that see no key: their softmax of zeros is finite, and so are its derivatives.
    std::optional<mx::array> sees;
    if (visible && (call_.mask || queries_ > keys_)) {
      sees = any_of_row(*visible, s_);
      scores = mx::where(*sees, scores, mx::array(0.0f), s_);
    }
    const auto of_keys = [&](const mx::array& weights) {
      return joined(sees ? mx::where(*sees, weights, mx::array(0.0f), s_) : weights);
    };
    if (!call_.sinks) {
      return {q, visible, of_keys(mx::softmax(scores, -1, true, s_)), std::nullopt};
    }
    mx::Shape shape = scores.shape();
    shape.back() = 1;
    const mx::array sinks = mx::reshape(mx::astype(*call_.sinks, mx::float32, s_), {1, key_heads_, ratio_, 1, 1}, s_);
    scores = mx::concatenate({mx::broadcast_to(sinks, shape, s_), scores}, -1, s_);
    const Arrays parts = mx::split(mx::softmax(scores, -1, true, s_), mx::Shape{1}, -1, s_);
    return {q, visible, of_keys(parts[1]), parts[0]};
  }

  mx::array output(const Chunk& chunk, int first, int last) const {
    const mx::array y = mx::matmul(chunk.weights, finite_v_, s_);
    if (!apart_) {
      return ungrouped(y, last - first);
    }
    const mx::array terms = mx::stop_gradient(terms_of_others(chunk, last - first), s_);
    const mx::array none = mx::equal(terms, mx::array(0.0f), s_);
    // The second factor is 1, and makes the derivative NaN.
    const mx::array one = mx::add(mx::multiply(y, mx::array(0.0f), s_), mx::array(1.0f), s_);
    return ungrouped(mx::where(none, y, mx::multiply(terms, one, s_), s_), last - first);
  }

  // Joined rows, with 0 where a row does not see the key.
  mx::array seen_or_zero(const Chunk& chunk, const mx::array& a, int n) const {
    return chunk.visible ? joined(mx::where(*chunk.visible, split(a, n), mx::array(0.0f), s_)) : a;
  }

  // Keys that may be hidden, with 0 in place of infinity and NaN.
  const mx::array& finite_k() const {
    return finite_k_;
  }
  const mx::array& v() const {
    return v_;
  }

  mx::array rows_of(const mx::array& a, int first, int last) const {
    mx::Shape start(4, 0), stop = a.shape();
    start[2] = first;
    stop[2] = last;
    return mx::slice(a, start, stop, s_);
  }

  // [batch, heads, n, ..] to [batch, key heads, ratio * n, ..] and back.
  mx::array grouped(const mx::array& a) const {
    return mx::reshape(a, {batch_, key_heads_, ratio_ * a.shape(2), a.shape(3)}, s_);
  }
  mx::array ungrouped(const mx::array& a, int n) const {
    return mx::reshape(a, {batch_, heads_, n, a.shape(-1)}, s_);
  }
  // The same with the heads apart, [batch, key heads, ratio, n, ..].
  mx::array split(const mx::array& a, int n) const {
    return mx::reshape(a, {batch_, key_heads_, ratio_, n, a.shape(-1)}, s_);
  }
  mx::array joined(const mx::array& a) const {
    return mx::flatten(a, 2, 3, s_);
  }

 private:
  static bool hides(const DenseAttention& call) {
    return call.mask || call.options.causal || call.options.window;
  }

  mx::array finite_or_zero(const mx::array& a) const {
    return mx::where(mx::isfinite(a, s_), a, mx::array(0.0f), s_);
  }

  mx::array scores_of(const mx::array& q, const mx::array& k) const {
    return split(mx::matmul(q, mx::swapaxes(k, -1, -2, s_), s_), q.shape(2) / ratio_);
  }

  // The terms of infinite and NaN values in the rows that see them: 0 where there are none, else infinity or NaN. A
  // weight of 0 makes NaN of infinity. Products count infinities, by their signs and without; NaN counts as very many.
  mx::array terms_of_others(const Chunk& chunk, int n) const {
    const mx::array none(0.0f), one(1.0f), very_many(0x1p60f), infinity(std::numeric_limits<float>::infinity());
    const mx::array weights = split(chunk.weights, n);
    const mx::array counted = mx::where(mx::greater(weights, none, s_), one, very_many, s_);
    const mx::array seen = joined(mx::where(*chunk.visible, counted, none, s_));
    const mx::array above = mx::equal(v_, infinity, s_);
    const mx::array below = mx::equal(v_, mx::negative(infinity, s_), s_);
    const mx::array signs = mx::subtract(mx::astype(above, mx::float32, s_), mx::astype(below, mx::float32, s_), s_);
    const mx::array each = mx::where(mx::isnan(v_, s_), very_many, mx::abs(signs, s_), s_);
    const mx::array sum = mx::matmul(seen, signs, s_);
    const mx::array count = mx::matmul(seen, each, s_);
    const mx::array alike =
        mx::logical_and(mx::less(count, mx::array(0x1p59f), s_), mx::equal(mx::abs(sum, s_), count, s_), s_);
    const mx::array nan(std::numeric_limits<float>::quiet_NaN());
    const mx::array terms = mx::where(alike, mx::multiply(mx::sign(sum, s_), infinity, s_), nan, s_);
    return mx::where(mx::equal(count, none, s_), none, terms, s_);
  }

  mx::array grouped_mask(int first, int last) const {
    const mx::array& mask = *call_.mask;
    const mx::array part = mask.shape(2) == 1 ? mask : rows_of(mask, first, last);
    const bool each = mask.shape(1) != 1;
    return mx::reshape(part, {part.shape(0), each ? key_heads_ : 1, each ? ratio_ : 1, part.shape(2), part.shape(3)},
                       s_);
  }

  const DenseAttention& call_;
  mx::Stream s_;
  bool apart_;
  int batch_;
  int heads_;
  int key_heads_;
  int ratio_;
  int queries_;
  int keys_;
  mx::array k_;
  mx::array v_;
  mx::array finite_k_;
  mx::array finite_v_;
};

void add_to(std::optional<mx::array>& sum, const mx::array& term, mx::Stream stream) {
  sum = sum ? mx::add(*sum, term, stream) : term;
}

}  // namespace

mx::array composed_attention(const DenseAttention& call, mx::Stream stream) {
  const Composition composition(call, stream, true);
  Arrays parts;
  for (int first = 0; first < composition.queries(); first += composition.step()) {
    const int last = std::min(first + composition.step(), composition.queries());
    const Chunk chunk = composition.chunk(first, last, parts.empty() ? Arrays{} : Arrays{parts.back()});
    parts.push_back(mx::astype(composition.output(chunk, first, last), call.queries.dtype(), stream));
  }
  return parts.size() == 1 ? parts[0] : mx::concatenate(parts, 2, stream);
}

// With weights p, scores s and dp = dy v^T: dv = p^T dy, ds = p (dp - sum(p dp)), dq = scale ds k, dk = scale ds^T q; a
// sink is a score whose dp is 0.
AttentionGradients attention_gradients(const DenseAttention& call, const mx::array& cotangent,
                                       const WantedGradients& wanted, mx::Stream s) {
  const Composition composition(call, s);
  std::optional<mx::array> dk, dv, dsinks, dmask;
  Arrays dq, dmask_rows, before;
  const bool mask_has_rows = call.mask && call.mask->shape(2) != 1;
  for (int first = 0; first < composition.queries(); first += composition.step()) {
    const int last = std::min(first + composition.step(), composition.queries());
    const int n = last - first;
    const Chunk chunk = composition.chunk(first, last, before);
    const mx::array& p = chunk.weights;
    const mx::array dy = composition.grouped(mx::astype(composition.rows_of(cotangent, first, last), mx::float32, s));
    before.clear();
    if (wanted.values) {
      add_to(dv, mx::matmul(mx::swapaxes(p, -1, -2, s), dy, s), s);
      before.push_back(*dv);
    }
    const mx::array dp =
        composition.seen_or_zero(chunk, mx::matmul(dy, mx::swapaxes(composition.v(), -1, -2, s), s), n);
    const mx::array mean = mx::sum(mx::multiply(p, dp, s), -1, true, s);
    if (wanted.sinks) {
      const mx::array terms = mx::multiply(*chunk.sink_weights, composition.split(mean, n), s);
      add_to(dsinks, mx::negative(mx::sum(terms, {0, 3, 4}, false, s), s), s);
    }
    // A mean that is not finite would make NaN of the p of hidden keys, which is 0.
    const mx::array ds = composition.seen_or_zero(chunk, mx::multiply(p, mx::subtract(dp, mean, s), s), n);
    if (wanted.queries) {
      // Where a row sees a key that is not finite, ds has NaN, or the key's score is -inf and its ds is 0.
      const mx::array products = mx::matmul(ds, composition.finite_k(), s);
      const mx::array part = mx::multiply(products, mx::array(call.options.scale), s);
      dq.push_back(mx::astype(composition.ungrouped(part, n), call.queries.dtype(), s));
      before.push_back(dq.back());
    }
    if (wanted.keys) {
      add_to(dk, mx::matmul(mx::swapaxes(ds, -1, -2, s), chunk.queries, s), s);
      before.push_back(*dk);
    }
    if (wanted.mask) {
      mx::array part = composition.ungrouped(ds, n);
      for (int axis = 0; axis < 4; ++axis) {
        if (call.mask->shape(axis) == 1) {
          part = mx::sum(part, axis, true, s);
        }
      }
      if (mask_has_rows) {
        dmask_rows.push_back(mx::astype(part, call.mask->dtype(), s));
        before.push_back(dmask_rows.back());
      } else {
        add_to(dmask, part, s);
        before.push_back(*dmask);
      }
    }
  }
  AttentionGradients gradients;
  if (wanted.queries) {
    gradients.queries = mx::concatenate(dq, 2, s);
  }
  if (wanted.keys) {
    gradients.keys = mx::astype(*dk, call.keys.dtype(), s);
  }
  if (wanted.values) {
    gradients.values = mx::astype(*dv, call.values.dtype(), s);
  }
  if (wanted.mask) {
    gradients.mask = mask_has_rows ? mx::concatenate(dmask_rows, 2, s) : mx::astype(*dmask, call.mask->dtype(), s);
  }
  if (wanted.sinks) {
    gradients.sinks = mx::astype(mx::flatten(*dsinks, s), call.sinks->dtype(), s);
  }
  return gradients;
}

}  // namespace mittens
