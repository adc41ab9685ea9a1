"""Prompts into empty caches, and tokens that make these grow: one append a layer, and mlx-lm's cache afterwards."""

import contextlib
import copy
import threading

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS
from mlx_lm.models import cache

import mlx_mittens as mm

pytestmark = pytest.mark.usefixtures("lenient", "native")

CACHES = {
    "plain": cache.KVCache,
    "quantized": lambda: cache.QuantizedKVCache(64, 8),
    "chunked": lambda: cache.ChunkedKVCache(300),
    "a window": lambda: cache.RotatingKVCache(8),
    "a window that keeps": lambda: cache.RotatingKVCache(12, 4),
    "a long window": lambda: cache.RotatingKVCache(300, 4),
    "batch": lambda: cache.BatchKVCache([0, 0]),
    "batch of windows": lambda: cache.BatchRotatingKVCache(8, [0, 0]),
    "batch of long windows": lambda: cache.BatchRotatingKVCache(300, [0, 0]),
}
LENGTHS = {
    "a prompt": [5],
    "a prompt that fills a step": [256],
    "a long prompt": [300],
    "tokens alone": [1] * 14,
    "a prompt and tokens": [5, 1, 1, 1, 1, 1],
    "tokens that grow": [255, 1, 1, 1],
    "prompts one after another": [5, 9, 1, 3, 1, 17, 2, 1, 1],
    "prompts that grow": [250, 11, 1, 256, 1, 300],
}
FIELDS = ("offset", "_idx", "_offset", "rotated", "start_position", "left_padding", "max_size", "keep")


def arrays(held):
    return [np.array(a) for part in held for a in (part if isinstance(part, tuple) else (part,))]


def assert_alike(ours, theirs, limit=LAYERS):
    """Caches of the same state, buffers in the same steps, but for the room that a window leaves for more tokens."""
    for field in FIELDS:
        a, b = (getattr(one, field, None) for one in (ours, theirs))
        assert np.array_equal(np.array(a), np.array(b)) if isinstance(b, mx.array) else a == b, field
    if isinstance(theirs, cache.QuantizedKVCache):
        ours, theirs = (
            [mx.dequantize(*part, one.group_size, one.bits) for part in (one.keys, one.values)]
            for one in (ours, theirs)
        )
        limit += 8 / 255  # a step of 8 bits, where numbers lie between -4 and 4
    elif hasattr(theirs, "max_size") and theirs.size() < theirs.max_size:
        assert theirs.size() <= ours.keys.shape[2] <= theirs.max_size
        ours, theirs = (one.keys_and_values() for one in (ours, theirs))
    else:
        ours, theirs = ((one.keys, one.values) for one in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.array(a), np.array(b), atol=limit * max(1, np.abs(np.array(b)).max()))


def heads(rng, rows, tokens, width=64):
    made = [mx.array(rng.standard_normal((rows, n, tokens, width)).astype(np.float32)) for n in (4, 2, 2)]
    mx.eval(made)
    return made


def turn(x, offset, **more):
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=1e4, scale=1.0, offset=offset, **more)


def append_heads(made, lengths, rows):
    """Turned queries, and the cache's results, of heads of random numbers."""
    rng, results = np.random.default_rng(3), []
    for tokens in lengths:
        q, k, v = (a * 1 for a in heads(rng, rows, tokens))
        q, k = turn(q, made.offset), turn(k, made.offset)
        seen = made.update_and_fetch(k, v)
        mx.eval(q, seen)
        results.append([np.array(q), *arrays(seen)])
    return results


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", CACHES)
def test_appends_to_caches_of_all_kinds(kind, lengths):
    rows, lengths = 2 if "batch" in kind else 1, LENGTHS[lengths]
    theirs, ours = CACHES[kind](), CACHES[kind]()
    expected = append_heads(theirs, lengths, rows)
    mm.stats(reset=True)
    with mm.patched():
        found = append_heads(ours, lengths, rows)
    op = "quantized_rope_append" if kind == "quantized" else "rope_append"
    assert tiny.kernels(op) == len(lengths)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        for x, y in zip(a[: None if op == "rope_append" else 1], b):
            np.testing.assert_allclose(x, y, atol=LAYERS * np.abs(y).max(), err_msg=f"step {step}")
    assert_alike(ours, theirs)


def test_trimmed_caches_grow_as_mlx_lms():
    """The tokens behind the last that is kept are dropped where that is within a step, and else are kept."""
    for kind in ("plain", "chunked", "quantized"):
        for left in (256, 300):
            made = [CACHES[kind]() for _ in range(2)]
            for one, patched in zip(made, (False, True), strict=True):
                with mm.patched(cache=patched):
                    append_heads(one, [512], 1)
                    one.trim(512 - left)
                    append_heads(one, [300, 1], 1)
            assert_alike(*made[::-1])


def caches_of(model, kind):
    """The caches that mlx-lm makes for a model, or caches of one kind."""
    return cache.make_prompt_cache(model) if kind == "its own" else [CACHES[kind]() for _ in model.layers]


MODELS_AND_CACHES = [
    (name, kind)
    for name in ("llama-3.2-1b", "qwen3-0.6b", "gemma-3-1b", "gpt-oss-20b")
    for kind in ("its own", "quantized", "a window that keeps", "batch", "batch of windows")
    if (name, kind) != ("gpt-oss-20b", "quantized")  # mlx-lm has none with sinks
]


