"""mlx-lm's caches of other kinds: the append with the rotary embedding in one kernel, and what they hold afterwards."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS
from mlx_lm.models import cache

import mlx_mittens as mm

KINDS = {
    "chunked": lambda: cache.ChunkedKVCache(300),
    "chunked and full": lambda: cache.ChunkedKVCache(16),
    "batch": lambda: cache.BatchKVCache([0, 3]),
    "batch of long prompts": lambda: cache.BatchKVCache([2, 0]),
}
FIELDS = {"ChunkedKVCache": ("offset", "start_position"), "BatchKVCache": ("offset", "_idx", "left_padding")}


def run(model, make, lengths, rows):
    """Logits of several steps, and the caches."""
    caches, results = [make() for _ in model.layers], []
    for i, tokens in enumerate(lengths):
        inputs = mx.array(np.random.default_rng(i).integers(1, 300, (rows, tokens)))
        for one in caches:
            if hasattr(one, "maybe_trim_front"):
                one.maybe_trim_front()
        results.append(model(inputs, cache=caches))
        mx.eval(results[-1], [one.state for one in caches])
    return results, caches


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_into_a_cache(native, kind, name):
    """After a prompt, in chunks, and where the buffers grow."""
    model, make, rows = tiny.build(name, mx.float32, 4), KINDS[kind], 1 if "chunked" in kind else 2
    lengths = [9, 5, *[1] * 6, 240, 1, 1, 1]
    theirs, before = run(model, make, lengths, rows)
    mm.stats(reset=True)
    with mm.patched():
        ours, after = run(model, make, lengths, rows)
    padding = max(before[0].left_padding.tolist()) if rows == 2 else 0
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = (np.array(y[:, padding if i == 0 else 0 :]) for y in (a, b))
        np.testing.assert_allclose(a, b, atol=LAYERS * np.abs(b).max(), err_msg=f"step {i}")
    for a, b in zip(after, before, strict=True):
        for field in FIELDS[type(a).__name__]:
            assert np.array_equal(np.array(getattr(a, field)), np.array(getattr(b, field))), field
        for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
            x, y = (np.array(side[:, :, padding:]) for side in (x, y))
            np.testing.assert_allclose(x, y, atol=LAYERS * np.abs(y).max())
    # The first prompt, a step that makes room and the one after it are mlx-lm's. A full chunk has room for no step.
    steps = 4 if kind == "chunked and full" else len(lengths) - 4
    assert tiny.kernels("rope_append") >= steps * len(model.layers)


def test_a_batch_that_changes(native):
    """Rows go and others come."""
    model, results = tiny.build("llama-3.2-1b", mx.float32, 4), []
    for patched in (False, True):
        with mm.patched() if patched else mm.patched(cache=False):
            _, caches = run(model, KINDS["batch"], [9, 1, 1], 2)
            _, others = run(model, lambda: cache.BatchKVCache([1]), [7, 1], 1)
            for one, other in zip(caches, others, strict=True):
                one.filter(mx.array([1]))
                one.extend(other)
            y = model(mx.array([[5], [6]]), cache=caches)
            results.append(np.array(model(mx.array([[7], [8]]), cache=caches)))
            mx.eval(y)
    np.testing.assert_allclose(results[1], results[0], atol=LAYERS * np.abs(results[0]).max())
