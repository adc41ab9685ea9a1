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
    """A model makes one for each kind of its layers; those of before are taken as the arrays that they are."""
    q, k, v = heads(rng, 7, 7)
    masks = [_ext.window_mask(7, 0, window) for window in range(1, 8)]
    for window, mask in enumerate(masks, 1):
        y = mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
        expected = mm.scaled_dot_product_attention(q, k, v, scale=0.125, window=window)
        np.testing.assert_allclose(np.array(y), np.array(expected), atol=LAYERS)


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt-oss-20b"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_prompts_in_chunks_over_a_rotating_cache(name, chunk):
    """Their window is 8: the mask of a chunk goes over what the cache still has."""
    model, prompt = tiny.build(name, mx.float32), [int(i) for i in np.arange(29) * 7 % 300]
    expected = tiny.tokens(model, prompt, 12, prefill_step_size=chunk)
    with mm.patched():
        assert tiny.tokens(model, prompt, 12, prefill_step_size=chunk) == expected


def steps(rng, rotating: cache.RotatingKVCache, prompt: int, tokens: int, together: int) -> list[np.ndarray]:
    """What attention sees after a prompt and then token by token, evaluated so many at once."""
    heads = [mx.array(rng.standard_normal((1, n, prompt + tokens, 64)).astype(np.float32)) for n in (4, 2, 2)]
    pending, results = [], []
    for first, end in [(0, prompt), *((i, i + 1) for i in range(prompt, prompt + tokens))]:
        q, k, v = (a[:, :, first:end] * 1 for a in heads)
        q, k = (mx.fast.rope(a, 64, traditional=False, base=1e4, scale=1.0, offset=rotating.offset) for a in (q, k))
        mask = rotating.make_mask(end - first)
        keys, values = rotating.update_and_fetch(k, v)
        pending.append(mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask=mask))
        if len(pending) == together:
            mx.eval(pending)
            results += map(np.array, pending)
            pending = []
    return [*results, *map(np.array, pending), np.array(keys), np.array(values), np.array(rotating.keys)]


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("most, keep, prompt", [(8, 0, 5), (8, 0, 20), (12, 4, 3), (12, 4, 30), (300, 0, 250)], ids=str)
def test_tokens_into_a_rotating_cache(most, keep, prompt, together):
    """Its order of keys, before and after they rotate, and where its buffers grow."""
    caches = [cache.RotatingKVCache(most, keep) for _ in range(2)]
    tokens = 60 if most == 300 else 20
    expected = steps(np.random.default_rng(1), caches[0], prompt, tokens, together)
    mm.stats(reset=True)
    with mm.patched():
        found = steps(np.random.default_rng(1), caches[1], prompt, tokens, together)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(a, b, atol=LAYERS, err_msg=f"step {i}")
    ours, theirs = (([c.offset, c._idx, c.max_size, c.keep]) for c in caches[::-1])
    assert ours == theirs
    assert tiny.kernels("rope_append") == tokens + 1


def test_a_rotating_cache_that_is_shared_is_copied():
    """What holds the keys of before keeps them, although the oldest is overwritten."""
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
