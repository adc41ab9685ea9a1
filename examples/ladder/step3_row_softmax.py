"""Step 3, softmax of rows: y = exp(x - max) / sum. A simdgroup takes 8 rows and walks along them, twice.

`RowValues` holds one number for each row. Maximum and sum come in one walk: where the maximum grows, the sum so far is
scaled down. The second walk computes the results.
"""

import mlx.core as mx
from anywhere import TILES, anywhere, show

BODY = """
    const uint lane = thread_index_in_simdgroup;
    const uint row = threadgroup_position_in_grid.x * 8;
    const uint rows = x_shape[0] - row;
    const uint stride = x_shape[1];

    RowValues<1> maximum;
    RowValues<1> total;
    fill(maximum, -INFINITY);
    fill(total, 0.0f);
    Tile<float, 1, 4> tile;
    for (uint column = 0; column < stride; column += 32) {
        load(tile, x + row * stride + column, stride, rows, stride - column, -INFINITY, lane);
        multiply(tile, M_LOG2E_F);  // exp(x) = exp2(x * log2(e))
        const float before = maximum.at[0];
        row_max(tile, maximum);
        total.at[0] *= fast::exp2(before - maximum.at[0]);
        subtract_rows(tile, maximum);
        exp2_of(tile);
        row_sum(tile, total);
    }
    RowValues<1> share;
    share.at[0] = 1 / total.at[0];
    for (uint column = 0; column < stride; column += 32) {
        load(tile, x + row * stride + column, stride, rows, stride - column, -INFINITY, lane);
        multiply(tile, M_LOG2E_F);
        subtract_rows(tile, maximum);
        exp2_of(tile);
        multiply_rows(tile, share);
        store<T>(tile, y + row * stride + column, stride, rows, stride - column, lane);
    }
"""


def row_softmax(x: mx.array) -> mx.array:
    kernel = mx.fast.metal_kernel(name="row_softmax", input_names=["x"], output_names=["y"], source=BODY, header=TILES)
    return kernel(
        inputs=[x],
        template=[("T", x.dtype)],
        grid=(32 * -(-x.shape[0] // 8), 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


if __name__ == "__main__":
    with anywhere():
        x = mx.random.normal((20, 300)) * 5
        show("row softmax", row_softmax(x), mx.softmax(x, axis=-1))
