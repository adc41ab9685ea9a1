"""Second derivatives, which mx's operations compute, of rows whose sums in float32 round one way."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import SUM, assert_near, units
from verification.fuzz import exact

import mlx_mittens as mm

# A chain of additions leaves the mean of so many equal numbers off by a hundred units.
COLUMNS = 1465
VALUE = -0.66492927
# All that a layer_norm of equal numbers divides by. A mean that is off counts eps^-1.5 times, 32,000 times.
EPS = float(np.float32(1e-3))

Norm = Callable[[mx.array, mx.array], mx.array]

NORMS: dict[str, tuple[Norm, Norm]] = {
    "layer_norm": (lambda x, w: mm.layer_norm(x, w, None, EPS), lambda x, w: exact.layer_norm(x, w, None, EPS)),
    "rms_norm": (lambda x, w: mm.rms_norm(x, w, EPS), lambda x, w: exact.rms_norm(x, w, EPS)),
    "add_rms_norm": (lambda x, w: mm.add_rms_norm(x, x, w, EPS)[0], lambda x, w: exact.rms_norm(x + x, w, EPS)),
}


@pytest.fixture(params=NORMS)
def norms(request, executor) -> tuple[Norm, Norm]:
    """A norm, and the same in float64."""
    return NORMS[request.param]


def wide(arrays: list[mx.array]) -> list[mx.array]:
    return [a.astype(mx.float64) for a in arrays]


def second_derivatives(norm: Norm, primals: list[mx.array], cotangent: mx.array, directions: list[mx.array]):
    """Gradients of the product of the gradients with directions."""

    def along(*arrays: mx.array) -> mx.array:
        gradients = mx.vjp(norm, list(arrays), [cotangent])[1]
        return sum((a * b).sum() for a, b in zip(gradients, directions))

    return mx.grad(along, argnums=(0, 1))(*primals)


def test_rows_of_one_value(norms, rng):
    norm, in_float64 = norms
    weight, cotangent, *directions = (mx.array(rng.standard_normal(COLUMNS).astype(np.float32)) for _ in range(4))
    primals = [mx.full((COLUMNS,), VALUE), 100 * weight]
    ours = second_derivatives(norm, primals, cotangent, directions)
    with mx.stream(mx.cpu):
        right = second_derivatives(in_float64, wide(primals), cotangent.astype(mx.float64), wide(directions))
        mx.eval(right)
    # That of x has sums of random terms in it.
    for name, limit, a, b in zip(("x", "weight"), (SUM, units(8, mx.float32)), ours, right):
        assert_near(a, np.array(b), name, limit)
