"""Step 1, copy: y = x. A simdgroup, 32 threads that run together, moves a tile of 16 rows by 32 columns.

A tile lies in the registers of all 32 lanes. `load` and `store` take its place in memory, the distance between its
rows, and how many rows and columns exist: tiles hang over the edges, where `load` gives the fill value and `store` does
nothing.
"""

import mlx.core as mx
from anywhere import TILES, anywhere, show

BODY = """
    const uint lane = thread_index_in_simdgroup;
    const uint row = threadgroup_position_in_grid.y * 16;
    const uint column = threadgroup_position_in_grid.x * 32;
    const uint stride = x_shape[1];
    const uint start = row * stride + column;

    Tile<T, 2, 4> tile;  // of 8 x 8 matrices
    load(tile, x + start, stride, x_shape[0] - row, x_shape[1] - column, T(0), lane);
    store<T>(tile, y + start, stride, x_shape[0] - row, x_shape[1] - column, lane);
"""


def copy(x: mx.array) -> mx.array:
    kernel = mx.fast.metal_kernel(name="copy", input_names=["x"], output_names=["y"], source=BODY, header=TILES)
    rows, columns = x.shape
    return kernel(
        inputs=[x],
        template=[("T", x.dtype)],
        grid=(32 * -(-columns // 32), -(-rows // 16), 1),  # in threads: one threadgroup of 32 for each tile
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


if __name__ == "__main__":
    with anywhere():
        x = mx.random.normal((100, 70))
        show("copy", copy(x), x)
