"""Layers that keep a state: a token of theirs is one launch between their projections, and gives mlx-lm's results."""

import contextlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.recurrent_layers import LAYERS_OF, empty_cache, is_kimi, norm_name
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, SUMS, assert_near
from mlx_lm.models import cache as caches
from mlx_lm.models import gated_delta, qwen3_next

import mlx_mittens as mm
from mlx_mittens.patching import recurrent_layers


@pytest.fixture(params=list(LAYERS_OF))
def layer(request, rng):
    made = LAYERS_OF[request.param]()
    numbers = lambda a: mx.array(rng.normal(size=a.shape).astype(np.float32)) / max(a.shape[-1], 4) ** 0.5
    made.update(nn.utils.tree_map(numbers, made.parameters()))
    mx.eval(made.parameters())
    return made


def filled(layer, x):
    """A cache after some tokens, with arrays of its own."""
    cache = empty_cache(layer)
    layer(x, None, cache)
    cache.cache = [mx.array(np.array(a)) for a in cache.cache]
    return cache


def copied(cache):
    made = caches.ArraysCache(size=len(cache.cache))
    made.cache = [a + 0 for a in cache.cache]
    return made


def runs(op="gated_delta_token"):
    """How often an op ran since counting began."""
    return sum(mm.stats().get(op, {"kernels": {}})["kernels"].values())


@contextlib.contextmanager
def counted():
    mm.stats(reset=True)
    yield
    mm.stats(reset=True)


@pytest.mark.parametrize("batch", [1, 3])
def test_two_hundred_tokens_are_mlx_lms(rng, layer, batch):
    """Outputs all along, and both states at the end."""
    x = mx.array(rng.normal(size=(batch, 205, 64)).astype(np.float32))
    plain = filled(layer, x[:, :5])
    ours = copied(plain)
    with counted():
        for t in range(5, 205):
            expected = layer(x[:, t : t + 1], None, plain)
            mx.eval(expected, plain.cache)
            with mm.patched():
                found = layer(x[:, t : t + 1], None, ours)
                mx.eval(found, ours.cache)
            assert_near(found, expected, f"token {t}", LAYERS)
        assert runs() == 200
    for i, (state, theirs) in enumerate(zip(ours.cache, plain.cache, strict=True)):
        assert state.dtype == theirs.dtype
        assert_near(state, theirs, f"state {i}", LAYERS)


def test_what_one_launch_does_not_do_is_mlx_lms(rng, layer):
    """Prompts, first tokens, masks, lengths: our launch before its steps. No cache: the call of the class."""
    x = mx.array(rng.normal(size=(2, 6, 64)).astype(np.float32))
    state = filled(layer, x)
    lengths, empty = copied(state), empty_cache(layer)
    lengths.lengths = mx.array([1, 0])
    mask = mx.array([[True], [False]])
    cases = {
        "a prompt": (x, None, copied(state)),
        "no cache": (x[:, :1], None, None),
        "a first token": (x[:, :1], None, empty),
        "a mask": (x[:, :1], mask, copied(state)),
        "lengths": (x[:, :1], None, lengths),
    }
    for name, (inputs, mask, cache) in cases.items():
        own = None if cache is None else copied(cache) if cache[0] is not None else empty_cache(layer)
        if own is not None and cache.lengths is not None:
            own.lengths = cache.lengths + 0
        expected = layer(inputs, mask, own)
        mx.eval(expected)
        with counted(), mm.patched():
            found = layer(inputs, mask, cache)
            mx.eval(found)
            assert runs() == 0 and runs("gated_delta_inputs") == (name != "no cache"), name
        seen = slice(0, 1 if mask is not None else None)  # results of hidden steps are unused
        assert_near(found[seen], expected[seen], name, LAYERS)


