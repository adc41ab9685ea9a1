"""Mixtures of mlx-lm under the patch and converted: the same tokens, by our experts and routers."""

import contextlib
import importlib
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.pages import MODELS as PAGE
from helpers.tolerances import LAYERS, assert_near, of_roundings
from mlx_lm.models import switch_layers

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.bench import architectures
from mlx_mittens.patching import feed_forward, routers
from mlx_mittens.patching.layer_targets import mixture_of
from mlx_mittens.patching.targets import TARGETS

pytestmark = pytest.mark.usefixtures("native", "lenient")

_BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
_DEEPSEEK = {
    "num_key_value_heads": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_layer_freq": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 32,
    "n_group": 1, "topk_group": 1, "rope_scaling": _YARN, "attention_bias": False,
}  # fmt: skip
MODELS = {
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 64, "head_dim": 32, "tie_word_embeddings": False, "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False, "num_key_value_heads": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 32},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": {**_DEEPSEEK, "topk_method": "noaux_tc", "norm_topk_prob": True, "scoring_func": "sigmoid"},
}  # fmt: skip


def build(name, bits, rng, dtype=mx.float32):
    mx.random.seed(int(rng.integers(2**31)))
    quantization = None if bits is None else {"bits": bits, "group_size": 64}
    return architectures.from_config({"model_type": name, **_BASE, **MODELS[name]}, dtype, quantization)


def layers_of(model):
    return [m for _, m in model.named_modules() if isinstance(m, switch_layers.SwitchGLU)]


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("name", MODELS)
def test_tokens(rng, name, bits):
    model, prompt = build(name, bits, rng), rng.integers(1, 300, 7).tolist()
    theirs = tiny.tokens(model, prompt, 12)
    fused = bits is not None
    product = "gather_sum" if fused else "gather_mm"
    with mm.patched():
        mm.stats(reset=True)
        assert tiny.tokens(model, prompt, 12) == theirs
    assert tiny.kernels(product) > 0 and tiny.kernels("route_top_k") > 0
    assert (tiny.kernels("gather_swiglu") > 0) == fused
    mm.nn.convert(model)
    mm.stats(reset=True)
    assert tiny.tokens(model, prompt, 12) == theirs
    assert tiny.kernels(product) > 0 and tiny.kernels("route_top_k") > 0
    assert (tiny.kernels("gather_swiglu") > 0) == fused


# Mixtures whose shared expert has no gate, and routers with a bias of scores.
BESIDE = [
    "Klear",
    "afmoe",
    "bailing_hybrid",
    "bailing_moe",
    "bailing_moe_linear",
    "bailing_moe_v3",
    "dbrx",
    "deepseek",
    "deepseek_v41",
    "ernie4_5_moe",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan",
    "jamba",
    "laguna",
    "lfm2_moe",
    "llama4",
    "minimax",
    "nemotron_h",
    "phimoe",
    "phixtral",
    "step3p5",
    "dots1",
    "exaone_moe",
    "glm4_moe",
    "kimi_k3",
    "kimi_linear",
    "longcat_flash",
    "mimo_v2_flash",
    "minimax_m3_vl",
    "mistral4",
]


@pytest.mark.parametrize("name", BESIDE)
def test_tokens_beside_a_shared_expert(rng, name, lenient):
    """Natively and, for a token, as on an Apple GPU."""
    model, prompt = PAGE["build"](name, mx.float32), rng.integers(1, 300, 7).tolist()
    for _, part in model.named_modules():
        for bias in ("e_score_correction_bias", "expert_bias", "router_bias"):
            if part.get(bias) is not None:
                part[bias] = mx.array(rng.normal(size=part[bias].shape).astype(np.float32) / 8)
    theirs = tiny.tokens(model, prompt, 8)
    logits = model(mx.array([prompt[:1]]))

    def compare(context):
        with context:
            mm.stats(reset=True)
            assert tiny.tokens(model, prompt, 8) == theirs
            assert tiny.kernels("route_top_k") > 0
            with mm.simulator.enabled(gpu="m2-max"):
                assert_near(model(mx.array([prompt[:1]])), logits, "a token", LAYERS)

    compare(mm.patched())
    mm.nn.convert(model)
    compare(contextlib.nullcontext())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_weights_of_a_sparse_mixer(rng, dtype, native, k):
    """Bands of one expert and of all, equal gates, gates below zero, and infinite ones: mlx-lm's experts and sums."""
    phimoe = importlib.import_module("mlx_lm.models.phimoe")
    block = PAGE["build"]("phimoe", mx.float32).model.layers[0].block_sparse_moe
    block.top_k, block.gate = k, nn.Identity()
    gates = rng.normal(size=(40, 4)).astype(np.float32)
    gates[:10], gates[10], gates[11], gates[12:20] = gates[:10] / 100 + 1, 2, -1, np.round(gates[12:20])
    gates[20, 0], gates[21] = -np.inf, -np.abs(gates[21])
    gates = mx.array(gates).astype(dtype)
    found = []

    def experts(x, indices):
        found.append(indices)
        return mx.broadcast_to(1 + indices[..., None].astype(dtype), (*indices.shape, 1))

    block.switch_mlp = experts
    theirs = phimoe.PhiMoESparseMoeBlock.__call__(block, gates)
    assert mixture_of(phimoe.PhiMoESparseMoeBlock) is routers.phimoe_mixture
    ours = routers.phimoe_mixture(block, gates)
    np.testing.assert_array_equal(*map(np.array, found))
    assert_near(ours, theirs, "sums", of_roundings(dtype))


