"""Attention of rows that share their first keys: as over these and the row's own in one array."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.attention import exact_of, inputs, mx_attention, run
from helpers.matrices import draw
from helpers.tolerances import assert_attention_right, assert_near

import mlx_mittens as mm
from mlx_mittens.specs.attention import seen_of_rows

SHAPES = [(4, 1, 90, 12), (2, 3, 33, 40), (1, 18, 5, 20), (1, 1, 200, 1), (3, 7, 70, 9)]


def drawn(rng, shape, prefix, dtype, heads=4, width=64):
    batch, queries, own = shape
    q, k, v = inputs(rng, (batch, heads, 2, queries, own, width), dtype)
    return q, k, v, *(draw(rng, (1, 2, prefix, width), dtype) for _ in range(2))


def joined(k, v, prefix_k, prefix_v):
    pairs = (prefix_k, k), (prefix_v, v)
    return [mx.concatenate([mx.broadcast_to(a, (len(b), *a.shape[1:])), b], 2) for a, b in pairs]


def seen_with_prefix(seen, prefix):
    return mx.array(np.concatenate([np.ones((*seen.shape[:3], prefix), bool), seen], -1))


def assert_right(y, q, rows, seen, sinks, dtype):
    assert y.dtype == dtype
    twin = mx_attention(q, *rows, 0.125, seen, sinks)
    assert_attention_right(y, twin, exact_of(q, *rows, 0.125, seen, sinks), dtype)


def own_limits(rng, batch, keys):
    """Starts and ends: the first row has no keys of its own, the last has all."""
    starts, ends = np.sort(rng.integers(0, keys + 1, (2, batch)), 0)
    starts[-1], ends[-1] = 0, keys
    if batch > 1:
        starts[0] = ends[0]
    return [mx.array(a.astype(np.int32)) for a in (starts, ends)]


@pytest.mark.parametrize("batch, queries, prefix, own", SHAPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_of_different_lengths(rng, dtype, executor, batch, queries, prefix, own, sinks):
    q, *rows = drawn(rng, (batch, queries, own), prefix, dtype)
    starts, ends = own_limits(rng, batch, own)
    given = draw(rng, (4,), dtype) if sinks else None
    y = run(lambda: mm.cascade_attention(q, *rows, scale=0.125, mask="causal", sinks=given, starts=starts, ends=ends))
    seen = seen_of_rows(starts, ends, True, None, batch, queries, own)
    assert_right(y, q, joined(*rows), seen_with_prefix(seen, prefix), given, dtype)


@pytest.mark.parametrize("batch, queries, prefix, own", SHAPES)
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_masks(rng, dtype, executor, batch, queries, prefix, own, mask):
    q, *rows = drawn(rng, (batch, queries, own), prefix, dtype)
    seen = rng.random((batch, 1, queries, own)) < (0.7 if mask != "none" else 2)
    numbers = np.where(seen, rng.standard_normal(seen.shape), -np.inf)
    given = {"none": None, "bool": mx.array(seen), "additive": mx.array(numbers).astype(dtype)}[mask]
    y = run(lambda: mm.cascade_attention(q, *rows, scale=0.125, mask=given))
    whole = seen_with_prefix(seen, prefix)
    if mask == "additive":
        whole = mx.concatenate([mx.zeros((batch, 1, queries, prefix), dtype), given], -1)
    assert_right(y, q, joined(*rows), whole, None, dtype)


@pytest.mark.parametrize("heads", [2, 4, 16])
@pytest.mark.parametrize("prefix, own", [(700, 3), (3, 700), (1500, 1500)])
def test_many_parts(rng, executor, heads, prefix, own):
    q, *rows = drawn(rng, (2, 1, own), prefix, mx.float16, heads)
    y = run(lambda: mm.cascade_attention(q, *rows, scale=0.125))
    assert_right(y, q, joined(*rows), None, None, mx.float16)


def test_queries_as_layers_make_them(rng, executor):
    """Transposed, in the middle of an array that holds keys and values too, and every second of a batch."""
    q, *rows = drawn(rng, (3, 2, 9), 40, mx.float16)
    for view in (
        mx.contiguous(q.swapaxes(1, 2)).swapaxes(1, 2),
        mx.concatenate([q, q], 1)[:, :4],
        mx.repeat(q, 2, 0)[::2],
        q.swapaxes(0, 1).swapaxes(0, 1),
    ):
        y = run(lambda view=view: mm.cascade_attention(view, *rows, scale=0.125))
        assert_right(y, q, joined(*rows), None, None, mx.float16)


@pytest.mark.parametrize("none", ["own", "prefix", "batch", "queries"])
def test_nothing(rng, executor, lenient, none):
    shape = {"own": (2, 1, 0), "batch": (0, 1, 9), "queries": (2, 0, 9)}.get(none, (2, 1, 9))
    q, *rows = drawn(rng, shape, 0 if none == "prefix" else 20, mx.float32)
    y = run(lambda: mm.cascade_attention(q, *rows, scale=0.125))
    assert y.shape == q.shape
    if y.size:
        assert_right(y, q, joined(*rows), None, None, mx.float32)


def test_a_start_that_is_no_key(rng, dtype, executor):
    """Its row is NaN, the others are as they are without it."""
    q, *rows = drawn(rng, (3, 1, 20), 50, dtype)
    starts, ends = mx.array([0, -1, 5]), mx.array([20, 20, 21])
    y = run(lambda: mm.cascade_attention(q, *rows, scale=0.125, starts=starts, ends=ends))
    right = run(
        lambda: mm.cascade_attention(q, *rows, scale=0.125, starts=mx.array([0, 0, 5]), ends=mx.array([20] * 3))
    )
    assert mx.array_equal(y[0], right[0]) and mx.all(mx.isnan(y[1:]))


@pytest.mark.parametrize("where", ["prefix", "own"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite(rng, dtype, executor, where, number):
    """A value reaches the rows that see it: all of them in the prefix, one where it is a row's own."""
    q, k, v, prefix_k, prefix_v = drawn(rng, (3, 1, 20), 50, dtype)
    if where == "prefix":
        prefix_v[0, 1, 7, 3] = number
    else:
        v[1, 1, 7, 3] = number
    y = np.array(run(lambda: mm.cascade_attention(q, k, v, prefix_k, prefix_v, scale=0.125)).astype(mx.float32))
    hit = np.zeros(y.shape, bool)
    hit[slice(None) if where == "prefix" else 1, 2:, 0, 3] = True
    np.testing.assert_array_equal(~np.isfinite(y), hit)


