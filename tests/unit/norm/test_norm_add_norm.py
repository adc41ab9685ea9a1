"""Promises of norm_add_norm alone, and the offset of a weight that it shares with rms_norm and add_rms_norm."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import as_list, assert_same_bits
from helpers.tolerances import FLOAT16_TWICE, assert_right

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import Case

OP = specs.get("norm_add_norm")
GEMMA = {"weight_offset": 1.0, "next_weight_offset": 1.0}


@pytest.mark.parametrize("shape", [(5, 31), (3, 1024), (2, 4100)])
def test_is_two_kernels_in_one(dtype, executor, rng, shape):
    """Bit for bit the results of rms_norm and add_rms_norm one after the other."""
    x, residual, weight, following = OP.draw(rng, Case("two", shape), dtype)
    for first, second in ((0.0, 0.0), (1.0, 0.5)):
        results = mm.norm_add_norm(x, residual, weight, following, 1e-5, weight_offset=first, next_weight_offset=second)
        normed = mm.rms_norm(x, weight, 1e-5, weight_offset=first)
        assert isinstance(results, tuple)
        assert_same_bits(results[1], residual + normed, "sum")
        assert_same_bits(results[0], mm.rms_norm(results[1], following, 1e-5, weight_offset=second), "norm")


@pytest.mark.parametrize("offsets", [(0, 0), (1, 1), (3, 1), (1, 3)])
def test_views(executor, rng, offsets):
    """Rows that start off every boundary, and arrays of strides."""
    length = 3 * 41 + max(offsets)
    flat = [mx.array(rng.standard_normal(length).astype(np.float16)) for _ in offsets]
    x, residual = (a[offset : offset + 3 * 41].reshape(3, 41) for a, offset in zip(flat, offsets))
    weights = mx.array(rng.standard_normal((41, 2)).astype(np.float16))
    case = Case("views", (3, 41), GEMMA)
    assert_right(OP, case, [x, residual, weights[:, 0], weights[::-1, 1]])
    turned = mx.array(rng.standard_normal((41, 3)).astype(np.float16)).T
    assert_right(OP, case, [turned, residual, weights[:, 0], weights[:, 1]])


def test_float16_sum_overflows_to_infinity(executor):
    x, residual = mx.ones((2, 64), mx.float16), mx.full((2, 64), 1.0, mx.float16)
    residual[1, 3] = 65504.0
    weight = mx.full((64,), 100.0, mx.float16)
    outputs, twins = (f(x, residual, weight, weight, 1e-5) for f in (OP.ours, OP.twin))
    for a, b in zip(outputs, twins):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=FLOAT16_TWICE, equal_nan=True)
    assert outputs[1][1, 3].item() == mx.inf


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_nan_and_infinity_stay_in_their_row(executor, value):
    x, residual = mx.ones((3, 65)), mx.zeros((3, 65))
    x[1, 64] = value
    outputs, twins = (f(x, residual, None, None, 1e-5) for f in (OP.ours, OP.twin))
    for a, b in zip(outputs, twins):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=FLOAT16_TWICE, equal_nan=True)
        assert np.isfinite(np.array(a)[[0, 2]]).all()


@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
def test_gradients_of_some_arguments(native, rng, argnums):
    arrays = OP.draw(rng, Case("some", (3, 33)), mx.float32)

    def total(*arrays):
        normed, summed = mm.norm_add_norm(*arrays, 1e-5, **GEMMA)
        return (normed * mx.sin(summed)).sum() + summed.sum()

    every = mx.grad(total, argnums=(0, 1, 2, 3))(*arrays)
    for argnum, gradient in zip(argnums, as_list(mx.grad(total, argnums=argnums)(*arrays)), strict=True):
        assert_same_bits(gradient, every[argnum], f"argument {argnum}")


def test_compiled_for_any_shape(executor, rng):
    """A row that does not stay in registers comes to a function compiled for one that does."""
    function = mx.compile(lambda *arrays: mm.norm_add_norm(*arrays, 1e-5, **GEMMA), shapeless=True)
    for shape in ((2, 24), (1, 24), (3, 9001)):
        arrays = OP.draw(rng, Case("compiled", shape), mx.float32)
        for a, b in zip(function(*arrays), mm.norm_add_norm(*arrays, 1e-5, **GEMMA), strict=True):
            assert_same_bits(a, b, f"{shape}")


def test_the_offset_is_added_in_float32(dtype, executor, rng):
    """Where 1 + weight would be rounded to the weight's type; as exact as float64 of the same numbers."""
    weight = mx.array((rng.standard_normal(96) * 2.0**-9).astype(np.float32)).astype(dtype)
    for name, count in (("rms_norm", 1), ("add_rms_norm", 2)):
        op = specs.get(name)
        case = Case("offset", (4, 96), {"weight_offset": 1.0})
        assert_right(op, case, [*op.draw(rng, case, dtype)[:count], weight])


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "norm_add_norm", "qk_norm"])
def test_bad_offsets(native, name):
    op, options = specs.get(name), {"eps": 1e-5}
    arrays = [mx.ones((2, 8) if kind == "rows" else (8,)) for _, kind in op.parameters]
    none = [a if a.ndim == 2 else None for a in arrays]
    with pytest.raises(ValueError, match=r"weight_offset is (inf|nan): expected a finite number"):
        op.ours(*arrays, **options, weight_offset=mx.inf)
    with pytest.raises(ValueError, match=r"weight_offset is 1 and .*weight is None: expected a weight, or no offset"):
        op.ours(*none, **options, weight_offset=1.0)
