"""Blocks that mm.nn.convert fuses: the same model in fewer kernels, and none that only looks the part."""

import copy
import operator

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS, PART_OF_A_CHANGE, SUMS, of_layer
from mlx.utils import tree_flatten
from mlx_lm.models import cache, granite, llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_mittens as mm
from mlx_mittens.nn.fused_attention import joined_attention

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
    weights = dict(tree_flatten(model.parameters()))

    assert mm.nn.convert(model) is model
    mm.stats(reset=True)
    for ours, theirs in zip(logits(model, prompt, following), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=LAYERS, atol=SUMS * np.abs(theirs).max())
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == weights.keys()
    assert all(mx.array_equal(after[name], weights[name]) for name in weights)
    assert tiny.kernels("scaled_dot_product_attention") == 4
    if name in FUSED:
        assert tiny.kernels("add_rms_norm") == 8
        assert tiny.kernels("quantized_swiglu") == (4 if bits else 0)
        # Queries, keys and values are one product of a layer.
        product = "quantized_matmul" if bits else "gemv"
        assert tiny.kernels(product) == 2 * (1 + 2 * (3 if bits else 5))
        assert tiny.kernels("rms_norm") == 2  # only the first block's own
        assert tiny.kernels("rope_append") == 4  # with norms of heads, and into the empty cache too
        assert tiny.kernels("qk_norm") == 0
    if name == "gemma-3-1b":  # two sums in each of two layers, for a prompt and for a token
        assert tiny.kernels("norm_add_norm") == 8


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


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
def test_caches_of_a_converted_model(rng, monkeypatch, name):
    """The plain cache is appended to in one call where it has room, and grown by itself where it has none."""
    monkeypatch.setattr(cache.KVCache, "step", 8)
    model = tiny.build(name, mx.float32, 4)
    converted = mm.nn.convert(copy.deepcopy(model))
    prompt = rng.integers(1, 300, 6).tolist()
    kinds = {
        "plain": lambda model: [cache.KVCache() for _ in model.layers],
        "rotating": lambda model: [cache.RotatingKVCache(max_size=12) for _ in model.layers],
        "growing": lambda model: [cache.ConcatenateKVCache() for _ in model.layers],
    }
    for caches in kinds.values():
        ours, theirs = caches(converted), caches(model)
        expected = tiny.tokens(model, prompt, 30, prompt_cache=theirs)
        assert tiny.tokens(converted, prompt, 30, prompt_cache=ours) == expected
        assert [c.offset for c in ours] == [c.offset for c in theirs]
    several = mx.array(rng.integers(1, 300, (3, 5)))
    ours, theirs = kinds["plain"](converted), kinds["plain"](model)
    for tokens in (several, several[:, :1], several[:, :4], several[:, 1:2]):
        np.testing.assert_allclose(
            np.array(converted(tokens, cache=ours)), np.array(model(tokens, cache=theirs)), rtol=LAYERS, atol=LAYERS
        )


@pytest.mark.parametrize("bits", [4, None])
def test_joined_projections_follow_their_weights(rng, bits):
    """Joined weights are given up once a layer has other weights, and a copy of the model is joined as it was."""
    tokens = mx.array(rng.integers(1, 300, (1, 7)))
    products = lambda: sum(mm.stats()["quantized_matmul" if bits else "gemv"]["kernels"].values())

    def check(model, plain, joined):
        expected = np.array(plain(tokens))
        mx.eval(model(tokens))
        mm.stats(reset=True)
        np.testing.assert_allclose(np.array(model(tokens)), expected, rtol=LAYERS, atol=LAYERS)
        assert products() == 1 + 2 * (3 if bits else 5) + 2 * (2 - joined)

    plain = tiny.build("llama-3.2-1b", mx.float32, bits)
    model = mm.nn.convert(copy.deepcopy(plain))
    check(model, plain, joined=2)
    check(copy.deepcopy(model), plain, joined=2)
    name = "scales" if bits else "weight"
    for each in (model, plain):
        layer = each.layers[0].self_attn.k_proj
        layer[name] = 2 * layer[name]
    check(model, plain, joined=1)
    other = tiny.build("llama-3.2-1b", mx.float32, bits)
    for each in (model, plain):
        each.update(copy.deepcopy(other.parameters()))
    check(model, plain, joined=0)