def test_scores_beyond_float16(rng, executor):
    """Products are float32; of two parts whose scores are far apart one has all the weight."""
    q, *rows = drawn(rng, (2, 1, 20), 50, mx.float16)
    q, rows[0] = q * 200, rows[0] * 100
    y = run(lambda: mm.cascade_attention(q, *rows, scale=0.125))
    assert_right(y, q, joined(*rows), None, None, mx.float16)


def test_launches(rng, native):
    """One over the prefix, one over each row's own keys, and one that puts their parts together."""
    q, *rows = drawn(rng, (8, 1, 30), 200, mx.float16)
    mm.stats(reset=True)
    with mm.simulator.enabled():
        mx.eval(mm.cascade_attention(q, *rows, scale=0.125))
    counts = mm.stats(reset=True)["cascade_attention"]["kernels"]
    assert sum(counts.values()) == 3 and any("attention_cascade_1" in name for name in counts)


def test_gradients_and_vmap(rng, native):
    q, *rows = drawn(rng, (2, 2, 9), 20, mx.float32)
    starts = mx.array([9, 0])  # the first row has no keys of its own

    def ours(*a):
        return mm.cascade_attention(*a, scale=0.125, starts=starts)

    def whole(q, *rows):
        seen = seen_with_prefix(seen_of_rows(starts, None, False, None, 2, 2, 9), 20)
        return mx.fast.scaled_dot_product_attention(q, *joined(*rows), scale=0.125, mask=seen)

    cotangent = [draw(rng, q.shape, mx.float32)]
    found, right = (mx.vjp(f, [q, *rows], cotangent)[1] for f in (ours, whole))
    for a, b in zip(found, right, strict=True):
        assert_near(a, b, "gradient")
    two = mx.stack([q, q * 2])
    mapped = mx.vmap(ours, in_axes=(0, *[None] * 4))(two, *rows)
    assert_near(mapped[1], ours(q * 2, *rows), "mapped")


def test_arguments(native):
    q, k = mx.zeros((2, 4, 3, 64)), mx.zeros((2, 2, 9, 64))
    with pytest.raises(ValueError, match=r"prefix_k has shape \(2,2,9,64\).*: expected a batch of one"):
        mm.cascade_attention(q, k, k, k, k, scale=1.0)
    with pytest.raises(ValueError, match=r"\[cascade_attention\] k has shape \(9,64\): expected four dimensions"):
        mm.cascade_attention(q, k[0, 0], k, k, k, scale=1.0)
    with pytest.raises(ValueError, match=r"prefix_k has shape \(1,1,9,64\).*: expected the same heads and widths"):
        mm.cascade_attention(q, k, k, k[:1, :1], k[:1, :1], scale=1.0)
    with pytest.raises(mm.DtypeError, match=r"starts has dtype float32: expected int32"):
        mm.cascade_attention(q, k, k, k[:1], k[:1], scale=1.0, starts=mx.zeros(2))
