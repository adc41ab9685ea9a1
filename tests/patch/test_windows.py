"""Windows behind the masks of mlx-lm's models: attention takes the window, and nobody computes the mask."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS
from mlx_lm.models import base, cache

import mlx_mittens as mm
from mlx_mittens import _ext

pytestmark = pytest.mark.usefixtures("lenient", "native")


def heads(rng, queries: int, keys: int) -> list[mx.array]:
    shapes = ((1, 4, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64))
    return [mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


def operations(*outputs: mx.array, tmp_path) -> str:
    """The operations that outputs are made of."""
    path = tmp_path / "graph.dot"
    mx.export_to_dot(str(path), *outputs)
    return path.read_text()


@pytest.mark.parametrize("offset", [0, 3, 11])
def test_a_mask_of_a_window_is_not_computed(rng, tmp_path, offset):
    queries = 13
    q, k, v = heads(rng, queries, offset + queries)
    plain = base.create_causal_mask(queries, offset, window_size=6)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=plain)
    with mm.patched(strict=True):
        mask = base.create_causal_mask(queries, offset, window_size=6)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
    assert "Arange" not in operations(y, tmp_path=tmp_path)
    np.testing.assert_allclose(np.array(y), np.array(expected), atol=LAYERS)
    np.testing.assert_array_equal(np.array(mask), np.array(plain))


def test_a_mask_that_a_model_changes_is_its_own(rng, tmp_path):
    """It is another array."""
    q, k, v = heads(rng, 9, 9)
    others = mx.array(rng.random((9, 9)) < 0.8)
    expected = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=0.125, mask=base.create_causal_mask(9, window_size=4) | (others & mx.eye(9).astype(mx.bool_))
    )
    with mm.patched():
        mask = base.create_causal_mask(9, window_size=4) | (others & mx.eye(9).astype(mx.bool_))
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
    assert "Arange" in operations(y, tmp_path=tmp_path)
    np.testing.assert_allclose(np.array(y), np.array(expected), atol=LAYERS)


def test_masks_with_padding_are_mlx_lms_own():
    padding = mx.array([0, 2])
    expected = base.create_causal_mask(5, 1, window_size=3, left_padding=padding)
    with mm.patched():
        mask = base.create_causal_mask(5, 1, window_size=3, left_padding=padding)
        assert base.create_causal_mask is cache.create_causal_mask
    np.testing.assert_array_equal(np.array(mask), np.array(expected))


def test_an_earlier_mask_is_known_as_long_as_few_came_after(rng):
    """A model makes one for each kind of its layers; earlier ones are taken as plain arrays."""
    q, k, v = heads(rng, 7, 7)
    masks = [_ext.window_mask(7, 0, window) for window in range(1, 8)]
    for window, mask in enumerate(masks, 1):
        y = mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
        expected = mm.scaled_dot_product_attention(q, k, v, scale=0.125, window=window)
        np.testing.assert_allclose(np.array(y), np.array(expected), atol=LAYERS)


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt-oss-20b"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_prompts_in_chunks_over_a_rotating_cache(name, chunk):
    """Their window is 8: the mask of a chunk covers the keys that the cache still has."""
    model, prompt = tiny.build(name, mx.float32), [int(i) for i in np.arange(29) * 7 % 300]
    expected = tiny.tokens(model, prompt, 12, prefill_step_size=chunk)
    with mm.patched():
        assert tiny.tokens(model, prompt, 12, prefill_step_size=chunk) == expected


def steps(rng, rotating: cache.RotatingKVCache, lengths: list[int], together: int, drafts: int = 0) -> list[np.ndarray]:
    """Results of attention for a prompt and then a few tokens at a time, evaluated `together` steps at once.

    Of several tokens as many as `drafts` are taken back, as far as the cache can be trimmed.
    """
    heads = [mx.array(rng.standard_normal((1, n, sum(lengths), 64)).astype(np.float32)) for n in (4, 2, 2)]
    pending, results, end = [], [], 0
    for tokens in lengths:
        first, end = end, end + tokens
        q, k, v = (a[:, :, first:end] * 1 for a in heads)
        q, k = (mx.fast.rope(a, 64, traditional=False, base=1e4, scale=1.0, offset=rotating.offset) for a in (q, k))
        mask = rotating.make_mask(end - first)
        keys, values = rotating.update_and_fetch(k, v)
        pending.append(mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask=mask))
        if len(pending) == together:
            mx.eval(pending)
            results += map(np.array, pending)
            pending = []
        if 1 < tokens < 10 and rotating.is_trimmable():
            rotating.trim(min(drafts, tokens - 1))
    return [*results, *map(np.array, pending), np.array(keys), np.array(values)]


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("most, keep, prompt", [(8, 0, 5), (8, 0, 20), (12, 4, 3), (12, 4, 30), (300, 0, 250)], ids=str)
def test_tokens_into_a_rotating_cache(most, keep, prompt, together):
    """Its order of keys, before and after they rotate, and where its buffers grow."""
    lengths = [prompt, *[1] * (60 if most == 300 else 20)]
    ours, theirs = compared(cache.RotatingKVCache, (most, keep), lengths, together)
    np.testing.assert_allclose(np.array(ours.keys), np.array(theirs.keys), atol=LAYERS)


@pytest.mark.parametrize("narrow", [None, 5])
@pytest.mark.parametrize("rope", [True, False], ids=["turned", "as they are"])
@pytest.mark.parametrize("most, keep, prompt", [(8, 0, 5), (8, 0, 20), (12, 4, 30)], ids=str)
def test_a_full_window_keeps_its_order_where_it_is_exact(most, keep, prompt, rope, narrow):
    """Attention sees the same tokens; they stand in their order, which exact sums rest on."""

    def attended(made, rng):
        results = []
        for tokens in (prompt, *[1] * 15):
            q, k, v = heads(rng, tokens, tokens)
            if rope:
                q, k = (
                    mx.fast.rope(a * 1, 64, traditional=False, base=1e4, scale=1.0, offset=made.offset) for a in (q, k)
                )
            mask = made.make_mask(tokens, window_size=narrow if tokens == 1 else None)
            keys, values = made.update_and_fetch(k, v)
            results.append(mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask=mask))
        return np.concatenate([np.array(y) for y in results], axis=2)

    theirs, ours = cache.RotatingKVCache(most, keep), cache.RotatingKVCache(most, keep)
    expected = attended(theirs, np.random.default_rng(2))
    with mm.patched(exact=True):
        found = attended(ours, np.random.default_rng(2))
    if not (narrow and keep):  # the mask of mlx-lm takes tokens that are always kept for old ones
        np.testing.assert_allclose(found, expected, atol=LAYERS)
    assert ours.offset == theirs.offset and ours._idx == ours.keys.shape[2] == most
    np.testing.assert_allclose(np.array(ours.keys), np.array(theirs._temporal_order(theirs.keys)), atol=LAYERS)


def compared(kind, arguments, lengths, together, drafts=0):
    """A cache under the patch and mlx-lm's after the same tokens, each step with one append."""
    theirs, ours = kind(*arguments), kind(*arguments)
    expected = steps(np.random.default_rng(1), theirs, lengths, together, drafts)
    mm.stats(reset=True)
    with mm.patched():
        found = steps(np.random.default_rng(1), ours, lengths, together, drafts)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(a, b, atol=LAYERS, err_msg=f"step {i}")
    assert [ours.offset, ours._idx, ours.max_size, ours.keep] == [
        theirs.offset,
        theirs._idx,
        theirs.max_size,
        theirs.keep,
    ]
    assert tiny.kernels("rope_append") == len(lengths)
    return ours, theirs


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("most, keep", [(6, 0), (24, 4), (48, 0), (400, 8)], ids=str)
def test_several_tokens_into_a_rotating_cache(monkeypatch, most, keep, drafts, together):
    """Chunks and drafts, before the window is full, over its end and behind it."""
    monkeypatch.setattr(cache.RotatingKVCache, "step", 16)
    compared(cache.RotatingKVCache, (most, keep), [5, 3, 1, 4, 2, 1, 8, 1, 1, 6, 16, 3, 1, 2, 5, 1], together, drafts)


