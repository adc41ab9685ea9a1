"""Promises of layer_norm alone."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import FAR_FROM_ZERO, ROUNDINGS, SUMS, assert_right

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import Case

OP = specs.get("layer_norm")


def test_hand_worked(executor):
    y = mm.layer_norm(mx.array([[1.0, 3.0]]), mx.array([2.0, 2.0]), mx.array([0.5, 0.0]), 0.0)
    np.testing.assert_allclose(np.array(y), [[-1.5, 2.0]], rtol=ROUNDINGS)


def test_vector(dtype, executor, rng):
    case = Case("vector", (333,))
    assert_right(OP, case, OP.draw(rng, case, dtype))


@pytest.mark.parametrize("eps", [1e-12, 1e-3, 10.0, 1])
def test_eps(dtype, executor, rng, eps):
    case = Case("eps", (4, 96), {"eps": eps})
    assert_right(OP, case, OP.draw(rng, case, dtype))


@pytest.mark.parametrize("columns", [64, 1000, 4099, 10000])
def test_mean_far_from_zero(executor, rng, columns):
    """The variance comes from centred values: E[x^2] - E[x]^2 would be far off here."""
    case = Case("offset", (3, columns))
    x, weight, bias = OP.draw(rng, case, mx.float32)
    x = mx.array((rng.standard_normal(case.shape) + 1000).astype(np.float32))
    exact = OP.exact(case, [x, weight, bias])[0]
    assert specs.error(mm.layer_norm(x, weight, bias, 1e-5), exact) < FAR_FROM_ZERO


def test_constant_rows_give_the_bias(dtype, executor, rng):
    x = mx.full((3, 256), 4.0, dtype)
    bias = mx.array(rng.standard_normal(256).astype(np.float32)).astype(dtype)
    assert mx.array_equal(mm.layer_norm(x, None, bias, 1e-5), mx.broadcast_to(bias, x.shape)).item()


def test_one_column_gives_the_bias(dtype, executor):
    y = mm.layer_norm(
        mx.array([[7.0], [-2.0]]).astype(dtype), mx.ones((1,), dtype), mx.array([0.25]).astype(dtype), 1e-5
    )
    assert y.tolist() == [[0.25], [0.25]]


@pytest.mark.parametrize("columns", [4, 64, 200, 1000, 4104, 70000])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_where_a_value_less_the_mean_overflows_the_bias_remains(executor, dtype, columns):
    """The variance is infinite: normed values are 0, also for 3e38 in a row whose mean is about -3e38."""
    x = np.full((3, columns), -3e38, np.float32)
    x[0, 0] = x[1, -1] = 3e38
    x = mx.array(x).astype(dtype)
    weight, bias = mx.full((columns,), 2.0, dtype), mx.full((columns,), 0.5, dtype)
    assert mx.array_equal(mm.layer_norm(x, weight, bias, 1e-5), mx.full(x.shape, 0.5, dtype)).item()
    loss = lambda *arrays: mm.layer_norm(*arrays, 1e-5).astype(mx.float32).sum()
    dx, dweight, dbias = mx.grad(loss, argnums=(0, 1, 2))(x, weight, bias)
    assert not mx.any(dx[:2]).item() and not mx.any(dweight).item()
    assert mx.array_equal(dbias, mx.full((columns,), 3.0, dtype)).item()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("columns", [4, 1000, 70000])
def test_rows_that_are_not_finite_are_nan(executor, columns, value):
    x = np.zeros((1, columns), np.float32)
    x[0, 1] = value
    assert mx.all(mx.isnan(mm.layer_norm(mx.array(x), None, None, 1e-5))).item()


@pytest.mark.parametrize("rows", [8, 100])
def test_an_infinite_gradient_of_a_bias_is_infinite(executor, rng, rows):
    """Also where its rows are added up in blocks, with the rounding errors of the sums before."""
    x, weight, bias = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((rows, 64), 64, 64))
    dy = rng.standard_normal((rows, 64)).astype(np.float32)
    dy[1, 3], dy[2, 5] = np.inf, -np.inf
    (dbias,) = mx.vjp(lambda bias: mm.layer_norm(x, weight, bias, 1e-5), [bias], [mx.array(dy)])[1]
    np.testing.assert_allclose(np.array(dbias), dy.astype(np.float64).sum(0), rtol=SUMS, atol=SUMS)
