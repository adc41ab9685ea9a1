"""Weighted sums of products with chosen experts."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product, quantize
from helpers.tolerances import LAYERS, SUMS, assert_near, assert_product_right

import mlx_mittens as mm
from mlx_mittens import specs

E, N, K = 5, 12, 64


def call_of(rng, tokens=3, chosen=2, dtype=mx.float32, experts=E):
    """Arguments of a call."""
    x = draw(rng, (tokens, chosen, K), dtype, outliers=False) / K**0.5
    indices = mx.array(rng.integers(0, experts, (tokens, chosen)))
    weights = mx.softmax(draw(rng, (tokens, chosen), mx.float32, outliers=False), -1)
    return [x, *quantize(rng, (experts, N, K), dtype, 32, 4), indices, weights]


def exact(x, words, scales, biases, indices, weights, bias=None):
    w, indices = specs.dequantized(words, scales, biases, 32, 4), np.array(indices)
    product = exact_product(specs.widen(x)[..., None, :], w[np.clip(indices, 0, len(w) - 1)])
    value, size = product.value[..., 0, :], product.magnitude[..., 0, :]
    if bias is not None:
        value = value + specs.widen(bias)[indices]
    value[indices >= len(w)] = np.nan
    weights = specs.widen(weights)[..., None]
    return specs.Exact((value * weights).sum(axis=-2), np.sqrt(((size * weights) ** 2).sum(axis=-2)))


@pytest.mark.parametrize("tokens, chosen", [(1, 1), (3, 2), (2, 10), (4, 16)])
def test_sums(rng, dtype, executor, tokens, chosen):
    call = call_of(rng, tokens, chosen, dtype)
    bias = draw(rng, (E, N), dtype)
    for given in (None, bias):
        y = mm.gather_sum(*call, bias=given, group_size=32)
        assert y.dtype == dtype and y.shape == (tokens, N)
        assert_product_right(y, exact(*call, given), dtype)


def test_indices_out_of_range(rng, executor):
    call = call_of(rng)
    for bad in (E, -1, 2**31 - 1):
        call[4] = mx.array([[0, 1], [bad, 2], [3, 4]])
        y = np.array(mm.gather_sum(*call, bias=mx.ones((E, N)), group_size=32))
        assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_gradients_vmap_and_compile(rng, native):
    x, words, scales, biases, indices, weights = call_of(rng)
    bias = draw(rng, (E, N), mx.float32)
    ours = lambda x, weights, bias: mm.gather_sum(x, words, scales, biases, indices, weights, bias=bias, group_size=32)

    def dense(x, weights, bias):
        w = mx.dequantize(words, scales, biases, 32, 4)[indices]
        y = (x[..., None, :] @ w.swapaxes(-1, -2)).squeeze(-2) + bias[indices]
        return (y * weights[..., None]).sum(axis=-2)

    primals, cotangent = [x, weights, bias], draw(rng, (3, N), mx.float32, outliers=False)
    for a, b in zip(mx.vjp(ours, primals, [cotangent])[1], mx.vjp(dense, primals, [cotangent])[1], strict=True):
        assert_near(a, b, "gradient", LAYERS)
    mapped = mx.vmap(lambda x: ours(x, weights, bias))(mx.stack([x, 2 * x]))
    assert_near(mapped[1], ours(2 * x, weights, bias), "vmap", SUMS)
    assert_near(mx.compile(ours)(*primals), ours(*primals), "compile", SUMS)


def test_more_than_a_kernel_takes(rng, lenient, native):
    call = call_of(rng, 2, 17)
    mm.stats(reset=True)
    assert_product_right(mm.gather_sum(*call, group_size=32), exact(*call), mx.float32)
    assert list(mm.stats()["gather_sum"]["mx"]) == ["sums of more than 16 experts"]


def test_bad_input(rng, native):
    x, words, scales, biases, indices, weights = call_of(rng)

    def call(x=x, indices=indices, weights=weights, **options):
        return mm.gather_sum(x, words, scales, biases, indices, weights, group_size=32, **options)

    for options, message in [
        ({"indices": indices[:2]}, r"indices has shape \(2,2\), x has shape \(3,2,64\): expected shape \(3,2\)"),
        ({"weights": weights[..., None]}, r"weights has shape \(3,2,1\), x has shape \(3,2,64\)"),
        ({"bias": mx.ones((N,))}, r"bias has shape \(12\), w has shape \(5,12,8\): expected shape \(5,12\)"),
        ({"x": x[..., :32]}, r"x has 32 columns"),
        ({"x": x[0, 0]}, r"x has shape \(64\): expected at least two dimensions"),
        ({"mode": "int4"}, r"mode is 'int4': expected affine, mxfp4, mxfp8 or nvfp4"),
    ]:
        with pytest.raises(ValueError, match=rf"\[gather_sum\] {message}"):
            call(**options)
    with pytest.raises(mm.DtypeError, match=r"\[gather_sum\] indices has dtype float32: expected integers"):
        call(indices=weights)
    with pytest.raises(mm.DtypeError, match=r"\[gather_sum\] weights has dtype uint32"):
        call(weights=indices.astype(mx.uint32))
