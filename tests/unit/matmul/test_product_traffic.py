"""What products of one row load, counted by the simulator, against the fewest bytes that they can do with."""

import mlx.core as mx
import pytest
from helpers.matrices import draw

import mlx_mittens as mm

LINE, PACK = 128, 16  # bytes
SHAPES = [(2048, 64), (4096, 40), (2880, 48), (896, 130)]  # columns, outputs
AFFINE_SHAPES = [(*shape, group) for shape in SHAPES for group in (32, 64, 128) if shape[0] % group == 0]


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


def lines_across(rows, row_bytes, run):
    """Lines that runs of the rows of an array touch beyond the fewest that hold as much, where rows begin within lines.

    run: bytes of a row that a simdgroup takes together.
    """
    across = 0
    for row in range(rows):
        for at in range(0, row_bytes, run):
            begin, size = row * row_bytes + at, min(run, row_bytes - at)
            across += (begin % LINE + size - 1) // LINE - (size - 1) // LINE
    return across


def assert_lines(counts, columns, across):
    """As few lines as may be, and `across` more, of which there are none where rows begin on lines."""
    assert across == 0 or columns % 2048
    assert counts["device_lines"] == counts["device_lines_fewest"] + across


def affine_lines_across(triple, columns, lane_columns):
    """A simdgroup takes the columns of its lanes at once, of words, scales and biases."""
    across = 0
    for array in triple:
        outputs, row_bytes = array.shape[0], array.nbytes // array.shape[0]
        across += lines_across(outputs, row_bytes, 32 * lane_columns * row_bytes // columns)
    return across


@pytest.mark.parametrize("columns, outputs, group", AFFINE_SHAPES)
@pytest.mark.parametrize("bits, lane_columns", [(4, 32), (8, 16)])
def test_affine_weights(rng, dtype, counted, columns, outputs, bits, lane_columns, group):
    """Lanes that share a group each load its scale and bias, from one line."""
    x = draw(rng, (1, columns), dtype)
    triple = mx.quantize(draw(rng, (outputs, columns), dtype), group, bits)
    (counts,) = counted(lambda: mm.quantized_matmul(x, *triple, group_size=group, bits=bits))
    words, scales, biases = triple
    fewest = words.nbytes + group // lane_columns * (scales.nbytes + biases.nbytes)
    assert loaded_of_weights(counts, x) <= 1.02 * fewest
    assert_lines(counts, columns, affine_lines_across(triple, columns, lane_columns))
    assert counts["bank_conflicts"] == 0
    assert counts["device_bytes_stored"] == outputs * dtype.size


@pytest.mark.parametrize("columns, outputs, group", AFFINE_SHAPES)
@pytest.mark.parametrize("bits, lane_columns", [(4, 32), (8, 16)])
def test_gate_and_up(rng, dtype, counted, columns, outputs, bits, lane_columns, group):
    x = draw(rng, (1, columns), dtype)
    gate, up = (mx.quantize(draw(rng, (outputs, columns), dtype), group, bits) for _ in range(2))
    (counts,) = counted(lambda: mm.quantized_swiglu(x, gate, up, group_size=group, bits=bits))
    fewest = sum(words.nbytes + group // lane_columns * 2 * scales.nbytes for words, scales, _ in (gate, up))
    assert loaded_of_weights(counts, x) <= 1.02 * fewest
    assert_lines(counts, columns, 2 * affine_lines_across(gate, columns, lane_columns))
    assert counts["bank_conflicts"] == 0


def accesses_of_blocks(blocks, columns):
    """Accesses of 16 bytes a lane from the start of a line on, and one more of what is left over in each row's tile."""
    outputs, row_bytes = blocks.shape
    tile = 32 * row_bytes * 32 // columns  # 32 blocks
    accesses = 0
    for begin in (row * row_bytes + at for row in range(outputs) for at in range(0, row_bytes, tile)):
        size = min(tile, row_bytes - begin % row_bytes)
        accesses += -(-(begin % LINE + size) // (32 * PACK)) + 1
    return accesses


@pytest.mark.parametrize("columns, outputs", SHAPES)
@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_blocks(rng, dtype, counted, columns, outputs, kind):
    """Wherever rows begin in an array that begins on a line."""
    x = draw(rng, (1, columns), dtype)
    blocks = mm.block_quantize(draw(rng, (outputs, columns), mx.float32), kind)
    mx.eval(blocks)  # natively
    (counts,) = counted(lambda: mm.block_matmul(x, blocks, kind))
    assert loaded_of_weights(counts, x) <= 1.02 * blocks.nbytes
    assert counts["device_lines"] == counts["device_lines_fewest"]
    of_x = counts["threadgroups"] * -(-columns // 1024) * 1024 * dtype.size // (32 * PACK)
    of_others = 10 * counts["threads"] // 32  # parameters and results
    assert counts["device_accesses"] <= accesses_of_blocks(blocks, columns) + of_x + of_others
