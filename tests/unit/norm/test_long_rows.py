"""Rows so long that every loop over their parts goes round twice, and in which no element outweighs the others."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits
from helpers.tolerances import SHORT_CHAINS, assert_right

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import Case


@pytest.mark.parametrize("vjp", [False, True])
def test_long_rows(op, vjp, executor, rng):
    case = Case("long", (1, 270001), vjp=vjp)
    arrays = [a / 16 for a in op.draw(rng, case, mx.float32)]
    assert_right(op, case, arrays, op.cotangents(rng, case, mx.float32))


def test_in_place(op, executor, rng):
    """Rows that a threadgroup goes through twice, written where they were read."""
    case = Case("donated", (9, 20000))
    arrays = op.draw(rng, case, mx.float16)
    right = specs.run(op, op.ours, case, arrays)
    mx.eval(right)
    for a, b in zip(specs.run(op, op.ours, case, [a + 0 for a in arrays]), right, strict=True):
        assert_same_bits(a, b, "in place")


@pytest.mark.parametrize("gpu", ["m2-max", "h200"])
def test_squares_of_a_row_add_up_in_short_chains(native, gpu):
    """A thread has 16 of 8,192 columns. The roundings of 16 squares of these numbers all go the same way, which is
    more than two units in one chain of additions, and less than a twentieth of one where each pack has its own sum."""
    numbers = [1.8976984024047852, 1.3401999473571777, 1.9133304357528687, 1.894818663597107]
    x = mx.array(np.repeat(np.array(numbers, np.float32)[:, None], 8192, axis=1))
    with mm.simulator.enabled(gpu=gpu):
        results = [mm.rms_norm(x, None, 0.0), mm.norm_add_norm(x, mx.zeros_like(x), None, None, 0.0)[1]]
        mx.eval(results)
    for y in results:
        assert np.abs(np.array(y, np.float64)[:, 0] - 1).mean() <= SHORT_CHAINS
