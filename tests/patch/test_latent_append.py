"""Latents and turned keys that a layer appends to its cache: one launch with the norm and the turned queries."""

import contextlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.pages import MODELS
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, assert_near, of_roundings
from mlx_lm.models import cache as caches

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.specs import reference

EPS, BASE = 1e-5, 1e4
# Batch, heads, tokens, width of turned keys, width of latents.
SHAPES = [(1, 4, 1, 32, 64), (1, 3, 1, 64, 512), (2, 2, 3, 10, 33), (3, 1, 1, 66, 1)]


def drawn(rng, shape, dtype):
    batch, heads, tokens, width, columns = shape
    shapes = [(batch, tokens, heads, width + 8), (batch, tokens, columns + width), (columns,)]
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in shapes]


def step(cache, arrays, width, offset, scale=1.0, factor=None, normed=True):
    """A layer of mlx-lm's on a token's projections: turned queries, and the cache's contents then."""
    queries, latents, weight = arrays
    queries = mx.split(queries.transpose(0, 2, 1, 3), [8], axis=-1)[1]
    latents, keys = mx.split(latents, [latents.shape[-1] - width], axis=-1)
    keys = keys.reshape(*keys.shape[:2], 1, width).transpose(0, 2, 1, 3)
    if normed:
        latents = mx.fast.rms_norm(latents, weight, EPS)
    if factor is not None:
        latents = latents * factor
    options = {"traditional": True, "base": BASE, "scale": 1.0, "offset": offset}
    queries, keys = (mx.fast.rope(heads, width, **options) for heads in (queries, keys))
    queries = _ext.times_turned(queries, scale)
    return queries, *cache.update_and_fetch(mx.expand_dims(latents, axis=1), keys)


def exact(arrays, width, offset, scale=1.0, factor=None, normed=True):
    queries, latents, weight = map(specs.widen, arrays)
    queries = queries.transpose(0, 2, 1, 3)[..., 8:]
    keys = latents[:, None, :, -width:]
    latents = latents[:, None, :, :-width]
    if normed:
        latents = reference.rms_norm(latents, weight, EPS)
    queries, keys = (reference.rope(a, width, BASE, offset, None, True)[0] for a in (queries, keys))
    return queries * scale, latents * (1 if factor is None else factor), keys


