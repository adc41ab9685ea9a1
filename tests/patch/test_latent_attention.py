"""Latent attention under the patch: heads of keys and of values that differ, over a cache, and models that have it."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.pages import MODELS
from helpers.tolerances import LAYERS, of_layer
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlx_mittens as mm

# Width of keys, of values, heads and heads of keys: one head that all share, and heads of their own.
HEADS = {"shared latent": (576, 512, 8, 1), "own heads": (192, 128, 4, 4)}


def attended(rng, dtype, widths) -> list[np.ndarray]:
    """A prompt and then tokens over a cache, as a layer does them."""
    width, value_width, heads, key_heads = widths
    cache, results = KVCache(), []
    for tokens in (7, 1, 1, 3, 1):
        q, k, v = (
            mx.array(rng.standard_normal((1, n, tokens, d)).astype(np.float32)).astype(dtype)
            for n, d in ((heads, width), (key_heads, width), (key_heads, value_width))
        )
        mask = cache.make_mask(tokens, return_array=False, window_size=None)
        keys, values = cache.update_and_fetch(k, v)
        y = mx.fast.scaled_dot_product_attention(q, keys, values, scale=width**-0.5, mask=mask)
        assert y.shape == (1, heads, tokens, value_width)
        results.append(np.array(y.astype(mx.float32)))
    return results


@pytest.mark.parametrize("kind", HEADS)
def test_heads_of_two_widths_over_a_cache(dtype, executor, kind):
    expected = attended(np.random.default_rng(5), dtype, HEADS[kind])
    mm.stats(reset=True)
    with mm.patched():
        found = attended(np.random.default_rng(5), dtype, HEADS[kind])
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(a, b, atol=of_layer(dtype) * np.abs(b).max(), err_msg=f"step {i}")
    assert tiny.kernels("scaled_dot_product_attention") >= len(expected)


@pytest.fixture
def whole_heads(monkeypatch):
    """Models whose heads are as wide as in DeepSeek V2 and V3, GLM and Kimi; the rest stays small."""
    widths = {"kv_lora_rank": 512, "q_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    for name, size in {**widths, "v_head_dim": 128, "num_key_value_heads": 4}.items():
        monkeypatch.setitem(MODELS["SIZES"], name, size)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "kimi_k25"])
def test_models_with_latent_attention(name, native, lenient, whole_heads):
    """Logits of a prompt, of tokens and of a prompt behind them are mx's, and kernels attend."""
    model, logits = MODELS["build"](name, mx.float32), []
    for patched in (contextlib.nullcontext, mm.patched):
        caches = make_prompt_cache(model)
        mm.stats(reset=True)
        with patched():
            steps = [model(mx.array([list(range(1, n + 1))]), cache=caches) for n in (9, 1, 1, 5, 1)]
            logits.append(np.concatenate([np.array(y[0], np.float32) for y in steps]))
    theirs, ours = logits
    np.testing.assert_allclose(ours, theirs, atol=LAYERS * np.abs(theirs).max())
    latent = sum("self_attn" in layer and "kv_a_proj_with_mqa" in layer.self_attn for layer in model.layers)
    assert latent > 0 and tiny.kernels("scaled_dot_product_attention") >= 5 * latent


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite", "kimi_k25", "longcat_flash"])
def test_projections_of_a_token_are_one_product(name, converts, lenient):
    """Of queries and latents, which read one norm; the tokens are mlx-lm's."""
    model, logits = MODELS["build"](name, mx.float32), []
    for is_ours in (False, True):
        if is_ours and converts:
            mm.nn.convert(model)
        cache = make_prompt_cache(model)
        with mm.patched() if is_ours and not converts else contextlib.nullcontext():
            mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=cache))
            with mm.simulator.enabled(gpu="m2-max") if is_ours else contextlib.nullcontext():
                mm.stats(reset=True)
                steps = [model(mx.array([[token]]), cache=cache) for token in (7, 8)]
                mx.eval(steps)
                logits.append(np.concatenate([np.array(y[0], np.float32) for y in steps]))
    theirs, ours = logits
    np.testing.assert_allclose(ours, theirs, atol=LAYERS * np.abs(theirs).max())
    attentions = len(cache) if name != "longcat_flash" else 2 * len(model.layers)
    counts = {op: sum(count["kernels"].values()) for op, count in mm.stats(reset=True).items()}
    assert counts["scaled_dot_product_attention"] == 2 * attentions
    routers = len(model.layers) if name == "longcat_flash" else 0  # a launch of the op each
    assert counts["quantized_matmuls"] == 2 * (attentions + routers)


def test_a_masked_token_of_latent_attention_is_mlx_lms(native, lenient):
    model, results = MODELS["build"]("deepseek_v3", mx.float32), []
    x = mx.random.normal((1, 1, model.args.hidden_size), key=mx.random.key(3))
    for context in (contextlib.nullcontext, mm.patched):
        cache = make_prompt_cache(model)[0]
        with context():
            layer = model.layers[0].self_attn
            mx.eval(layer(mx.concatenate([x] * 4, 1) + mx.arange(4)[:, None], None, cache))
            results.append(np.array(layer(x, mx.array([[False, True, True, False, True]]), cache)))
    np.testing.assert_allclose(results[1], results[0], atol=LAYERS * np.abs(results[0]).max())
