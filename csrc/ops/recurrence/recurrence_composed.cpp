// Recurrences as products of matrices, a chunk of steps at a time: solving a triangular system gives the updates of all
// steps of a chunk.
#include <limits>
#include <optional>
#include <vector>

#include "mlx/ops.h"
#include "ops/recurrence/recurrence.h"
#include "runtime/array_util.h"

namespace mittens {

namespace {

constexpr int steps_of_chunk = 64;
constexpr int steps_of_column_chunk = 16;  // of gates per column, whose decays are [steps, steps, columns]
constexpr float least_gate = 1e-37f;  // whose logarithm is taken: a smaller one has a gradient of 0

// Which elements of a matrix [n, n] count.
template <typename Counts>
mx::array triangle(int n, const Counts& counts) {
  std::vector<float> values;
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      values.push_back(counts(i, j) ? 1.0f : 0.0f);
    }
  }
  return mx::array(values.begin(), {n, n});
}

// The inverse of 1 + A, where A [.., n, n] is zero but below the diagonal. Blocks of the diagonal of twice the size
// follow from two: [[X, 0], [-Y B X, Y]] is the inverse of [[1/X, 0], [B, 1/Y]].
mx::array inverse_of_one_plus(const mx::array& a, int n, mx::Stream stream) {
  mx::array x = triangle(n, [](int i, int j) { return i == j; });
  for (int size = 1; size < n; size *= 2) {
    const mx::array between =
        triangle(n, [=](int i, int j) { return i / size == j / size + 1 && i / (2 * size) == j / (2 * size); });
    const mx::array b = mx::multiply(a, between, stream);
    const mx::array corner = size == 1 ? b : mx::matmul(x, mx::matmul(b, x, stream), stream);
    x = mx::subtract(x, corner, stream);
  }
  return x;
}

struct Chunk {
  mx::array q, k;  // [batch, key_heads, 1, n, columns]
  mx::array v;  // [batch, key_heads, group, n, rows]
  mx::array log_gates;  // [batch, key_heads, group, n, 1 or columns]
  mx::array rates;  // [batch, key_heads, group, n, 1]
};

mx::array turned(const mx::array& a, mx::Stream stream) {
  return mx::swapaxes(a, -1, -2, stream);
}

// y of a chunk [batch, key_heads, group, n, rows]; the state [batch, key_heads, group, rows, columns] goes on.
mx::array over_chunk(const Chunk& chunk, mx::array& state, bool corrects, mx::Stream s) {
  const int n = chunk.q.shape(3);
  const bool per_column = chunk.log_gates.shape(4) > 1;
  const mx::array since = mx::cumsum(chunk.log_gates, 3, false, true, s);  // the start of the chunk
  const mx::array nothing(-std::numeric_limits<float>::infinity());
  const mx::array seen = triangle(n, [](int i, int j) { return j <= i; });
  const mx::array before = triangle(n, [](int i, int j) { return j < i; });
  // Over the steps between each two, added up one by one: the difference of two large sums would be mostly rounding.
  const auto decays_of = [&](const mx::array& log_gates, const mx::array& seen, const mx::array& before) {
    const mx::array sums = mx::cumsum(mx::multiply(log_gates, before, s), 3, false, true, s);
    return mx::exp(mx::where(mx::astype(seen, mx::bool_, s), sums, nothing, s), s);
  };
  // The product of a with each key, decayed over the steps between them.
  mx::array qk = seen, kk = seen;
  if (per_column) {
    const mx::array decays =
        decays_of(mx::expand_dims(chunk.log_gates, 4, s), mx::expand_dims(seen, 2, s), mx::expand_dims(before, 2, s));
    const mx::array keys = mx::multiply(decays, mx::expand_dims(chunk.k, 3, s), s);
    qk = mx::sum(mx::multiply(keys, mx::expand_dims(chunk.q, 4, s), s), -1, false, s);
    kk = mx::sum(mx::multiply(keys, mx::expand_dims(chunk.k, 4, s), s), -1, false, s);
  } else {
    const mx::array decays = decays_of(chunk.log_gates, seen, before);
    const mx::array keys = turned(chunk.k, s);
    qk = mx::multiply(mx::matmul(chunk.q, keys, s), decays, s);
    kk = mx::multiply(mx::matmul(chunk.k, keys, s), decays, s);
  }
  const mx::array decay = mx::exp(since, s);
  const mx::array of_state = turned(state, s);
  // The factors of the keys.
  mx::array updates = chunk.v;
  if (corrects) {
    updates = mx::subtract(updates, mx::matmul(mx::multiply(chunk.k, decay, s), of_state, s), s);
  }
  updates = mx::multiply(chunk.rates, updates, s);
  if (corrects) {
    updates = mx::matmul(inverse_of_one_plus(mx::multiply(chunk.rates, kk, s), n, s), updates, s);
  }
  const mx::array y = mx::add(mx::matmul(mx::multiply(chunk.q, decay, s), of_state, s), mx::matmul(qk, updates, s), s);
  mx::Shape start(5, 0), stop = since.shape();
  start[3] = n - 1;
  const mx::array whole = mx::slice(since, start, stop, s);
  const mx::array until_end = mx::cumsum(chunk.log_gates, 3, true, false, s);
  const mx::array keys = mx::multiply(chunk.k, mx::exp(until_end, s), s);
  state = mx::add(mx::multiply(state, mx::exp(whole, s), s), mx::matmul(turned(updates, s), keys, s), s);
  return y;
}

}  // namespace

