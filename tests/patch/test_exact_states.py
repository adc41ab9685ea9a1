"""Layers that keep a state, with exact=True: a token has the bits that it has alone, whatever its batch has."""

import contextlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.recurrent_layers import LAYERS_OF, WIDTH, convolution, empty_cache, falcon, granite, mamba, nemotron
from mlx_lm.models import cache as caches
from mlx_lm.models import lfm2

import mlx_mittens as mm

KINDS = {
    **{name: (make, None) for name, make in LAYERS_OF.items()},
    "lfm2": (lambda: convolution(lfm2, False), 1),
    "lfm2, bias": (lambda: convolution(lfm2, True), 1),
    "mamba2": (mamba, 2),
    "granite": (granite, 2),
    "nemotron_h": (nemotron, 2),
    "falcon_h1": (falcon, 2),
}
TOKENS = 7


class Kind:
    def __init__(self, name, rng):
        make, self.states = KINDS[name]
        self.layer = make()
        numbers = lambda a: mx.array(rng.normal(size=a.shape).astype(np.float32)) / max(a.shape[-1], 4) ** 0.5
        self.layer.update(nn.utils.tree_map(numbers, self.layer.parameters()))
        self.layer.set_dtype(mx.float16)
        mx.eval(self.layer.parameters())

    def run(self, chunks, masked=False, lengths=None):
        """The outputs of chunks one behind another, as one, and the states behind them."""
        cache = caches.ArraysCache(size=self.states) if self.states else empty_cache(self.layer)
        if lengths is not None:
            cache.prepare(lengths=lengths)
        outputs = []
        for x in chunks:
            mask = mx.ones(x.shape[:2], mx.bool_) if masked else None
            mask = mask if lengths is None else cache.make_mask(x.shape[1])
            outputs.append(self.layer(x, mask=mask, cache=cache))
            mx.eval(outputs[-1], cache.cache)
        return mx.concatenate(outputs, axis=1), cache.cache


@pytest.fixture(params=list(KINDS))
def kind(request, rng, native):
    return Kind(request.param, rng)


def assert_same_bits(found, expected, what):
    for ours, theirs in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert mx.array_equal(ours, theirs), what


def tokens_of(x):
    return mx.split(x, x.shape[1], axis=1)


@pytest.mark.parametrize("gpu", [None, "m2-max"], ids=["native", "Apple's kernels"])
def test_masks_and_cuts_of_a_prompt(rng, kind, gpu):
    """Tokens one by one, in chunks and at once, with a mask that hides nothing and without one."""
    x = mx.array(rng.normal(size=(1, TOKENS, WIDTH)).astype(np.float16))
    with mm.patched(exact=True), mm.simulator.enabled(gpu=gpu) if gpu else contextlib.nullcontext():
        alone = kind.run(tokens_of(x))
        for masked in (False, True):
            assert_same_bits(kind.run([x], masked), alone, "at once")
            assert_same_bits(kind.run([x[:, :3], x[:, 3:4], x[:, 4:]], masked), alone, "in chunks")
            assert_same_bits(kind.run(tokens_of(x), masked), alone, "one by one")


def test_rows_of_several_lengths(rng, kind):
    """Rows that are padded on their right, in chunks."""
    x = mx.array(rng.normal(size=(3, TOKENS, WIDTH)).astype(np.float16))
    lengths = [TOKENS, 2, 4]
    with mm.patched(exact=True):
        together, states = kind.run([x[:, :3], x[:, 3:]], lengths=lengths)
        for row, length in enumerate(lengths):
            alone = kind.run(tokens_of(x[row : row + 1, :length]))
            one = together[row : row + 1, :length], [state[row : row + 1] for state in states]
            assert_same_bits(one, alone, f"row {row}")