@pytest.mark.parametrize(
    "name, module, attribute, value",
    [
        ("qwen3-0.6b", "rope", "base", 100.0),
        ("qwen3-0.6b", "rope", "scale", 0.5),
        ("qwen3-0.6b", "rope", "dims", 8),
        ("qwen3-0.6b", "rope", "traditional", True),
        ("qwen3-0.6b", "k_norm", "eps", 1.0),
        ("llama-3.2-1b", "rope", "traditional", True),
        ("llama-3.2-1b", "rope", "_freqs", mx.full((32,), 3.0)),
    ],
)
def test_a_rotary_embedding_follows_its_module(rng, name, module, attribute, value):
    plain = tiny.build(name, mx.float32, None)
    converted = mm.nn.convert(copy.deepcopy(plain))
    prompt, following = mx.array(rng.integers(1, 300, (1, 9))), mx.array(rng.integers(1, 300, (1, 1)))
    before = logits(plain, prompt, following)[1]
    for model in (plain, converted):
        for layer in model.layers:
            setattr(layer.self_attn[module], attribute, value)
    expected, found = logits(plain, prompt, following)[1], logits(converted, prompt, following)[1]
    assert np.abs(expected - before).max() > 1e-2
    np.testing.assert_allclose(found, expected, rtol=LAYERS, atol=LAYERS)


def triple(module, name):
    array = module[name]
    array *= 3


def fill_rows(module, name):
    module[name][1:5] = 1


def give_bias(module, name):
    module[name] = 3 * mx.random.normal(module.weight.shape[:1])


def give_freshly(module, name):
    module[name] = mx.random.normal(module[name].shape)


@pytest.mark.parametrize(
    "name, bits, part, parameter, change",
    [
        ("llama-3.2-1b", None, "self_attn.q_proj", "weight", triple),
        ("llama-3.2-1b", None, "self_attn.k_proj", "weight", fill_rows),
        ("llama-3.2-1b", None, "self_attn.v_proj", "weight", give_freshly),
        ("llama-3.2-1b", 4, "self_attn.v_proj", "scales", triple),
        ("llama-3.2-1b", 4, "self_attn.k_proj", "biases", fill_rows),
        ("llama-3.2-1b", 4, "self_attn.v_proj", "bias", give_bias),
        ("llama-3.2-1b", None, "self_attn.q_proj", "bias", give_bias),
        ("llama-3.2-1b", None, "self_attn.rope", "_freqs", triple),
        ("qwen2.5-0.5b", None, "self_attn.v_proj", "bias", triple),
        ("qwen2.5-0.5b", None, "self_attn.q_proj", "bias", dict.pop),
        ("qwen3-0.6b", 4, "self_attn.q_norm", "weight", triple),
        ("qwen3-0.6b", None, "self_attn.k_norm", "weight", fill_rows),
        ("llama-3.2-1b", 4, "mlp.gate_proj", "scales", triple),
        ("llama-3.2-1b", 4, "mlp.gate_proj", "bias", give_bias),
        ("llama-3.2-1b", 4, "mlp.up_proj", "bias", give_bias),
        ("llama-3.2-1b", 4, "input_layernorm", "weight", triple),
        ("llama-3.2-1b", 4, "post_attention_layernorm", "weight", triple),
    ],
)
def test_a_converted_model_follows_its_parameters(rng, device, name, bits, part, parameter, change):
    """Those that are given, added, taken away, and assigned to in place, which leaves Python's object as it was."""
    plain = tiny.build(name, mx.float32, bits)
    for layer in plain.layers:  # so that attention tells between tokens, and its result counts
        for projection, factor in (("q_proj", 1.5), ("k_proj", 1.5), ("v_proj", 20)):
            for scaled in ("scales", "biases") if bits else ("weight",):
                layer.self_attn[projection][scaled] *= factor
    converted = mm.nn.convert(copy.deepcopy(plain))
    prompt, following = mx.array(rng.integers(1, 300, (1, 9))), mx.array(rng.integers(1, 300, (1, 1)))
    before = logits(plain, prompt, following)
    np.testing.assert_allclose(logits(converted, prompt, following)[1], before[1], rtol=LAYERS, atol=LAYERS)
    again = copy.deepcopy(converted)
    for model in (plain, converted, again):
        mx.random.seed(3)
        for layer in model.layers:
            change(operator.attrgetter(part)(layer), parameter)
    late = copy.deepcopy(converted)
    expected = logits(plain, prompt, following)
    for model in (converted, again, late):
        for found, wanted, was in zip(logits(model, prompt, following), expected, before, strict=True):
            change = np.abs(wanted - was).max()
            assert change > 5e-3
            np.testing.assert_allclose(found, wanted, rtol=0, atol=PART_OF_A_CHANGE * change)


