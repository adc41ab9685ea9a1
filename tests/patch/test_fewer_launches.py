"""A token of quantized models on Apple GPUs: layers of one input are one launch, a mixture from its router on two."""

import mlx.core as mx
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS, assert_near, of_layer

import mlx_mittens as mm

# Of two layers: the first norm has no product before it, the last one several rows behind it in other calls.
NORMS = {"quantized_matmul_sum": 3, "quantized_swiglu": 2, "rms_norm": 1, "add_rms_norm": 1}
MIXTURES = {"quantized_matmuls": 4, "mixture": 4, "quantized_matmul_sum": 2, "rms_norm": 1, "add_rms_norm": 1}
# By model: launches of a token's layers, that are several layers or experts in one.
MODELS = {
    "llama-3.2-1b": {"quantized_matmuls": 2, **NORMS},
    "qwen2.5-0.5b": {"quantized_matmuls": 2, **NORMS},
    "qwen3-0.6b": {"quantized_matmuls": 2, **NORMS},
    # The projections of the gated delta, and in both layers the router, with the shared expert's gate if there is one.
    # Before the second layer's attention the mixture adds the residual for the norm. Router and experts read one.
    "qwen3-next-80b-a3b": {"gated_delta_token": 1, **MIXTURES},
    "qwen3-30b-a3b": MIXTURES,
    "gpt-oss-20b": MIXTURES,
    "gemma-3-1b": {"quantized_matmuls": 2, "norm_add_norm": 4, "quantized_swiglu": 2, "rms_norm": 1},
    "lfm2-1.2b": {"short_conv_token": 1, **NORMS},
    "mamba2-2.7b": {"ssm_token": 2, "quantized_matmul_sum": 1, "rms_norm": 3, "add_rms_norm": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_token_gives_what_mlx_lm_gives(rng, name):
    model = tiny.build(name, mx.float32, bits=4)
    prompt, token = mx.array(rng.integers(0, 320, (1, 5))), mx.array(rng.integers(0, 320, (1, 1)))

    expected, _ = tiny.token_and_launches(model, prompt, token)
    found, counts = tiny.token_and_launches(model, prompt, token, mm.patched(), mm.simulator.enabled(gpu="m2-max"))
    assert {op: counts.get(op) for op in MODELS[name]} == MODELS[name]
    assert "route_top_k" not in counts
    assert_near(found, expected, name, LAYERS)


def test_a_converted_model_has_them_too(rng):
    """But for the attention, whose joined weights are a fusion of their own where its structure is known."""
    model = tiny.build("qwen3-next-80b-a3b", mx.float32, bits=4)
    prompt, token = mx.array(rng.integers(0, 320, (1, 5))), mx.array(rng.integers(0, 320, (1, 1)))

    expected, _ = tiny.token_and_launches(model, prompt, token)
    mm.nn.convert(model)
    found, counts = tiny.token_and_launches(model, prompt, token, simulated=mm.simulator.enabled(gpu="m2-max"))
    wanted = {"gated_delta_token": 1, "quantized_matmuls": 3, "mixture": 4}
    assert {op: counts.get(op) for op in wanted} == wanted
    assert_near(found, expected, "logits", LAYERS)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_norms_of_a_converted_model_lie_between_its_products(rng, dtype, name):
    model = tiny.build(name, dtype, bits=4)
    prompt, token = mx.array(rng.integers(0, 320, (1, 5))), mx.array(rng.integers(0, 320, (1, 1)))
    expected, _ = tiny.token_and_launches(model, prompt, token)
    mm.nn.convert(model)
    found, counts = tiny.token_and_launches(model, prompt, token, simulated=mm.simulator.enabled(gpu="m2-max"))
    # The first layer's product with the joined matrix has no norm to take.
    assert {op: counts.get(op) for op in NORMS} == NORMS and counts["quantized_matmuls"] == 1
    assert_near(found, expected, name, LAYERS if dtype == mx.float32 else 2 * of_layer(dtype))


def test_layers_that_are_not_alike_are_multiplied_with_one_by_one(rng):
    """Of other bits, and with a bias where another has none."""
    import mlx.nn as nn

    from mlx_mittens.patching import linears

    x = mx.array(rng.normal(size=(1, 64))).astype(mx.float32)
    four, eight = (nn.QuantizedLinear(64, 32, bias=False, group_size=32, bits=bits) for bits in (4, 8))
    biased, dense = nn.QuantizedLinear(64, 32, group_size=32, bits=4), nn.Linear(64, 32)
    with mm.simulator.enabled(gpu="m2-max"):
        for layers, count in (([four, four], 1), ([four, eight], 0), ([four, biased], 0), ([four, dense], 0)):
            mm.stats(reset=True)
            found = linears.products(x, layers)
            mx.eval(found)
            assert sum(mm.stats().get("quantized_matmuls", {"kernels": {}})["kernels"].values()) == count
            for y, layer in zip(found, layers, strict=True):
                assert_near(y, layer(x), "product", LAYERS)
