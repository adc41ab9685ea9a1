"""Layers with short convolutions: a token of theirs is one launch between projections, and gives mlx-lm's results."""

import contextlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.recurrent_layers import WIDTH, convolution, falcon, granite, mamba, nemotron
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, assert_near
from mlx_lm.models import cache as caches
from mlx_lm.models import lfm2, lfm2_moe

import mlx_mittens as mm
from mlx_mittens.patching import recurrent_layers

# By layer: its constructor, the op of its tokens, its states, and the other launches between the projections.
KINDS = {
    "lfm2": (lambda: convolution(lfm2, False), "short_conv_token", 1, []),
    "lfm2, bias": (lambda: convolution(lfm2, True), "short_conv_token", 1, []),
    "lfm2_moe": (lambda: convolution(lfm2_moe, False), "short_conv_token", 1, []),
    "mamba2": (mamba, "ssm_token", 2, ["rms_norm"]),
    "mamba2, groups": (lambda: mamba(2, False), "ssm_token", 2, ["rms_norm"]),
    "granite": (granite, "ssm_token", 2, ["rms_norm"]),
    "nemotron_h": (nemotron, "ssm_token", 2, ["rms_norm", "Multiply"]),
    "falcon_h1": (falcon, "ssm_token", 2, ["rms_norm"]),
    "falcon_h1, no norm": (lambda: falcon(norm=False), "ssm_token", 2, []),
}


class Kind:
    def __init__(self, name, rng):
        make, self.op, self.states, self.between = KINDS[name]
        self.layer = make()
        numbers = lambda a: mx.array(rng.normal(size=a.shape).astype(np.float32)) / max(a.shape[-1], 4) ** 0.5
        self.layer.update(nn.utils.tree_map(numbers, self.layer.parameters()))
        mx.eval(self.layer.parameters())

    def __call__(self, x, mask, cache):
        return self.layer(x, mask=mask, cache=cache)

    def cache(self, like=None):
        made = caches.ArraysCache(size=self.states)
        if like is not None:
            made.cache = [mx.array(np.array(a)) if a.dtype == mx.float32 else a + 0 for a in like.cache]
        return made

    def filled(self, x):
        cache = self.cache()
        mx.eval(self(x, None, cache), cache.cache)
        return self.cache(cache)

    def runs(self):
        """How often the op ran since counting began."""
        return sum(mm.stats().get(self.op, {"kernels": {}})["kernels"].values())


@pytest.fixture(params=list(KINDS))
def kind(request, rng):
    mm.stats(reset=True)
    yield Kind(request.param, rng)
    mm.stats(reset=True)