def test_other_code_is_left_alone(rng, layer, monkeypatch):
    """Code that the call rests on: a function of another text, a norm of another class, a convolution with a bias."""
    x = mx.array(rng.normal(size=(1, 2, 64)).astype(np.float32))
    state = filled(layer, x)

    def count():
        with counted(), mm.patched():
            mx.eval(layer(x[:, :1], None, copied(state)))
            return runs()

    assert count() == 1
    recurrent_layers._are_known.cache_clear()
    monkeypatch.setattr(recurrent_layers, "digest_in", lambda module, name: "another")
    assert count() == 0
    monkeypatch.undo()
    recurrent_layers._are_known.cache_clear()
    assert count() == 1

    norm = layer[norm_name(layer)]

    class Norm(type(norm)):
        def __call__(self, *arguments):
            return 2 * super().__call__(*arguments)

    before, norm.__class__ = type(norm), Norm
    assert count() == 0
    norm.__class__ = before
    conv = layer.q_conv.conv if is_kimi(layer) else layer.conv1d
    conv.bias = mx.zeros((conv.weight.shape[0],))
    assert count() == 0


def test_gradients_are_those_of_mlx_lm(rng, layer):
    x = mx.array(rng.normal(size=(1, 3, 64)).astype(np.float32))
    state = filled(layer, x[:, :2])
    slope = mx.grad(lambda x: (layer(x, None, copied(state)) ** 2).sum())
    expected = slope(x[:, 2:])
    mx.eval(expected)
    with mm.patched():
        assert_near(slope(x[:, 2:]), expected, "gradient", LAYERS)


@pytest.mark.parametrize("convert", [False, True], ids=["patched", "converted"])
def test_a_token_takes_one_launch_between_the_projections(rng, layer, convert):
    """Beside the projections' launches: no copy of a view, and no operation of mx."""
    projections = 8 if is_kimi(layer) else 2 if isinstance(layer, qwen3_next.Qwen3NextGatedDeltaNet) else 4
    kernel = "gated_delta_token_apart_float16" if is_kimi(layer) else "gated_delta_token_float16"
    layer.set_dtype(mx.float16)
    x = mx.array(rng.normal(size=(1, 4, 64)).astype(np.float32)).astype(mx.float16)
    state = filled(layer, x[:, :3])
    if convert:
        mm.nn.convert(layer)
    last = x[:, 3:] + 0
    mx.eval(last, layer.parameters())
    with contextlib.nullcontext() if convert else mm.patched():
        launched = launched_on_apple(lambda: layer(last, None, state))
    products = [name for name in launched if name.startswith("gemv")]
    assert len(products) == projections + 1, launched
    assert [name for name in launched if name not in products] == [kernel]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_gives_its_tokens(rng, batch):
    """Patched and converted beside plain, after a prompt."""
    model = tiny.build("qwen3-next-80b-a3b", mx.float32)
    prompt = mx.array(rng.integers(0, 320, (batch, 7)))
    each = mx.array(rng.integers(0, 320, (batch, 6)))

    def logits(context):
        with context:
            return tiny.logits_of_steps(model, prompt, each)

    expected = logits(contextlib.nullcontext())
    with counted():
        patched = logits(mm.patched())
        assert runs() == 6
    mm.nn.convert(model)
    with counted():
        converted = logits(contextlib.nullcontext())
        assert runs() == 6
    for ours in (patched, converted):
        for t, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert_near(a, b, f"token {t}", LAYERS)


def test_prompts_of_a_converted_layer_are_on_our_ops(rng, layer):
    x = mx.array(rng.normal(size=(1, 6, 64)).astype(np.float32))
    expected = layer(x, None, empty_cache(layer))
    mx.eval(expected)
    mm.nn.convert(layer)
    mm.stats(reset=True)
    found = layer(x, None, empty_cache(layer))
    mx.eval(found)
    ran = {op for op, counts in mm.stats().items() if counts["kernels"]}
    assert {"gated_delta_inputs", "gated_delta_update"} <= ran and not {"gated_delta_token", "qk_norm"} & ran
    assert_near(found, expected, "a prompt", LAYERS)


def test_the_key_eps_is_that_of_the_calls():
    """Which `normalize_qk` turns into one of a mean square."""
    q = mx.full((1, 1, 1, 4), 1e-3)
    normed, _ = gated_delta.normalize_qk(q, q, inv_scale=0.5, eps=recurrent_layers._KEY_EPS)
    expected = 0.5 * 1e-3 / np.sqrt(4e-6 + recurrent_layers._KEY_EPS)
    np.testing.assert_allclose(np.array(normed).ravel(), expected, rtol=SUMS)
