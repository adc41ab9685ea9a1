"""Converted models of other kinds than Llama's: their calls find our functions, and nobody else's do."""

import copy
import inspect

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS
from mlx_lm.models import base, cache, gated_delta, qwen3_next

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.nn import rebinding

pytestmark = pytest.mark.usefixtures("lenient", "native")

STEPS = (9, 40, 1, 1)


def run(model, inputs):
    """Logits and launches by op of prompts and tokens, and the caches."""
    caches, results = cache.make_prompt_cache(model), []
    for x in inputs:
        mm.stats(reset=True)
        y = np.array(model(x, cache=caches))
        counts = {op: sum(one["kernels"].values()) for op, one in mm.stats().items() if one["kernels"]}
        results.append((y, counts))
    return results, caches


@pytest.fixture
def inputs():
    return [mx.array([[int(i) for i in np.arange(n) * 7 % 300]]) for n in STEPS]


def test_a_converted_qwen3_next_has_the_launches_of_a_patched_one(inputs):
    model = tiny.build("qwen3-next-80b-a3b", mx.float32, 4)
    theirs, _ = run(model, inputs)
    with mm.patched():
        patched, _ = run(model, inputs)
    mm.nn.convert(model)
    converted, caches = run(model, inputs)
    for n, (y, counts), (_, expected), (plain, _) in zip(STEPS, converted, patched, theirs, strict=True):
        delta = {"gated_delta_token"} if n == 1 else {"gated_delta_inputs", "gated_delta_update"}
        assert {*delta, "rope_append", "add_rms_norm"} <= set(counts) and counts == expected
        np.testing.assert_allclose(y, plain, atol=LAYERS * np.abs(plain).max())
    assert sum(type(one) is cache.KVCache for one in caches) == len(model.layers) // 2


def test_mx_and_mlx_lm_stay_as_they_are():
    before = (mx.fast.rms_norm, mx.fast.rope, gated_delta.normalize_qk, base.scaled_dot_product_attention)
    calls = [vars(kind)["__call__"] for kind in (qwen3_next.Qwen3NextAttention, qwen3_next.Qwen3NextGatedDeltaNet)]
    plain, model = (tiny.build("qwen3-next-80b-a3b", mx.float32, 4) for _ in range(2))
    mm.nn.convert(model)
    after = (mx.fast.rms_norm, mx.fast.rope, gated_delta.normalize_qk, base.scaled_dot_product_attention)
    assert after == before and not any(isinstance(one, _ext.FunctionWrapper) for one in after)
    assert calls == [
        vars(kind)["__call__"] for kind in (qwen3_next.Qwen3NextAttention, qwen3_next.Qwen3NextGatedDeltaNet)
    ]
    mm.stats(reset=True)
    mx.eval(plain(mx.array([[1, 2, 3]])))
    assert not mm.stats()


def test_a_second_conversion_and_a_copy_change_nothing(inputs):
    model = mm.nn.convert(tiny.build("qwen3-next-80b-a3b", mx.float32, 4))
    classes = [type(module) for _, module in model.named_modules()]
    expected, _ = run(model, inputs)
    for other in (mm.nn.convert(model), copy.deepcopy(model)):
        assert [type(module) for _, module in other.named_modules()] == classes
        found, _ = run(other, inputs)
        for (a, ours), (b, theirs) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
            assert ours == theirs


def test_a_model_converted_under_the_patch(inputs):
    """The patch may go: a converted model does not hold the patch's functions."""
    model = tiny.build("qwen3-next-80b-a3b", mx.float32, 4)
    with mm.patched():
        mm.nn.convert(model)
        during, _ = run(model, inputs)
    after, _ = run(model, inputs)
    for (a, ours), (b, theirs) in zip(during, after, strict=True):
        np.testing.assert_allclose(a, b, atol=LAYERS * np.abs(b).max())
        assert ours == theirs


def test_gradients_of_a_converted_model():
    plain, model = (tiny.build("qwen3-next-80b-a3b", mx.float32) for _ in range(2))
    model.update(plain.parameters())
    mm.nn.convert(model)
    tokens = mx.array([[1, 5, 9, 2, 7]])

    def loss(model):
        return (model(tokens) ** 2).mean()

    expected, found = (nn.value_and_grad(one, loss)(one) for one in (plain, model))
    np.testing.assert_allclose(np.array(found[0]), np.array(expected[0]), rtol=LAYERS)
    flat = [dict(nn.utils.tree_flatten(one[1])) for one in (expected, found)]
    assert flat[0].keys() == flat[1].keys()
    for name, gradient in flat[0].items():
        scale = max(np.abs(np.array(gradient)).max(), 1e-3)
        np.testing.assert_allclose(np.array(flat[1][name]), np.array(gradient), atol=LAYERS * scale, err_msg=name)


def test_what_a_call_sees_of_a_cache():
    """Its fields and methods, as they are."""
    made = cache.KVCache()
    seen = rebinding._Appending(made)
    assert seen.offset == 0 and seen.empty() and not hasattr(seen, "bits")
    seen.offset = 3
    assert made.offset == 3 and seen.make_mask(1, window_size=None, return_array=False) is None
    other = cache.ArraysCache(2)
    assert rebinding.is_appended_to(made) and not rebinding.is_appended_to(other)
    assert not rebinding.is_appended_to(type("Subclass", (cache.KVCache,), {})())


def test_source_and_arguments_of_a_rebound_call_are_those_of_mlx_lm():
    model = mm.nn.convert(tiny.build("qwen3-next-80b-a3b", mx.float32, 4))
    kinds = {rebinding.class_before(module): type(module) for _, module in model.named_modules()}
    for kind in (qwen3_next.Qwen3NextAttention, qwen3_next.Qwen3NextGatedDeltaNet):
        ours = kinds[kind]
        assert ours is not kind and issubclass(ours, kind) and ours.__name__ == kind.__name__
        assert inspect.signature(ours.__call__) == inspect.signature(kind.__call__)
        assert inspect.getsource(ours.__call__) == inspect.getsource(kind.__call__)


def test_a_layer_that_asks_its_base_for_the_product(inputs):
    """afm7's layers are a Linear's product in several parts: that product is ours."""
    afm7 = pytest.importorskip("mlx_lm.models.afm7")
    layer = afm7.FusedLinear(64, [32, 16])
    x = mx.random.normal((1, 3, 64))
    expected = layer(x)
    holder = nn.Module()
    holder.layer = layer
    mm.nn.convert(holder)
    mm.stats(reset=True)
    for a, b in zip(layer(x), expected, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=LAYERS)
    assert tiny.kernels("gemv") == 1
