"""GGUF kinds but q4_0 and q8_0: byte for byte as from the gguf package, and products with them."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, draw_blocks, exact_product
from helpers.tolerances import FLOAT16, SUMS, assert_product_right, of_terms

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.specs import widen

gguf = pytest.importorskip("gguf")

KINDS = ("q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4")
QUANTIZED = ("q4_1", "q5_0", "q5_1", "mxfp4")


def type_of(kind):
    return getattr(gguf.GGMLQuantizationType, "IQ4_" + kind[4:].upper() if kind[0] == "i" else kind.upper())


def size_of(kind):
    """Weights and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[type_of(kind)]


def drawn(rng, rows, count, kind, **options):
    """Blocks, and their weights as the package has them."""
    blocks = draw_blocks(rng, rows, count, kind, **options)
    return blocks, gguf.dequantize(blocks, type_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_matches_the_package(rng, dtype, executor, kind):
    blocks, w = drawn(rng, 40, 3, kind)
    found = mm.block_dequantize(mx.array(blocks), kind, dtype)
    np.testing.assert_array_equal(widen(found), widen(mx.array(w).astype(dtype)))
    some = mm.block_dequantize(mx.array(blocks)[::3], kind)
    np.testing.assert_array_equal(np.array(some), w[::3])


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_are_read_within_their_block(rng, executor, kind):
    """Halves that are NaN, too: the same as from the package."""
    blocks = rng.integers(0, 256, (64, size_of(kind)[1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, type_of(kind))
    np.testing.assert_array_equal(np.array(mm.block_dequantize(mx.array(blocks), kind)), expected)


@pytest.mark.parametrize("kind", ("q4_0", "q8_0", *KINDS))
def test_the_reference_matches_the_package(rng, kind):
    known = specs.gguf.KINDS[kind]
    assert (known.weights, known.bytes) == size_of(kind)
    blocks, w = drawn(rng, 5, 3, kind)
    np.testing.assert_array_equal(specs.gguf.weights(blocks, kind).astype(np.float32), w)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantize_matches_the_package(rng, dtype, native, kind):
    w = rng.standard_normal((300, 32)) * np.exp2(rng.integers(-12, 12, (300, 1)))
    w[::7], w[1::7] = 0, rng.integers(-8, 9, w[1::7].shape) / 2
    w[2::7], w[3::7] = rng.choice([-1.5, 1.5], w[2::7].shape), 1.25
    w = np.array(mx.array(w.astype(np.float32)).astype(dtype).astype(mx.float32))
    with np.errstate(all="ignore"):
        expected = gguf.quantize(w, type_of(kind))
    blocks = mm.block_quantize(mx.array(w).astype(dtype), kind)
    np.testing.assert_array_equal(np.array(blocks), expected)


@pytest.fixture(params=[1, 2])
def tiles(native, request):
    """The kernels for many rows of Apple GPUs, in two orders of threads; a call gives the launches."""
    with mm.simulator.enabled(seed=request.param, gpu="m2-max"):
        _ext.simulator_record(True)
        yield lambda: [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", *KINDS])
@pytest.mark.parametrize("rows, outputs", [(17, 16), (19, 37), (40, 70), (65, 21)])
def test_products_of_many_rows(rng, dtype, tiles, kind, rows, outputs):
    """Tiles, with tails of rows, columns and outputs."""
    count = 256 // size_of(kind)[0] + 1
    assert_products_right(rng, dtype, kind, rows, count, outputs)
    size = 64 if rows == 40 and kind in ("q4_0", "q8_0", "q4_k", "q5_k", "q6_k") else 32
    assert tiles() == [f"block_matmul_tiles_{kind}_{size}_{str(dtype).split('.')[-1]}"]


@pytest.mark.parametrize("rows", [1, 20])
def test_products_of_odd_rows(rng, dtype, tiles, rows):
    """Blocks of 17 bytes: rows begin on any byte."""
    assert_products_right(rng, dtype, "mxfp4", rows, 3, 20)


def test_quantize_every_exponent(native):
    """Scales of mxfp4 from the smallest to the largest, and magnitudes at both sides of powers of two."""
    d = np.float32(2) ** np.arange(-124, 127).astype(np.float32)
    near = np.concatenate([d, *(np.nextafter(d, np.float32(side)) for side in (0, np.inf))])
    w = np.linspace(-1, 1, 32, dtype=np.float32) * near[:, None]
    found = np.array(mm.block_quantize(mx.array(w), "mxfp4"))
    np.testing.assert_array_equal(found, gguf.quantize(w, type_of("mxfp4")))


@pytest.mark.parametrize("kind", ("q4_1", "q5_0", "q5_1"))
def test_quantize_no_finite_number(native, kind):
    """A block with a NaN is all NaN; blocks without one are unaffected."""
    w = np.ones((4, 32), np.float32)
    w[0, 3], w[1, 5], w[2, 7] = np.nan, np.inf, -np.inf
    found = np.array(mm.block_dequantize(mm.block_quantize(mx.array(w), kind), kind))
    assert np.isnan(found[0]).all() and not np.isfinite(found[1:3]).any() and (np.abs(found[3] - 1) < FLOAT16).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, count, outputs", [(1, 1, 1), (1, 3, 9), (2, 9, 5), (7, 2, 33), (9, 5, 70), (33, 1, 12)])
def test_products(rng, dtype, native, kind, rows, count, outputs):
    assert_products_right(rng, dtype, kind, rows, count, outputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, count, outputs", [(1, 1, 1), (1, 9, 5), (5, 1, 6)])
def test_products_of_kernels(rng, dtype, executor, kind, rows, count, outputs):
    assert_products_right(rng, dtype, kind, rows, count, outputs)


def assert_products_right(rng, dtype, kind, rows, count, outputs):
    blocks, w = drawn(rng, outputs, count, kind)
    x = draw(rng, (rows, w.shape[1]), dtype)
    bias = draw(rng, (outputs,), dtype) if rows % 2 else None
    y = mm.block_matmul(x, mx.array(blocks), kind, bias)
    assert_product_right(y, exact_product(widen(x), w.astype(np.float64), widen(bias)), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4])
def test_products_of_large_activations(rng, dtype, executor, kind, rows):
    """Neither integers times activations nor sums that cancel overflow, where the product does not."""
    largest = mx.finfo(dtype).max
    blocks, w = drawn(rng, 5, 2, kind, size=1 / 1000 if kind == "nvfp4" else 3e-7)
    x = rng.choice([-1, 1], (rows, w.shape[1])) * rng.uniform(0.9, 1, (rows, w.shape[1])) * largest
    x[0, 1:-1] = rng.standard_normal(w.shape[1] - 2)
    x = mx.array(x.astype(np.float32)).astype(dtype)
    exact = exact_product(widen(x), w.astype(np.float64))
    y = mm.block_matmul(x, mx.array(blocks), kind)
    assert (np.abs(widen(x)) @ np.abs(w.astype(np.float64)).T < largest).all()
    assert_product_right(y, exact, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_views(rng, executor, kind):
    """Blocks on every boundary of a larger file."""
    blocks, w = drawn(rng, 5, 1, kind)
    x = draw(rng, (1, w.shape[1]), mx.float32)
    for offset in (2, 5, 16):
        file = mx.array(np.concatenate([np.zeros(offset, np.uint8), blocks.reshape(-1)]))
        view = file[offset:].reshape(blocks.shape)
        np.testing.assert_array_equal(np.array(mm.block_dequantize(view, kind)), w)
        assert_product_right(mm.block_matmul(x, view, kind), exact_product(widen(x), w.astype(np.float64)), mx.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_vmap_and_compile(rng, native, kind):
    blocks, w = drawn(rng, 6, 1, kind)
    x, cotangent = draw(rng, (3, w.shape[1]), mx.float32), draw(rng, (3, 6), mx.float32)
    ours = lambda x: mm.block_matmul(x, mx.array(blocks), kind)
    (found,), (expected,) = (mx.vjp(f, [x], [cotangent])[1] for f in (ours, lambda x: x @ mx.array(w).T))
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=SUMS, atol=of_terms(100))
    for f in (mx.vmap(ours), mx.compile(ours)):
        np.testing.assert_allclose(np.array(f(x)), np.array(ours(x)), rtol=SUMS, atol=of_terms(100))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantizers_without_kernels(kind):
    with mm.simulator.enabled(), pytest.raises(ValueError, match=f"kind is '{kind}': expected q4_0 or q8_0 on a GPU"):
        mm.block_quantize(mx.zeros((2, 32)), kind)
