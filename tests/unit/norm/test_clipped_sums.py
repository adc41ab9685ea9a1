"""norm_add_norm whose sum is clipped to the finite numbers of float16."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits
from helpers.tolerances import FLOAT16_TWICE

import mlx_mittens as mm

LARGEST = 65504.0
EPS = 1e-5


def drawn(rng, shape):
    """Arrays whose sums pass the range on both sides."""
    x = mx.array(rng.standard_normal(shape).astype(np.float16))
    residual = mx.array((rng.standard_normal(shape) * 30000).clip(-65000, 65000).astype(np.float16))
    weights = [mx.array((rng.standard_normal(shape[-1:]).clip(-3, 3) * size).astype(np.float16)) for size in (20000, 1)]
    return x, residual, *weights


def exact(x, residual, weight, following):
    """In float64, rounded to float16 where the op rounds."""
    x, residual, weight, following = (np.array(a).astype(np.float64) for a in (x, residual, weight, following))
    with np.errstate(over="ignore"):
        normed = (x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)).astype(np.float16) * weight
        normed = normed.astype(np.float16).astype(np.float64)
    total = (residual + normed).clip(-LARGEST, LARGEST).astype(np.float16).astype(np.float64)
    return total / np.sqrt((total**2).mean(-1, keepdims=True) + EPS) * following, total


@pytest.mark.parametrize("shape", [(3, 1), (5, 31), (2, 200), (3, 500), (2, 1152), (1, 4100), (1, 16500)])
def test_sums_beyond_the_range_are_clipped(executor, rng, shape):
    arrays = drawn(rng, shape)
    normed, total = mm.norm_add_norm(*arrays, EPS, clip_sum=True)
    expected, sums = exact(*arrays)
    assert np.isfinite(np.array(total)).all()
    assert shape[-1] == 1 or (np.abs(sums) == LARGEST).any()
    np.testing.assert_allclose(np.array(total), sums, rtol=FLOAT16_TWICE, atol=FLOAT16_TWICE * LARGEST / 2)
    np.testing.assert_allclose(np.array(normed), expected, rtol=4 * FLOAT16_TWICE, atol=4 * FLOAT16_TWICE)


@pytest.mark.parametrize("value", [mx.nan, mx.inf, -mx.inf])
def test_infinity_is_clipped_and_nan_stays(executor, value):
    x, residual = mx.ones((3, 65), mx.float16), mx.zeros((3, 65), mx.float16)
    residual[1, 64] = value
    _, total = mm.norm_add_norm(x, residual, None, None, EPS, clip_sum=True)
    expected = np.ones((3, 65))
    expected[1, 64] = np.nan if np.isnan(value) else np.sign(value) * LARGEST
    np.testing.assert_allclose(np.array(total), expected, rtol=FLOAT16_TWICE, equal_nan=True)


def test_sums_of_other_types_stay(executor, rng):
    for dtype in (mx.float32, mx.bfloat16):
        arrays = [a.astype(dtype) * 4 for a in drawn(rng, (2, 96))]
        for a, b in zip(mm.norm_add_norm(*arrays, EPS, clip_sum=True), mm.norm_add_norm(*arrays, EPS), strict=True):
            assert_same_bits(a, b, f"{dtype}")


def test_weights_of_a_wider_type(executor, rng):
    """The sum is float16, and its norm is not."""
    x, residual, weight, following = drawn(rng, (2, 96))
    normed, total = mm.norm_add_norm(x, residual, weight, following.astype(mx.float32), EPS, clip_sum=True)
    assert (normed.dtype, total.dtype) == (mx.float32, mx.float16)
    assert np.isfinite(np.array(total)).all() and (np.abs(np.array(total)) == LARGEST).any()


def test_a_clipped_sum_has_no_gradient(native, rng):
    arrays = drawn(rng, (3, 40))

    def loss(*arrays):
        normed, total = mm.norm_add_norm(*arrays, EPS, clip_sum=True)
        return normed.astype(mx.float32).sum() + (total.astype(mx.float32) * 2.0**-8).sum()

    def of_mx(x, residual, weight, following):
        total = residual.astype(mx.float32) + mx.fast.rms_norm(x, weight, EPS).astype(mx.float32)
        total = mx.clip(total, -LARGEST, LARGEST).astype(mx.float16)
        normed = mx.fast.rms_norm(total, following, EPS)
        return normed.astype(mx.float32).sum() + (total.astype(mx.float32) * 2.0**-8).sum()

    total = np.array(mm.norm_add_norm(*arrays, EPS, clip_sum=True)[1])
    for gradient, other in zip(*(mx.grad(f, argnums=(0, 1, 3))(*arrays) for f in (loss, of_mx)), strict=True):
        scale = np.abs(np.array(other)).max()
        np.testing.assert_allclose(
            np.array(gradient), np.array(other), rtol=4 * FLOAT16_TWICE, atol=4 * FLOAT16_TWICE * scale
        )
    clipped = np.abs(total) == LARGEST
    assert clipped.any() and not np.array(mx.grad(loss, argnums=1)(*arrays))[clipped].any()


def test_compiled_for_any_shape(executor, rng):
    function = mx.compile(lambda *arrays: mm.norm_add_norm(*arrays, EPS, clip_sum=True), shapeless=True)
    for shape in ((2, 24), (1, 24), (3, 9001)):
        arrays = drawn(rng, shape)
        for a, b in zip(function(*arrays), mm.norm_add_norm(*arrays, EPS, clip_sum=True), strict=True):
            assert_same_bits(a, b, f"{shape}")
