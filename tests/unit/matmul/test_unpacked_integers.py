"""Products on CPUs in which x becomes integers, of formats whose weights are unpacked or looked up in a table."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, draw_blocks, exact_product, exact_swiglu, quantize
from helpers.support import check_instruction_sets
from helpers.tolerances import INT8_ACTIVATIONS, assert_product_right, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import EPSILON, dequantized, widen

HALVES = [mx.float16, mx.bfloat16]
CPU = mx.Device(mx.cpu)
AFFINE = [("affine", bits) for bits in (2, 3, 5, 6)]
FLOATS = [("mxfp4", 4), ("nvfp4", 4)]
GROUPS = {"affine": 64, "mxfp4": 32, "nvfp4": 16}
KINDS = tuple(specs.gguf.KINDS)

formats = pytest.mark.parametrize("mode, bits", AFFINE + FLOATS)


def pack(integers, bits):
    """Integers one after another from the lowest bit up, in words."""
    places = (integers[..., None] >> np.arange(bits)) & 1
    stream = np.packbits(places.reshape(len(integers), -1).astype(np.uint8), axis=-1, bitorder="little")
    return mx.array(stream.view(np.uint32))


def draw_weights(rng, outputs, columns, mode, bits, dtype, zero=None):
    """The arrays of a format, with a column of zeros if one is named."""
    integers = rng.integers(0, 1 << bits, (outputs, columns))
    groups = (outputs, columns // GROUPS[mode])
    if zero is not None:
        integers[:, zero] = 1 << (bits - 1) if mode == "affine" else 0
    words = pack(integers, bits)
    if mode != "affine":
        one = 127 if mode == "mxfp4" else 7 << 3
        return words, mx.array(rng.integers(one - 3, one + 1, groups).astype(np.uint8))
    scales = np.exp2(rng.integers(-3, 0, groups) + 2.0 - bits)
    return words, mx.array(scales).astype(dtype), mx.array(-(1 << (bits - 1)) * scales).astype(dtype)


def options(mode, bits):
    return {"group_size": GROUPS[mode], "bits": bits, "mode": mode, "stream": CPU}


def dense(w, mode, bits):
    return dequantized(*w, *([None] * (3 - len(w))), GROUPS[mode], bits, mode)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 24, 41])
@pytest.mark.parametrize("columns, outputs", [(64, 1), (448, 71), (2112, 33)])
@formats
def test_products(rng, dtype, rows, columns, outputs, mode, bits):
    """Along the weights and in panels, whose chunks have odd ends."""
    w = draw_weights(rng, outputs, columns, mode, bits, dtype)
    x, bias = draw(rng, (rows, columns), dtype, outliers=rows == 8), draw(rng, (outputs,), dtype)
    y = mm.quantized_matmul(x, *w, bias=bias, **options(mode, bits))
    assert_product_right(y, exact_product(widen(x), dense(w, mode, bits), widen(bias)), dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 3, 9, 25])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_blocks(rng, dtype, rows, kind):
    """Every other row of blocks, so that rows are not back to back."""
    blocks = draw_blocks(rng, 74, 1280 // specs.gguf.KINDS[kind].weights, kind, spread=1)
    w = specs.gguf.weights(blocks, kind)
    x = draw(rng, (rows, 1280), dtype, outliers=False)
    y = mm.block_matmul(x, mx.array(blocks)[::2], kind, stream=CPU)
    assert_product_right(y, exact_product(widen(x), w[::2]), dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("outlier", [8.0, 100.0, 6e4])
@formats
def test_an_outlier_that_meets_a_weight_of_zero_hides_nothing(rng, dtype, rows, outlier, mode, bits):
    w = draw_weights(rng, 8, 1024, mode, bits, dtype, zero=5)
    x = widen(draw(rng, (rows, 1024), dtype, outliers=False))
    x[::3, 5] = outlier
    x = mx.array(x).astype(dtype)
    y = mm.quantized_matmul(x, *w, **options(mode, bits))
    exact = exact_product(widen(x), dense(w, mode, bits)).value
    assert (np.abs(widen(y) - exact) <= units(1, dtype) * (np.abs(exact) + np.sqrt(np.mean(exact**2)))).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rows", [2, 40])
@formats
def test_an_element_that_is_not_finite_stays_in_its_row(rng, value, rows, mode, bits):
    w = draw_weights(rng, 24, 256, mode, bits, mx.float16)
    x = widen(draw(rng, (rows, 256), mx.float16, outliers=False))
    x[0, 17] = value
    y = mm.quantized_matmul(mx.array(x).astype(mx.float16), *w, **options(mode, bits))
    assert not np.isfinite(widen(y[0])).any()
    exact = exact_product(widen(mx.array(x[1:]).astype(mx.float16)), dense(w, mode, bits))
    assert_product_right(y[1:], exact, mx.float16)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 40])
def test_scales_that_are_no_number(rng, rows, mode):
    words, scales = draw_weights(rng, 3, 128, mode, 4, mx.float16)
    bytes_of = np.array(scales)
    bytes_of[1, 1] = 0xFF if mode == "mxfp4" else 0x7F
    x = draw(rng, (rows, 128), mx.float16, outliers=False)
    y = widen(mm.quantized_matmul(x, words, mx.array(bytes_of), **options(mode, 4)))
    assert np.isnan(y[:, 1]).all() and np.isfinite(y[:, [0, 2]]).all()


@pytest.mark.parametrize("size", [0.0, 2.0**-120, 2.0**-90, 2.0**100])
@pytest.mark.parametrize("rows", [1, 40])
@formats
def test_tiny_and_huge_rows(rng, size, rows, mode, bits):
    w = draw_weights(rng, 16, 192, mode, bits, mx.bfloat16)
    x = (draw(rng, (rows, 192), mx.float32) * size).astype(mx.bfloat16)
    y = widen(mm.quantized_matmul(x, *w, **options(mode, bits)))
    exact = exact_product(widen(x), dense(w, mode, bits))
    assert (np.abs(y - exact.value) <= EPSILON[mx.bfloat16] * np.abs(exact.value) + 2.0**-14 * exact.magnitude).all()


@formats
def test_exact_rows_are_those_of_each_row_alone(rng, mode, bits):
    w = draw_weights(rng, 40, 512, mode, bits, mx.float16)
    x = widen(draw(rng, (32, 512), mx.float16, outliers=False))
    x[3::5, 100] = 500
    x = mx.array(x).astype(mx.float16)
    product = lambda x: mm.quantized_matmul(x, *w, exact=True, **options(mode, bits))
    alone = mx.concatenate([product(x[i : i + 1]) for i in range(32)])
    for rows in (2, 3, 9, 32):
        assert mx.array_equal(product(x[:rows]), alone[:rows])


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("bits", [3, 6])
def test_feed_forward_parts(rng, rows, bits):
    gate, up = (quantize(rng, (72, 512), mx.float16, 64, bits) for _ in range(2))
    x = draw(rng, (rows, 512), mx.float16, outliers=False)
    y = mm.quantized_swiglu(x, gate, up, 64, bits, stream=CPU)
    exact = exact_swiglu(x, gate, up, 64, bits)
    assert (np.abs(widen(y) - exact.value) <= units(2, mx.float16) * (np.abs(exact.value) + exact.magnitude)).all()


@pytest.mark.parametrize("tokens", [3, 200])
@formats
def test_experts(rng, tokens, mode, bits):
    w = [draw_weights(rng, 40, 256, mode, bits, mx.float16) for _ in range(4)]
    stack = [mx.stack(arrays) for arrays in zip(*w, strict=True)]
    x = draw(rng, (tokens, 1, 1, 256), mx.float16, outliers=False)
    experts = rng.integers(0, 4, (tokens, 2)).astype(np.uint32)
    y = mm.gather_qmm(x, *stack, rhs_indices=mx.array(experts), **options(mode, bits))
    every = np.stack([dense(one, mode, bits) for one in w])
    exact = np.einsum("tk,tenk->ten", widen(x)[:, 0, 0], every[experts])
    size = np.sqrt(np.mean(exact**2))
    assert (np.abs(widen(y)[:, :, 0] - exact) <= units(1, mx.float16) * (np.abs(exact) + size)).all()


@pytest.mark.parametrize("dtype", [mx.float32, *HALVES])
@pytest.mark.parametrize("rows", [1, 9, 40])
@formats
def test_int8_activations(rng, dtype, rows, mode, bits):
    w = draw_weights(rng, 71, 544 if mode != "affine" else 576, mode, bits, dtype)
    x = draw(rng, (rows, dense(w, mode, bits).shape[1]), dtype, outliers=False)
    y = mm.quantized_matmul(x, *w, activations="int8", **options(mode, bits))
    error = widen(y) - (exact := exact_product(widen(x), dense(w, mode, bits)).value)
    assert np.sqrt(np.mean(error**2)) <= INT8_ACTIVATIONS * np.sqrt(np.mean(exact**2))


def test_every_instruction_set():
    """The tests above, with each set of this machine but its best one."""
    check_instruction_sets(__file__, "not every")
