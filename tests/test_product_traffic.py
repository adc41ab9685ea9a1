"""What products of one row load, counted by the simulator, against the fewest bytes that they can do with."""

import mlx.core as mx
import pytest
from matrices import draw

import mlx_mittens as mm

SHAPES = [(2048, 64), (4096, 40), (2880, 48), (896, 130)]  # columns, outputs


def loaded_of_weights(counts, x, times=None):
    """Bytes, less those of x, which is taken once by every threadgroup, if not so many times."""
    return counts["device_bytes_loaded"] - (counts["threadgroups"] if times is None else times) * x.nbytes


@pytest.mark.parametrize("columns, outputs", SHAPES)
def test_dense_weights(rng, dtype, counted, columns, outputs):
    w, x = draw(rng, (outputs, columns), dtype), draw(rng, (1, columns), dtype)
    (counts,) = counted(lambda: mm.gemv(w, x))
    assert loaded_of_weights(counts, x, times=-(-outputs // 4)) <= 1.02 * w.nbytes
    assert counts["device_lines"] == counts["device_lines_fewest"]
    assert counts["device_bytes_stored"] == outputs * dtype.size


@pytest.mark.parametrize("columns, outputs", [(1024, 40), (896, 33), (512, 9)])
def test_short_dense_weights(rng, dtype, counted, columns, outputs):
    """On NVIDIA GPUs a simdgroup has an output."""
    w, x = draw(rng, (outputs, columns), dtype), draw(rng, (1, columns), dtype)
    (counts,) = counted(lambda: mm.gemv(w, x), gpu="nvidia")
    assert loaded_of_weights(counts, x, times=outputs) == w.nbytes
    assert counts["device_lines"] == counts["device_lines_fewest"]
    assert counts["device_bytes_stored"] == outputs * dtype.size


@pytest.mark.parametrize("columns, outputs", SHAPES)
@pytest.mark.parametrize("bits, lane_columns", [(4, 32), (8, 16)])
@pytest.mark.parametrize("group", [32, 64])
def test_affine_weights(rng, counted, columns, outputs, bits, lane_columns, group):
    """Lanes that share a group each load its scale and bias, from one line."""
    x = draw(rng, (1, columns), mx.float16)
    words, scales, biases = mx.quantize(draw(rng, (outputs, columns), mx.float16), group, bits)
    (counts,) = counted(lambda: mm.quantized_matmul(x, words, scales, biases, group_size=group, bits=bits))
    fewest = words.nbytes + group // lane_columns * (scales.nbytes + biases.nbytes)
    assert loaded_of_weights(counts, x) <= 1.02 * fewest
    assert counts["device_bytes_stored"] == outputs * 2


@pytest.mark.parametrize("columns, outputs", SHAPES)
def test_gate_and_up(rng, counted, columns, outputs):
    x = draw(rng, (1, columns), mx.float16)
    gate, up = (mx.quantize(draw(rng, (outputs, columns), mx.float16), 32, 4) for _ in range(2))
    (counts,) = counted(lambda: mm.quantized_swiglu(x, gate, up, group_size=32, bits=4))
    assert loaded_of_weights(counts, x) <= 1.02 * sum(a.nbytes for a in (*gate, *up))


@pytest.mark.parametrize("columns, outputs", SHAPES)
@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_blocks(rng, counted, columns, outputs, kind):
    x = draw(rng, (1, columns), mx.float16)
    blocks = mm.block_quantize(draw(rng, (outputs, columns), mx.float32), kind)
    mx.eval(blocks)  # natively
    (counts,) = counted(lambda: mm.block_matmul(x, blocks, kind))
    assert loaded_of_weights(counts, x) <= 1.02 * blocks.nbytes
