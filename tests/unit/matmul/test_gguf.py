"""GGUF blocks: byte for byte as from the gguf package, and products with them."""

import platform

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import BLOCK_BYTES, draw, exact_product, with_one_nan
from helpers.tolerances import SUM, SUMS, assert_product_right, of_terms

import mlx_mittens as mm
from mlx_mittens.specs import widen

gguf = pytest.importorskip("gguf")

KINDS = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def blocks_of(w: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quantize(w, KINDS[kind])


def weights(rng, shape):
    """Of every size, with zeros, ties, blocks of nothing, and halves between two integers."""
    size = np.exp2(rng.integers(-12, 12, (*shape[:-1], 1)))
    w = (rng.standard_normal(shape) * size).astype(np.float32)
    flat = w.reshape(-1, 32)
    flat[::7] = 0
    flat[1::7] = rng.integers(-8, 9, flat[1::7].shape) / 2
    flat[2::7] = rng.choice([-1.5, 1.5], flat[2::7].shape)
    return w


def test_quantize_and_dequantize_match_the_package(rng, dtype, executor, kind):
    w = np.array(mx.array(weights(rng, (64, 5 * 32))).astype(dtype).astype(mx.float32))
    with np.errstate(all="ignore"):
        expected = blocks_of(w, kind)
    blocks = mm.block_quantize(mx.array(w).astype(dtype), kind)
    assert blocks.dtype == mx.uint8
    np.testing.assert_array_equal(np.array(blocks), expected)
    widened = mm.block_dequantize(blocks, kind, dtype)
    exact = gguf.dequantize(expected, KINDS[kind])
    np.testing.assert_array_equal(widen(widened), widen(mx.array(exact).astype(dtype)))


def special_blocks(rng, dtype):
    """NaN, infinities, zeros of both signs, and magnitudes from the smallest subnormal to the largest number."""
    w = rng.standard_normal((1200, 32)).astype(np.float32)
    w /= np.abs(w).max(-1, keepdims=True)
    w[:600] *= np.exp2(rng.uniform(-149, -116, (600, 1)))  # of a scale, or of its reciprocal, float32 has no number
    w[600:800] *= np.exp2(rng.uniform(-30, -10, (200, 1)))  # nor a half
    w[800:900] *= np.exp2(rng.uniform(10, 127, (100, 1)))
    w[:1200:3][rng.random((400, 32)) < 0.5] = 0
    for row, value in zip(w[900:], np.resize([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], 300)):
        row[rng.random(32) < rng.choice([0.05, 0.5, 1])] = value
    w[1100:][rng.random((100, 32)) < 0.1] = np.nan
    return np.array(mx.array(w.astype(np.float32)).astype(dtype).astype(mx.float32))


def test_special_blocks_match_the_package(rng, dtype, executor, kind):
    """Byte for byte, save where the package converts an infinity or NaN to an integer."""
    w = special_blocks(rng, dtype)
    with np.errstate(all="ignore"):
        expected = blocks_of(w, kind)
        exact = gguf.dequantize(expected, KINDS[kind])
        largest = np.take_along_axis(w, np.abs(w).argmax(-1, keepdims=True), -1)
        scale = largest / np.float32(-8 if kind == "q4_0" else 127)
        defined = np.isfinite(w * np.where(scale == 0, 0, 1 / scale)).all(-1)
        if executor == "gpu":  # Apple's take subnormal numbers for zero
            defined &= (np.abs(scale) >= np.finfo(np.float32).tiny).all(-1)
    blocks = mm.block_quantize(mx.array(w).astype(dtype), kind)
    assert (150 if executor == "gpu" else 300) < defined.sum() < len(w)
    if platform.machine() == "x86_64" and executor != "gpu":  # there the package's integers are 0 too
        np.testing.assert_array_equal(with_one_nan(np.array(blocks), kind), with_one_nan(expected, kind))
    np.testing.assert_array_equal(np.array(blocks)[defined], expected[defined])
    np.testing.assert_array_equal(np.array(mm.block_dequantize(blocks, kind)), exact)
    assert np.isnan(exact[np.isnan(w).any(-1)]).all()


def test_any_leading_shape(rng, executor, kind):
    w = mx.array(weights(rng, (2, 3, 4, 64)))
    blocks = mm.block_quantize(w, kind)
    assert blocks.shape == (2, 3, 4, 36 if kind == "q4_0" else 68)
    widened = np.array(mm.block_dequantize(blocks, kind))
    np.testing.assert_array_equal(np.array(mm.block_dequantize(blocks[:, 1], kind)), widened[:, 1])
    assert mm.block_quantize(w[:0], kind).shape == (0, *blocks.shape[1:])
    np.testing.assert_array_equal(np.array(mm.block_quantize(w.swapaxes(0, 2), kind)), np.array(blocks).swapaxes(0, 2))


@pytest.mark.parametrize(
    "rows, columns, outputs",
    [
        (1, 32, 1), (1, 32, 3), (1, 96, 5), (1, 1024, 9), (1, 1056, 7), (1, 2880, 22), (2, 8224, 4), (3, 1120, 6),
        (5, 64, 33), (16, 160, 10),
    ],
)  # fmt: skip
def test_products(rng, dtype, executor, kind, rows, columns, outputs):
    blocks = blocks_of(rng.standard_normal((outputs, columns)).astype(np.float32), kind)
    w = gguf.dequantize(blocks, KINDS[kind])
    x = draw(rng, (rows, columns), dtype)
    bias = draw(rng, (outputs,), dtype) if rows % 2 else None
    y = mm.block_matmul(x, mx.array(blocks), kind, bias)
    assert y.shape == (rows, outputs)
    assert_product_right(y, exact_product(widen(x), w.astype(np.float64), widen(bias)), dtype)


@pytest.mark.parametrize("rows", [*range(1, 18), 31, 33, 129, 257])
def test_any_number_of_rows(rng, dtype, native, kind, rows):
    columns, outputs = 32 * int(rng.integers(1, 40)), int(rng.integers(1, 140))
    blocks = blocks_of(rng.standard_normal((outputs, columns)).astype(np.float32), kind)
    x = draw(rng, (rows, columns), dtype)
    exact = exact_product(widen(x), gguf.dequantize(blocks, KINDS[kind]).astype(np.float64))
    assert_product_right(mm.block_matmul(x, mx.array(blocks), kind), exact, dtype)


def test_views(rng, executor, kind):
    """Blocks on every boundary of a larger file, and activations in another order."""
    data = blocks_of(rng.standard_normal((8, 3 * 32)).astype(np.float32), kind)
    x = draw(rng, (96, 2), mx.float32)
    exact = exact_product(widen(x).T, gguf.dequantize(data, KINDS[kind]).astype(np.float64))
    for offset in (0, 1, 2, 3, 5):
        file = mx.array(np.concatenate([np.zeros(offset, np.uint8), data.reshape(-1)]))
        assert_product_right(mm.block_matmul(x.T, file[offset:].reshape(data.shape), kind), exact, mx.float32)
    every_other = mx.array(data)[::2]
    half = exact_product(widen(x).T, gguf.dequantize(data[::2], KINDS[kind]).astype(np.float64))
    assert_product_right(mm.block_matmul(x.T, every_other, kind), half, mx.float32)


def test_extremes(executor, kind):
    size = BLOCK_BYTES[kind]
    blocks = np.full((4, size), 0x77, np.uint8)  # q4_0: -1, q8_0: 119
    for row, d in enumerate([0.0, np.inf, np.nan, 65504.0]):
        blocks[row, :2] = np.frombuffer(np.float16(d).tobytes(), np.uint8)
    y = np.array(mm.block_matmul(mx.ones((1, 32)), mx.array(blocks), kind))[0]
    q = -1 if kind == "q4_0" else 119
    assert y[0] == 0 and np.isinf(y[1]) and np.sign(y[1]) == np.sign(q) and np.isnan(y[2])
    assert y[3] == 65504.0 * q * 32


@pytest.mark.parametrize("rows", [1, 2, 5, 17])
@pytest.mark.parametrize("columns", [32, 1024, 2080])
def test_products_of_large_activations(rng, dtype, executor, kind, rows, columns):
    """Neither integers times activations nor sums that cancel overflow, where the product does not."""
    largest = mx.finfo(dtype).max
    w = rng.standard_normal((5, columns)).astype(np.float32)
    data = blocks_of(w / np.abs(w).max() / (1 if dtype == mx.float16 else 4 * columns), kind)
    x = rng.choice([-1, 1], (rows, columns)) * rng.uniform(0.9, 1, (rows, columns)) * largest
    x[0, 1:-1] = rng.standard_normal(columns - 2)
    x = mx.array(x.astype(np.float32)).astype(dtype)
    exact = exact_product(widen(x), gguf.dequantize(data, KINDS[kind]).astype(np.float64))
    with mm.strict(executor != "gpu" or rows <= 16):  # more rows go to mx on a GPU
        y = mm.block_matmul(x, mx.array(data), kind)
    in_range = np.abs(exact.value) < largest
    assert in_range.any() and np.isfinite(widen(y)[in_range]).all()
    if in_range.all():
        assert_product_right(y, exact, dtype)


def test_views_of_more_elements_than_an_int_counts(native):
    """All of its strides are 0, so that its dimensions are as good as one."""
    shape = (65536, 34 * 964)
    assert shape[0] * shape[1] > 2**31
    blocks = mx.broadcast_to(mx.array([1], mx.uint8), shape)
    y = mm.block_matmul(mx.ones((1, 32 * 964)), blocks, "q8_0")
    scale = float(np.frombuffer(b"\1\1", np.float16)[0])
    assert mx.allclose(y, mx.full(y.shape, 32 * 964 * scale), rtol=SUM).item()
    mx.clear_cache()


def test_gradients_vmap_and_compile(rng, executor, kind):
    data = blocks_of(rng.standard_normal((6, 64)).astype(np.float32), kind)
    w, blocks = mx.array(gguf.dequantize(data, KINDS[kind])), mx.array(data)
    x, bias, cotangent = draw(rng, (3, 64), mx.float32), draw(rng, (6,), mx.float32), draw(rng, (3, 6), mx.float32)

    def ours(x, bias):
        return mm.block_matmul(x, blocks, kind, bias)

    found, expected = (mx.vjp(f, [x, bias], [cotangent])[1] for f in (ours, lambda x, bias: x @ w.T + bias))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=SUMS, atol=of_terms(100))
    for f in (mx.vmap(ours, in_axes=(0, None)), mx.compile(ours)):
        np.testing.assert_allclose(np.array(f(x, bias)), np.array(x @ w.T + bias), rtol=SUMS, atol=of_terms(100))


