"""Prompts of layers that keep a state: one launch before the steps, and outputs and states of mlx-lm's."""

import contextlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.recurrent_layers import LAYERS_OF, WIDTH, empty_cache, falcon, granite, mamba, nemotron
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, assert_near, units
from mlx_lm.models import cache as caches
from mlx_lm.models import nemotron_h

import mlx_mittens as mm
from mlx_mittens.patching import recurrent_layers

KINDS = {
    **{name: (make, "gated_delta_inputs") for name, make in LAYERS_OF.items()},
    "mamba2": (mamba, "ssm_inputs"),
    "mamba2, groups": (lambda: mamba(2, False), "ssm_inputs"),
    "granite": (granite, "ssm_inputs"),
    "nemotron_h": (nemotron, "ssm_inputs"),
    "falcon_h1": (falcon, "ssm_inputs"),
    "falcon_h1, norm before": (lambda: falcon(before=True), "ssm_inputs"),
    "falcon_h1, no norm": (lambda: falcon(norm=False), "ssm_inputs"),
}


class Kind:
    def __init__(self, name, rng):
        make, self.op = KINDS[name]
        self.layer = make()
        numbers = lambda a: mx.array(rng.normal(size=a.shape).astype(np.float32)) / max(a.shape[-1], 4) ** 0.5
        self.layer.update(nn.utils.tree_map(numbers, self.layer.parameters()))
        mx.eval(self.layer.parameters())

    def run(self, chunks, mask_of=lambda cache, tokens: None, prepare=lambda cache: None):
        """The outputs of chunks of a prompt one after the other, and the states behind them."""
        cache = empty_cache(self.layer) if self.op == "gated_delta_inputs" else caches.ArraysCache(size=2)
        prepare(cache)
        outputs = []
        for x in chunks:
            outputs.append(self.layer(x, mask=mask_of(cache, x.shape[1]), cache=cache))
            mx.eval(outputs[-1], cache.cache)
        return outputs, cache

    def runs(self):
        return sum(mm.stats().get(self.op, {"kernels": {}})["kernels"].values())


@pytest.fixture(params=list(KINDS))
def kind(request, rng):
    yield Kind(request.param, rng)
    mm.stats(reset=True)


def draw(rng, *shape):
    return mx.array(rng.normal(size=(*shape, WIDTH)).astype(np.float32))


def assert_states_near(ours, theirs, tolerance=LAYERS):
    for i, (state, expected) in enumerate(zip(ours.cache, theirs.cache, strict=True)):
        assert state.dtype == expected.dtype
        assert_near(state, expected, f"state {i}", tolerance)


