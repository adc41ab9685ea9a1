"""Rows so long that every loop over their parts goes round twice, and in which no element outweighs the others."""

import mlx.core as mx
import pytest
from support import assert_right

from mlx_mittens.cases import Case


@pytest.mark.parametrize("vjp", [False, True])
def test_long_rows(op, vjp, executor, rng):
    case = Case("long", (1, 270001), vjp=vjp)
    arrays = [a / 16 for a in op.draw(rng, case, mx.float32)]
    assert_right(op, case, arrays, op.cotangents(rng, case, mx.float32))
