"""Step 4, matrix product: y = a b. A simdgroup sums up 32 x 32 elements of y, 8 columns of a and rows of b at a time.

`multiply_add` is the GPU's matrix product of 8 x 8 matrices, for all of two tiles; sums are in float32 whatever T is.
"""

import mlx.core as mx
from anywhere import TILES, anywhere, show

BODY = """
    const uint lane = thread_index_in_simdgroup;
    const uint row = threadgroup_position_in_grid.y * 32;
    const uint column = threadgroup_position_in_grid.x * 32;
    const uint rows = a_shape[0] - row;
    const uint inner = a_shape[1];
    const uint columns = b_shape[1];

    Tile<float, 4, 4> sums;
    fill(sums, 0.0f);
    for (uint k = 0; k < inner; k += 8) {
        Tile<T, 4, 1> left;
        Tile<T, 1, 4> right;
        load(left, a + row * inner + k, inner, rows, inner - k, T(0), lane);
        load(right, b + k * columns + column, columns, inner - k, columns - column, T(0), lane);
        multiply_add(sums, left, right);
    }
    store<T>(sums, y + row * columns + column, columns, rows, columns - column, lane);
"""


def gemm(a: mx.array, b: mx.array) -> mx.array:
    kernel = mx.fast.metal_kernel(name="gemm", input_names=["a", "b"], output_names=["y"], source=BODY, header=TILES)
    rows, columns = a.shape[0], b.shape[1]
    return kernel(
        inputs=[a, b],
        template=[("T", a.dtype)],
        grid=(32 * -(-columns // 32), -(-rows // 32), 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[a.dtype],
    )[0]


if __name__ == "__main__":
    with anywhere():
        a, b = mx.random.normal((70, 50)), mx.random.normal((50, 90))
        show("gemm", gemm(a, b), a @ b)