@pytest.mark.parametrize("converted", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("batch", [1, 3])
def test_prompts_of_any_length_are_mlx_lms(rng, kind, batch, converted):
    """Fewer steps than the convolution has taps, as many, and more than one simdgroup has; the first without states."""
    chunks = [draw(rng, batch, tokens) for tokens in (2, 3, 4, 1, 37)]
    first = [[x] for x in (draw(rng, batch, 1), draw(rng, batch, 19))]
    expected = [kind.run(each) for each in (chunks, *first)]
    if converted:
        mm.nn.convert(kind.layer)
    mm.stats(reset=True)
    with contextlib.nullcontext() if converted else mm.patched():
        found = [kind.run(each) for each in (chunks, *first)]
    assert kind.runs() == 6  # the token behind others is a launch of its own
    for (ours, our_states), (theirs, their_states) in zip(found, expected, strict=True):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.dtype == b.dtype
            assert_near(a, b, f"chunk {i}", LAYERS)
        assert_states_near(our_states, their_states)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_half_types_are_no_farther_from_float32_than_mlx_lms(rng, kind, dtype):
    kind.layer.set_dtype(dtype)
    kind.layer.set_dtype(mx.float32)  # of rounded numbers
    chunks = [draw(rng, 2, tokens).astype(dtype).astype(mx.float32) for tokens in (5, 18)]
    exact, exact_states = kind.run(chunks)
    kind.layer.set_dtype(dtype)
    chunks = [x.astype(dtype) for x in chunks]
    theirs, their_states = kind.run(chunks)
    with mm.patched():
        ours, our_states = kind.run(chunks)
    pairs = [*zip(ours, theirs, exact), *zip(our_states.cache, their_states.cache, exact_states.cache)]
    for a, b, c in pairs:
        assert a.dtype == b.dtype and a.shape == b.shape
        error, allowed = (float(mx.abs(each.astype(mx.float32) - c).max()) for each in (a, b))
        assert error <= 1.5 * allowed + units(2, dtype) * float(mx.abs(c).max())


def padded_left(cache):
    cache.left_padding = mx.array([0, 2, 7])


def padded_right(cache):
    cache.prepare(lengths=[9, 2, 0])


# mlx-lm's state spaces read beyond a chunk that is shorter than a length.
@pytest.mark.parametrize("prepare, sizes", [(padded_left, (5, 4, 1)), (padded_right, (9, 1))], ids=["left", "right"])
def test_padded_batches_are_mlx_lms(rng, kind, prepare, sizes):
    """A step of padding has no part in outputs and states, whatever is there."""
    chunks = [draw(rng, 3, tokens) for tokens in sizes]
    mask_of = lambda cache, tokens: cache.make_mask(tokens)
    expected, states = kind.run(chunks, mask_of, prepare)
    with mm.patched():
        mm.stats(reset=True)
        found, ours = kind.run(chunks, mask_of, prepare)
        assert kind.runs() == len(sizes)
    before = 0
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        at = np.arange(before, before + a.shape[1])
        seen = at >= np.array([[0], [2], [7]]) if prepare is padded_left else at < np.array([[9], [2], [0]])
        before += a.shape[1]
        assert_near(mx.array(np.array(a)[seen]), mx.array(np.array(b)[seen]), f"chunk {i}", LAYERS)
    if prepare is padded_right and isinstance(kind.layer, nemotron_h.NemotronHMamba2Mixer):
        states[1] = ours[1]  # mlx-lm loses the state before a hidden last step there: it hands on no lengths
    assert_states_near(ours, states)


def test_gradients_of_a_prompt_are_mlx_lms(rng, kind):
    x = draw(rng, 2, 5)
    slope = mx.grad(lambda x: (kind.layer(x, mask=None, cache=kind.run([])[1]) ** 2).sum())
    expected = slope(x)
    mx.eval(expected)
    with mm.patched():
        assert_near(slope(x), expected, "gradient", LAYERS)


def test_calls_with_other_masks_are_mlx_lms(rng):
    """Masks that are added, or that all sequences share."""
    x, cache = draw(rng, 2, 3), caches.ArraysCache(size=2)
    is_known = lambda mask: recurrent_layers._is_known_call(x, mask, cache)
    assert is_known(None) and is_known(mx.ones((2, 3), mx.bool_))
    assert not any(map(is_known, (mx.ones((1, 3), mx.bool_), mx.zeros((2, 3)), "causal")))


def test_a_prompt_takes_one_launch_before_its_steps(rng, kind):
    """With no copy of a part, and no concatenation."""
    kind.layer.set_dtype(mx.float16)
    x = draw(rng, 1, 9).astype(mx.float16)
    _, cache = kind.run([x])
    mx.eval(x, cache.cache, kind.layer.parameters())
    with mm.patched():
        launched = launched_on_apple(lambda: kind.layer(x, mask=None, cache=cache))
    between = [name.removesuffix("_float16") for name in launched if not name.startswith("gemv")]
    if kind.op == "gated_delta_inputs":
        steps = ["recurrence", "rms_norm_simd8", "Compiled"]
    else:  # the time steps are a view
        steps = ["copy_strided_2", "state_space", "rms_norm_simd", "Compiled"]
        steps += ["Multiply"] if isinstance(kind.layer, nemotron_h.NemotronHMamba2Mixer) else []
        if "norm" not in kind.layer:
            steps.remove("rms_norm_simd")
    assert between[0] == "layer_inputs" and len(between) == 1 + len(steps), launched
    assert all(any(name.startswith(step) for name in between[1:]) for step in steps), launched


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "mamba2-2.7b"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_gives_its_tokens_behind_a_prompt(rng, name, batch):
    model = tiny.build(name, mx.float32)
    prompt = mx.array(rng.integers(0, 320, (batch, 21)))
    each = mx.array(rng.integers(0, 320, (batch, 4)))
    expected, *others = tiny.logits_of_each_way(model, prompt, each)
    for ours in others:
        for t, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert_near(a, b, f"token {t}", LAYERS)
