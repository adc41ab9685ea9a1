"""Masks of rows that are padded on their left, which attention replaces by the first key of each row."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits
from helpers.tolerances import FLOAT16, assert_near

import mlx_mittens as mm
from mlx_mittens import _ext

pytest.importorskip("mlx_lm")

from mlx_lm.models import base, cache


def launched(build):
    """Kernels of attention that a call launches in the simulator."""
    with mm.simulator.enabled():
        _ext.simulator_record(True)
        y = build()
        mx.eval(y)
        names = [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)
    return y, [name for name in names if name.startswith("attention")]


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("queries, offset", [(1, 20), (5, 0), (4, 9)])
def test_the_mask_is_mlx_lms(native, queries, offset, window):
    """A row that is padded beyond the keys, and one whose padding is negative, as rotating caches have it."""
    padding = mx.array([0, 3, 40, -2])
    theirs = base.create_causal_mask(queries, offset, window, left_padding=padding)
    with mm.patched():
        ours = base.create_causal_mask(queries, offset, window, left_padding=padding)
    assert ours.shape == theirs.shape and mx.array_equal(ours, theirs)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("bits", [0, 8])
def test_attention_knows_it(rng, native, queries, bits):
    keys = 40
    q, k, v = (
        mx.array(rng.standard_normal((3, heads, n, 64)).astype(np.float32)).astype(mx.float16)
        for heads, n in ((4, queries), (2, keys), (2, keys))
    )
    padding = mx.array([5, 0, 31])
    rows = [mx.quantize(a, 64, bits) for a in (k, v)] if bits else (k, v)

    def attend():
        mask = base.create_causal_mask(queries, keys - queries, left_padding=padding)
        if bits:
            return base.quantized_scaled_dot_product_attention(q, *rows, 0.125, mask, 64, bits)
        return mx.fast.scaled_dot_product_attention(q, *rows, scale=0.125, mask=mask)

    with mm.patched():
        ours, names = launched(attend)
        on_cpu = attend()
    assert any(name.startswith("attention_ragged") for name in names)
    assert_near(ours[:, :, -1], on_cpu[:, :, -1], "attention", FLOAT16)
    if not bits:
        assert_near(on_cpu[:, :, -1], attend()[:, :, -1], "attention", FLOAT16)


def test_another_mask_is_a_mask(rng, native):
    """One that was made of it, and one of other shapes."""
    q = mx.array(rng.standard_normal((2, 2, 1, 64)).astype(np.float32))
    k = mx.array(rng.standard_normal((2, 2, 10, 64)).astype(np.float32))
    with mm.patched():
        mask = base.create_causal_mask(1, 9, left_padding=mx.array([2, 0]))
        hidden = mask & (mx.arange(10) != 9)
        y = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.125, mask=hidden)
    expected = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.125, mask=hidden)
    assert_near(y, expected, "attention")


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_padded_batch_in_a_cache(rng, native, kind):
    """A prompt and tokens: each row is near its result alone, and exact rows have its bits."""
    lengths, width, tokens = (7, 12, 1), 64, 9
    total = max(lengths)
    padding = [total - length for length in lengths]
    make = lambda: cache.BatchRotatingKVCache(8, padding) if kind == "window" else cache.BatchKVCache(padding)
    draw = lambda n: mx.array(rng.standard_normal((3, 2, n, width)).astype(np.float32))
    steps = [total, *[1] * tokens]
    rows = [(draw(n), draw(n), draw(n)) for n in steps]

    def run(one=None):
        own = make() if one is None else (cache.RotatingKVCache(8) if kind == "window" else cache.KVCache())
        results = []
        for i, (q, k, v) in enumerate(rows):
            if one is not None:
                q, k, v = (a[one : one + 1, :, padding[one] if i == 0 else 0 :] for a in (q, k, v))
            mask = own.make_mask(q.shape[2], window_size=8 if kind == "window" else None, return_array=False)
            keys, values = own.update_and_fetch(k, v)
            results.append(base.scaled_dot_product_attention(q, keys, values, own, 0.125, mask)[:, :, -1])
        return mx.stack(results)

    with mm.patched(exact=kind == "full"):
        ours = run()
        if kind == "full":
            for one in range(3):
                assert_same_bits(ours[:, one], run(one)[:, 0], f"row {one}")
    assert_near(ours, run(), "attention of a cache")


def test_bad_input(native):
    for arguments, message in (
        ((0, 4, None, mx.array([1])), r"\[row_mask\] 0 queries after 4 keys"),
        ((1, 4, 0, mx.array([1])), r"with a window of 0"),
        ((1, 4, None, mx.array([1.0])), r"starts has shape \(1\) and dtype float32"),
    ):
        with pytest.raises(ValueError, match=message):
            _ext.row_mask(*arguments)
