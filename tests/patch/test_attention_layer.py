"""The attention layers of mlx-lm's models under the patch, for one token: the same numbers in fewer steps."""

import functools
import importlib
import inspect

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.support import assert_same_bits
from helpers.tolerances import SUMS, assert_near, of_layer
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.tuner.lora import LoRALinear

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.patching.digests import digest
from mlx_mittens.patching.targets import TARGETS

NAMES = ["llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "lfm2-1.2b"]
KNOWN = [target for target in TARGETS if target.text]
LATER = {"mlx_lm.models.mellum"}  # models that mlx-lm has from 0.32 on


class Layer:
    """An attention layer with its input and cache."""

    def __init__(self, rng, name=NAMES[0], dtype=mx.float32, batch=1, bits=None, capacity=24, held=5):
        mx.random.seed(int(rng.integers(2**31)))
        layers = tiny.build(name, dtype, bits).layers
        self.module = next(layer.self_attn for layer in layers if "self_attn" in layer)
        for norm in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
            if norm in self.module:
                self.module[norm].weight = self.normal(rng, 64, dtype=dtype) / 4 + 1
        self.x = self.normal(rng, batch, 1, tiny.config(name)["hidden_size"], dtype=dtype)
        heads = tiny.config(name)["num_key_value_heads"]
        self.state = [self.normal(rng, batch, heads, capacity, 64, dtype=dtype) for _ in range(2)]
        self.held = held
        mx.eval(self.module, self.x, self.state)

    @staticmethod
    def normal(rng, *shape, dtype):
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    def cache(self, kind=KVCache) -> KVCache:
        cache = kind()
        cache.keys, cache.values = (mx.array(np.array(a.astype(mx.float32))).astype(a.dtype) for a in self.state)
        cache.offset = self.held
        mx.eval(cache.keys, cache.values)
        return cache

    def packed(self, bits, group_size=64) -> QuantizedKVCache:
        cache = QuantizedKVCache(group_size, bits)
        cache.keys, cache.values = (mx.quantize(a, group_size, bits) for a in self.state)
        cache.offset = self.held
        mx.eval(cache.keys, cache.values)
        return cache

    def run(self, tokens=3):
        """The results of some tokens, and the cache's contents then."""
        cache = self.cache()
        results = [self.module(self.x * (i + 1), None, cache) for i in range(tokens)]
        assert cache.offset == self.held + tokens
        return [*results, *(a[:, :, : cache.offset] for a in (cache.keys, cache.values))]

    def attempt(self, x=None, mask=None, cache=None):
        """Whether the layer would be done in one step."""
        attempt = _ext.try_normed_attention_layer if "q_norm" in self.module else _ext.try_attention_layer
        attempt = _ext.try_lfm2_attention_layer if "q_layernorm" in self.module else attempt
        return attempt(self.module, self.x if x is None else x, mask, self.cache() if cache is None else cache)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_give_what_they_gave(rng, executor, dtype, name, batch):
    layer = Layer(rng, name, dtype, batch)
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    expected = layer.run()
    mx.eval(expected)
    mx.set_default_device(before)
    mm.stats(reset=True)
    with mm.patched(linear=False):
        results = layer.run()
        mx.eval(results)
    counts = mm.stats()
    assert {op: sum(counts[op]["kernels"].values()) for op in counts} == {
        "rope_append": 3,
        "scaled_dot_product_attention": 3,
    }
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert a.dtype == dtype
        assert_near(a, b, f"result {i}", of_layer(dtype))


@pytest.mark.parametrize("bits, group_size", [(4, 64), (8, 32)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_with_a_quantized_cache(rng, executor, dtype, name, batch, bits, group_size):
    """The bits of the layer's own call, whose append and attention are two primitives."""
    layer = Layer(rng, name, dtype, batch)

    def run():
        cache = layer.packed(bits, group_size)
        results = [layer.module(layer.x * (i + 1), None, cache) for i in range(3)]
        assert cache.offset == layer.held + 3
        return [*results, *(a[:, :, : cache.offset] for a in (*cache.keys, *cache.values))]

    with mm.patched(linear=False, attention_layer=False):
        expected = run()
        mx.eval(expected)
    mm.stats(reset=True)
    with mm.patched(linear=False):
        assert layer.attempt(cache=layer.packed(bits, group_size)) is not None
        results = run()
        mx.eval(results)
    counts = mm.stats()
    assert {op: sum(counts[op]["kernels"].values()) for op in counts} == {
        "quantized_rope_append": 3,
        "quantized_scaled_dot_product_attention": 3,
    }
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_not_copied_while_steps_are_on_their_way(rng, native, name, bits):
    layer = Layer(rng, name, mx.float16, capacity=4096)
    cache = layer.packed(bits) if bits else layer.cache()
    buffers = [*cache.keys, *cache.values] if bits else [cache.keys, cache.values]
    places = [np.asarray(memoryview(a)).ctypes.data for a in buffers]
    with mm.patched():
        mx.eval([layer.module(layer.x * (i + 1), None, cache) for i in range(20)], buffers)
    assert [np.asarray(memoryview(a)).ctypes.data for a in buffers] == places


@pytest.mark.parametrize("name", NAMES)
def test_traditional_rotary_embeddings(rng, monkeypatch, name):
    layer = Layer(rng, name)
    monkeypatch.setitem(layer.module, "rope", nn.RoPE(64, traditional=True))
    expected = layer.run()
    mx.eval(expected)
    mm.stats(reset=True)
    with mm.patched(linear=False):
        results = layer.run()
        assert layer.attempt() is not None
        mx.eval(results)
    assert sum(mm.stats()["rope_append"]["kernels"].values()) == 3
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_near(a, b, f"result {i}", of_layer(mx.float32))


@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_no_more_than_its_products_and_one_step(rng, tmp_path, name):
    layer = Layer(rng, name, mx.float16, bits=4)
    with mm.patched():
        y = layer.module(layer.x, None, layer.cache())
        mx.export_to_dot(str(tmp_path / "graph.dot"), y)
    graph = (tmp_path / "graph.dot").read_text()
    assert graph.count("MittensCacheStep") == 1 and graph.count("MittensQuantizedMatmul") == 4
    assert not any(name in graph for name in ("Reshape", "Transpose", "RoPE", "RMSNorm"))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", NAMES)
def test_many_tokens_of_a_model(rng, name, bits):
    """Past where the cache has to grow."""
    mx.random.seed(int(rng.integers(2**31)))
    model = tiny.build(name, mx.float32, bits)
    prompt = rng.integers(0, 300, 6).tolist()
    expected = tiny.tokens(model, prompt, 260)
    with mm.patched():
        assert tiny.tokens(model, prompt, 260) == expected


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.name)
def test_the_installed_layers_are_those_that_are_known(target):
    try:
        importlib.import_module(target.module)
    except ImportError as error:
        if error.name == target.module and target.module in LATER:
            assert not target.is_known()  # so the patch leaves it out
            return
        if error.name.split(".")[0] in ("mlx_lm", "mlx_mittens"):
            raise
        pytest.skip(f"{target.module} needs {error.name}")
    assert target.is_known()


@pytest.mark.parametrize("name", NAMES)
def test_others_stay_what_they_were(rng, monkeypatch, name):
    """Calls that are not one token with a known cache and a known rotary embedding."""
    layer = Layer(rng, name)
    module = layer.module

    class Subclass(KVCache):
        pass

    class Turn(nn.RoPE):
        pass

    other_scales = layer.packed(8)
    other_scales.values = [a.astype(mx.float16) if a.dtype == mx.float32 else a for a in other_scales.values]
    rotating = RotatingKVCache(max_size=16)
    rotating.update_and_fetch(*(a[:, :, :5] for a in layer.state))
    other_dtype = layer.cache()
    other_dtype.keys, other_dtype.values = (a.astype(mx.float16) for a in (other_dtype.keys, other_dtype.values))
    other_batch = layer.cache()
    other_batch.keys, other_batch.values = (mx.concatenate([a, a]) for a in (other_batch.keys, other_batch.values))
    full = layer.cache()
    full.offset = 24
    calls = {
        "a mask": {"mask": mx.ones((1, 6), mx.bool_)},
        "two tokens": {"x": mx.concatenate([layer.x, layer.x], axis=1)},
        "no tokens": {"x": layer.x[:, :0]},
        "a row": {"x": layer.x[0]},
        "an empty cache": {"cache": KVCache()},
        "a full cache": {"cache": full},
        "a subclass": {"cache": layer.cache(Subclass)},
        "a quantized cache of 6 bits": {"cache": layer.packed(6)},
        "an empty quantized cache": {"cache": QuantizedKVCache(64, 8)},
        "a quantized cache of two types": {"cache": other_scales},
        "a rotating cache": {"cache": rotating},
        "no cache at all": {"cache": object()},
        "a cache of another type": {"cache": other_dtype},
        "a cache of another batch": {"cache": other_batch},
    }
    turns = {
        "another rotary embedding": Turn(64),
        "one that is too wide": nn.RoPE(66),
        "one of an odd width": nn.RoPE(33),
        "one without a base": nn.RoPE(64, base=0.0),
    }
    with mm.patched(linear=False):
        assert layer.attempt() is not None
        for what, call in calls.items():
            cache = call.setdefault("cache", layer.cache())
            before = getattr(cache, "offset", 0)
            assert layer.attempt(**call) is None, what
            assert getattr(cache, "offset", 0) == before, what
        for switch in ("quantized_scaled_dot_product_attention", "cache"):
            with mm.patched(linear=False, **{switch: False}):
                assert layer.attempt(cache=layer.packed(8)) is None, switch
        for what, rope in turns.items():
            monkeypatch.setitem(module, "rope", rope)
            assert layer.attempt() is None, what
        monkeypatch.undo()
        monkeypatch.setattr(module, "n_heads", 3)
        assert layer.attempt() is None
        monkeypatch.undo()
        output = "out_proj" if "out_proj" in layer.module else "o_proj"
        for part in ("q_proj", "v_proj", output, "rope"):
            with monkeypatch.context() as patch:
                patch.delitem(module, part)
                assert layer.attempt() is None
                with pytest.raises(AttributeError, match=part):
                    module(layer.x, None, layer.cache())
        assert layer.attempt() is not None


def test_layers_under_transformations(rng):
    layer = Layer(rng)

    def f(x):
        return (layer.module(x, None, layer.cache()) ** 2).sum()

    def g(parameters):
        layer.module.update(parameters)
        return f(layer.x)

    runs = {
        "grad": lambda: mx.grad(f)(layer.x),
        "grad of the weights": lambda: mx.grad(g)(layer.module.parameters())["q_proj"]["weight"],
        "compile": lambda: mx.compile(f)(layer.x),
        "jvp": lambda: mx.jvp(f, [layer.x], [layer.x + 1])[1][0],
        "checkpoint": lambda: mx.grad(mx.checkpoint(f))(layer.x),
    }
    parameters = layer.module.parameters()
    expected = {}
    for name, run in runs.items():
        expected[name] = run()
        mx.eval(expected[name])
        layer.module.update(parameters)
    with mm.patched():
        for name, run in runs.items():
            assert_near(run(), expected[name], name, SUMS)
            layer.module.update(parameters)


def test_adapters_and_other_layers_within(rng):
    layer = Layer(rng, bits=4)
    layer.module.q_proj = LoRALinear.from_base(layer.module.q_proj)
    layer.module.q_proj.lora_b = layer.normal(rng, *layer.module.q_proj.lora_b.shape, dtype=mx.float32) / 100
    layer.module.o_proj = nn.Sequential(layer.module.o_proj, nn.GELU())
    expected = layer.run()
    mx.eval(expected)
    with mm.patched():
        assert layer.attempt() is not None
        for i, (a, b) in enumerate(zip(layer.run(), expected, strict=True)):
            assert_near(a, b, f"result {i}")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
def test_what_others_put_on_top_is_called(rng, monkeypatch, name):
    layer = Layer(rng, name)
    called = []

    def noted(function, what):
        @functools.wraps(function)
        def outer(*args, **kwargs):
            called.append(what)
            return function(*args, **kwargs)

        return outer

    module = importlib.import_module(type(layer.module).__module__)
    places = [
        (KVCache, "update_and_fetch", 1),
        (module, "scaled_dot_product_attention", 1),
        (mx.fast, "scaled_dot_product_attention", 1),
        (type(layer.module["rope"]), "__call__", 2),
        *[(nn.RMSNorm, "__call__", 2)] * ("q_norm" in layer.module),
    ]
    with mm.patched():
        for owner, function, times in places:
            with monkeypatch.context() as patch:
                patch.setattr(owner, function, noted(getattr(owner, function), function))
                layer.module(layer.x, None, layer.cache())
                assert called == [function] * times
                called.clear()
        with monkeypatch.context() as patch:  # an op of ours has the type of the patch's functions
            patch.setattr(mx.fast, "scaled_dot_product_attention", mm.scaled_dot_product_attention)
            assert layer.attempt() is None
        assert layer.attempt() is not None


def test_a_call_that_does_something_else_is_left_alone(monkeypatch):
    original = llama.Attention.__call__

    def other(self, x, mask=None, cache=None):
        return self.o_proj(x)

    @functools.wraps(original)
    def around(self, x, mask=None, cache=None):
        return original(self, x, mask, cache)

    for call in (other, around):
        monkeypatch.setattr(llama.Attention, "__call__", call)
        with mm.patched():
            assert llama.Attention.__call__ is call
        monkeypatch.undo()
    monkeypatch.delattr(llama.Attention, "__call__")
    with mm.patched():
        assert "__call__" not in vars(llama.Attention)
    monkeypatch.undo()
    with mm.patched():
        assert isinstance(llama.Attention.__call__, _ext.FunctionWrapper)
    assert llama.Attention.__call__ is original


def test_the_digest_is_of_what_a_function_does():
    # fmt: off
    def one(x: int, y=(1, 2)) -> int:
        """Text."""
        return x + y[0]
    first = digest(one)
    def one(x,
            y = (1, 2)):  # without types
        "Text."
        return (x +
                y[0])
    second = digest(one)
    def one(x, y=(1, 2)):
        """Text."""
        return x - y[0]
    third = digest(one)
    # fmt: on
    assert first == second != third and len(first) == 16
    assert digest(len) == digest(functools.wraps(one)(lambda x, y: 0)) == ""


@pytest.mark.parametrize("switch", ["attention_layer", "cache", "scaled_dot_product_attention", "rms_norm", "linear"])
def test_the_switches_that_it_needs(switch):
    with mm.patched(**{switch: False}):
        plain, normed = (isinstance(layer.Attention.__call__, _ext.FunctionWrapper) for layer in (llama, qwen3))
    assert plain == (switch in ("rms_norm", "linear")) and normed == (switch == "linear")


def test_errors_within_are_the_layers_own(rng, monkeypatch):
    layer = Layer(rng)

    def fail(x):
        raise KeyError("no weights today")

    with mm.patched():
        for part, offset in (("k_proj", 5), ("o_proj", 6)):
            cache = layer.cache()
            with monkeypatch.context() as patch:
                patch.setitem(layer.module, part, fail)
                with pytest.raises(KeyError, match="no weights today"):
                    layer.module(layer.x, None, cache)
            assert cache.offset == offset
    with mm.strict(False), mm.patched():
        with pytest.raises(ValueError, match="shape|matmul"):
            layer.module(layer.x[..., :-1], None, layer.cache())


def test_a_model_is_converted_under_the_patch_as_without(rng):
    types = []
    for patch in (False, True):
        model = tiny.build(NAMES[0], mx.float16, 4)
        if patch:
            with mm.patched():
                mm.nn.convert(model)
        else:
            mm.nn.convert(model)
        call = type(model.layers[0].self_attn).__call__
        types.append((call.__name__, inspect.getsourcefile(call)))
    assert types[0] == types[1]
    with mm.patched():
        assert_same_bits(model(mx.array([[1, 2]])), model(mx.array([[1, 2]])), "logits")
