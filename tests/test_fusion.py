"""Blocks that mm.nn.convert fuses: the same model in fewer kernels, and none that only looks the part."""

import copy

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import tiny
from mlx.utils import tree_flatten
from mlx_lm.models import granite, llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_mittens as mm

FUSED = ["llama-3.2-1b", "qwen3-0.6b", "qwen2.5-0.5b"]

pytestmark = pytest.mark.usefixtures("lenient")


def logits(model, prompt, following):
    caches = make_prompt_cache(model)
    result = [model(prompt, cache=caches), model(following, cache=caches)]
    mx.eval(result)
    return [np.array(a) for a in result]


@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_converted_model_is_the_same_model(rng, name, bits):
    mx.random.seed(int(rng.integers(2**31)))
    model = tiny.build(name, mx.float32, bits)
    prompt, following = mx.array(rng.integers(1, 300, (2, 13))), mx.array(rng.integers(1, 300, (2, 1)))
    expected = logits(model, prompt, following)
    weights = {name: a for name, a in tree_flatten(model.parameters())}

    assert mm.nn.convert(model) is model
    mm.stats(reset=True)
    for ours, theirs in zip(logits(model, prompt, following), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max())
    assert {name: a for name, a in tree_flatten(model.parameters())}.keys() == weights.keys()
    assert tiny.kernels("scaled_dot_product_attention") == 4
    if name in FUSED:
        assert tiny.kernels("add_rms_norm") == 8
        assert tiny.kernels("quantized_swiglu") == (4 if bits else 0)
        norms_of_heads = 8 if name == "qwen3-0.6b" else 0
        assert tiny.kernels("rms_norm") == 2 + norms_of_heads  # only the first block's own


def test_converted_and_patched_tokens(rng):
    model = tiny.build("llama-3.2-1b", mx.float32, 4)
    prompt = rng.integers(1, 300, 9).tolist()
    expected = tiny.tokens(model, prompt, 30)
    quantized = tiny.tokens(model, prompt, 30, kv_bits=8, quantized_kv_start=0)
    mm.nn.convert(model)
    assert tiny.tokens(model, prompt, 30) == expected
    mm.stats(reset=True)
    assert tiny.tokens(model, prompt, 30, kv_bits=8, quantized_kv_start=0) == quantized
    assert tiny.kernels("quantized_scaled_dot_product_attention") > 0
    with mm.patched():
        assert tiny.tokens(copy.deepcopy(model), prompt, 30) == expected


def test_without_fusing(rng):
    model = mm.nn.convert(tiny.build("llama-3.2-1b", mx.float32, 4), fuse=False)
    assert type(model.layers[0]) is llama.TransformerBlock and type(model.model.norm) is mm.nn.RMSNorm


def test_a_multiplied_residual_is_not_fused(rng):
    arguments = {
        "model_type": "granite",
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
        "logits_scaling": 1.0,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 0.5,
        "max_position_embeddings": 128,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
    }
    model = granite.Model(granite.ModelArgs(**arguments))
    prompt = mx.array([[1, 2, 3]])
    expected = np.array(model(prompt))
    mm.nn.convert(model)
    mm.stats(reset=True)
    np.testing.assert_allclose(np.array(model(prompt)), expected, rtol=1e-3, atol=1e-4)
    assert not tiny.kernels("add_rms_norm")


def test_layers_left_out_or_in_another_order_are_right(rng):
    """What a block hands on is for the norm that it was computed with, and for no other."""
    plain = tiny.build("llama-3.2-1b", mx.float32, 4, num_hidden_layers=3)
    fused = mm.nn.convert(copy.deepcopy(plain))
    x = mx.array(rng.normal(size=(1, 5, 128)).astype(np.float32))

    def run(model, order):
        h = x
        for i in order:
            h = model.layers[i](h, "causal", None)
        return np.array(model.model.norm(h))

    for order in ([0, 2], [2, 1, 0], [1, 1], [2], [0, 1, 2]):
        np.testing.assert_allclose(run(fused, order), run(plain, order), rtol=1e-3, atol=1e-3)


def test_compiled_checkpointed_and_adapted_models(rng):
    plain = tiny.build("llama-3.2-1b", mx.float32, 4)
    fused = mm.nn.convert(copy.deepcopy(plain))
    prompt = mx.array(rng.integers(1, 300, (1, 11)))
    expected = np.array(plain(prompt))
    step = mx.compile(lambda tokens: fused(tokens))
    for _ in range(2):
        np.testing.assert_allclose(np.array(step(prompt)), expected, rtol=1e-3, atol=1e-3)
    original = type(fused.layers[0]).__call__
    grad_checkpoint(fused.layers[0])
    try:
        np.testing.assert_allclose(np.array(fused(prompt)), expected, rtol=1e-3, atol=1e-3)
    finally:
        type(fused.layers[0]).__call__ = original
    linear_to_lora_layers(fused, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["mlp.gate_proj"]})
    np.testing.assert_allclose(np.array(fused(prompt)), expected, rtol=1e-3, atol=1e-3)
    assert not isinstance(fused.layers[0].mlp.gate_proj, nn.QuantizedLinear)


def test_training_a_converted_model(rng):
    plain = tiny.build("llama-3.2-1b", mx.float32)
    fused = mm.nn.convert(copy.deepcopy(plain))
    tokens = mx.array(rng.integers(1, 300, (2, 12)))

    def losses(model):
        optimizer = optim.SGD(learning_rate=0.05)
        loss_of = lambda model: nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")
        result = []
        for _ in range(3):
            loss, gradients = nn.value_and_grad(model, loss_of)(model)
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), loss)
            result.append(loss.item())
        return result

    expected = losses(plain)
    assert expected[2] < expected[0]
    np.testing.assert_allclose(losses(fused), expected, rtol=1e-3)
