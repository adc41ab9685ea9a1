"""Rows so long that every loop over their parts goes round twice, and in which no element outweighs the others."""

import mlx.core as mx
import pytest
from helpers.support import assert_same_bits
from helpers.tolerances import assert_right

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
