"""Attention whose rows of a batch have keys of their own, and the logsumexp of its scores."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from helpers.attention import exact_of, inputs, mx_attention, run
from helpers.matrices import draw, quantize
from helpers.support import assert_same_bits
from helpers.tolerances import assert_attention_right, assert_near

import mlx_mittens as mm
from mlx_mittens.specs import widen
from mlx_mittens.specs.attention import seen_of_rows
from mlx_mittens.specs.op import dequantized

KINDS = ("starts", "ends", "both", "each query")
HIDES = ("none", "causal", "window", "bool", "additive")


def limits(rng, kind, batch, queries, keys):
    """Starts and ends of a batch: one row of no keys, one of all, if there are as many."""
    starts = ends = None
    if kind in ("starts", "both"):
        starts = rng.integers(0, keys + 1, batch)
        starts[-1] = 0
    if kind in ("ends", "both"):
        ends = rng.integers(0, keys + 1, batch)
        ends[-1] = keys
    if kind == "each query":
        starts = np.sort(rng.integers(0, keys + 1, (batch, queries)), axis=1)
    if kind == "both" and batch > 1:
        starts[0] = ends[0]
    return [None if a is None else mx.array(a.astype(np.int32)) for a in (starts, ends)]


def hiding(rng, how, shape, dtype):
    """A mask and a window by their name."""
    batch, heads, _, queries, keys, _ = shape
    if how == "bool":
        return mx.array(rng.random((batch, 1, queries, keys)) < 0.7), None
    if how == "additive":
        hidden = rng.random((heads, queries, keys)) < 0.2
        return mx.array(np.where(hidden, -np.inf, rng.standard_normal(hidden.shape))).astype(dtype), None
    return ("causal" if how == "causal" else None), (9 if how == "window" else None)


def as_mask(starts, ends, mask, window, shape):
    """The same as a mask of bool or of numbers."""
    batch, _, _, queries, keys, _ = shape
    seen = mx.array(seen_of_rows(starts, ends, mask == "causal", window, batch, queries, keys))
    if not isinstance(mask, mx.array):
        return seen
    return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, mx.array(-np.inf, mask.dtype))


def dense(q, k, v, **options):
    return mm.scaled_dot_product_attention(q, k, v, scale=q.shape[3] ** -0.5, **options)


def packed(q, k, v, *, bits, mask=None, **options):
    return mm.quantized_scaled_dot_product_attention(q, k, v, q.shape[3] ** -0.5, mask, 64, bits, **options)


SHAPES = [
    (3, 4, 2, 1, 70, 64),
    (2, 3, 1, 5, 33, 80),
    (2, 8, 1, 3, 300, 64),
    (1, 2, 2, 20, 20, 128),
    (2, 2, 1, 33, 90, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(rng, dtype, executor, shape, kind):
    for how in HIDES if executor != "simulator" else rng.permutation(HIDES)[:2]:
        q, k, v = inputs(rng, shape, dtype)
        starts, ends = limits(rng, kind, shape[0], *shape[3:5])
        mask, window = hiding(rng, how, shape, dtype)
        sinks = draw(rng, (shape[1],), dtype) if rng.integers(2) else None
        y = run(lambda: dense(q, k, v, mask=mask, window=window, sinks=sinks, starts=starts, ends=ends))
        array, scale = as_mask(starts, ends, mask, window, shape), shape[5] ** -0.5
        twin = mx_attention(q, k, v, scale, array, sinks)
        assert_attention_right(y, twin, exact_of(q, k, v, scale, array, sinks), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries, keys", [(1, 90), (4, 300), (18, 40)])
def test_packed_as_with_a_mask(rng, dtype, executor, bits, kind, queries, keys):
    shape = (2, 4, 2, queries, keys, 64)
    q = draw(rng, (2, 4, queries, 64), dtype)
    k, v = (quantize(rng, (2, 2, keys, 64), dtype, 64, bits) for _ in range(2))
    starts, ends = limits(rng, kind, 2, queries, keys)
    mask, window = hiding(rng, HIDES[int(rng.integers(5))], shape, dtype)
    y = run(lambda: packed(q, k, v, bits=bits, mask=mask, window=window, starts=starts, ends=ends))
    rows = [dequantized(*rows, 64, bits) for rows in (k, v)]
    array = as_mask(starts, ends, mask, window, shape)
    twin = mx_attention(q, *(mx.dequantize(*rows, 64, bits) for rows in (k, v)), 0.125, array)
    assert_attention_right(y, twin, exact_of(q, *rows, 0.125, array), dtype)


@pytest.mark.parametrize("bits", [2, 5])
def test_bits_without_kernels(rng, native, lenient, bits):
    q = draw(rng, (2, 4, 3, 64), mx.float32)
    k, v = (quantize(rng, (2, 2, 20, 64), mx.float32, 64, bits) for _ in range(2))
    starts, ends = mx.array([3, 30]), mx.array([20, 9])
    y, sums = packed(q, k, v, bits=bits, mask="causal", starts=starts, ends=ends, return_logsumexp=True)
    rows = [mx.dequantize(*rows, 64, bits) for rows in (k, v)]
    expected, of_rows = dense(q, *rows, mask="causal", starts=starts, ends=ends, return_logsumexp=True)
    assert mx.isnan(y[1]).all() and mx.isnan(sums[1]).all() and mx.isnan(expected[1]).all()
    assert_near(y[0], widen(expected[0]), "results")
    assert_near(sums[0], widen(of_rows[0]), "results")


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("queries, keys", [(1, 70), (3, 1100), (20, 40)])
def test_unseen_keys_hold_anything(rng, executor, bits, queries, keys):
    """NaN and infinities before a row's start and behind its end, and a view of a larger cache."""
    starts, ends = mx.array([5, 20]), mx.array([keys - 7, keys])
    shape = (2, 4, 2, queries, keys, 64)
    q, k, v = inputs(rng, shape, mx.float16)
    seen = mx.array(seen_of_rows(starts, ends, False, None, 2, 1, keys)).swapaxes(-1, -2)
    options = {"starts": starts, "ends": ends, "mask": "causal"}
    if bits:
        k, v = (mx.quantize(a, 64, bits) for a in (k, v))
        attend = partial(packed, bits=bits)
        poison = lambda rows: tuple(mx.where(seen, a, a if a.dtype == mx.uint32 else mx.nan) for a in rows)
    else:
        attend = dense
        poison = lambda a: mx.where(seen, a, mx.array(np.where(rng.integers(2), np.nan, -np.inf))).astype(a.dtype)
    y = run(lambda: attend(q, k, v, **options))
    assert_same_bits(run(lambda: attend(q, poison(k), poison(v), **options)), y, "the results")


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("queries, keys", [(1, 90), (2, 1500), (5, 1030)])
@pytest.mark.parametrize("how", ["none", "causal", "window"])
def test_exact_rows_are_as_alone(rng, executor, bits, queries, keys, how):
    """A row of a padded batch gets, bit for bit, the result of an exact call of it and its keys."""
    batch = 3
    starts = rng.integers(0, keys - queries, batch)
    ends = np.array([keys, *rng.integers(starts[1:] + queries, keys + 1)])
    q, k, v = inputs(rng, (batch, 4, 1, queries, keys, 64), mx.float16)
    options = {"mask": "causal" if how == "causal" else None, "window": 37 if how == "window" else None}
    attend = partial(packed, bits=bits) if bits else dense
    pack = (lambda a: mx.quantize(a, 64, bits)) if bits else (lambda a: a)
    cut = lambda a, b: mx.contiguous(a[b : b + 1, :, int(starts[b]) : int(ends[b])])
    of = lambda rows, b: tuple(cut(a, b) for a in rows) if bits else cut(rows, b)
    k, v = pack(k), pack(v)
    y = attend(
        q, k, v, exact=True, starts=mx.array(starts.astype(np.int32)), ends=mx.array(ends.astype(np.int32)), **options
    )
    for b in range(batch):
        alone = attend(q[b : b + 1], of(k, b), of(v, b), exact=True, **options)
        assert_same_bits(y[b : b + 1], alone, f"row {b}: keys {starts[b]} to {ends[b]}")


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("starts, ends", [([-1, 0], None), ([0, 71], None), (None, [70, -3]), (None, [70, 71])])
def test_rows_beyond_the_keys_are_nan(rng, executor, bits, starts, ends):
    q, k, v = inputs(rng, (2, 4, 2, 3, 70, 64), mx.float32)
    bad = 0 if starts == [-1, 0] else 1
    options = {"starts": starts and mx.array(starts), "ends": ends and mx.array(ends), "return_logsumexp": True}
    if bits:
        k, v = (mx.quantize(a, 64, bits) for a in (k, v))
    attend = partial(packed, bits=bits) if bits else dense
    y, sums = run(lambda: attend(q, k, v, **options))
    assert mx.isnan(y[bad]).all() and mx.isnan(sums[bad]).all()
    assert mx.isfinite(y[1 - bad]).all() and mx.isfinite(sums[1 - bad]).all()


