"""Decoder layers that normalize the outputs of their parts, patched and converted: Gemma 2 and 3, GLM-4."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.tolerances import LAYERS, SUMS, assert_near, of_layer
from mlx.utils import tree_map_with_path
from mlx_lm.models import gemma, gemma2, gemma3_text, glm4

import mlx_mittens as mm

pytestmark = pytest.mark.usefixtures("lenient")

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 101,
}
MORE = {
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2},
    "glm4": {
        **{"attention_bias": False, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
        **{"max_position_embeddings": 64, "rope_traditional": True},
    },
}
MODULES = {"gemma": gemma, "gemma2": gemma2, "gemma3_text": gemma3_text, "glm4": glm4}


def build(name: str, rng, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A small model whose norms differ."""
    module = MODULES[name]
    fields = module.ModelArgs.__dataclass_fields__
    arguments = {key: value for key, value in {**SIZES, **MORE[name]}.items() if key in fields}
    model = module.Model(module.ModelArgs(model_type=name, **arguments))
    draw = lambda path, a: mx.array(rng.standard_normal(a.shape).astype(np.float32) / (2 if a.ndim == 1 else 8))
    model.update(tree_map_with_path(draw, model.parameters()))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def logits(model: nn.Module) -> np.ndarray:
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
    return np.array(model(tokens).astype(mx.float32))


def launched() -> dict[str, int]:
    return {op: sum(counts["kernels"].values()) for op, counts in mm.stats(reset=True).items()}


# Between three layers, each of two parts, are five sums whose norm is known, and the last one's. Norms that are left:
# of the first input, and of heads.
NORMS = {
    "gemma": {"add_rms_norm": 6, "rms_norm": 1},
    "gemma2": {"norm_add_norm": 6, "rms_norm": 1},
    "gemma3_text": {"norm_add_norm": 6, "rms_norm": 7},
    "glm4": {"norm_add_norm": 6, "rms_norm": 1},
}


@pytest.mark.parametrize("name", list(MODULES))
def test_the_same_model_in_fewer_kernels(rng, name):
    model = build(name, rng)
    expected = logits(model)
    mm.stats(reset=True)
    with mm.patched():
        patched = logits(model)
    counts = launched()
    assert {op: counts.get(op, 0) for op in NORMS[name]} == NORMS[name]
    assert counts.get("softcap", 0) == (name == "gemma2")
    mm.nn.convert(model)
    mm.stats(reset=True)
    converted = logits(model)
    counts = launched()
    norms = dict(NORMS[name])
    if name == "gemma3_text":  # heads of queries and keys are normed at once
        norms |= {"rms_norm": 1, "qk_norm": 3}
    assert {op: counts.get(op, 0) for op in norms} == norms
    for result in (patched, converted):
        np.testing.assert_allclose(result, expected, rtol=LAYERS, atol=SUMS * np.abs(expected).max())


def test_gemma_3_keeps_sums_in_float16_finite(rng):
    """It clips them in float16, by the same kernels."""
    model = build("gemma3_text", rng, mx.float16)

    def enlarge():
        for layer in model.layers:
            layer.post_attention_layernorm.weight = mx.full((64,), 60000.0, mx.float16)
            layer.post_feedforward_layernorm.weight = mx.full((64,), 60000.0, mx.float16)

    usual = [(layer.post_attention_layernorm.weight, layer.post_feedforward_layernorm.weight) for layer in model.layers]
    enlarge()
    expected = logits(model)
    assert np.isfinite(expected).all()
    mm.stats(reset=True)
    with mm.patched():
        patched = logits(model)
    assert launched()["norm_add_norm"] == NORMS["gemma3_text"]["norm_add_norm"]
    for layer, weights in zip(model.layers, usual, strict=True):  # a trial shows nothing where norms overflow
        layer.post_attention_layernorm.weight, layer.post_feedforward_layernorm.weight = weights
    mm.nn.convert(model)
    enlarge()
    mm.stats(reset=True)
    converted = logits(model)
    assert launched()["norm_add_norm"] == NORMS["gemma3_text"]["norm_add_norm"]
    for result in (patched, converted):
        np.testing.assert_array_equal(np.isfinite(result), True)
        limit = 2 * of_layer(mx.float16)
        np.testing.assert_allclose(result, expected, rtol=limit, atol=limit * np.abs(expected).max())


def test_a_sum_of_gemma_3_that_is_read_is_computed_once(rng):
    """Where somebody holds a layer's result, the norm after it has a launch of its own."""
    model = build("gemma3_text", rng, mx.float16)
    x = mx.array(rng.standard_normal((1, 1, 64)).astype(np.float16))
    layer, norm = model.layers[0], model.model.norm

    def both():
        y = layer(x)
        held = y + 0
        return norm(y), held, y

    expected = both()
    with mm.patched():
        found = both()
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, "layer", 2 * of_layer(mx.float16))