def test_a_rotary_embedding_without_its_base(rng):
    plain = tiny.build("qwen3-0.6b", mx.float32)
    converted = mm.nn.convert(copy.deepcopy(plain))
    for model in (plain, converted):
        logits(model, mx.array([[1, 2, 3]]), mx.array([[4]]))
        del model.layers[1].self_attn.rope.base
        with pytest.raises(AttributeError, match="base"):
            logits(model, mx.array([[1, 2, 3]]), mx.array([[4]]))


class Clipped(llama.Attention):
    """As OLMo's, where no number of a trial reaches the clip."""

    def __call__(self, x, mask=None, cache=None):
        B, L, _ = x.shape
        q, k, v = (mx.clip(product(x), -100, 100) for product in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (a.reshape(B, L, -1, 64).transpose(0, 2, 1, 3) for a in (q, k, v))
        y = scaled_dot_product_attention(self.rope(q), self.rope(k), v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(B, L, -1))


class Hidden(llama.Attention):
    """The same with the clip in a function of its own."""

    def __call__(self, x, mask=None, cache=None):
        B, L, _ = x.shape
        clipped = lambda a: mx.clip(a, -100, 100).reshape(B, L, -1, 64).transpose(0, 2, 1, 3)
        q, k, v = clipped(self.q_proj(x)), clipped(self.k_proj(x)), clipped(self.v_proj(x))
        y = scaled_dot_product_attention(self.rope(q), self.rope(k), v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(B, L, -1))


class Odd(llama.Attention):
    """An attention that uses only known names, in another order."""

    def __call__(self, x, mask=None, cache=None):
        B, L, _ = x.shape
        q = self.rope(self.q_proj(x).reshape(B, L, self.n_heads, -1).transpose(0, 2, 1, 3))
        k = self.k_proj(x).reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        v = self.rope(self.v_proj(x).reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3))
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(B, L, -1))


@pytest.mark.parametrize("kind", [Clipped, Hidden, Odd])
def test_another_attention_is_not_joined(rng, kind):
    model = tiny.build("llama-3.2-1b", mx.float32, 4)
    model.layers[0].self_attn.__class__ = kind
    model.layers[0].self_attn.v_proj.scales = 1000 * model.layers[0].self_attn.v_proj.scales
    plain = copy.deepcopy(model)
    mm.nn.convert(model)
    ours = [type(layer.self_attn).__call__ is joined_attention for layer in model.layers]
    assert ours == [False, True]
    tokens = mx.array(rng.integers(1, 300, (1, 7)))
    np.testing.assert_allclose(np.array(model(tokens)), np.array(plain(tokens)), rtol=LAYERS, atol=LAYERS)


def test_without_fusing(rng):
    model = mm.nn.convert(tiny.build("llama-3.2-1b", mx.float32, 4), fuse=False)
    assert type(model.layers[0]) is llama.TransformerBlock and type(model.model.norm) is mm.nn.RMSNorm


@pytest.mark.parametrize("norms", [1.0, 0.02])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_multiplied_residual_is_not_fused(rng, dtype, norms):
    """Also where the multiplied part is little beside the residual."""
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
    model.set_dtype(dtype)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        model.layers[0][norm].weight = model.layers[0][norm].weight * norms
    prompt = mx.array([[1, 2, 3]])
    expected = np.array(model(prompt).astype(mx.float32))
    mm.nn.convert(model)
    mm.stats(reset=True)
    limit = of_layer(dtype)
    np.testing.assert_allclose(np.array(model(prompt).astype(mx.float32)), expected, rtol=limit, atol=limit)
    assert type(model.layers[0]) is granite.TransformerBlock
    assert tiny.kernels("add_rms_norm") == 2  # as under the patch: the sums that its norms are given


