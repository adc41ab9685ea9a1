"""Step 5, attention: y = softmax(q k^T / sqrt(D)) v, causal. Steps 3 and 4 together.

A simdgroup takes 8 rows of queries and walks along the keys, 16 at a time. It keeps the softmax so far: each row's
maximum and sum, and the sum of the values. Where a maximum grows, the sums are scaled down. Scores are never in memory.
metal/attention/attention.h is this, with masks, sinks and loads of 16 bytes.
"""

import mlx.core as mx
from anywhere import TILES, anywhere, show

BODY = """
    const uint lane = thread_index_in_simdgroup;
    const uint tokens = q_shape[1];
    const uint row = threadgroup_position_in_grid.x * 8;
    const uint rows = tokens - row;
    const uint head = threadgroup_position_in_grid.y * tokens * D;

    Tile<T, 1, D / 8> query;
    load(query, q + head + row * D, D, rows, D, T(0), lane);
    Tile<float, 1, D / 8> sums;
    RowValues<1> maximum;
    RowValues<1> total;
    fill(sums, 0.0f);
    fill(maximum, -INFINITY);
    fill(total, 0.0f);

    for (uint first = 0; first < min(row + 8, tokens); first += 16) {
        Tile<T, 2, D / 8> key;
        load(key, k + head + first * D, D, tokens - first, D, T(0), lane);
        Tile<float, 1, 2> scores;
        fill(scores, 0.0f);
        multiply_add_abt(scores, query, key, lane);
        multiply(scores, M_LOG2E_F * rsqrt(float(D)));
        fill_from(scores, int(row) - int(first) + 1, -INFINITY, lane);  // what comes after a row's own token

        RowValues<1> factor = maximum;
        row_max(scores, maximum);
        factor.at[0] = fast::exp2(factor.at[0] - maximum.at[0]);
        subtract_rows(scores, maximum);
        exp2_of(scores);
        total.at[0] *= factor.at[0];
        row_sum(scores, total);

        Tile<T, 2, D / 8> value;
        load(value, v + head + first * D, D, tokens - first, D, T(0), lane);
        const Tile<T, 1, 2> weights = converted<T>(scores);
        multiply_rows(sums, factor);
        multiply_add(sums, weights, value);
    }
    RowValues<1> share;
    share.at[0] = 1 / total.at[0];
    multiply_rows(sums, share);
    store<T>(sums, y + head + row * D, D, rows, D, lane);
"""


def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Of q, k and v [heads, tokens, D], where D is a multiple of 8."""
    kernel = mx.fast.metal_kernel(
        name="attention", input_names=["q", "k", "v"], output_names=["y"], source=BODY, header=TILES
    )
    heads, tokens, width = q.shape
    return kernel(
        inputs=[q, k, v],
        template=[("T", q.dtype), ("D", width)],
        grid=(32 * -(-tokens // 8), heads, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )[0]


if __name__ == "__main__":
    with anywhere():
        q, k, v = (mx.random.normal((2, 45, 64)) for _ in range(3))
        exact = mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=64**-0.5, mask="causal")[0]
        show("attention", attention(q, k, v), exact)