def test_gradients_of_a_sparse_mixer(rng, native):
    block = PAGE["build"]("phimoe", mx.float32).model.layers[0].block_sparse_moe
    block.gate, gates = nn.Identity(), mx.array(rng.normal(size=(9, 4)).astype(np.float32))
    block.switch_mlp = lambda x, indices: mx.broadcast_to(1.0 + indices[..., None], (*indices.shape, 1))
    ours, theirs = (
        mx.grad(lambda g, f=f: (f(g) ** 2).sum())(gates) for f in (partial(routers.phimoe_mixture, block), block)
    )
    assert_near(ours, theirs, "gradient", LAYERS)


def test_routers_alone_leave_experts_to_mx(rng):
    model, prompt = build("qwen3_moe", 4, rng), mx.array([[1, 2, 3]])
    expected = model(prompt)
    with mm.patched(experts=False):
        mm.stats(reset=True)
        assert_near(model(prompt), expected, "router", LAYERS)
    assert tiny.kernels("route_top_k") > 0
    assert not mm.stats().keys() & {"gather_qmm", "gather_swiglu", "gather_sum"}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_half_types_run_on_a_cpu(rng, name):
    """Where mx's own gather_mm refuses them."""
    model, prompt = build(name, None, rng, mx.bfloat16), mx.array(rng.integers(1, 300, (1, 5)))
    with pytest.raises(RuntimeError, match="float32"):
        mx.eval(model(prompt))
    with mm.patched():
        y = model(prompt)
        mx.eval(y)
    assert y.dtype == mx.bfloat16 and bool(mx.isfinite(y).all())


def test_many_tokens(rng):
    """mlx-lm sorts them by their experts."""
    model, prompt = build("qwen3_moe", 4, rng), mx.array(rng.integers(1, 300, (2, 40)))
    expected = model(prompt)
    with mm.patched():
        assert_near(model(prompt), expected, "patched", LAYERS)
    assert_near(mm.nn.convert(model)(prompt), expected, "converted", LAYERS)


def test_prompts_of_apple_gpus_are_not_sorted(rng):
    """Where tiles of experts take them in any order: three launches, and two more to sort the numbers of their rows."""
    glu = switch_layers.SwitchGLU(64, 64, 4)
    nn.quantize(glu, 32, 4)
    x, weights = (mx.array(rng.normal(size=shape).astype(np.float32)) for shape in ((1, 40, 64), (1, 40, 2)))
    indices = mx.array(rng.integers(0, 4, (1, 40, 2)).astype(np.uint32))
    expected = feed_forward.weighted_experts(glu, x, indices, weights)
    for layer, patched in ((glu, True), (mm.nn.convert(glu), False)):
        with mm.patched() if patched else contextlib.nullcontext(), mm.simulator.enabled(gpu="m1"):
            _ext.simulator_record(True)
            y = feed_forward.weighted_experts(layer, x, indices, weights)
            mx.eval(y)
            kernels = [launch["kernel"].removesuffix("_float32") for launch in _ext.simulator_record(False)]
        assert_near(y, expected, "a prompt", LAYERS)
        tiles = ["gather_swiglu_tiles_4bit_64", "gather_qmm_tiles_4bit_64"]
        assert kernels == ["expert_tiles", tiles[0], "expert_tiles", tiles[1], "row_sums"]


def test_gradients_of_a_mixture(rng):
    """By the weights of the layers before it, with a router that learns."""
    model, prompt = build("qwen3_moe", None, rng), mx.array(rng.integers(1, 300, (1, 6)))
    weight = model.model.layers[0].mlp.gate.weight

    def loss(weight):
        model.model.layers[0].mlp.gate.weight = weight
        return (model(prompt) ** 2).mean()

    expected = mx.grad(loss)(weight)
    with mm.patched():
        assert_near(mx.grad(loss)(weight), expected, "gradient of a router", LAYERS)


def test_quantized_after_it_was_converted(rng):
    model, prompt = mm.nn.convert(build("mixtral", None, rng)), mx.array(rng.integers(1, 300, (1, 5)))
    nn.quantize(model, 64, 4)
    mm.stats(reset=True)
    ours = model(prompt)
    mx.eval(ours)
    assert tiny.kernels("gather_sum") > 0 and tiny.kernels("gather_swiglu") > 0
    assert {type(layer.gate_proj).__name__ for layer in layers_of(model)} == {"QuantizedSwitchLinear"}


