"""Functions of deepseek_v41's streams, beside mlx-lm's: in half types, for batches, prompts and tokens."""

import importlib

import mlx.core as mx
import numpy as np
import pytest
from helpers.pages import MODELS as PAGE
from helpers.tolerances import LAYERS, ROUNDINGS, assert_near, units

import mlx_mittens as mm
from mlx_mittens.patching import hyper_connections

pytestmark = pytest.mark.usefixtures("native", "lenient")


@pytest.fixture(autouse=True)
def uncompiled():
    """On a CPU `mx.compile` would compile C++ for each type."""
    mx.disable_compile()
    yield
    mx.enable_compile()


SHAPES = [(1, 1), (2, 1), (2, 5)]  # batch and tokens
v41 = importlib.import_module("mlx_lm.models.deepseek_v41")


def normal(rng, *shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 3, 4])
def test_sums_of_streams(rng, dtype, shape, count):
    streams, x = normal(rng, *shape, count, 32, dtype=dtype), normal(rng, *shape, 32, dtype=dtype)
    mix, post, comb = normal(rng, *shape, count), normal(rng, *shape, count), normal(rng, *shape, count, count)
    limit = max(units(1, dtype), 8 * ROUNDINGS)
    for ours, theirs, arguments in (
        (hyper_connections.collapsed, v41._collapse, (streams, mix)),
        (hyper_connections.expanded, v41._expand, (x, streams, post, comb)),
    ):
        found, expected = ours(*arguments), theirs(*arguments)
        assert found.dtype == dtype and found.shape == expected.shape
        assert_near(found, expected, theirs.__name__, limit)


@pytest.mark.parametrize("shape", SHAPES)
def test_hyper_connection(rng, dtype, shape):
    model = PAGE["build"]("deepseek_v41", dtype)
    layer = model.layers[0].attn_hc
    layer.fn, layer.base, layer.scale = normal(rng, *layer.fn.shape), normal(rng, *layer.base.shape), normal(rng, 3)
    streams = normal(rng, *shape, layer.hc, 128, dtype=dtype)
    found, expected = hyper_connections.hyper_connection(layer, streams), layer(streams)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs, "mixes", LAYERS)
    layer.fn = layer.fn.astype(mx.float16)
    assert hyper_connections.hyper_connection(layer, streams) is None


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("heads", [0, 3])
def test_a_rotary_embedding_of_trailing_columns(rng, dtype, heads, inverse):
    rope = PAGE["build"]("deepseek_v41").layers[0].self_attn.rope
    x = normal(rng, *((2, 5, heads, 64) if heads else (2, 5, 64)), dtype=dtype)
    options = {"rope_dim": rope.dims, "offset": 7, "scale": 2.0, "inverse": inverse}
    found, expected = hyper_connections.turned(x, rope, **options), v41._apply_rope(x, rope, **options)
    np.testing.assert_array_equal(*(np.array(y[..., : -rope.dims].astype(mx.float32)) for y in (found, x)))
    assert_near(found, expected, "turned", max(units(2, dtype), 8 * ROUNDINGS))
    assert hyper_connections.turned(x, rope, rope_dim=rope.dims // 2) is None


def test_a_clamped_activation(rng, dtype):
    up, gate = (8 * normal(rng, 3, 64, dtype=dtype) for _ in range(2))
    activation = v41.DeepseekV41SwiGLU(10.0)
    found = hyper_connections.clamped_swiglu(activation, up, gate)
    assert_near(found, activation(up, gate), "activation", max(units(1, dtype), 8 * ROUNDINGS))
    assert hyper_connections.clamped_swiglu(v41.DeepseekV41SwiGLU(0.0), up, gate) is None


def test_fp8_is_bit_for_bit(rng, dtype):
    x = normal(rng, 2, 3, 64, dtype=dtype) * mx.array([1e-6, 1.0, 300.0]).reshape(3, 1).astype(dtype)
    found, expected = hyper_connections.fp8_rounded(x, 32), v41._fake_quant_fp8(x, 32)
    np.testing.assert_array_equal(np.array(found.astype(mx.float32)), np.array(expected.astype(mx.float32)))
    assert hyper_connections.fp8_rounded(x, 48) is None


def test_rows_by_their_numbers(rng):
    values, indices = normal(rng, 1, 6, 8), mx.array([[[0, 5, -1], [3, -1, -1]]])
    found, expected = hyper_connections.gathered_rows(values, indices), v41._gather_rows(values, indices)
    np.testing.assert_array_equal(np.array(found), np.array(expected))
    assert hyper_connections.gathered_rows(mx.concatenate([values, values]), indices) is None


@pytest.mark.parametrize("how", ["patched", "converted"])
def test_tokens_of_a_batch(rng, how):
    model = PAGE["build"]("deepseek_v41", mx.float32)
    steps = [mx.array(rng.integers(0, 300, (2, n))) for n in (9, 1, 1, 4, 1)]

    def logits():
        caches = model.make_cache()
        return [model(step, cache=caches) for step in steps]

    expected = logits()
    mx.eval(expected)
    if how == "patched":
        with mm.patched():
            found = logits()
    else:
        mm.nn.convert(model)
        found = logits()
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs, "logits", LAYERS)
