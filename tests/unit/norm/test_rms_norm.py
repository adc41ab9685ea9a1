"""Promises of rms_norm alone."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import EQUAL_NUMBERS, ROUNDINGS, SUM, assert_right
from helpers.variants import planned_launches

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import Case

OP = specs.get("rms_norm")


def test_hand_worked(executor):
    y = mm.rms_norm(mx.array([[3.0, 4.0], [0.0, 0.0]]), mx.array([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(np.array(y[0]), [3 / 12.5**0.5, 8 / 12.5**0.5], rtol=ROUNDINGS)
    assert np.isnan(np.array(y[1])).all(), "0 / 0, as in mx"


def test_vector(dtype, executor, rng):
    case = Case("vector", (333,))
    assert_right(OP, case, OP.draw(rng, case, dtype))


@pytest.mark.parametrize("columns", [3754, 4096])
def test_equal_numbers(executor, rng, columns):
    """Roundings of one long chain of additions would all go the same way."""
    values = rng.uniform(1, 9, (64, 1)).astype(np.float32)
    x = mx.array(np.broadcast_to(values, (64, columns)))
    np.testing.assert_allclose(np.array(mm.rms_norm(x, None, 0.0)), 1, rtol=0, atol=EQUAL_NUMBERS)
    np.testing.assert_allclose(np.array(mm.add_rms_norm(x, x, None, 0.0)[0]), 1, rtol=0, atol=EQUAL_NUMBERS)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-3, 10.0, 1])
def test_eps(dtype, executor, rng, eps):
    case = Case("eps", (4, 96), {"eps": eps})
    assert_right(OP, case, OP.draw(rng, case, dtype))


def test_eps_carries_tiny_rows(executor):
    x = mx.full((2, 64), 1e-30)
    np.testing.assert_allclose(np.array(mm.rms_norm(x, None, 1e-6)), 1e-27, rtol=SUM)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_rounds_before_the_weight(dtype, executor, rng):
    """As in mx: the normalized value is rounded, then the product."""
    case = Case("rounding", (8, 500))
    x, weight = OP.draw(rng, case, dtype)
    plain = mm.rms_norm(x, None, 1e-5)
    assert mx.array_equal(mm.rms_norm(x, weight, 1e-5), plain * weight).item()


def test_float16_weight_overflows_to_infinity(executor):
    x = mx.ones((2, 64), mx.float16)
    weight = mx.full((64,), 60000.0, mx.float16)
    x[0, 0] = 60.0
    y, twin = mm.rms_norm(x, weight, 1e-5), mx.fast.rms_norm(x, weight, 1e-5)
    assert np.isinf(np.array(y)).sum() == 1
    np.testing.assert_array_equal(np.isinf(np.array(y)), np.isinf(np.array(twin)))


@pytest.mark.parametrize("rows, threads", [(1, 32), (3, 96), (16, 512), (40, 512)])
def test_a_weights_gradient_is_summed_by_no_more_simdgroups_than_there_are_sums(rows, threads):
    x, weight = mx.ones((rows, 600)), mx.ones((600,))  # each row has a threadgroup, which leaves its sum
    f = lambda x, weight: mm.rms_norm(x, weight, 1e-5)
    launches = planned_launches(lambda: mx.vjp(f, [x, weight], [x])[1], "apple")
    assert [launch["threads"][0] for launch in launches if "column_sum" in launch["kernel"]] == [threads]
