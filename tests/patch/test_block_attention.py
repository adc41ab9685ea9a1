"""Attention of minimax_m3_vl for a token, whose indexer chooses blocks of keys, beside mlx-lm's."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.pages import MODELS
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, assert_near
from mlx_lm.models import cache as caches

import mlx_mittens as mm

pytestmark = pytest.mark.usefixtures("native", "lenient")


def build(local=1, most=2, sparse=True, normed=True):
    model = MODELS["build"]("minimax_m3_vl", mx.float32)
    for layer in model.layers:
        attention = layer.self_attn
        attention.index_local_blocks, attention.index_topk_blocks = local, most
        attention.is_sparse_attn, attention.use_qk_norm = sparse, normed
    return model


def logits(model, tokens, prompt=5):
    """Behind a prompt and each token, and the caches' contents then."""
    cache, found = model.make_cache(), []
    for part in (tokens[:, :prompt], *(tokens[:, t : t + 1] for t in range(prompt, tokens.shape[1]))):
        found.append(model(part, cache=cache)[:, -1])
        mx.eval(found[-1], [one.state for one in cache])
    return mx.stack(found), [part.keys[..., : part.offset, :] for one in cache for part in one.caches]


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"local": 2, "most": 3},
        {"local": 0},  # mlx-lm's own call chooses
        {"local": 2},
        {"most": 100},  # all blocks are seen
        {"sparse": False},
        {"normed": False},
    ],
    ids=str,
)
def test_logits(rng, options, converts):
    """Each number of tokens in the last block, and of blocks, from one on."""
    model, tokens = build(**options), mx.array(rng.integers(1, 300, (1, 24)))
    theirs = logits(model, tokens)
    if converts:
        mm.nn.convert(model)
    with contextlib.nullcontext() if converts else mm.patched():
        ours = logits(model, tokens)
    assert_near(ours[0], theirs[0], "logits", LAYERS)
    for i, (a, b) in enumerate(zip(ours[1], theirs[1], strict=True)):
        assert_near(a, b, f"keys {i}", LAYERS)


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
def test_launches(rng, converts):
    model, tokens = build(), mx.array(rng.integers(1, 300, (1, 11)))
    if converts:
        mm.nn.convert(model)
    with contextlib.nullcontext() if converts else mm.patched():
        cache = model.make_cache()
        for part in (tokens[:, :10], tokens[:, 10:]):
            mx.eval(model(part, cache=cache), [one.state for one in cache])
        launched = launched_on_apple(lambda: model(mx.array([[7]]), cache=cache))
    layers = len(model.layers)
    assert launched.count("rope_append_normed_float32") == 2 * layers
    assert not {"SliceUpdate", "RoPE", "Full", "Concatenate", "Select"} & set(launched)
    assert len(launched) <= 25 * layers


def test_batches_are_mlx_lms(rng):
    model, tokens = build(), mx.array(rng.integers(1, 300, (2, 16)))
    theirs, _ = logits(model, tokens)
    with mm.patched():
        ours, _ = logits(model, tokens)
    assert_near(ours, theirs, "logits", LAYERS)


def test_a_cache_that_lags_behind(rng):
    """An indexer's cache of fewer tokens than the other: mlx-lm's own call raises its error, or computes it."""
    model, tokens = build(), mx.array(rng.integers(1, 300, (1, 9)))
    results = []
    for patched in (contextlib.nullcontext, mm.patched):
        with patched():
            cache = model.make_cache()
            mx.eval(model(tokens[:, :8], cache=cache))
            for one in cache:
                one.caches[1].trim(1)
            try:
                results.append(model(tokens[:, 8:], cache=cache))
                mx.eval(results[-1])
            except ValueError as error:
                results.append(str(error))
    assert type(results[0]) is type(results[1])
    if isinstance(results[0], mx.array):
        assert_near(results[1], results[0], "logits", LAYERS)


def test_gradients(rng):
    model, tokens = build(), mx.array(rng.integers(1, 300, (1, 6)))

    weights = mx.array(rng.standard_normal(128).astype(np.float32))

    def loss(x):
        return (model.layers[0](x, None, None) * weights).sum()

    x = model.model.embed_tokens(tokens)[:, :1]
    expected = mx.grad(loss)(x)
    with mm.patched():
        found = mx.grad(loss)(x)
    assert_near(found, expected, "gradient", LAYERS)


def test_a_window_of_another_cache(rng):
    """Caches that turn over are asked for their contents."""
    model, tokens = build(sparse=False), mx.array(rng.integers(1, 300, (1, 20)))
    results = []
    for patched in (contextlib.nullcontext, mm.patched):
        cache = [caches.CacheList(caches.RotatingKVCache(max_size=6)) for _ in model.layers]
        with patched():
            mm.stats(reset=True)
            found = [model(tokens[:, t : t + 1], cache=cache) for t in range(20)]
            mx.eval(found)
        results.append(mx.concatenate(found))
    assert tiny.kernels("rope_append") > 0
    assert_near(results[1], results[0], "logits", LAYERS)
