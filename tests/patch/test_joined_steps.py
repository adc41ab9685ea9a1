"""Attention joins the append before it: caches are updated in place while it is on its way, in any layer."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.support import assert_same_bits, peak_memory
from helpers.tolerances import PEER
from mlx_lm.generate import generate_step
from mlx_lm.models import base, cache

import mlx_mittens as mm

pytestmark = pytest.mark.usefixtures("native", "lenient")

HEADS, WIDTH, HELD, ROOM = (4, 2, 2), 64, 40, 1024
KINDS = ["plain", "window", "4 bits", "8 bits", "batch of 4 bits", "batch of 8 bits"]


def draw(rng, rows, tokens):
    return [mx.array(rng.standard_normal((rows, n, tokens, WIDTH)).astype(np.float16)) for n in HEADS]


def filled(rng, kind):
    """A cache of some tokens that has room for more."""
    rows = 3 if kind.startswith("batch") else 1
    bits = int(kind.split()[-2]) if kind.endswith("bits") else None
    if rows > 1:
        made = mm.nn.BatchQuantizedKVCache([5, 0, 17], 64, bits)
    elif bits:
        made = cache.QuantizedKVCache(64, bits)
    else:
        made = cache.KVCache() if kind == "plain" else cache.RotatingKVCache(ROOM)
    made.step = ROOM
    _, keys, values = draw(rng, rows, HELD)
    with mm.patched():
        turned = [mx.fast.rope(a, WIDTH, traditional=False, base=1e4, scale=1.0, offset=0) for a in (keys * 2, keys)]
        mx.eval(made.update_and_fetch(turned[1], values), turned)
    return made, rows


def buffers_of(made):
    return [*made.keys, *made.values] if isinstance(made.keys, (tuple, list)) else [made.keys, made.values]


def step(made, q, k, v):
    """A token of a layer: the turned queries, and its attention."""
    mask = made.make_mask(1) if isinstance(made, mm.nn.BatchQuantizedKVCache) else None
    q, k = (mx.fast.rope(a, WIDTH, traditional=False, base=1e4, scale=1.0, offset=made.offset) for a in (q, k))
    keys, values = made.update_and_fetch(k, v)
    return q, base.scaled_dot_product_attention(q, keys, values, made, 0.125, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_not_copied_while_attention_is_on_its_way(rng, kind):
    made, rows = filled(rng, kind)
    fresh = [draw(rng, rows, 1) for _ in range(12)]
    mx.eval(fresh)
    places = [np.asarray(memoryview(a)).ctypes.data for a in buffers_of(made)]
    with mm.patched():
        for heads in fresh:
            q, y = step(made, *(a * 1 for a in heads))
            mx.async_eval(y)
            del q, y
        mx.eval(buffers_of(made))
    assert [np.asarray(memoryview(a)).ctypes.data for a in buffers_of(made)] == places


@pytest.mark.parametrize("first", ["queries", "attention", "buffers", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_is_asked_first(kind, first):
    """Queries, attention and buffers have the bits that steps give one by one."""
    found = []
    for pending in (False, True):
        rng = np.random.default_rng(7)
        made, rows = filled(rng, kind)
        kept = []
        with mm.patched():
            for _ in range(3):  # of more that are pending the starts of rows are not looked through
                q, y = step(made, *(a * 1 for a in draw(rng, rows, 1)))
                if not pending:
                    mx.eval(q)
                kept += [q, y]
            wanted = {"queries": kept[::2], "attention": kept[1::2], "buffers": buffers_of(made), "all": []}[first]
            mx.eval(wanted)
            mx.eval(kept, buffers_of(made))
            view = [a[:, :, : HELD + 3] for a in buffers_of(made)]
        found.append([*kept, *view])
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert_same_bits(a, b, f"array {i}")


def test_what_depends_on_the_queries_does_not_join(rng):
    """A mask that is computed of them."""
    made, rows = filled(rng, "8 bits")
    with mm.patched():
        q, k, v = (a * 1 for a in draw(rng, rows, 1))
        q, k = (mx.fast.rope(a, WIDTH, traditional=False, base=1e4, scale=1.0, offset=made.offset) for a in (q, k))
        keys, values = made.update_and_fetch(k, v)
        mask = mx.broadcast_to(q[:, :, :, :1] * 0, (1, HEADS[0], 1, HELD + 1))
        y = base.scaled_dot_product_attention(q, keys, values, made, 0.125, mask)
        expected = base.scaled_dot_product_attention(mx.array(np.array(q)), keys, values, made, 0.125, mask)
        mx.eval(y)
    np.testing.assert_allclose(np.array(y), np.array(expected), atol=PEER[q.dtype])


@pytest.mark.parametrize("converted", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-3-1b"])
def test_a_generation_holds_a_packed_cache_once(name, converted):
    """Beside a prompt's cache it takes less than half of one more."""
    model = tiny.build(name, mx.float16, 8, sliding_window=4096) if "gemma" in name else tiny.build(name, mx.float16, 8)
    model = mm.nn.convert(model) if converted else model
    caches = [cache.QuantizedKVCache(64, 8) for _ in model.layers]
    prompt = mx.array(np.arange(2000) * 7 % 300)
    with mm.patched():
        for _ in generate_step(prompt, model, max_tokens=2, prompt_cache=caches):
            pass
        size = sum(a.nbytes for one in caches for a in buffers_of(one))

        def generate():
            for _ in generate_step(mx.array([5]), model, max_tokens=24, prompt_cache=caches):
                pass
            return mx.array(0)

        assert peak_memory(generate) < size / 2