@pytest.mark.parametrize("how", ["patched", "converted", "both"])
@pytest.mark.parametrize("name, kind", MODELS_AND_CACHES)
def test_the_first_prompts_of_a_model(name, kind, how):
    """Short and long ones, and tokens, each with one append a layer."""
    model = tiny.build(name, mx.float32)
    rows = 2 if "batch" in kind else 1
    inputs = [mx.array([[int(i) for i in np.arange(n) * 7 % 300]] * rows) for n in (7, 40, 3, 1, 1)]
    before, after = (caches_of(model, kind) for _ in range(2))
    expected = [np.array(model(x, cache=before)) for x in inputs]
    if how != "patched":
        mm.nn.convert(model)
    op = "quantized_rope_append" if kind == "quantized" else "rope_append"
    limit = LAYERS if kind != "quantized" else 0.05
    with mm.patched() if how != "converted" else contextlib.nullcontext():
        for x, theirs in zip(inputs, expected, strict=True):
            mm.stats(reset=True)
            y = np.array(model(x, cache=after))
            assert tiny.kernels(op) == len(model.layers)
            np.testing.assert_allclose(y, theirs, atol=limit * np.abs(theirs).max())
    if kind != "quantized":
        for a, b in zip(after, before, strict=True):
            assert_alike(a, b)


def operations(*outputs, tmp_path):
    path = tmp_path / "graph.dot"
    mx.export_to_dot(str(path), *outputs)
    return path.read_text()


def test_no_rotary_embedding_of_mx_is_left(tmp_path):
    """One append in the graph, and no rope or update beside it, also where a token comes before the prompt is there."""
    made = cache.KVCache()
    with mm.patched():
        for tokens in (9, 1):
            q, k, v = (a * 1 for a in heads(np.random.default_rng(0), 1, tokens))
            q, k = turn(q, made.offset), turn(k, made.offset)
            seen = made.update_and_fetch(k, v)
    graph = operations(q, *seen, tmp_path=tmp_path)
    assert graph.count('label ="MittensCacheStep"') == 2
    assert "RoPE" not in graph and "SliceUpdate" not in graph


@pytest.mark.parametrize("kind", ["plain", "a window", "quantized"])
def test_copies_of_a_cache_are_apart(kind):
    """A prompt is kept for several answers, as a server does."""
    made = [CACHES[kind]() for _ in range(2)]
    for one, patched in zip(made, (False, True), strict=True):
        with mm.patched(cache=patched):
            append_heads(one, [5], 1)
            kept = copy.deepcopy(one)
            append_heads(one, [3, 1], 1)
            append_heads(kept, [1, 1, 9], 1)
            one.second = kept
    assert_alike(*made[::-1])
    assert_alike(*(one.second for one in made[::-1]))


def test_keys_that_go_to_two_caches():
    """The append turns them for one, mx's own operation for the other."""
    with mm.patched():
        first, second = cache.KVCache(), cache.KVCache()
        q, k, v = (a * 1 for a in heads(np.random.default_rng(0), 1, 5))
        q, k = turn(q, 0), turn(k, 0)
        for one in (first, second):
            one.update_and_fetch(k, v)
    mx.eval(q, first.keys, second.keys)
    np.testing.assert_allclose(np.array(first.keys), np.array(second.keys), atol=LAYERS)
    np.testing.assert_array_equal(np.array(first.values), np.array(second.values))


def test_gradients_go_through_a_first_prompt():
    """A transformation looks at the keys: the rotary embedding and the append are mx's then."""
    q, k, v = heads(np.random.default_rng(1), 1, 6)

    def loss(q, k, v):
        made = cache.KVCache()
        keys, values = made.update_and_fetch(turn(k, 0), v)
        return (mx.fast.scaled_dot_product_attention(turn(q, 0), keys, values, scale=0.125) ** 2).sum()

    expected = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
    with mm.patched():
        found = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
        compiled = mx.compile(mx.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for a, b, c in zip(found, compiled, expected, strict=True):
        for x in (a, b):
            np.testing.assert_allclose(np.array(x), np.array(c), atol=LAYERS * np.abs(np.array(c)).max())


def test_threads_with_caches_of_their_own():
    model = tiny.build("llama-3.2-1b", mx.float32)
    prompts = [mx.array([[(3 * i + j) % 300 for j in range(5 + i)]]) for i in range(4)]
    mx.eval(prompts, model.parameters())

    def run(prompt):
        with mx.stream(mx.new_stream(mx.cpu)):
            made = cache.make_prompt_cache(model)
            y = model(prompt, cache=made)
            y = model(prompt[:, -1:], cache=made) + y[:, -1:]
            mx.eval(y)
            return np.array(y)

    expected, found = [run(prompt) for prompt in prompts], {}
    with mm.patched():
        threads = [threading.Thread(target=lambda i=i: found.update({i: run(prompts[i])})) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, y in enumerate(expected):
        np.testing.assert_allclose(found[i], y, atol=LAYERS * np.abs(y).max())


@pytest.mark.parametrize("kind", ["plain", "a window"])
def test_what_an_append_does_not_cover_is_mlx_lms(kind):
    """Keys that nothing turned, of heads of another width than the values'."""
    theirs, ours = CACHES[kind](), CACHES[kind]()
    k, v = mx.ones((1, 2, 3, 64)), mx.ones((1, 2, 3, 32))
    expected = theirs.update_and_fetch(k, v)
    with mm.patched():
        mm.stats(reset=True)
        found = ours.update_and_fetch(k, v)
        q, turned = turn(mx.ones((1, 4, 3, 64)), 3), turn(k, 3)
        ours.update_and_fetch(turned, v)
    theirs.update_and_fetch(turned, v)
    assert not mm.stats().get("rope_append", {}).get("kernels")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))
    mx.eval(q)
    assert_alike(ours, theirs)