def test_queries_beyond_the_keys_are_nan(rng, executor):
    q, k, v = inputs(rng, (1, 2, 1, 4, 30, 64), mx.float32)
    y = run(lambda: dense(q, k, v, starts=mx.array([[0, -5, 31, 30]])))
    bad = mx.isnan(y).all(-1)[0]
    assert bad.tolist() == [[False, True, True, False]] * 2
    assert not y[:, :, 3].any()  # a query that starts behind the last key sees none


def test_several_prompts_in_one_row(rng, dtype, executor):
    """Their queries start at their prompt's first key: each prompt gets the same as alone."""
    lengths = (7, 1, 23, 12)
    total = sum(lengths)
    q, k, v = inputs(rng, (1, 4, 2, total, total, 64), dtype)
    begins = np.repeat(np.cumsum((0, *lengths[:-1])), lengths).astype(np.int32)
    y = run(lambda: dense(q, k, v, mask="causal", starts=mx.array(begins[None])))
    for begin in np.unique(begins):
        part = slice(int(begin), int(begin) + int((begins == begin).sum()))
        one = [a[:, :, part] for a in (q, k, v)]
        twin = mx_attention(*one, 0.125, "causal")
        assert_attention_right(y[:, :, part], twin, exact_of(*one, 0.125, "causal"), dtype)


