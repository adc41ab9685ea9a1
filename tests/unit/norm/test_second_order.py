"""Second derivatives, also of rows whose sums in float32 round one way."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import GRADIENTS_16_BIT, LAYERS, SUM, SUMS, assert_near, units
from verification.fuzz import exact

import mlx_mittens as mm
from mlx_mittens import _ext

# Number of equal numbers whose mean a chain of additions leaves off by a hundred units.
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


def with_options(kind: str, weighted: bool) -> tuple[Norm, Norm]:
    """A norm of x and a weight, and the same in float64; layer_norm has a bias of the weight's numbers."""
    if kind == "layer_norm":
        given = lambda w: (w, w) if weighted else (None, None)
        return lambda x, w: mm.layer_norm(x, *given(w), EPS), lambda x, w: exact.layer_norm(x, *given(w), EPS)
    if not weighted:
        return lambda x, w: mm.rms_norm(x, None, EPS), lambda x, w: exact.rms_norm(x, None, EPS)
    return (
        lambda x, w: mm.rms_norm(x, w, EPS, weight_offset=0.5),
        lambda x, w: exact.rms_norm(x, w + 0.5, EPS),
    )


def derivatives(norm: Norm, arrays: list[mx.array], directions: list[mx.array], order: int) -> list[mx.array]:
    """Of the product of the gradients by x and weight with directions: by x, weight and the cotangent."""

    def along(x: mx.array, weight: mx.array, cotangent: mx.array) -> mx.array:
        gradients = mx.vjp(norm, [x, weight], [cotangent])[1]
        return sum((a * b).sum() for a, b in zip(gradients, directions))

    def again(*arrays: mx.array) -> mx.array:
        return sum((a * b).sum() for a, b in zip(mx.grad(along, argnums=(0, 1, 2))(*arrays), (*directions, arrays[0])))

    return mx.grad(along if order == 2 else again, argnums=(0, 1, 2))(*arrays)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 35, 96), (2, 9001)], ids=str)
def test_beside_float64(rng, dtype, native, kind, shape, weighted, order):
    """Far from zero, over several blocks of rows and of columns."""
    if order == 3 and (shape != (3, 7) or dtype != mx.float32):
        return
    norm, in_float64 = with_options(kind, weighted)
    draw = lambda *shape: mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    arrays = [draw(*shape) + 1, draw(shape[-1]), draw(*shape)]
    directions = [draw(*shape), draw(shape[-1])]
    mm.stats(reset=True)
    ours = derivatives(norm, arrays, directions, order)
    mx.eval(ours)
    if order == 2:
        kernels = mm.stats()[f"{kind}_vjp_vjp"]["kernels"]
        assert set(kernels) == {f"native {_ext.cpu_instructions}"}, kernels
    with mx.stream(mx.cpu):
        right = derivatives(in_float64, wide(arrays), wide(directions), order)
        mx.eval(right)
    limit = GRADIENTS_16_BIT if dtype != mx.float32 else SUMS if order == 2 else LAYERS
    for name, a, b in zip(("x", "weight", "cotangent"), ours, right):
        assert a.dtype == dtype
        assert_near(a, np.array(b), name, limit)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_composed_as_on_a_gpu(rng, native, kind, weighted):
    norm, _ = with_options(kind, weighted)
    draw = lambda *shape: mx.array(rng.standard_normal(shape).astype(np.float32))
    arrays, directions = [draw(5, 33) + 1, draw(33), draw(5, 33)], [draw(5, 33), draw(33)]
    found = derivatives(norm, arrays, directions, 2)
    mx.eval(found)
    _ext.prefer_composed(True)
    try:
        composed = derivatives(norm, arrays, directions, 2)
        mx.eval(composed)
    finally:
        _ext.prefer_composed(False)
    for name, a, b in zip(("x", "weight", "cotangent"), found, composed):
        assert_near(a, b, name, SUM)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_squares_that_overflow_give_zeros(native, kind):
    norm, _ = with_options(kind, True)
    x = mx.array([[1e30, -2e30, 3e30, 0.0]])
    arrays, directions = [x, mx.ones((4,)), mx.ones((1, 4))], [mx.ones((1, 4)), mx.ones((4,))]
    by_x, by_weight, _ = derivatives(norm, arrays, directions, 2)
    assert not np.array(by_x).any() and not np.array(by_weight).any()