@pytest.mark.parametrize("most, copies", [(64, 0), (20, 1)], ids=["room", "no room"])
@pytest.mark.parametrize("batched", [False, True])
def test_drafts_within_a_window_are_appended_in_place(tmp_path, batched, most, copies):
    """In one launch, without a copy of the keys before them, where the window has room for them."""
    made = cache.BatchRotatingKVCache(most, [0]) if batched else cache.RotatingKVCache(most)
    turned = lambda a: mx.fast.rope(a, 64, traditional=False, base=1e4, scale=1.0, offset=made.offset)
    heads = [mx.random.normal((1, n, 16, 64)) for n in (4, 2, 2)]
    mx.eval(heads)
    with mm.patched():
        for tokens in (16, 5):
            queries, keys, values = (a[:, :, :tokens] * 1 for a in heads)
            queries, (keys, values) = turned(queries), made.update_and_fetch(turned(keys), values)
            text = operations(queries, keys, values, tmp_path=tmp_path)
            mx.eval(queries, keys, values)
    assert ("Concatenate" in text) == bool(copies)


def test_a_rotating_cache_that_is_shared_is_copied():
    """A holder of earlier keys keeps them, although the oldest is overwritten."""
    rotating = cache.RotatingKVCache(4)
    fresh = lambda i: mx.full((1, 2, 1, 64), float(i))
    with mm.patched():
        for i in range(4):
            rotating.update_and_fetch(fresh(i), fresh(i))
        before = rotating.keys[:, :, :3]
        later = before * 1
        rotating.update_and_fetch(fresh(9), fresh(9))
        mx.eval(rotating.keys, later)
    assert later[0, 0, :, 0].tolist() == before[0, 0, :, 0].tolist() == [0, 1, 2]
    assert rotating.keys[0, 0, :, 0].tolist() == [9, 1, 2, 3]


def test_gradients_and_compiled_functions(rng):
    q, k, v = heads(rng, 9, 9)

    def loss(q):
        mask = base.create_causal_mask(9, window_size=4)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask).square().sum()

    expected = mx.grad(loss)(q)
    with mm.patched():
        np.testing.assert_allclose(np.array(mx.grad(loss)(q)), np.array(expected), atol=LAYERS)
        np.testing.assert_allclose(np.array(mx.compile(mx.grad(loss))(q)), np.array(expected), atol=LAYERS)


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"\[window_mask\] 0 queries after 0 keys with a window of 4"):
        _ext.window_mask(0, 0, 4)