def _float64_logsumexp(q, k, mask, sinks):
    q, k = widen(q), widen(k)
    scores = q @ np.repeat(np.swapaxes(k, -1, -2), q.shape[1] // k.shape[1], 1) * q.shape[3] ** -0.5
    if mask is not None:
        scores = np.where(np.broadcast_to(np.array(mask), scores.shape), scores, -np.inf)
    if sinks is not None:
        first = np.broadcast_to(widen(sinks)[None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([first, scores], -1)
    return np.logaddexp.reduce(scores, -1)


@pytest.mark.parametrize("shape", [(2, 4, 2, 1, 700, 64), (2, 4, 2, 3, 50, 64), (1, 2, 1, 19, 30, 128)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["none", "both"])
def test_logsumexp(rng, dtype, executor, shape, sinks, kind):
    q, k, v = inputs(rng, shape, dtype, outliers=False)
    starts, ends = limits(rng, kind, shape[0], *shape[3:5])
    drawn = draw(rng, (shape[1],), dtype) if sinks else None
    options = {"mask": "causal", "sinks": drawn, "starts": starts, "ends": ends}
    y, sums = run(lambda: dense(q, k, v, return_logsumexp=True, **options))
    assert sums.dtype == mx.float32 and sums.shape == q.shape[:3]
    assert_same_bits(y, run(lambda: dense(q, k, v, **options)), "the results")
    seen = mx.array(seen_of_rows(starts, ends, True, None, shape[0], *shape[3:5]))
    expected = _float64_logsumexp(q, k, seen, drawn)
    assert (np.isneginf(widen(sums)) == np.isneginf(expected)).all()
    there = np.isfinite(expected)
    assert_near(mx.array(widen(sums)[there].astype(np.float32)), expected[there], "results")


def test_logsumexp_of_no_keys(native):
    q, k = mx.zeros((2, 4, 3, 64)), mx.zeros((2, 2, 0, 64))
    y, sums = dense(q, k, k, return_logsumexp=True)
    assert y.shape == q.shape and not y.any() and mx.isneginf(sums).all()
    _, sums = dense(q, k, k, sinks=mx.arange(4.0), return_logsumexp=True)
    assert sums.tolist() == [[[float(h)] * 3 for h in range(4)]] * 2
    y, sums = dense(q[:, :, :0], q[:, :2], q[:, :2], return_logsumexp=True)
    assert y.shape == (2, 4, 0, 64) and sums.shape == (2, 4, 0)


def test_gradients_of_both_results(rng, executor):
    """Those of mx's own operations, with rows of different lengths."""
    shape = (2, 2, 1, 3, 12, 64)
    q, k, v = inputs(rng, shape, mx.float32, outliers=False)
    starts, ends = mx.array([2, 0]), mx.array([12, 9])
    seen = mx.array(seen_of_rows(starts, ends, True, None, 2, 3, 12))
    weights = draw(rng, (2, 2, 3, 64), mx.float32, False), draw(rng, (2, 2, 3), mx.float32, False)

    def ours(q, k, v):
        y, sums = dense(q, k, v, mask="causal", starts=starts, ends=ends, return_logsumexp=True)
        return (y * weights[0]).sum() + (sums * weights[1]).sum()

    def twin(q, k, v):
        scores = mx.where(seen, q @ k.swapaxes(-1, -2) * 0.125, -mx.inf)
        y, sums = mx.softmax(scores, axis=-1) @ v, mx.logsumexp(scores, axis=-1)
        return (y * weights[0]).sum() + (sums * weights[1]).sum()

    for one, other in zip(mx.grad(ours, (0, 1, 2))(q, k, v), mx.grad(twin, (0, 1, 2))(q, k, v)):
        assert_near(one, widen(other), "results")


def test_vmap_and_compile(rng, executor):
    q, k, v = (draw(rng, (3, *s), mx.float32) for s in ((2, 4, 1, 64), (2, 2, 20, 64), (2, 2, 20, 64)))
    starts, ends = mx.array([[1, 0], [5, 3], [19, 11]]), mx.array([20, 12])

    def attend(q, k, v, starts, ends):
        return dense(q, k, v, starts=starts, ends=ends, return_logsumexp=True)

    for one, other in zip(
        mx.vmap(attend, (0, 0, 0, 0, None))(q, k, v, starts, ends),
        map(mx.stack, zip(*(attend(*rows, ends) for rows in zip(q, k, v, starts)))),
    ):
        assert_near(one, widen(other), "results")
    shapeless = mx.compile(attend, shapeless=True)
    for keys in (20, 11):
        rows = q[0], k[0][:, :, :keys], v[0][:, :, :keys], starts[0], mx.minimum(ends, keys)
        for one, other in zip(shapeless(*rows), attend(*rows)):
            assert_near(one, widen(other), "results")


def test_arguments(native):
    q, k = mx.zeros((2, 4, 3, 64)), mx.zeros((2, 2, 9, 64))
    wrong = [
        ({"starts": mx.array([0.0, 1.0])}, mm.DtypeError, r"starts has dtype float32: expected int32; convert it by"),
        ({"ends": mx.array([0, 1], mx.int64)}, mm.DtypeError, r"ends has dtype int64: expected int32"),
        ({"starts": mx.array([0, 1, 2])}, ValueError, r"starts has shape \(3\): expected \(2\)"),
        ({"starts": mx.zeros((2, 4), mx.int32)}, ValueError, r"starts has shape \(2,4\): expected \(2\).* or \(2,3\)"),
        ({"ends": mx.zeros((2, 3), mx.int32)}, ValueError, r"ends has shape \(2,3\): expected \(2\), a key for each"),
        ({"starts": mx.zeros((2, 3), mx.int32), "exact": True}, ValueError, r"exact is True and starts has shape"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            dense(q, k, k, **options)
