"""Decoder layers of Gemma 3n for a token, beside mlx-lm's."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.pages import MODELS
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, assert_near
from mlx_lm.models.cache import make_prompt_cache

import mlx_mittens as mm

pytestmark = pytest.mark.usefixtures("native", "lenient")


def build(rng, active=0, corrects=True, clip=120.0):
    """With weights of the streams' coefficients that are clipped, and scales that are not zero."""
    model = MODELS["build"]("gemma3n", mx.float32)
    for layer in model.layers:
        altup, config = layer.altup, layer.config
        config.altup_active_idx, config.altup_correct_scale, config.altup_coef_clip = active, corrects, clip
        altup.correct_output_scale = mx.array(rng.standard_normal(128).astype(np.float32))
        for linear in (altup.prediction_coefs, altup.correction_coefs):
            linear.weight = mx.array(rng.standard_normal(linear.weight.shape).astype(np.float32))
    mx.eval(model.parameters())
    return model


def logits(model, tokens, prompt=5):
    """Behind a prompt and each token: the window of a layer turns over."""
    cache, found = make_prompt_cache(model), []
    for part in (tokens[:, :prompt], *(tokens[:, t : t + 1] for t in range(prompt, tokens.shape[1]))):
        found.append(model(part, cache=cache)[:, -1])
        mx.eval(found[-1])
    return mx.stack(found)


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("options", [{}, {"active": 2}, {"corrects": False}, {"clip": 0.5}, {"clip": None}], ids=str)
def test_logits(rng, options, converts):
    model, tokens = build(rng, **options), mx.array(rng.integers(1, 300, (1, 20)))
    theirs = logits(model, tokens)
    if converts:
        mm.nn.convert(model)
    mm.stats(reset=True)
    with contextlib.nullcontext() if converts else mm.patched():
        ours = logits(model, tokens)
    assert tiny.kernels("rope_append") > 0
    assert_near(ours, theirs, "logits", LAYERS)


def test_batches(rng):
    model, tokens = build(rng), mx.array(rng.integers(1, 300, (2, 12)))
    theirs = logits(model, tokens)
    with mm.patched():
        ours = logits(model, tokens)
    assert_near(ours, theirs, "logits", LAYERS)


def test_new_weights_are_clipped(rng):
    """Those of the last call are not clipped again, but others are."""
    model, tokens = build(rng), mx.array(rng.integers(1, 300, (1, 6)))
    linear = model.layers[0].altup.prediction_coefs
    with mm.patched():
        cache = make_prompt_cache(model)
        mx.eval(model(tokens[:, :1], cache=cache))
        clipped = linear.weight
        mx.eval(model(tokens[:, 1:2], cache=cache))
        assert linear.weight is clipped
        linear.weight = mx.full(linear.weight.shape, 1000.0)
        mx.eval(model(tokens[:, 2:3], cache=cache))
    np.testing.assert_array_equal(np.array(linear.weight), np.full(linear.weight.shape, 120.0, np.float32))


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
def test_launches(rng, converts):
    model, tokens = build(rng), mx.array(rng.integers(1, 300, (1, 10)))
    if converts:
        mm.nn.convert(model)
    with contextlib.nullcontext() if converts else mm.patched():
        cache = make_prompt_cache(model)
        mx.eval(model(tokens, cache=cache))
        mx.eval(model(tokens[:, :1], cache=cache))
        launched = launched_on_apple(lambda: model(tokens[:, 1:2], cache=cache))
    assert launched.count("rope_append_normed_float32") == 2  # the others have no keys of their own
    assert launched.count("Minimum") < len(model.layers)  # no weights are clipped
    assert len(launched) <= 62 * len(model.layers)


def test_gradients(rng):
    model, tokens = build(rng), mx.array(rng.integers(1, 300, (1, 6)))
    layer = model.layers[0]
    streams = mx.array(rng.standard_normal((4, 1, 1, 128)).astype(np.float32))
    weights = mx.array(rng.standard_normal((4, 1, 1, 128)).astype(np.float32))
    mx.eval(model(tokens))

    def loss(x):
        return (layer(x, None, make_prompt_cache(model)[0], mx.ones((1, 1, 64))) * weights).sum()

    expected = mx.grad(loss)(streams)
    with mm.patched():
        found = mx.grad(loss)(streams)
    assert_near(found, expected, "gradient", LAYERS)