@pytest.mark.parametrize("options", [{}, {"scale": 0.125}, {"factor": 1.75}, {"normed": False}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(rng, dtype, executor, shape, options):
    width, cache = shape[3], caches.KVCache()
    first, second = drawn(rng, shape, dtype), drawn(rng, shape, dtype)
    with mm.patched():
        step(cache, first, width, 0, **options)
        mm.stats(reset=True)
        found = step(cache, second, width, shape[2], **options)
        mx.eval(found)
    assert {op for op in mm.stats() if tiny.kernels(op)} == {"rope_append"}
    before = exact(first, width, 0, **options)
    expected = exact(second, width, shape[2], **options)
    names = ("queries", "latents", "keys")
    for name, ours, old, new in zip(names, found, before, expected, strict=True):
        wanted = new if name == "queries" else np.concatenate([old, new], axis=2)
        assert_near(ours, mx.array(wanted.astype(np.float32)), name, 2 * of_roundings(dtype))


@pytest.mark.parametrize("make", [lambda: caches.RotatingKVCache(max_size=6), lambda: caches.BatchKVCache([1, 0])])
def test_other_caches(rng, native, make):
    """Rotating ones, whose tokens come round, and batches, whose rows have offsets of their own."""
    tokens = [drawn(rng, (2, 2, 1, 16, 24), mx.float32) for _ in range(15)]
    results = []
    for patched in (contextlib.nullcontext, mm.patched):
        cache = make()
        with patched():
            for arrays in tokens:
                seen = step(cache, arrays, 16, cache.offset)
                mx.eval(seen)
        results.append((*seen, *cache.state[:2]))
    assert tiny.kernels("rope_append") > 0
    for i, (ours, theirs) in enumerate(zip(*reversed(results), strict=True)):
        assert_near(ours, theirs, str(i), LAYERS)


def test_values_without_columns(rng, executor):
    """An indexer's cache has keys alone; simdgroups behind the last head must not divide by their parts."""
    x = mx.array(rng.standard_normal((1, 2, 1, 16)).astype(np.float32))
    with mm.patched():
        turn = {"traditional": True, "base": BASE, "scale": 1.0, "offset": 3}
        queries, key = (mx.fast.rope(a * 1, 16, **turn) for a in (x, x[:, :1]))
        keys, values = caches.KVCache().update_and_fetch(key, mx.zeros((1, 1, 1, 0)))
        mm.stats(reset=True)
        mx.eval(queries, keys, values)
    assert tiny.kernels("rope_append") == 1 and values.shape == (1, 1, 1, 0)
    expected = reference.rope(specs.widen(x), 16, BASE, 3, None, True)[0]
    assert_near(queries, mx.array(expected.astype(np.float32)), "queries", LAYERS)
    assert_near(keys, mx.array(expected[:, :1].astype(np.float32)), "keys", LAYERS)


def test_nothing_is_kept_where_the_norm_is_held(rng, native):
    """A norm that the caller has is computed for it as well."""
    queries, latents, weight = drawn(rng, (1, 2, 1, 16, 24), mx.float32)
    with mm.patched():
        normed = mx.fast.rms_norm(latents[..., :24], weight, EPS)
        turn = {"traditional": True, "base": BASE, "scale": 1.0, "offset": 0}
        turned = mx.fast.rope(queries[..., 8:].transpose(0, 2, 1, 3), 16, **turn)
        key = mx.fast.rope(latents[:, None, :, 24:], 16, **turn)
        seen, _ = caches.KVCache().update_and_fetch(mx.expand_dims(normed, 1), key)
        mx.eval(turned, seen, normed)
    assert_near(seen[:, 0], normed, "latents", LAYERS)


# Files whose caches have heads that are made of latents.
EXPANDED = ["deepseek_v2", "minicpm3", "youtu_llm"]
SPARSE = ["deepseek_v32", "glm_moe_dsa"]  # attention over eight chosen keys


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize(
    "name", ["deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_linear", "longcat_flash", *EXPANDED, *SPARSE]
)
def test_a_layers_launches(rng, name, converts, lenient):
    """Tokens are mlx-lm's, and a layer of attention and experts has few launches on an Apple GPU."""
    model, prompt = MODELS["build"](name, mx.float32), rng.integers(1, 300, 7).tolist()
    theirs = tiny.tokens(model, prompt, 12)
    if converts:
        mm.nn.convert(model)
    with contextlib.nullcontext() if converts else mm.patched():
        assert tiny.tokens(model, prompt, 12) == theirs
        cache = caches.make_prompt_cache(model)
        for tokens in (prompt[:5], prompt[5:6]):
            mx.eval(model(mx.array([tokens]), cache=cache), [one.state for one in cache])
        held = lambda: [part.keys for one in cache for part in one.caches] if name in SPARSE else []
        launched = launched_on_apple(lambda: (model(mx.array([[7]]), cache=cache), held()))
    layers = len(model.layers) * (2 if name == "longcat_flash" else 1)
    appends = layers // 2 if name == "kimi_linear" else 2 * layers if name in SPARSE else layers
    assert launched.count("rope_append_float32") == appends
    assert not {"SliceUpdate", "Cos", "RoPE", "Full", "Concatenate"} & set(launched)
    assert len(launched) <= 20 * layers


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SPARSE)
def test_tokens_beyond_the_chosen_keys(rng, name, batch, converts, lenient):
    """An indexer chooses 8 of more keys: a token's logits are mlx-lm's, and a layer has at most 20 launches."""
    model, tokens = MODELS["build"](name, mx.float32), mx.array(rng.integers(1, 300, (batch, 20)))
    for layer in model.layers:
        layer.self_attn.indexer.index_topk = 8

    def run():
        cache, found = caches.make_prompt_cache(model), []
        for part in (tokens[:, :6], *(tokens[:, t : t + 1] for t in range(6, 20))):
            found.append(model(part, cache=cache)[:, -1])
            mx.eval(found[-1], [one.state for one in cache])
        return mx.stack(found), cache

    theirs, _ = run()
    if converts:
        mm.nn.convert(model)
    with contextlib.nullcontext() if converts else mm.patched():
        mm.stats(reset=True)
        ours, cache = run()
        used = mm.stats()
        held = lambda: [part.keys for one in cache for part in one.caches]
        launched = launched_on_apple(lambda: (model(mx.array([[7]] * batch), cache=cache), held()))
    assert_near(ours, theirs, "logits", LAYERS)
    if not converts:
        assert sum(used["index_scores"]["kernels"].values()) == 12 * len(model.layers)
    if batch == 1:
        # Tokens from the third on have more than 8 keys.
        assert all(
            sum(used[op]["kernels"].values()) == 12 * len(model.layers) for op in ("index_scores", "take_tokens")
        )
        assert not {"Maximum", "Multiply", "Sum", "GatherAxis"} & set(launched)
        assert len(launched) <= 20 * len(model.layers)


def test_rows_of_a_batch_choose_their_own_keys(rng, native, lenient):
    """Prompts of unequal lengths: keys before a row's first are never chosen."""
    model, tokens = MODELS["build"]("glm_moe_dsa", mx.float32), mx.array(rng.integers(1, 300, (3, 24)))

    def run():
        cache, found = [caches.CacheList(*(caches.BatchKVCache([4, 0, 7]) for _ in range(2))) for _ in model.layers], []
        for part in (tokens[:, :12], *(tokens[:, t : t + 1] for t in range(12, 24))):
            found.append(model(part, cache=cache)[:, -1])
            mx.eval(found[-1], [one.state for one in cache])
        return mx.stack(found)

    theirs = run()
    with mm.patched():
        mm.stats(reset=True)
        ours = run()
    assert sum(mm.stats()["index_scores"]["kernels"].values()) == 12 * len(model.layers)
    assert_near(ours, theirs, "logits", LAYERS)


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
def test_a_gate_of_the_output(rng, converts, native, lenient):
    """Kimi K3 may multiply attention's result with a gate."""
    model, tokens = MODELS["build"]("kimi_k3", mx.float32), mx.array(rng.integers(1, 300, (1, 12)))
    for layer in model.layers:
        attention = layer.self_attn
        if not layer.is_linear:
            attention.use_gate = True
            attention.g_proj = nn.Linear(128, attention.num_heads * attention.v_head_dim, bias=False)
    mx.eval(model.parameters())

    def logits():
        cache, found = caches.make_prompt_cache(model), []
        for part in (tokens[:, :4], *(tokens[:, t : t + 1] for t in range(4, 12))):
            found.append(model(part, cache=cache)[:, -1])
            mx.eval(found[-1])
        return mx.stack(found)

    theirs = logits()
    mx.eval(theirs)
    if converts:
        mm.nn.convert(model)
    mm.stats(reset=True)
    with contextlib.nullcontext() if converts else mm.patched():
        ours = logits()
        mx.eval(ours)
    assert tiny.kernels("rope_append") > 0
    assert_near(ours, theirs, "logits", LAYERS)
