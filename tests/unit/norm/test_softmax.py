"""Promises of softmax alone."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import ROUNDINGS, SUM, assert_near, assert_right, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import Case, reference

OP = specs.get("softmax")
SHAPE = (3, 4, 5)
AXES = [None, 0, 1, 2, -1, -2, -3, (0,), (1, 2), (0, 1), (0, 2), (2, 0), (-1, 0), (0, 1, 2), [1, 2], ()]


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_axes(dtype, executor, rng, axis):
    for vjp in (False, True):
        case = Case("axis", SHAPE, {"axis": axis}, vjp=vjp)
        assert_right(OP, case, OP.draw(rng, case, dtype), OP.cotangents(rng, case, dtype))


@pytest.mark.parametrize("axis", [0, 1, (0, 1), None], ids=str)
def test_axes_of_views(dtype, executor, rng, axis):
    a = mx.array(rng.standard_normal((7, 3, 10)).astype(np.float32)).astype(dtype)
    for view in (a.transpose(2, 0, 1), a[::2, :, ::3], mx.broadcast_to(a[:, :1], a.shape)):
        case = Case("view", view.shape, {"axis": axis})
        assert_right(OP, case, [view])


def test_default_axis_is_the_whole_array(executor, rng):
    a = mx.array(rng.standard_normal(SHAPE).astype(np.float32))
    assert_near(mm.softmax(a), reference.softmax(specs.widen(a)), "no axis", ROUNDINGS)
    assert mm.softmax(mx.array(2.0)).item() == 1.0, "a scalar"


def test_axis_by_name_and_by_position(executor, rng):
    a = mx.array(rng.standard_normal(SHAPE).astype(np.float32))
    assert mx.array_equal(mm.softmax(a, 1), mm.softmax(a, axis=1)).item()
    assert mx.array_equal(mm.softmax(a, axis=1, precise=True), mm.softmax(a, axis=1, precise=False)).item()


def test_rows_add_up_to_one(executor, rng):
    a = mx.array((10 * rng.standard_normal((5, 3001))).astype(np.float32))
    np.testing.assert_allclose(np.array(mm.softmax(a, axis=-1)).sum(axis=-1, dtype=np.float64), 1, atol=SUM)


def test_far_from_zero(dtype, executor, rng):
    """Without the largest value taken off first all of these overflow or vanish."""
    for offset in (-50000.0, -300.0, 300.0, 50000.0):
        a = mx.array((offset + 64 * rng.integers(0, 3, size=(2, 500))).astype(np.float32)).astype(dtype)
        assert_right(OP, Case("offset", a.shape), [a])


def test_one_element_outweighs_the_rest(dtype, executor):
    for columns in (8, 1025, 9000):
        a = np.zeros((2, columns), np.float32)
        a[0, columns // 3] = a[1, -1] = 200
        y = np.array(mm.softmax(mx.array(a).astype(dtype), axis=-1).astype(mx.float32))
        assert y[0, columns // 3] == y[1, -1] == 1.0 and y.sum() == 2.0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 24), (5, 500), (3, 1025), (9, 17001), (2, 66000)], ids=str)
def test_gradient_of_rows_that_one_element_nearly_fills(dtype, executor, rng, shape):
    """There the elements' gradients are small beside the rounding error of the row's sum of 1."""
    rows, columns = shape
    a, dy = rng.standard_normal(shape), 5 + rng.standard_normal(shape)
    a[:, np.arange(columns) % (columns // 20) > 0] -= 50  # no more than float16 can tell from zero
    share = np.array([0.99, 0.997, 0.999, 0.9995])[np.arange(rows) % 4]
    a[np.arange(rows), rng.integers(0, columns, rows)] = np.log(20 * share / (1 - share))
    a, dy = (mx.array(v.astype(np.float32)).astype(dtype) for v in (a, dy))

    dx = specs.widen(mx.vjp(lambda a: mm.softmax(a, axis=-1), [a], [dy])[1][0])
    y, dy = reference.softmax(specs.widen(a), -1), specs.widen(dy)
    mean = (y * dy).sum(axis=-1, keepdims=True)
    unit, smallest = specs.EPSILON[dtype], specs.SMALLEST_NORMAL[dtype]
    size = np.maximum(y, smallest)
    moved = np.sqrt(((size * (dy - mean)) ** 2).sum(axis=-1, keepdims=True))
    rounded = 2 * unit * size * (np.abs(dy - mean) + moved) + unit * smallest
    assert (np.abs(dx - y * (dy - mean)) <= rounded + units(8, mx.float32) * y * (np.abs(dy) + np.abs(mean))).all()


def test_gradients_of_a_row_that_rounds_to_zero(native):
    a = mx.zeros((1, 35_000_000), mx.float16)
    dy = mx.ones(a.shape, mx.float16)

    def gradient(a):
        return mx.vjp(lambda a: mm.softmax(a, axis=-1), [a], [dy])[1][0]

    assert mm.softmax(a, axis=-1).max().item() == 0
    assert mx.all(gradient(a) == 0).item()
    assert mx.all(mx.vjp(gradient, [a], [dy])[1][0] == 0).item()


def test_masked_scores(dtype, executor, rng):
    """A causal mask of -inf: masked places are exactly zero, a row with nothing left is NaN as in mx."""
    scores = mx.array(rng.standard_normal((9, 40)).astype(np.float32))
    mask = mx.array(np.where(np.tri(9, 40, k=-1, dtype=bool), 0, -math.inf).astype(np.float32))
    a = (scores + mask).astype(dtype)
    y = np.array(mm.softmax(a, axis=-1).astype(mx.float32))
    assert np.isnan(y[0]).all(), "every place masked"
    assert not np.isnan(y[1:]).any()
    assert (y[1:][np.triu(np.ones((9, 40), bool))[1:]] == 0).all()
    assert_right(OP, Case("mask", a.shape), [a])


def test_rows_of_the_lowest_value(dtype, executor):
    """A row masked with the lowest finite number, rather than with -inf, is uniform."""
    for lowest, columns in itertools.product((mx.finfo(dtype).min, -1e4), (16, 3000, 9000)):
        a = mx.zeros((2, columns), dtype)
        a[0] = lowest
        a[1, 1:] = lowest
        y = np.array(mm.softmax(a, axis=-1).astype(mx.float32))
        np.testing.assert_allclose(y[0], 1 / columns, rtol=units(1, dtype))
        assert y[1, 0] == 1 and (y[1, 1:] == 0).all()


def test_half_types_accumulate_in_float32(executor):
    """In float16 a sum of 1 stops growing at 2048, in bfloat16 at 256."""
    for dtype, columns in itertools.product((mx.float16, mx.bfloat16), (4096, 20000)):
        y = mm.softmax(mx.zeros((1, columns), dtype), axis=-1)
        exact = mx.array(1 / columns).astype(dtype).item()
        assert y.min().item() == y.max().item() == exact


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.bool_], ids=str)
def test_integers_become_float32_as_in_mx(dtype, executor):
    a = mx.array([[0, 1, 3], [2, 2, 2]]).astype(dtype)
    y = mm.softmax(a, axis=-1)
    assert y.dtype == mx.softmax(a, axis=-1).dtype == mx.float32
    np.testing.assert_allclose(np.array(y), np.array(mx.softmax(a.astype(mx.float32), axis=-1)), rtol=ROUNDINGS)


def test_an_axis_of_more_elements_than_an_array_may_have_goes_to_mx(lenient, native):
    """Nothing is computed here: it would take gigabytes."""
    a = mx.broadcast_to(mx.array(1.0), (2**16, 2**15))
    mm.stats(reset=True)
    assert mm.softmax(a).shape == a.shape
    assert "2**31 elements or more along several axes" in str(mm.stats())
