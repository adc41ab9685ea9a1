"""Testing a kernel of mx.fast.metal_kernel with pytest, on any machine: pytest examples/test_my_kernel.py"""

import mlx.core as mx
import pytest

import mlx_mittens as mm

ROW_SUM = """
    threadgroup float partial[8];
    uint thread_index = thread_position_in_threadgroup.x;
    uint row = threadgroup_position_in_grid.y;
    float sum = 0;
    for (int column = thread_index; column < x_shape[1]; column += 256) {
        sum += x[row * x_shape[1] + column];
    }
    sum = simd_sum(sum);
    if (thread_index_in_simdgroup == 0) {
        partial[simdgroup_index_in_threadgroup] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index == 0) {
        for (int i = 1; i < 8; ++i) {
            sum += partial[i];
        }
        out[row] = sum;
    }
"""


def row_sum(x: mx.array, source: str = ROW_SUM) -> mx.array:
    """The code under test: it knows nothing of the simulator."""
    kernel = mx.fast.metal_kernel(name="row_sum", input_names=["x"], output_names=["out"], source=source)
    return kernel(
        inputs=[x],
        grid=(256, x.shape[0], 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(x.shape[0],)],
        output_dtypes=[mx.float32],
    )[0]


@pytest.mark.parametrize("columns", [1, 31, 256, 1000])
@pytest.mark.parametrize("seed", [0, 1, 2])  # the order in which threads run
def test_row_sum(columns, seed):
    x = mx.random.normal((5, columns)).astype(mx.float16)
    with mm.simulator.enabled(seed=seed):
        assert mx.allclose(row_sum(x), x.astype(mx.float32).sum(axis=1), atol=1e-3)


def test_a_missing_barrier_is_caught():
    broken = ROW_SUM.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", "")
    with mm.simulator.enabled(seed=2), pytest.raises(mm.simulator.Fault, match='"partial".*no barrier between'):
        mx.eval(row_sum(mx.ones((5, 1000)), broken))


def test_a_write_past_the_end_is_caught():
    broken = ROW_SUM.replace("out[row] = sum", "out[row + 1] = sum")
    with mm.simulator.enabled(), pytest.raises(mm.simulator.Fault, match="out"):
        mx.eval(row_sum(mx.ones((5, 1000)), broken))
