"""Promises of softcap alone."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import ROUNDINGS, units

import mlx_mittens as mm
from mlx_mittens import specs


def test_hand_worked(executor):
    y = mm.softcap(mx.array([-mx.inf, -1e30, 0.0, 1e-30, 15.0, 1000.0, mx.inf, mx.nan]), 30.0)
    expected = [-30, -30, 0, 1e-30, 30 * np.tanh(0.5), 30, 30, np.nan]
    np.testing.assert_allclose(np.array(y), expected, rtol=ROUNDINGS)


def test_is_odd_and_grows(dtype, executor):
    """Over the whole line: no step where one form of tanh takes over from another."""
    x = mx.concatenate([mx.linspace(-3, 3, 4001), mx.linspace(-400, 400, 333)]).astype(dtype)
    y = np.array(mm.softcap(x, 5.0).astype(mx.float32))
    np.testing.assert_array_equal(np.array(mm.softcap(-x, 5.0).astype(mx.float32)), -y)
    exact = 5 * np.tanh(specs.widen(x) / 5)
    np.testing.assert_allclose(y, exact, rtol=units(4 if dtype == mx.float32 else 1, dtype))
    assert np.abs(y).max() == 5.0


@pytest.mark.parametrize("cap", [1e-30, 1e-3, 1e30])
def test_caps_of_any_size(executor, cap):
    x = mx.array([-2.0, 0.0, 1e-3, 7.0])
    exact = np.float64(np.float32(cap)) * np.tanh(np.array(x, np.float64) / np.float64(np.float32(cap)))
    np.testing.assert_allclose(np.array(mm.softcap(x, cap)), exact, rtol=ROUNDINGS)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (70001,)])
def test_any_shape(executor, rng, shape):
    x = mx.array(rng.standard_normal(shape).astype(np.float32) * 40)
    y = mm.softcap(x, 30.0)
    assert y.shape == shape
    np.testing.assert_allclose(np.array(y), 30 * np.tanh(specs.widen(x) / 30), rtol=ROUNDINGS)


def test_views(dtype, executor, rng):
    """Off every boundary, and of strides."""
    whole = mx.array(rng.standard_normal((9, 67)).astype(np.float32) * 40).astype(dtype)
    for view in (whole[1:, :], whole[:, 1:], whole.T, whole[::2, ::3], mx.broadcast_to(whole[:1], (5, 67))):
        y = mm.softcap(view, 30.0)
        exact = 30 * np.tanh(specs.widen(view) / 30)
        np.testing.assert_allclose(np.array(y.astype(mx.float32)), exact, rtol=units(4, dtype), atol=0)


@pytest.mark.parametrize("cap", [0.0, -1.0, mx.inf, mx.nan])
def test_bad_cap(native, cap):
    with pytest.raises(ValueError, match=r"\[softcap\] cap is .*: expected a finite positive number"):
        mm.softcap(mx.ones((2,)), cap)


def test_gradient_is_one_launch(nvidia_kernels, dtype, rng):
    """Of arrays that start at different places of 16 bytes, too."""
    x, dy = (mx.array(rng.standard_normal(70).astype(np.float32) * 40).astype(dtype) for _ in range(2))
    for ours in (lambda: mx.vjp(lambda x: mm.softcap(x, 30.0), [x[3:]], [dy[:-3]])[1][0],
                 lambda: mx.jvp(lambda x: mm.softcap(x, 30.0), [x[3:]], [dy[:-3]])[1][0]):  # fmt: skip
        nvidia_kernels()
        dx = ours()
        mx.eval(dx)
        assert nvidia_kernels() == [f"softcap_vjp_{str(dtype).rpartition('.')[2]}"]
        exact = specs.widen(dy[:-3]) * (1 - np.tanh(specs.widen(x[3:]) / 30) ** 2)
        np.testing.assert_allclose(np.array(dx.astype(mx.float32)), exact, rtol=units(8, dtype))
