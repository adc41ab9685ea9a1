"""Heads made of latents, whose keys share the columns that are turned: one launch turns and appends them."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.pages import MODELS
from helpers.tolerances import LAYERS, assert_near, of_roundings
from mlx_lm.models import cache as caches

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.specs import reference

BASE = 1e4
MODELS_OF_HEADS = ["deepseek_v2", "minicpm3", "youtu_llm"]
# Batch, heads, tokens, columns that are copied, turned ones, width of values.
SHAPES = [
    (1, 4, 1, 64, 32, 64),
    (2, 3, 2, 1, 2, 5),  # the fewest columns
    (3, 1, 1, 67, 66, 1),  # parts of 64 columns that no border meets
    (1, 2, 3, 3, 130, 33),  # most are turned
    (1, 3, 1, 128, 64, 128),  # DeepSeek-V2's
]


def drawn(rng, shape, dtype):
    batch, heads, tokens, begin, dims, columns = shape
    shapes = [
        (batch, tokens, heads * (begin + dims)),
        (batch, tokens, heads * (begin + columns)),
        (batch, tokens, 7 + dims),
    ]
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in shapes]


def parts(arrays, shape):
    """Queries, keys before the turned columns, values, and the key that heads share: views."""
    batch, heads, tokens, begin, _, _ = shape
    queries, made, latent = arrays
    queries, made = (a.reshape(batch, tokens, heads, -1).transpose(0, 2, 1, 3) for a in (queries, made))
    return queries, *mx.split(made, [begin], axis=-1), latent[:, None, :, 7:]


def step(cache, arrays, shape, offset, traditional=True, freqs=None):
    queries, keys, values, key = parts([a * 1 for a in arrays], shape)
    before, part = mx.split(queries, [shape[3]], axis=-1)
    base = BASE if freqs is None else None
    options = {"traditional": traditional, "base": base, "scale": 1.0, "offset": offset, "freqs": freqs}
    turned, key = (mx.fast.rope(a, shape[4], **options) for a in (part, key))
    queries, keys = _ext.before_turned(before, turned, queries, part), _ext.before_turned(keys, key)
    return queries, *cache.update_and_fetch(keys, values)


def exact(arrays, shape, offset, traditional=True, freqs=None):
    queries, keys, values, key = (specs.widen(a) for a in parts(arrays, shape))
    begin, dims = shape[3:5]
    base = BASE if freqs is None else None
    turned, key = (
        reference.rope(a, dims, base, offset, None if freqs is None else specs.widen(freqs), traditional)[0]
        for a in (queries[..., begin:], key)
    )
    queries = np.concatenate([queries[..., :begin], turned], axis=-1)
    key = np.broadcast_to(key, (*keys.shape[:-1], dims))
    return queries, np.concatenate([keys, key], axis=-1), values


def appends():
    return tiny.kernels("rope_append")


@pytest.mark.parametrize("way", ["traditional", "halves", "freqs"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(rng, dtype, executor, shape, way):
    cache, options = caches.KVCache(), {"traditional": way == "traditional"}
    if way == "freqs":
        options["freqs"] = mx.array(rng.uniform(1, 100, shape[4] // 2).astype(np.float32))
        mx.eval(options["freqs"])
    first, second = drawn(rng, shape, dtype), drawn(rng, shape, dtype)
    with mm.patched():
        step(cache, first, shape, 0, **options)
        mm.stats(reset=True)
        found = step(cache, second, shape, shape[2], **options)
        mx.eval(found)
    assert {op for op in mm.stats() if tiny.kernels(op)} == {"rope_append"}
    before = exact(first, shape, 0, **options)
    expected = exact(second, shape, shape[2], **options)
    for name, ours, old, new in zip(("queries", "keys", "values"), found, before, expected, strict=True):
        wanted = new if name == "queries" else np.concatenate([old, new], axis=2)
        assert_near(ours, mx.array(wanted.astype(np.float32)), name, 2 * of_roundings(dtype))


def test_copied_columns_keep_their_bits(rng, native, dtype):
    """NaN and infinite ones too, and the largest of float16: nothing is computed of them."""
    shape = (1, 2, 1, 8, 4, 8)
    arrays = drawn(rng, shape, dtype)
    special = mx.array([np.nan, np.inf, -np.inf, -0.0, 65504.0, 6e-8, 1.0, 2.0]).astype(dtype)
    arrays[0] = mx.concatenate([special, arrays[0][0, 0, 8:]]).reshape(arrays[0].shape)
    arrays[1] = mx.concatenate([special, arrays[1][0, 0, 8:]]).reshape(arrays[1].shape)
    mm.stats(reset=True)
    with mm.patched():
        queries, keys, _ = step(caches.KVCache(), arrays, shape, 5)
        mx.eval(queries, keys)
    assert appends() == 1
    for found in (queries, keys):
        seen = np.array(found[0, 0, 0, :8].astype(mx.float32))
        np.testing.assert_array_equal(seen, np.array(special.astype(mx.float32)))
        assert np.signbit(seen[3])


def test_other_caches(rng, native):
    """Rotating ones, whose tokens come round, batches, whose rows have offsets of their own, and quantized ones."""
    shape = (2, 2, 1, 32, 32, 64)
    made = [
        lambda: caches.RotatingKVCache(max_size=6),
        lambda: caches.BatchKVCache([1, 0]),
        lambda: caches.QuantizedKVCache(group_size=32, bits=8),
    ]
    tokens = [drawn(rng, shape, mx.float32) for _ in range(15)]
    for make in made:
        results, counts = [], []
        for patched in (contextlib.nullcontext, mm.patched):
            cache = make()
            mm.stats(reset=True)
            with patched():
                for arrays in tokens:
                    seen = step(cache, arrays, shape, cache.offset)
                    mx.eval(seen)
            results.append([a for part in seen for a in (part if isinstance(part, (tuple, list)) else (part,))])
            counts.append(appends())
        packed = hasattr(cache, "bits")
        assert counts[1] == (0 if packed else len(tokens))
        for i, (ours, theirs) in enumerate(zip(*reversed(results), strict=True)):
            assert_near(ours, theirs, str(i), LAYERS)


@pytest.mark.parametrize("change", ["scaled", "scaled before", "no columns", "part", "a head each", "turned twice"])
def test_what_is_computed_apart(rng, native, change):
    """Heads that the append does not know give mlx-lm's results."""
    shape = (1, 2, 1, 8, 8, 16)
    queries, keys, values, key = parts(drawn(rng, shape, mx.float32), shape)
    results = []
    for patched in (contextlib.nullcontext, mm.patched):
        begin = 0 if change == "no columns" else 8
        turn = {"traditional": True, "base": BASE, "scale": 1.0, "offset": 3}
        dims = 4 if change == "part" else 8
        with patched():
            own = mx.concatenate([key, key + 1], axis=1) if change == "a head each" else key
            whole = queries[..., 8 - begin :] * 1
            before, part = mx.split(whole, [begin], axis=-1)
            factor = 1.5 if change == "scaled before" else None
            turned, own = (mx.fast.rope(a if factor is None else a * factor, dims, **turn) for a in (part, own * 1))
            q = _ext.before_turned(before, turned, whole, part)
            k = _ext.before_turned(keys[..., :begin] * 1, own)
            if change == "turned twice":
                q, k = (_ext.before_turned(keys[..., :1] * 1, a) for a in (q, k))
            if change == "scaled":
                q = _ext.times_turned(q, 0.5)
            found = (q, *caches.KVCache().update_and_fetch(k, values))
            mx.eval(found)
        results.append(found)
    for i, (ours, theirs) in enumerate(zip(*reversed(results), strict=True)):
        assert_near(ours, theirs, str(i), LAYERS)