def test_a_block_that_takes_more_is_not_fused(rng):
    """As in mlx-vlm, whose blocks pass positions: a trial does not show their arguments."""

    class Block(llama.TransformerBlock):
        def __call__(self, x, mask=None, cache=None, position_ids=None):
            r = self.self_attn(self.input_layernorm(x), mask, cache)
            h = x + r
            r = self.mlp(self.post_attention_layernorm(h))
            return h + r

    model = tiny.build("llama-3.2-1b", mx.float32, 4)
    for layer in model.layers:
        layer.__class__ = Block
    x = mx.array(rng.normal(size=(1, 5, 128)).astype(np.float32))
    expected = np.array(model.layers[0](x, "causal", None, None))
    mm.nn.convert(model)
    np.testing.assert_allclose(np.array(model.layers[0](x, "causal", None, None)), expected, rtol=LAYERS, atol=LAYERS)


def test_layers_left_out_or_in_another_order_are_right(rng):
    """A block hands its result on to the norm that it was computed with, and to no other."""
    plain = tiny.build("llama-3.2-1b", mx.float32, 4, num_hidden_layers=3)
    fused = mm.nn.convert(copy.deepcopy(plain))
    x = mx.array(rng.normal(size=(1, 5, 128)).astype(np.float32))

    def run(model, order):
        h = x
        for i in order:
            h = model.layers[i](h, "causal", None)
        return np.array(model.model.norm(h))

    for order in ([0, 2], [2, 1, 0], [1, 1], [2], [0, 1, 2]):
        np.testing.assert_allclose(run(fused, order), run(plain, order), rtol=LAYERS, atol=LAYERS)


def test_what_is_added_in_place_between_blocks_counts(rng):
    """A steering vector, say: Python's object stays the same, but the block's result is stale."""
    plain = tiny.build("llama-3.2-1b", mx.float32, 4, num_hidden_layers=3)
    fused = mm.nn.convert(copy.deepcopy(plain))
    x, vector = (mx.array(rng.normal(size=shape).astype(np.float32)) for shape in ((1, 5, 128), (128,)))

    def run(model):
        h = x
        for layer in model.layers:
            h = layer(h, "causal", None)
            h += vector
        h[:, 0] = 1.0
        return np.array(model.model.norm(h))

    np.testing.assert_allclose(run(fused), run(plain), rtol=LAYERS, atol=LAYERS)