Arrays recurrence_composed(const Arrays& inputs, const RecurrenceOptions& options, mx::Stream stream) {
  const RecurrenceArrays arrays(inputs, options);
  const int batch = arrays.q.shape(0), steps = arrays.q.shape(1), key_heads = arrays.q.shape(2);
  const int columns = arrays.q.shape(3), heads = arrays.v.shape(2), rows = arrays.v.shape(3);
  const int group = heads / key_heads;
  // [batch, steps, heads, ..] -> [batch, key_heads, heads of each, steps, size]
  const auto by_head = [&](const mx::array& a, int heads_of_key, int size) {
    const mx::array wide = in_dtype(a, mx::float32, stream);
    const mx::array moved = mx::reshape(wide, {batch, steps, key_heads, heads_of_key, size}, stream);
    return mx::transpose(moved, {0, 2, 3, 1, 4}, stream);
  };
  const bool per_column = arrays.gate_per_column();
  mx::array q = by_head(arrays.q, 1, columns), k = by_head(arrays.k, 1, columns);
  mx::array v = by_head(arrays.v, group, rows);
  mx::array gates = by_head(arrays.gates, group, per_column ? columns : 1);
  mx::array rates = by_head(arrays.rates, group, 1);
  std::optional<mx::array> mask;
  if (arrays.mask) {
    mask = mx::reshape(*arrays.mask, {batch, 1, 1, steps, 1}, stream);
    gates = mx::where(*mask, gates, mx::array(1.0f), stream);
    for (mx::array* hidden : {&q, &k, &v, &rates}) {  // NaN there too
      *hidden = mx::where(*mask, *hidden, mx::array(0.0f), stream);
    }
  }
  const mx::array log_gates = mx::log(mx::maximum(gates, mx::array(least_gate), stream), stream);
  mx::array state = arrays.state ? mx::reshape(*arrays.state, {batch, key_heads, group, rows, columns}, stream)
                                 : mx::zeros({batch, key_heads, group, rows, columns}, mx::float32, stream);
  const int chunk_size = per_column ? steps_of_column_chunk : steps_of_chunk;
  Arrays results;
  for (int begin = 0; begin < steps; begin += chunk_size) {
    const auto part = [&](const mx::array& a) {
      mx::Shape start(5, 0), stop = a.shape();
      start[3] = begin;
      stop[3] = std::min(steps, begin + chunk_size);
      return mx::slice(a, start, stop, stream);
    };
    const Chunk chunk{part(q), part(k), part(v), part(log_gates), part(rates)};
    results.push_back(over_chunk(chunk, state, options.corrects, stream));
  }
  mx::array y = results.size() > 1 ? mx::concatenate(results, 3, stream) : results[0];
  if (mask) {
    y = mx::where(*mask, y, mx::array(0.0f), stream);
  }
  y = mx::reshape(mx::transpose(y, {0, 3, 1, 2, 4}, stream), arrays.v.shape(), stream);
  return {y, mx::reshape(state, {batch, heads, rows, columns}, stream)};
}

}  // namespace mittens
