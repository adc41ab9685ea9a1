"""Promises of quantized_embedding alone: mx's bits, indices of any kind, and layers."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.calls import FLOAT_MODES
from helpers.matrices import draw, quantize
from helpers.support import assert_same_bits, launched_on_apple

import mlx_mittens as mm
from mlx_mittens.specs import SMALLEST_NORMAL

ROWS = 21
INTEGERS = (mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64)


def of_mx(indices, w, scales, biases=None, group_size=64, bits=4, mode="affine"):
    with mx.stream(mx.cpu):
        rows = (w[indices], scales[indices], None if biases is None else biases[indices])
        return mx.dequantize(*rows, group_size=group_size, bits=bits, mode=mode)


@pytest.fixture
def indices(rng):
    return mx.array(rng.integers(-ROWS, ROWS, (2, 5)))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_bits_of_mx(rng, dtype, executor, indices, bits, group_size):
    table = quantize(rng, (ROWS, 384), dtype, group_size, bits)
    y = mm.quantized_embedding(indices, *table, group_size, bits)
    assert y.dtype == dtype and y.shape == (2, 5, 384)
    assert_same_bits(y, of_mx(indices, *table, group_size, bits))


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_small_floats(rng, executor, indices, mode):
    """Also codes and scales that are no number, infinite or zero."""
    bits, group_size = FLOAT_MODES[mode]
    with mx.stream(mx.cpu):
        w, scales = mx.quantize(draw(rng, (ROWS, 96), mx.float32), group_size, bits, mode)
    words, bytes_ = np.array(w), np.array(scales)
    words[:3] = rng.integers(0, 2**32, words[:3].shape, dtype=np.uint32)
    bytes_[0], bytes_[1], bytes_[2] = 0, 127, 255
    table = mx.array(words), mx.array(bytes_)
    indices = mx.concatenate([indices.flatten(), mx.array([0, 1, 2])])
    y = mm.quantized_embedding(indices, *table, group_size=group_size, bits=bits, mode=mode)
    expected = of_mx(indices, *table, group_size=group_size, bits=bits, mode=mode)
    assert y.dtype == expected.dtype == mx.bfloat16
    if executor != "native":  # GPUs take numbers below the smallest normal one for zero
        expected = mx.where(mx.abs(expected) < SMALLEST_NORMAL[mx.bfloat16], mx.zeros_like(expected), expected)
    np.testing.assert_array_equal(np.array(y.astype(mx.float32)), np.array(expected.astype(mx.float32)))


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_integers_of_any_kind(rng, executor, kind):
    table = quantize(rng, (ROWS, 64), mx.float16, 64, 4)
    indices = mx.array([[3, 0], [20, 7]], kind)
    assert_same_bits(mm.quantized_embedding(indices, *table), of_mx(indices, *table))
    if mx.issubdtype(kind, mx.signedinteger):
        indices = mx.array([-1, -21, 5], kind)
        assert_same_bits(mm.quantized_embedding(indices, *table), of_mx(indices, *table))


@pytest.mark.parametrize(
    "indices",
    [
        mx.array([ROWS, -ROWS - 1, 2**31 - 1, -(2**31)], mx.int32),
        mx.array([ROWS, 2**31, 2**32 - 1, 2**32 - ROWS], mx.uint32),
        mx.array([2**32, -(2**32), 2**32 + 3, -(2**40)], mx.int64),
        mx.array(np.array([2**32, 2**63, 2**32 + 3, 2**64 - 1], np.uint64)),
    ],
    ids=str,
)
def test_out_of_range_is_nan(rng, executor, dtype, indices):
    table = quantize(rng, (ROWS, 64), dtype, 64, 4)
    between = mx.concatenate([mx.array([5], indices.dtype), indices, mx.array([6], indices.dtype)])
    y = mm.quantized_embedding(between, *table)
    assert mx.isnan(y[1:-1]).all() and not mx.isnan(y[0]).any() and not mx.isnan(y[-1]).any()
    assert_same_bits(y[0::5], of_mx(mx.array([5, 6]), *table))


def test_a_table_without_rows(executor):
    table = mx.zeros((0, 8), mx.uint32), mx.zeros((0, 1)), mx.zeros((0, 1))
    assert mx.isnan(mm.quantized_embedding(mx.array([0, -1]), *table)).all()


def test_values_that_are_not_finite(rng, executor, dtype):
    """Of the whole group, as mx has them: a scale that is infinite makes NaN of a zero."""
    w, scales, biases = quantize(rng, (4, 64), dtype, 32, 4)
    scales[0, 0], scales[1, 1], biases[2, 0] = mx.inf, mx.nan, -mx.inf
    found = mm.quantized_embedding(mx.arange(4), w, scales, biases, 32, 4)
    expected = of_mx(mx.arange(4), w, scales, biases, 32, 4)
    np.testing.assert_array_equal(np.array(found.astype(mx.float32)), np.array(expected.astype(mx.float32)))


def test_views(rng, executor):
    w, scales, biases = quantize(rng, (2 * ROWS, 256), mx.float16, 64, 4)
    indices = mx.arange(40, dtype=mx.int32).reshape(4, 10).T[::3]
    views = ((slice(None, None, 2),) * 3, (slice(1, None),) * 3, ((..., slice(16, 24)), *[(..., slice(2, 3))] * 2))
    for view in views:
        table = [a[part] for a, part in zip((w, scales, biases), view, strict=True)]
        some = indices % len(table[0])
        assert_same_bits(mm.quantized_embedding(some, *table), of_mx(some, *table))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (300,)])
def test_shapes(rng, executor, shape):
    table = quantize(rng, (ROWS, 64), mx.float32, 64, 4)
    indices = mx.array(rng.integers(0, ROWS, shape))
    y = mm.quantized_embedding(indices, *table)
    assert y.shape == (*shape, 64)
    if 0 not in shape:
        assert_same_bits(y.reshape(-1, 64), of_mx(indices.reshape(-1), *table))


def test_vmap(rng, executor):
    table = quantize(rng, (ROWS, 64), mx.float32, 64, 4)
    stack = [mx.stack([a, a[::-1]]) for a in table]
    indices = mx.array(rng.integers(-ROWS, ROWS, (2, 5)))
    over_indices = mx.vmap(lambda i: mm.quantized_embedding(i, *table), in_axes=1)(indices)
    assert_same_bits(over_indices, of_mx(indices.T, *table))
    over_both = mx.vmap(mm.quantized_embedding)(indices, *stack)
    assert_same_bits(over_both, mx.stack([of_mx(i, *(a[n] for a in stack)) for n, i in enumerate(indices)]))


def test_gradients_are_those_of_mx(rng, executor):
    w, scales, biases = quantize(rng, (ROWS, 64), mx.float32, 64, 4)
    indices = mx.array([3, 3, -1])
    weight = draw(rng, (3, 64), mx.float32)
    ours, theirs = (
        mx.grad(lambda s, b, op=op: (weight * op(indices, w, s, b)).sum(), argnums=(0, 1))(scales, biases)
        for op in (mm.quantized_embedding, of_mx)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_same_bits(a, b)


def test_compiled_without_shapes(rng, executor):
    table = quantize(rng, (ROWS, 64), mx.float16, 64, 4)
    function = mx.compile(lambda i: mm.quantized_embedding(i, *table), shapeless=True)
    for n in (1, 4, 9):
        indices = mx.array(rng.integers(0, ROWS, (n,)))
        assert_same_bits(function(indices), of_mx(indices, *table))


@pytest.mark.parametrize("mode", ["affine", *FLOAT_MODES])
def test_layers(rng, executor, mode):
    bits, group_size = FLOAT_MODES.get(mode, (4, 64))
    with mx.stream(mx.cpu):
        layer = nn.Embedding(ROWS, 128).to_quantized(group_size, bits, mode)
        mx.eval(layer.parameters())
    indices = mx.array([[3, 3, -1]])
    expected = of_mx(indices, layer.weight, layer.scales, layer.get("biases"), group_size, bits, mode)
    mm.stats(reset=True)
    with mm.patched(strict=True):
        patched = layer(indices)
        mx.eval(patched)
    converted = mm.nn.convert(layer)(indices)
    assert_same_bits(patched, expected)
    assert_same_bits(converted, expected)
    assert set(mm.stats()) == {"quantized_embedding"}


def test_what_is_left_to_mx(rng):
    layer = nn.QuantizedEmbedding(ROWS, 64)
    w, scales, biases = layer.weight, layer.scales, layer.biases
    three = mx.array([3])
    with mm.strict(False):
        with mm.patched():
            assert layer(slice(3)).shape == (3, 64)
            with pytest.raises(ValueError, match="boolean indices"):
                layer(mx.array([True]))
        mm.stats(reset=True)
        wide = [a.astype(mx.float64) for a in (scales, biases)]
        assert mm.quantized_embedding(three, w, *wide, stream=mx.cpu).dtype == mx.float64
        mixed = w, scales.astype(mx.float16), biases
        assert_same_bits(mm.quantized_embedding(three, *mixed), of_mx(three, *mixed))
        reasons = set(mm.stats()["quantized_embedding"]["mx"])
    assert reasons == {"float64", "scales and biases of two dtypes"}


def test_one_launch(rng):
    table = quantize(rng, (ROWS, 2048), mx.float16, 64, 4)
    indices = mx.array([[3]])
    mx.eval(table, indices)
    (name,) = launched_on_apple(lambda: mm.quantized_embedding(indices, *table))
    assert name == "quantized_embedding_4bit_float16"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"indices": mx.array([0.5])}, mm.DtypeError, "indices has dtype float32: expected integers"),
        ({"indices": mx.array([True])}, mm.DtypeError, "indices has dtype bool: expected integers"),
        ({"w": mx.zeros((2, 4, 8), mx.uint32)}, ValueError, r"w has shape \(2,4,8\): expected two dimensions"),
        ({"w": mx.zeros((4, 8))}, mm.DtypeError, "w has dtype float32: expected uint32"),
        ({"scales": mx.zeros((4, 2))}, ValueError, r"biases has shape \(4,1\), scales has shape \(4,2\)"),
        ({"biases": None}, ValueError, "biases is None: expected an array"),
        ({"bits": 7}, ValueError, "bits is 7: expected 1, 2, 3, 4, 5, 6 or 8"),
        ({"group_size": 48}, ValueError, "group_size is 48: expected 32, 64 or 128"),
        ({"mode": "int4"}, ValueError, "mode is 'int4': expected affine, mxfp4, mxfp8 or nvfp4"),
    ],
)
def test_bad_input(arguments, error, message):
    table = {"w": mx.zeros((4, 8), mx.uint32), "scales": mx.zeros((4, 1)), "biases": mx.zeros((4, 1))}
    with pytest.raises(error, match=r"\[quantized_embedding\] " + message):
        mm.quantized_embedding(**{"indices": mx.array([0]), **table, **arguments})
