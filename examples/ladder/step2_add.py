"""Step 2, add: y = a + b. Two tiles at once; an operation of the library works on all of a tile."""

import mlx.core as mx
from anywhere import TILES, anywhere, show

BODY = """
    const uint lane = thread_index_in_simdgroup;
    const uint row = threadgroup_position_in_grid.y * 16;
    const uint column = threadgroup_position_in_grid.x * 32;
    const uint stride = a_shape[1];
    const uint start = row * stride + column;
    const uint rows = a_shape[0] - row;
    const uint columns = a_shape[1] - column;

    Tile<T, 2, 4> sum;
    Tile<T, 2, 4> other;
    load(sum, a + start, stride, rows, columns, T(0), lane);
    load(other, b + start, stride, rows, columns, T(0), lane);
    add(sum, other);
    store<T>(sum, y + start, stride, rows, columns, lane);
"""


def add(a: mx.array, b: mx.array) -> mx.array:
    kernel = mx.fast.metal_kernel(name="add", input_names=["a", "b"], output_names=["y"], source=BODY, header=TILES)
    rows, columns = a.shape
    return kernel(
        inputs=[a, b],
        template=[("T", a.dtype)],
        grid=(32 * -(-columns // 32), -(-rows // 16), 1),
        threadgroup=(32, 1, 1),
        output_shapes=[a.shape],
        output_dtypes=[a.dtype],
    )[0]


if __name__ == "__main__":
    with anywhere():
        a, b = mx.random.normal((100, 70)), mx.random.normal((100, 70))
        show("add", add(a, b), a + b)
