"""Promises of add_rms_norm alone."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import FLOAT16_TWICE, ROUNDINGS, SUM

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import Case

OP = specs.get("add_rms_norm")


def test_returns_a_tuple(executor):
    result = mm.add_rms_norm(mx.ones((2, 8)), mx.ones((2, 8)), None, 1e-5)
    assert isinstance(result, tuple) and len(result) == 2


def test_sum_is_rounded_as_mx_rounds_it(dtype, executor, rng):
    for shape in ((5, 31), (3, 1024), (2, 4100), (1, 9000)):
        x, residual, weight = OP.draw(rng, Case("sum", shape), dtype)
        _, total = mm.add_rms_norm(x, residual, weight, 1e-5)
        assert mx.array_equal(total, x + residual).item(), shape


def test_norm_is_that_of_the_rounded_sum(dtype, executor, rng):
    for shape in ((5, 31), (3, 1024), (2, 4100)):
        x, residual, weight = OP.draw(rng, Case("norm", shape), dtype)
        normed, total = mm.add_rms_norm(x, residual, weight, 1e-5)
        assert mx.array_equal(normed, mm.rms_norm(total, weight, 1e-5)).item(), shape


def test_float16_sum_overflows_to_infinity(executor):
    x = mx.full((2, 64), 1.0, mx.float16)
    x[1, 3] = 60000.0
    outputs, twins = OP.ours(x, x, None, 1e-5), OP.twin(x, x, None, 1e-5)
    for a, b in zip(outputs, twins):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=FLOAT16_TWICE, equal_nan=True)
    assert outputs[1][1, 3].item() == mx.inf


@pytest.mark.parametrize("which", [0, 1])
def test_either_output_alone(executor, rng, which):
    arrays = OP.draw(rng, Case("alone", (4, 100)), mx.float32)
    both = OP.ours(*arrays, 1e-5)
    mx.eval(both)
    alone = OP.ours(*arrays, 1e-5)[which]
    assert mx.array_equal(alone, both[which]).item()


def test_chain_of_blocks(executor, rng):
    """As a transformer uses it: the sum goes on as the next residual, in place where it may."""
    weight = mx.ones((64,))
    x = residual = mx.array(rng.standard_normal((3, 64)).astype(np.float32))
    y = total = x
    for _ in range(6):
        x, residual = mm.add_rms_norm(x, residual, weight, 1e-5)
        y, total = OP.twin(y, total, weight, 1e-5)
    np.testing.assert_allclose(np.array(x), np.array(y), rtol=SUM, atol=ROUNDINGS)
    np.testing.assert_allclose(np.array(residual), np.array(total), rtol=SUM, atol=ROUNDINGS)