def test_export_leaves_experts_to_mx(rng, tmp_path):
    model, prompt = build("mixtral", 4, rng), mx.array([[1, 2, 3]])
    expected = model(prompt)
    for prepare in (lambda: mm.patch(), lambda: mm.nn.convert(model)):
        prepare()
        try:
            file = str(tmp_path / "model.mlxfn")
            mx.export_function(file, lambda x: model(x), prompt)
            (result,) = mx.import_function(file)(prompt)
            assert_near(result, expected, "exported", LAYERS)
        finally:
            mm.unpatch()


def test_every_known_mixture_is_there():
    """Each class that the table names has the call that is known."""
    named = {target.name for target in TARGETS if target.switch == "router"}
    assert len(named) >= 15
    for target in TARGETS:
        if target.switch == "router":
            importlib.import_module(target.module)
            assert target.is_known(), f"{target.name} is another in this mlx-lm"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_experts(rng, groups):
    """Routers of DeepSeek-V3's kind choose among the experts of half of the groups."""
    deepseek = importlib.import_module("mlx_lm.models.deepseek_v3")
    gate = build("deepseek_v3", None, rng).model.layers[1].mlp.gate
    gate.n_group, gate.topk_group = groups, max(1, groups // 2)
    gate.e_score_correction_bias = mx.array(rng.standard_normal(8).astype(np.float32) / 4)
    x = mx.array(rng.standard_normal((1, 40, 64)).astype(np.float32))
    assert mixture_of(deepseek.MoEGate) is routers.deepseek_v3_gate
    indices, weights = routers.deepseek_v3_gate(gate, x)
    theirs = gate(x)
    order, other = (mx.argsort(a, -1) for a in (indices, theirs[0]))
    assert_near(mx.take_along_axis(weights, order, -1), mx.take_along_axis(theirs[1], other, -1), "weights")
    np.testing.assert_array_equal(np.sort(np.array(indices)), np.sort(np.array(theirs[0])))


GROUPED = ["bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "deepseek_v3", "kimi_linear"]


@pytest.mark.parametrize("name", GROUPED)
def test_a_token_s_groups(rng, name):
    """In the launches of the experts, too."""
    model, x = PAGE["build"](name, mx.float32), mx.array(rng.standard_normal((1, 1, 128)).astype(np.float32))
    kinds = ("SparseMoeBlock", "BailingSparseMoE", "DeepseekV3MoE", "KimiSparseMoE")
    block = next(part for _, part in model.named_modules() if type(part).__name__ in kinds)
    for part in (block, block.gate, block.get("args")):
        if part is not None and hasattr(part, "topk_group"):
            for groups in ("n_group", "num_expert_group"):
                if hasattr(part, groups):
                    setattr(part, groups, 2)
            part.topk_group = 1
    expected = block(x)
    for simulated in (contextlib.nullcontext(), mm.simulator.enabled(gpu="m2-max")):
        with mm.patched(), simulated:
            mm.stats(reset=True)
            assert_near(block(x), expected, name, LAYERS)
            assert tiny.kernels("route_top_k") + tiny.kernels("mixture") > 0


@pytest.mark.parametrize("name", ["kimi_k3", "longcat_flash", "minimax_m3_vl"])
def test_gradients_of_mixtures_whose_layers_are_known(rng, name, lenient):
    model = PAGE["build"](name, mx.float32)
    kinds = ("SparseMoeBlock", "KimiK3SparseMoE", "LongcatFlashMoE")
    block = next(part for _, part in model.named_modules() if type(part).__name__ in kinds)
    x, weights = (mx.array(rng.standard_normal((1, n, 128)).astype(np.float32)) for n in (3, 1))

    def loss(x):
        return (block(x) * weights).sum()

    expected = mx.grad(loss)(x)
    with mm.patched():
        found = mx.grad(loss)(x)
    assert_near(found, expected, "gradient", LAYERS)


@pytest.mark.parametrize("name", ["bailing_moe_v3", "deepseek_v41", "minimax"])
def test_wide_routers_while_mlx_compiles(rng, name, lenient):
    """Weights that are kept in float32, where they are inputs of a compiled function, and where one changes."""
    model, x = PAGE["build"](name, mx.float32), mx.array(rng.standard_normal((1, 3, 128)).astype(np.float32))
    kinds = ("BailingSparseMoE", "MoE", "MiniMaxSparseMoeBlock")
    block = next(part for _, part in model.named_modules() if type(part).__name__ in kinds)
    block.gate.set_dtype(mx.float16)
    for _ in range(2):
        expected = block(x)
        with mm.patched():
            compiled = mx.compile(lambda x: block(x), inputs=block)
            for found in (compiled(x), block(x)):
                assert_near(found, expected, name, LAYERS)
        part = "scales" if "scales" in block.gate else "weight"
        block.gate[part] = block.gate[part] * 2
