"""Bytes that products of one row load, counted by the simulator, against the fewest bytes that they can do with."""

import mlx.core as mx
import pytest
from helpers.matrices import draw

import mlx_mittens as mm

LINE, PACK = 128, 16  # bytes
RUN = 16  # columns that a lane takes of affine weights at once
SHAPES = [(2048, 64), (4096, 40), (2880, 48), (896, 130)]  # columns, outputs
AFFINE_SHAPES = [(*shape, group) for shape in SHAPES for group in (32, 64, 128) if shape[0] % group == 0]


def loaded_of_weights(counts, x, times=None):
    """Bytes, less x's, which every threadgroup loads once, or which is loaded `times` times."""
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


def rows_of_blocks(outputs, size):
    """The rows of blocks of `size`; the last block repeats some rows before it."""
    return [row for first in range(0, outputs, size) for row in range(min(first, outputs - size), outputs)[:size]]


def lines_across(rows, row_bytes, run):
    """Lines that runs of some rows of an array touch beyond the fewest, where rows begin within lines.

    run: bytes of a row that a simdgroup takes together.
    """
    across = 0
    for row in rows:
        for at in range(0, row_bytes, run):
            begin, size = row * row_bytes + at, min(run, row_bytes - at)
            across += (begin % LINE + size - 1) // LINE - (size - 1) // LINE
    return across


def lines_of_x(columns, itemsize, blocks):
    """Lines of x that are touched again: of a lane's neighbouring columns each load takes 16 bytes."""
    lines = 0
    for begin in range(0, columns, 32 * RUN):
        lanes = min(32, (columns - begin) // RUN)
        loads = RUN * itemsize // PACK
        lines += loads * (-(-lanes * RUN * itemsize // LINE) - -(-lanes * PACK // LINE))
    return blocks * lines


def assert_lines(counts, columns, triples, size, itemsize):
    """As few lines as may be, but for x's lines, and where rows begin within lines.

    size: outputs of a simdgroup, which takes the columns of its lanes at once, of words, scales and biases.
    """
    across = 0
    for array in (array for triple in triples for array in triple):
        row_bytes = array.nbytes // array.shape[0]
        across += lines_across(rows_of_blocks(array.shape[0], size), row_bytes, 32 * RUN * row_bytes // columns)
    assert across == 0 or columns % 2048
    blocks = -(-triples[0][0].shape[0] // size)
    assert counts["device_lines"] == counts["device_lines_fewest"] + across + lines_of_x(columns, itemsize, blocks)


@pytest.mark.parametrize("columns, outputs, group", AFFINE_SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_affine_weights(rng, dtype, counted, columns, outputs, bits, group):
    """Lanes that share a group each load its scale and bias, from one line."""
    x = draw(rng, (1, columns), dtype)
    triple = mx.quantize(draw(rng, (outputs, columns), dtype), group, bits)
    (counts,) = counted(lambda: mm.quantized_matmul(x, *triple, group_size=group, bits=bits))
    words, scales, biases = triple
    fewest = words.nbytes + group // RUN * (scales.nbytes + biases.nbytes)
    rows = rows_of_blocks(outputs, 4)
    assert loaded_of_weights(counts, x, times=len(rows) // 4) <= 1.02 * fewest * len(rows) / outputs
    assert_lines(counts, columns, [triple], 4, dtype.size)
    assert counts["bank_conflicts"] == 0
    assert counts["device_bytes_stored"] == outputs * dtype.size


@pytest.mark.parametrize("columns, outputs, group", AFFINE_SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_gate_and_up(rng, dtype, counted, columns, outputs, bits, group):
    x = draw(rng, (1, columns), dtype)
    gate, up = (mx.quantize(draw(rng, (outputs, columns), dtype), group, bits) for _ in range(2))
    (counts,) = counted(lambda: mm.quantized_swiglu(x, gate, up, group_size=group, bits=bits))
    fewest = sum(words.nbytes + group // RUN * 2 * scales.nbytes for words, scales, _ in (gate, up))
    assert loaded_of_weights(counts, x, times=-(-outputs // 2)) <= 1.02 * fewest
    assert_lines(counts, columns, [gate, up], 2, dtype.size)
    assert counts["bank_conflicts"] == 0


@pytest.mark.parametrize("columns, outputs", SHAPES)
@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_blocks(rng, dtype, counted, columns, outputs, kind):
    """Lanes take 16 bytes and a scale; with 4 bits pairs of lanes load the same bytes, from one line."""
    x = draw(rng, (1, columns), dtype)
    blocks = mm.block_quantize(draw(rng, (outputs, columns), mx.float32), kind)
    mx.eval(blocks)  # natively
    (counts,) = counted(lambda: mm.block_matmul(x, blocks, kind))
    rows = rows_of_blocks(outputs, 4)
    assert loaded_of_weights(counts, x, times=len(rows) // 4) <= 1.02 * len(rows) * columns // RUN * (16 + 2)
    assert counts["bank_conflicts"] == 0
    assert counts["device_bytes_stored"] == outputs * dtype.size