def test_gradients(rng, native):
    """Are mx's: nothing is fused where derivatives are asked for."""
    shape = (1, 2, 1, 8, 8, 16)
    arrays = drawn(rng, shape, mx.float32)

    def total(*arrays):
        return sum((a * a).sum() * (i + 1) for i, a in enumerate(step(caches.KVCache(), arrays, shape, 4)))

    expected = mx.grad(total, argnums=(0, 1, 2))(*arrays)
    with mm.patched():
        found = mx.grad(total, argnums=(0, 1, 2))(*arrays)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_near(a, b, str(i), LAYERS)


def logits(model, cache, tokens):
    found = []
    for part in (tokens[:, :4], *(tokens[:, t : t + 1] for t in range(4, tokens.shape[1]))):
        found.append(model(part, cache=cache)[:, -1])
        mx.eval(found[-1])
    return mx.stack(found)


KINDS = {
    "plain": lambda count: [caches.KVCache() for _ in range(count)],
    "rotating": lambda count: [caches.RotatingKVCache(max_size=6) for _ in range(count)],
    "batch": lambda count: [caches.BatchKVCache([2, 0]) for _ in range(count)],
    "batch of one": lambda count: [caches.BatchKVCache([1]) for _ in range(count)],
    "quantized": lambda count: [caches.QuantizedKVCache(group_size=32, bits=8) for _ in range(count)],
}


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS_OF_HEADS)
def test_models(rng, native, lenient, name, kind, converts):
    """Logits behind a prompt and 16 tokens are mlx-lm's."""
    model, rows = MODELS["build"](name, mx.float32), 2 if kind == "batch" else 1
    tokens = mx.array(rng.integers(1, 300, (rows, 20)))
    theirs = logits(model, KINDS[kind](len(model.layers)), tokens)
    if converts:
        mm.nn.convert(model)
    with contextlib.nullcontext() if converts else mm.patched():
        mm.stats(reset=True)
        ours = logits(model, KINDS[kind](len(model.layers)), tokens)
    if kind in ("plain", "rotating", "batch of one"):
        assert appends() >= 16 * len(model.layers)
    assert_near(ours, theirs, "logits", LAYERS)
