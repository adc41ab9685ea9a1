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