@pytest.mark.parametrize("converted", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("batch", [1, 3])
def test_two_hundred_tokens_are_mlx_lms(rng, kind, batch, converted):
    """Outputs all along, and the states at the end."""
    x = mx.array(rng.normal(size=(batch, 205, WIDTH)).astype(np.float32))
    plain = kind.filled(x[:, :5])
    ours = kind.cache(plain)
    expected = []
    for t in range(5, 205):
        expected.append(kind(x[:, t : t + 1], None, plain))
        mx.eval(expected[-1], plain.cache)
    if converted:
        mm.nn.convert(kind.layer)
    mm.stats(reset=True)
    with contextlib.nullcontext() if converted else mm.patched():
        for t in range(5, 205):
            found = kind(x[:, t : t + 1], None, ours)
            mx.eval(found, ours.cache)
            assert_near(found, expected[t - 5], f"token {t}", LAYERS)
    assert kind.runs() == 200
    for i in range(kind.states):
        assert ours[i].dtype == plain[i].dtype
        assert_near(ours[i], plain[i], f"state {i}", LAYERS)


def test_what_one_launch_does_not_do_is_mlx_lms(rng, kind):
    """Prompts, first tokens, masks, lengths, no cache. Short convolutions take all with a cache in their launch."""
    x = mx.array(rng.normal(size=(2, 6, WIDTH)).astype(np.float32))
    state = kind.filled(x)
    cases = {
        "a prompt": (x, None, state),
        "no cache": (x[:, :1], None, None),
        "a first token": (x[:, :1], None, "empty"),
        "a mask": (x[:, :1], mx.array([[True], [False]]), state),
        "lengths": (x[:, :1], None, state),
    }
    for name, (inputs, mask, cache) in cases.items():
        given = lambda cache=cache: None if cache is None else kind.cache(None if cache == "empty" else cache)
        plain, ours = given(), given()
        if name == "lengths":
            plain.lengths, ours.lengths = mx.array([1, 0]), mx.array([1, 0])  # which a call updates
        expected = kind(inputs, mask, plain)
        mx.eval(expected)
        mm.stats(reset=True)
        with mm.patched():
            found = kind(inputs, mask, ours)
            mx.eval(found)
        assert kind.runs() == (ours is not None and kind.op == "short_conv_token"), name
        seen = mx.ones(inputs.shape[:2], mx.bool_) if mask is None else mask  # results of hidden steps are unused
        assert_near(*(mx.where(seen[..., None], y, 0) for y in (found, expected)), name, LAYERS)
        for i in range(kind.states if ours is not None else 0):
            assert_near(ours[i], plain[i], f"{name}: state {i}", LAYERS)


def test_rows_padded_on_their_right_are_those_alone(rng, kind):
    """Outputs and states. In mlx-lm 0.32.2 Nemotron-H's state of such a batch is another: it is given no lengths."""
    x = mx.array(rng.normal(size=(2, 6, WIDTH)).astype(np.float32))
    state, lengths = kind.filled(x), (4, 1)
    ours = kind.cache(state)
    ours.prepare(lengths=lengths)
    with mm.patched():
        found = kind(x, ours.make_mask(6), ours)
        mx.eval(found, ours.cache)
    for row, length in enumerate(lengths):
        alone = kind.cache(state)
        alone.filter([row])
        expected = kind(x[row : row + 1, :length], None, alone)
        assert_near(found[row : row + 1, :length], expected, f"row {row}", LAYERS)
        for i in range(kind.states):
            assert_near(ours[i][row : row + 1], alone[i], f"row {row}: state {i}", LAYERS)


@pytest.mark.parametrize("converted", [False, True], ids=["patched", "converted"])
def test_a_token_takes_one_launch_between_the_projections(rng, kind, converted):
    """And its norm another: no copy of a view. Weights of a norm of groups are multiplied by mx."""
    kind.layer.set_dtype(mx.float16)
    x = mx.array(rng.normal(size=(1, 4, WIDTH)).astype(np.float32)).astype(mx.float16)
    state = kind.filled(x[:, :3])
    if converted:
        mm.nn.convert(kind.layer)
    last = x[:, 3:] + 0
    mx.eval(last, state.cache, kind.layer.parameters())
    with contextlib.nullcontext() if converted else mm.patched():
        launched = launched_on_apple(lambda: kind(last, None, state))
    named = [name.removesuffix("_float16") for name in launched]
    between = [name for name in named if not name.startswith("gemv")]
    assert len(named) - len(between) == 2, launched
    assert between[0] == kind.op and len(between) == 1 + len(kind.between), launched
    assert all(a.startswith(b) for a, b in zip(between[1:], kind.between, strict=True)), launched


def test_gradients_are_those_of_mlx_lm(rng, kind):
    x = mx.array(rng.normal(size=(1, 3, WIDTH)).astype(np.float32))
    state = kind.filled(x[:, :2])
    slope = mx.grad(lambda x: (kind(x, None, kind.cache(state)) ** 2).sum())
    expected = slope(x[:, 2:])
    mx.eval(expected)
    with mm.patched():
        assert_near(slope(x[:, 2:]), expected, "gradient", LAYERS)


def test_other_code_is_left_alone(rng, kind, monkeypatch):
    """Code that the call rests on: a function of another text, a norm of another class, another convolution."""
    x = mx.array(rng.normal(size=(1, 2, WIDTH)).astype(np.float32))
    state = kind.filled(x)
    layer = kind.layer

    def count():
        mm.stats(reset=True)
        with mm.patched():
            mx.eval(kind(x[:, :1], None, kind.cache(state)))
        return kind.runs()

    assert count() == 1
    conv = layer["conv1d"] if kind.states == 2 else layer["conv"]
    conv.dilation = 2
    with mm.patched(), contextlib.suppress(ValueError):
        mx.eval(kind(x[:, :1], None, kind.cache(state)))
    assert kind.runs() == 1
    conv.dilation = 1
    if kind.states == 1:
        return
    recurrent_layers._are_known.cache_clear()
    monkeypatch.setattr(recurrent_layers, "digest_in", lambda module, name: "another")
    assert count() == 0
    monkeypatch.undo()
    recurrent_layers._are_known.cache_clear()
    assert count() == 1
    if "norm" in layer:

        class Norm(type(layer.norm)):
            def __call__(self, x, gate=None):
                return 2 * super().__call__(x, gate)

        before, layer.norm.__class__ = type(layer.norm), Norm
        assert count() == 0
        layer.norm.__class__ = before


def test_a_norm_before_the_gate_is_mlx_lms(rng):
    layer = falcon(before=True)
    x = mx.array(rng.normal(size=(1, 3, WIDTH)).astype(np.float32))
    caches_of = [caches.ArraysCache(size=2) for _ in range(2)]
    with mm.patched():
        mm.stats(reset=True)
        for t in range(3):
            mx.eval(layer(x[:, t : t + 1], cache=caches_of[0]))
        assert "ssm_token" not in mm.stats()


def test_a_wider_result_on_a_cpu_is_mlx_lms(rng):
    """Where D is float32 and the rest is not, mlx-lm's operations give float32; its kernel for Apple GPUs does not."""
    layer = mamba()
    layer.set_dtype(mx.float16)
    layer.D = layer.D.astype(mx.float32)
    x = mx.array(rng.normal(size=(1, 3, WIDTH)).astype(np.float32)).astype(mx.float16)
    cache, own = caches.ArraysCache(size=2), caches.ArraysCache(size=2)
    for t in range(3):
        expected = layer(x[:, t : t + 1], None, own)
        with mm.patched():
            found = layer(x[:, t : t + 1], None, cache)
        assert found.dtype == expected.dtype == mx.float32


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_a_model_gives_its_tokens(rng, name):
    """Patched and converted beside plain, after a prompt."""
    model = tiny.build({"lfm2": "lfm2-1.2b", "mamba2": "mamba2-2.7b"}[name], mx.float32)
    prompt = mx.array(rng.integers(0, 320, (2, 7)))
    each = mx.array(rng.integers(0, 320, (2, 6)))
    expected, *others = tiny.logits_of_each_way(model, prompt, each)
    for ours in others:
        for t, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert_near(a, b, f"token {t}", LAYERS)