class Clamped(nn.Module):
    """A feed-forward part as Step 3.5's, which bounds gates and values."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.gate_proj, self.up_proj = (nn.Linear(128, 256, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(256, 128, bias=False)

    def __call__(self, x):
        gate, up = nn.silu(self.gate_proj(x)), self.up_proj(x)
        if self.limit:
            gate, up = mx.minimum(gate, self.limit), mx.clip(up, -self.limit, self.limit)
        return self.down_proj(gate * up)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("limit", [None, 7.0, 16.0])
def test_clamps_are_kept(rng, limit, dtype):
    """Usual numbers do not reach them."""
    mlp = Clamped(limit)
    mlp.set_dtype(dtype)
    nn.quantize(mlp)
    x = mx.array(rng.normal(size=(1, 4, 128)) * 30).astype(dtype)
    expected = np.array(mlp(x).astype(mx.float32))
    model = nn.Sequential(mlp)
    mm.nn.convert(model)
    mm.stats(reset=True)
    found = np.array(model(x).astype(mx.float32))
    np.testing.assert_allclose(found, expected, rtol=LAYERS, atol=SUMS * np.abs(expected).max() * 2**13)
    assert bool(mm.stats().get("quantized_swiglu")) == (limit is None)


class Gated(nn.Module):
    """A feed-forward part with some activation."""

    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(128, 256, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(256, 128, bias=False)
        self.activation = activation

    def __call__(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class OfGemma(Gated):
    def __call__(self, x):
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_an_activation_is_no_other(rng, dtype, size):
    """Also where gates of usual numbers are so small or large that activations are alike."""
    parts = {
        "silu": (Gated(nn.silu), True),
        "GELU": (Gated(nn.gelu), False),
        "GELU's other approximation": (Gated(nn.gelu_fast_approx), False),
        "ReLU": (Gated(nn.relu), False),
        "Gemma": (OfGemma(None), True),
    }
    for name, (mlp, is_fused) in parts.items():
        mlp.gate_proj.weight = mlp.gate_proj.weight * size
        mlp.set_dtype(dtype)
        nn.quantize(mlp)
        x = mx.array(rng.normal(size=(1, 4, 128))).astype(dtype)
        mm.nn.convert(nn.Sequential(mlp), fuse=False)  # mx adds up products in half types
        expected = np.array(mlp(x).astype(mx.float32))
        mm.nn.convert(nn.Sequential(mlp))
        mm.stats(reset=True)
        found = np.array(mlp(x).astype(mx.float32))
        limit = of_layer(dtype)
        np.testing.assert_allclose(found, expected, rtol=limit, atol=limit * np.abs(expected).max(), err_msg=name)
        assert bool(mm.stats().get("quantized_swiglu")) == is_fused, name


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-3-1b", "gpt-oss-20b"])
def test_converting_twice_is_converting_once(rng, name):
    plain = tiny.build(name, mx.float32, 4)
    once = mm.nn.convert(copy.deepcopy(plain))
    twice = copy.deepcopy(plain)
    mm.nn.convert(twice.layers[0])
    mm.nn.convert(mm.nn.convert(twice))
    classes = lambda model: {path: type(module) for path, module in model.named_modules()}
    assert classes(twice) == classes(once)
    prompt, following = mx.array(rng.integers(1, 300, (1, 9))), mx.array(rng.integers(1, 300, (1, 1)))
    for a, b in zip(logits(twice, prompt, following), logits(once, prompt, following), strict=True):
        np.testing.assert_array_equal(a, b)
    linear_to_lora_layers(twice, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": {"mlp.gate_proj"}})
    mx.eval(twice(prompt))


def test_a_norm_that_lies_elsewhere_in_part_is_not_taken(rng):
    """As of a block that is sharded fully, whose weights are whole within its own call alone."""
    plain = tiny.build("llama-3.2-1b", mx.float32, 4)
    fused = mm.nn.convert(copy.deepcopy(plain))
    x = mx.array(rng.normal(size=(1, 5, 128)).astype(np.float32))
    whole = fused.layers[1].input_layernorm.weight
    fused.layers[1].input_layernorm.weight = whole[:64]
    h = fused.layers[0](x, "causal", None)
    fused.layers[1].input_layernorm.weight = whole
    np.testing.assert_allclose(
        np.array(fused.layers[1](h, "causal", None)),
        np.array(plain.layers[1](plain.layers[0](x, "causal", None), "causal", None)),
        rtol=LAYERS,
        atol=LAYERS,
    )


def test_converting_draws_no_random_numbers(rng):
    model = tiny.build("llama-3.2-1b", mx.float32, 4)
    mx.random.seed(5)
    expected = mx.random.uniform()
    mx.random.seed(5)
    mm.nn.convert(model)
    assert mx.random.uniform() == expected


def test_compiled_checkpointed_and_adapted_models(rng):
    plain = tiny.build("llama-3.2-1b", mx.float32, 4)
    fused = mm.nn.convert(copy.deepcopy(plain))
    prompt = mx.array(rng.integers(1, 300, (1, 11)))
    expected = np.array(plain(prompt))
    step = mx.compile(lambda tokens: fused(tokens))
    for _ in range(2):
        np.testing.assert_allclose(np.array(step(prompt)), expected, rtol=LAYERS, atol=LAYERS)
    original = type(fused.layers[0]).__call__
    grad_checkpoint(fused.layers[0])
    try:
        np.testing.assert_allclose(np.array(fused(prompt)), expected, rtol=LAYERS, atol=LAYERS)
    finally:
        type(fused.layers[0]).__call__ = original
    linear_to_lora_layers(fused, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["mlp.gate_proj"]})
    np.testing.assert_allclose(np.array(fused(prompt)), expected, rtol=LAYERS, atol=LAYERS)
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
    np.testing.assert_allclose(losses(fused), expected, rtol=LAYERS)
