"""The gated half of a feed-forward block."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.matrices import draw, exact_swiglu, quantize
from helpers.tolerances import LAYERS, ROUNDINGS, SUMS, assert_product_right

import mlx_mittens as mm


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "rows, columns, outputs, group_size",
    [(1, 64, 1, 32), (1, 2880, 10, 64), (2, 896, 7, 64), (3, 640, 21, 128), (5, 1024, 6, 64), (16, 96, 9, 32)],
)
def test_shapes(rng, dtype, executor, rows, columns, outputs, group_size, bits):
    gate, up = (quantize(rng, (outputs, columns), dtype, group_size, bits) for _ in range(2))
    x = draw(rng, (rows, columns), dtype) * (0.5 / columns**0.5)
    y = mm.quantized_swiglu(x, gate, up, group_size, bits)
    assert_product_right(y, exact_swiglu(x, gate, up, group_size, bits), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [*range(1, 18), 33, 129, 257])
def test_any_number_of_rows(rng, dtype, native, rows, bits):
    columns, outputs = 32 * int(rng.integers(1, 40)), int(rng.integers(1, 140))
    gate, up = (quantize(rng, (outputs, columns), dtype, 32, bits) for _ in range(2))
    x = draw(rng, (rows, columns), dtype) * (0.5 / columns**0.5)
    assert_product_right(mm.quantized_swiglu(x, gate, up, 32, bits), exact_swiglu(x, gate, up, 32, bits), dtype)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("rows, columns, outputs", [(17, 32, 8), (33, 96, 41), (66, 64, 65), (530, 32, 9)])
def test_tiles_of_many_rows(rng, dtype, native, seed, rows, columns, outputs, bits):
    """In several orders of threads: bands of tiles, and tails of rows, columns and outputs."""
    gate, up = (quantize(rng, (outputs, columns), dtype, 32, bits) for _ in range(2))
    x = draw(rng, (rows, columns), dtype) * (0.5 / columns**0.5)
    with mm.simulator.enabled(seed=seed, gpu="m1"):
        mm.stats(reset=True)
        y = mm.quantized_swiglu(x, gate, up, 32, bits)
        mx.eval(y)
        (kernel,) = mm.stats()["quantized_swiglu"]["kernels"]
    assert "qmm_tiles" in kernel
    assert_product_right(y, exact_swiglu(x, gate, up, 32, bits), dtype)


ACTIVATIONS = {"swiglu": nn.silu, "geglu": nn.gelu_approx}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_what_the_layers_of_a_model_compute(rng, executor, activation):
    gate, up = (quantize(rng, (24, 128), mx.float32, 64, 4) for _ in range(2))
    x = draw(rng, (2, 1, 128), mx.float32, outliers=False) / 11
    expected = ACTIVATIONS[activation](mx.quantized_matmul(x, *gate)) * mx.quantized_matmul(x, *up)
    y = mm.quantized_swiglu(x, gate, up, activation=activation)
    np.testing.assert_allclose(np.array(y), np.array(expected), rtol=SUMS, atol=SUMS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates(executor, activation):
    words, scales = mx.full((2, 8), 0x11111111, mx.uint32), mx.array([[10.0], [-10.0]])
    triple = (words, scales, mx.zeros((2, 1)))
    y = np.array(mm.quantized_swiglu(mx.ones((1, 64)), triple, triple, activation=activation))
    np.testing.assert_array_equal(y, [[640.0 * 640.0, 0.0]])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_whose_square_overflows(executor, activation):
    """In silu it is times 0."""
    ones, scale = mx.full((1, 16), 0x01010101, mx.uint32), 2.0**-100
    gate, up = ((ones, mx.full((1, 1), factor), mx.zeros((1, 1))) for factor in (1.0, scale))
    x = mx.array([[value] + 63 * [0.0] for value in (1e30, -1e30)])
    y = mm.quantized_swiglu(x, gate, up, 64, 8, activation=activation)
    np.testing.assert_allclose(np.array(y), [[1e30 * 1e30 * scale], [0.0]], rtol=ROUNDINGS)
    infinite = (ones, mx.full((1, 1), 1e9), mx.zeros((1, 1)))
    assert mm.quantized_swiglu(x[:1], infinite, up, 64, 8, activation=activation).item() == math.inf


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_gates(native, activation):
    triple = (mx.full((1, 16), 0x01010101, mx.uint32), mx.ones((1, 1)), mx.zeros((1, 1)))
    x = mx.array([[value] + 63 * [0.0] for value in (math.inf, math.nan, 0.0)])
    y = np.array(mm.quantized_swiglu(x, triple, triple, 64, 8, activation=activation))
    np.testing.assert_array_equal(y, [[math.inf], [math.nan], [0.0]])


def test_strided_weights(rng, executor):
    """Gate and up as halves of one matrix, and with strides that differ."""
    both = quantize(rng, (2 * 16, 64), mx.float32, 32, 4)
    gate, up = ([a[i * 16 : (i + 1) * 16] for a in both] for i in range(2))
    x = draw(rng, (1, 64), mx.float32) / 8
    assert_product_right(mm.quantized_swiglu(x, gate, up, 32), exact_swiglu(x, gate, up, 32, 4), mx.float32)
    every_other = [a[::2] for a in both]
    assert_product_right(
        mm.quantized_swiglu(x, gate, every_other, 32), exact_swiglu(x, gate, every_other, 32, 4), mx.float32
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_vmap_and_compile(rng, executor, activation):
    gate, up = (quantize(rng, (16, 64), mx.float32, 32, 4) for _ in range(2))
    x = draw(rng, (3, 64), mx.float32, outliers=False) / 8

    def ours(x):
        return mm.quantized_swiglu(x, gate, up, 32, activation=activation)

    def dense(x):
        w, v = (mx.dequantize(*triple, 32, 4) for triple in (gate, up))
        return ACTIVATIONS[activation](x @ w.T) * (x @ v.T)

    cotangent = draw(rng, (3, 16), mx.float32)
    for a, b in zip(mx.vjp(ours, [x], [cotangent])[1], mx.vjp(dense, [x], [cotangent])[1], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=LAYERS, atol=LAYERS)
    np.testing.assert_allclose(np.array(mx.vmap(ours)(x)), np.array(dense(x)), rtol=SUMS, atol=SUMS)
    np.testing.assert_allclose(np.array(mx.compile(ours)(x)), np.array(dense(x)), rtol=SUMS, atol=SUMS)


def test_bad_input(rng, native):
    x, gate = mx.zeros((1, 64)), quantize(rng, (16, 64), mx.float32, 64, 4)
    for up, message in [
        (quantize(rng, (8, 64), mx.float32, 64, 4), "up's w has 8 rows, gate's has 16"),
        (quantize(rng, (16, 128), mx.float32, 64, 4), "x has 64 columns"),
        (quantize(rng, (2, 16, 64), mx.float32, 64, 4), r"up's w has shape \(2,16,8\): expected two dimensions"),
    ]:
        with pytest.raises(ValueError, match=r"\[quantized_swiglu\] " + message):
            mm.quantized_swiglu(x, gate, up)
    with pytest.raises(ValueError, match=r"bits is 9"):
        mm.quantized_swiglu(x, gate, gate, bits=9)
    with pytest.raises(ValueError, match=r"\[quantized_swiglu\] activation is 'clipped': expected swiglu or geglu"):
        mm.quantized_swiglu(x, gate, gate, activation="clipped")