def product(x=(1, 32), x_type=mx.float32, blocks=(2, 18), blocks_type=mx.uint8, kind="q4_0", bias=None):
    return mm.block_matmul(
        mx.zeros(x, x_type), mx.zeros(blocks, blocks_type), kind, None if bias is None else mx.zeros(bias)
    )


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: product(kind="q9"), ValueError, r"kind is 'q9': expected q4_0, q4_1, .*, iq4_xs, mxfp4 or nvfp4"),
        (lambda: product(kind="q4_k"), ValueError, r"rows of a whole number of q4_k blocks, 144 bytes each"),
        (lambda: mm.block_quantize(mx.zeros((2, 256)), "q4_k"), ValueError, r"which the gguf package does not make"),
        (lambda: product(blocks=(2, 17)), ValueError, r"whole number"),
        (lambda: product(x=(1, 64)), ValueError, r"x has 64 columns"),
        (lambda: product(blocks_type=mx.float32), mm.DtypeError, r"blocks has dtype float32"),
        (lambda: product(x_type=mx.int32), mm.DtypeError, r"int32"),
        (lambda: product(blocks=(18,)), ValueError, r"two dimensions"),
        (lambda: product(bias=(3,)), ValueError, r"bias has shape \(3\)"),
        (lambda: mm.block_quantize(mx.zeros((2, 33)), "q8_0"), ValueError, r"multiple of 32"),
        (lambda: mm.block_quantize(mx.zeros((2, 32), mx.int8), "q8_0"), mm.DtypeError, r"w has dtype int8"),
        (lambda: mm.block_dequantize(mx.zeros((18,), mx.uint8), "q4_0", mx.int32), mm.DtypeError, r"dtype is int32"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("kind, bytes_a_block", [("q4_0", 18), ("q2_k", 84)])
def test_rows_of_more_weights_than_an_array_has(native, kind, bytes_a_block):
    blocks = mx.zeros((2**31 // bytes_a_block * bytes_a_block,), mx.uint8)
    with pytest.raises(ValueError, match=r"rows of \d+ weights: expected at most 2\*\*31 - 1"):
        mm.block_dequantize(blocks, kind)
