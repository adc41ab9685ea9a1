"""The gated half of chosen experts."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product, exact_swiglu, quantize
from helpers.tolerances import LAYERS, SUMS, assert_near, assert_product_right, of_layer

import mlx_mittens as mm
from mlx_mittens import specs

E, N, K = 5, 12, 64


@pytest.fixture(params=[4, 8])
def weights(request, rng):
    """Gate and up as triples, for a type, with the bits."""
    return lambda dtype=mx.float32: [*(quantize(rng, (E, N, K), dtype, 32, request.param) for _ in "gu"), request.param]


def tokens(rng, count, dtype=mx.float32):
    return draw(rng, (count, 1, 1, K), dtype, outliers=False) / (2 * K**0.5)


def test_products(weights, rng, dtype, executor):
    gate, up, bits = weights(dtype)
    for count in (1, 7, 32):
        x, rhs = tokens(rng, count, dtype), rng.integers(-1, E + 2, (count, 2))
        y = mm.gather_swiglu(x, gate, up, rhs_indices=mx.array(rhs), group_size=32, bits=bits)
        assert y.shape == (count, 2, 1, N) and y.dtype == dtype
        for i, e in np.ndindex(rhs.shape):
            expert = rhs[i, e]
            if not 0 <= expert < E:
                assert np.isnan(specs.widen(y[i, e])).all()
                continue
            of_expert = lambda triple: [a[int(expert)] for a in triple]
            exact = exact_swiglu(x[i, 0], of_expert(gate), of_expert(up), 32, bits)
            assert_product_right(y[i, e], exact, dtype)


def test_is_two_products(weights, rng, executor):
    gate, up, bits = weights()
    x, lhs, rhs = tokens(rng, 4)[:, 0], mx.array([0, 3, 3, 9]), mx.array([4, 4, 0, 1])
    product = lambda x, triple: mm.gather_qmm(x, *triple, lhs, rhs, True, 32, bits)
    expected = lambda x: product(x, gate) * mx.sigmoid(product(x, gate)) * product(x, up)
    ours = lambda x: mm.gather_swiglu(x, gate, up, lhs, rhs, 32, bits)
    np.testing.assert_allclose(np.array(ours(x)), np.array(expected(x)), rtol=SUMS, atol=SUMS)
    cotangent = draw(rng, (4, 1, N), mx.float32, outliers=False)
    for a, b in zip(mx.vjp(ours, [x], [cotangent])[1], mx.vjp(expected, [x], [cotangent])[1], strict=True):
        assert_near(a, b, "gradient", LAYERS)
    several = mx.stack([x, 2 * x])
    mapped = np.array(mx.vmap(ours)(several))
    np.testing.assert_allclose(mapped[1], np.array(ours(2 * x)), rtol=SUMS, atol=SUMS)
    np.testing.assert_allclose(np.array(mx.compile(ours)(x)), np.array(ours(x)), rtol=SUMS, atol=SUMS)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_gpt_oss(rng, dtype, executor, mode):
    """With biases, an activation that clips, and outputs that a limit meets."""
    options = {"group_size": 32, "bits": 4, "mode": mode}
    parts = [mx.quantize(draw(rng, (E, N, K), mx.float32), **options) for _ in "gu"]
    parts = [[a.astype(dtype) if a.dtype == mx.float32 else a for a in stack] for stack in parts]
    bias = tuple(draw(rng, (E, N), dtype) for _ in "gu")
    x, rhs = 20 * tokens(rng, 3, dtype), mx.array([[0, E], [4, 1], [2, 2]])
    y = specs.widen(mm.gather_swiglu(x, *parts, rhs_indices=rhs, bias=bias, activation="clipped", **options))
    chosen = np.minimum(np.array(rhs), E - 1)
    gate, up = (
        exact_product(specs.widen(x), specs.dequantized(*stack, *[None] * (3 - len(stack)), 32, 4, mode)[chosen])
        for stack in parts
    )
    g, u = (a.value + specs.widen(b)[chosen][..., None, :] for a, b in zip((gate, up), bias, strict=True))
    assert (g > 7).any() and (abs(u) > 7).any() and (g < 0).any()
    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    assert np.isnan(y[0, 1]).all()
    expected[0, 1] = y[0, 1] = 0
    np.testing.assert_allclose(y, expected, rtol=of_layer(dtype), atol=of_layer(dtype) * abs(expected).max())


def test_bits_that_go_to_mx(rng, lenient, native):
    gate, up = (quantize(rng, (E, N, K), mx.float32, 32, 1) for _ in "gu")
    x, rhs = tokens(rng, 2), mx.array([[0, E], [4, 1]])
    y = np.array(mm.gather_swiglu(x, gate, up, rhs_indices=rhs, group_size=32, bits=1))
    product = lambda triple: mx.gather_qmm(x, *triple, rhs_indices=mx.array([[0, 0], [4, 1]]), group_size=32, bits=1)
    expected = np.array(product(gate) * mx.sigmoid(product(gate)) * product(up))
    assert np.isnan(y[0, 1]).all()
    for at in ((0, 0), (1, 0), (1, 1)):
        np.testing.assert_allclose(y[at], expected[at], rtol=SUMS, atol=SUMS)


def test_bad_input(weights, rng, native):
    gate, up, bits = weights()
    x, rhs = tokens(rng, 2), mx.array([[0], [1]])
    call = lambda x=x, up=up, rhs=rhs: mm.gather_swiglu(x, gate, up, rhs_indices=rhs, group_size=32, bits=bits)
    other = quantize(rng, (E + 1, N, K), mx.float32, 32, bits)
    with pytest.raises(ValueError, match=r"\[gather_swiglu\] up's w has shape .*: expected the same shape"):
        call(up=other)
    with pytest.raises(mm.DtypeError, match=r"\[gather_swiglu\] rhs_indices has dtype float32: expected integers"):
        call(rhs=rhs.astype(mx.float32))
    with pytest.raises(ValueError, match=r"\[gather_swiglu\] x has 32 columns"):
        call(x=x[..., :32])
    with pytest.raises(ValueError, match=r"\[gather_swiglu\] x has shape \(64\): expected at least two dimensions"):
        call(x=x[0, 0, 0])
    with pytest.raises(ValueError, match=r"\[gather_swiglu\] gate has 3 arrays: mode mxfp4 expects 2, w and scales"):
        mm.gather_swiglu(x, gate, up, rhs_indices=rhs, mode="mxfp4")
    with pytest.raises(ValueError, match=r"\[gather_swiglu\] activation is 'gelu': expected swiglu, geglu or clipped"):
        mm.gather_swiglu(x, gate, up, rhs_indices=rhs, group_size=32, bits=bits, activation="gelu")
    with pytest.raises(ValueError, match=r"\[gather_swiglu\] up's bias has shape \(12\), w has shape"):
        bias = (mx.ones((E, N)), mx.ones((N,)))
        mm.gather_swiglu(x, gate, up, rhs_indices=rhs, group_size=32, bits=bits, bias=bias)
