"""Attention over dense keys and values."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from helpers.attention import (
    HIDES,
    MASKS,
    draw,
    exact_of,
    hidden_keys,
    hides,
    inputs,
    mask_of,
    mx_attention,
    poisoned,
    run,
    without,
)
from helpers.support import assert_same_bits
from helpers.tolerances import (
    FLOAT16_TWICE,
    FLOAT64_ROUNDINGS,
    GRADIENTS_16_BIT,
    LAYERS,
    ROUNDINGS,
    SUM,
    SUMS,
    assert_attention_right,
    assert_error_at_most_that_of_mx,
    assert_near,
)

import mlx_mittens as mm
from mlx_mittens.specs.attention import twin_mask

MX = mx.fast.scaled_dot_product_attention


def attend(q, k, v, scale, mask=None, sinks=None, window=None):
    """One call, compared with float64 and mx."""
    y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, window=window))
    assert y.shape == (*q.shape[:3], v.shape[3])
    twin = mx_attention(q, k, v, scale, mask, sinks, window)
    assert_attention_right(y, twin, exact_of(q, k, v, scale, mask, sinks, window), q.dtype)
    return y


def check(rng, shape, dtype, mask=None, sinks=False, window=None, value_width=None):
    q, k, v = inputs(rng, shape, dtype, value_width)
    drawn = draw(rng, (shape[1],), dtype) if sinks else None
    return attend(q, k, v, shape[5] ** -0.5, mask_of(rng, mask, shape, dtype), drawn, window)


# Lengths around the edges of tiles: (queries, keys).
LENGTHS = [
    (1, 1), (1, 7), (1, 31), (1, 64), (1, 65), (1, 300), (2, 33), (3, 128), (4, 129), (5, 5), (7, 64), (8, 100),
    (9, 63), (15, 16), (16, 257), (17, 17), (24, 40), (31, 32), (32, 31), (33, 65), (48, 96), (63, 64), (64, 64),
    (65, 63), (66, 200), (100, 100), (127, 129), (129, 127), (200, 300), (257, 256), (300, 300),
]  # fmt: skip


@pytest.mark.parametrize("queries, keys", LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
def test_lengths(rng, executor, queries, keys, mask):
    if executor == "simulator" and queries * keys > 5000:
        queries, keys = min(queries, 66), min(keys, 70)
    dtype = list({mx.float32, mx.float16, mx.bfloat16})[int(rng.integers(3))]
    check(rng, (1, 2, 1, queries, keys, 64), dtype, mask, sinks=bool(rng.integers(2)))


@pytest.mark.parametrize("width", [64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("queries, keys", [(1, 70), (6, 40), (35, 50)])
def test_widths(rng, dtype, executor, width, queries, keys):
    check(rng, (1, 2, 2, queries, keys, width), dtype, "causal")


@pytest.mark.parametrize("width, value_width", [(1, 1), (3, 5), (17, 64), (40, 40), (100, 128), (1025, 7)])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_any_width_on_the_cpu(rng, dtype, native, width, value_width, queries):
    check(rng, (1, 4, 2, queries, 75, width), dtype, "causal", value_width=value_width)


@pytest.mark.parametrize("width, value_width", [(192, 128), (96, 64), (64, 192), (576, 512)])
@pytest.mark.parametrize("queries, mask", [(1, "none"), (5, "additive"), (24, "causal")])
def test_values_of_another_width(rng, dtype, lenient, executor, width, value_width, queries, mask):
    check(rng, (1, 4, 2, queries, 40, width), dtype, mask, sinks=mask == "additive", value_width=value_width)


@pytest.mark.parametrize("queries", [3, 24])
def test_derivatives_with_values_of_another_width(rng, native, queries):
    """Compiled, and batched by vmap, along sinks too."""
    shape = (2, 4, 2, queries, 30, 48)
    arrays = [*inputs(rng, shape, mx.float32, 80, outliers=False), draw(rng, (4,), mx.float32)]
    mask = mask_of(rng, "bool", shape, mx.float32)
    of = lambda f: lambda q, k, v, s: f(q, k, v, scale=0.2, mask=mask, sinks=s)
    cotangent = draw(rng, (2, 4, queries, 80), mx.float32)
    tangents = [draw(rng, a.shape, mx.float32, False) for a in arrays]
    ours, twin = of(mx.compile(mm.scaled_dot_product_attention)), of(MX)
    for a, b in zip(*(mx.vjp(f, arrays, [cotangent])[1] for f in (ours, twin)), strict=True):
        assert_near(a, b, f"gradient of shape {b.shape}", SUMS)
    assert_near(*(mx.jvp(f, arrays, tangents)[1][0] for f in (ours, twin)), "jvp", LAYERS)
    several = [mx.stack([a, 2 * a, -a]) for a in arrays]
    each = mx.stack([twin(*(a[i] for a in several)) for i in range(3)])
    assert_near(mx.vmap(ours)(*several), each, "vmap", SUMS)
    each = mx.stack([twin(*(a[i] for a in several[:3]), arrays[3]) for i in range(3)])
    assert_near(mx.vmap(ours, in_axes=(0, 0, 0, None))(*several[:3], arrays[3]), each, "vmap, sinks shared", SUMS)


@pytest.mark.parametrize("heads, key_heads", [(1, 1), (3, 3), (4, 2), (6, 2), (8, 1), (10, 2), (16, 1), (21, 3)])
@pytest.mark.parametrize("queries", [1, 2, 5, 19])
def test_ratios(rng, dtype, executor, heads, key_heads, queries):
    check(rng, (2, heads, key_heads, queries, 45, 64), dtype, "bool" if queries == 5 else None, sinks=queries == 2)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 64, 1000])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries, keys", [(1, 100), (4, 90), (70, 70), (20, 85)])
def test_window(rng, executor, window, mask, queries, keys):
    check(rng, (1, 4, 2, queries, keys, 64), mx.float16, mask, window=window)


@pytest.mark.parametrize("queries, keys", [(1, 5000), (3, 3001), (700, 700), (40, 2100), (1030, 515)])
def test_long(rng, dtype, native, queries, keys):
    check(rng, (1, 2, 1, queries, keys, 64), dtype, "causal")


@pytest.mark.parametrize(
    "ratio, width, keys, splits",
    [
        *((4, 64, 512, False), (4, 64, 513, True), (8, 64, 700, True), (16, 64, 600, True)),
        *((4, 128, 256, False), (4, 128, 257, True), (8, 128, 300, True), (16, 128, 290, True)),
    ],
)
def test_rows_that_share_keys(rng, executor, ratio, width, keys, splits):
    """Few enough keys are one threadgroup's; others are split."""
    mm.stats(reset=True)
    check(rng, (1, ratio, 1, 1, keys, width), mx.float16, sinks=bool(rng.integers(2)))
    kernels = str(mm.stats()["scaled_dot_product_attention"]["kernels"])
    assert executor == "native" or ("decode" in kernels and ("combine" in kernels) == splits), kernels


@pytest.mark.parametrize("key", [0, 31, 500, 1030, 1099])
def test_a_key_that_outweighs_all_others(rng, executor, key):
    """Wherever it lies among the splits: the sums of others count for nothing beside it."""
    q, k, v = (draw(rng, (1, 1, n, 256), mx.float32, outliers=False) for n in (1, 1100, 1100))
    k[0, 0, key] = q[0, 0, 0] * (300 * 16 / mx.sum(q * q))
    y = mm.scaled_dot_product_attention(q, k, v, scale=1 / 16)
    np.testing.assert_allclose(np.array(y[0, 0, 0]), np.array(v[0, 0, key]), rtol=SUM, atol=ROUNDINGS)


@pytest.mark.parametrize("queries", [1, 9, 40])
def test_strides(rng, dtype, executor, queries):
    """Transposed arrays, a cache of larger capacity, broadcast heads: read where they lie."""
    batch, heads, key_heads, keys, width = 2, 4, 2, 50, 64
    q = draw(rng, (batch, queries, heads, width), dtype).swapaxes(1, 2)
    cache = [draw(rng, (batch, key_heads, 256, width), dtype) for _ in range(2)]
    attend(q, *(a[:, :, :keys] for a in cache), 0.125, "causal")
    attend(q, *(a[:, :, 3 : 6 * keys : 5][:, :, :keys] for a in cache), 0.125)
    attend(q, *(draw(rng, (batch, keys, key_heads, width), dtype).swapaxes(1, 2) for _ in range(2)), 0.125, "causal")
    shared = [mx.broadcast_to(a[:, :1, :keys], (batch, heads, keys, width)) for a in cache]
    attend(q, *shared, 0.125)
    wide = draw(rng, (batch, key_heads, keys, 3 * width), dtype)
    attend(q, wide[..., :width], wide[..., 2 * width :], 0.125)
    columns = draw(rng, (batch, key_heads, width, keys), dtype).swapaxes(2, 3)
    attend(q, columns, columns, 0.125)
    attend(draw(rng, q.shape, dtype)[:, :, ::-1], cache[0][:, ::-1, :keys], cache[1][:, ::-1, :keys], 0.125)


@pytest.mark.parametrize(
    "shape",
    [
        (40,), (1, 40), (9, 1), (9, 40), (1, 1, 40), (4, 1, 40), (4, 9, 40), (1, 1, 9, 40), (2, 1, 1, 40),
        (2, 4, 9, 40), (2, 1, 9, 1), (1, 1, 1, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_broadcast(rng, executor, shape, kind):
    q, k, v = inputs(rng, (2, 4, 2, 9, 40, 64), mx.float16)
    mask = mx.array(rng.random(shape) < 0.7) if kind == "bool" else draw(rng, shape, mx.float16)
    attend(q, k, v, 0.125, mask)


@pytest.mark.parametrize("queries", [2, 30])
def test_masks_of_other_types_and_strides(rng, executor, queries):
    q, k, v = inputs(rng, (1, 2, 1, queries, 40, 64), mx.float32)
    attend(q, k, v, 0.125, draw(rng, (queries, 40), mx.float16))
    attend(q, k, v, 0.125, mx.array(rng.integers(-3, 3, (queries, 40))))
    attend(q, k, v, 0.125, draw(rng, (40, queries), mx.float32).T)
    attend(q, k, v, 0.125, mx.array(rng.random((queries, 80)) < 0.6)[:, ::2])
    attend(q, k, v, 0.125, mx.array(rng.random((queries, 40)) < 0.6)[::-1, ::-1])


@pytest.mark.parametrize("queries, keys", [(1, 200), (64, 200)])
def test_masks_that_hide_whole_blocks(rng, executor, queries, keys):
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, 64), mx.float16)
    seen = np.zeros((queries, keys), bool)
    seen[:, 70:80] = True
    attend(q, k, v, 0.125, mx.array(seen))
    attend(q, k, v, 0.125, mx.array(np.where(seen, 0, -np.inf)).astype(mx.float16))
    attend(q, k, v, 0.125, mx.array(np.where(seen, 0, np.finfo(np.float16).min)).astype(mx.float16))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("queries", [2, 9, 40])
def test_rows_that_see_no_key_are_zero(rng, dtype, executor, queries, sinks):
    keys = 5
    q, k, v = inputs(rng, (2, 4, 2, queries, keys, 64), dtype)
    drawn = draw(rng, (4,), dtype) if sinks else None
    seen = rng.random((queries, keys)) < 0.5
    seen[rng.integers(0, queries)] = False
    none = ~seen.any(1)

    def check(q, rows, mask=None, window=None):
        y = attend(q, k, v, 0.125, mask, drawn, window)
        assert not np.array(y.astype(mx.float32))[:, :, rows].any()

    check(q, none, mx.array(seen))
    check(q, slice(None), mx.zeros((queries, keys), mx.bool_))
    check(q, none, mx.array(np.where(seen, 0, -np.inf)).astype(dtype))
    check(q, slice(None), mx.full((queries, keys), -np.inf, dtype))
    q = draw(rng, (2, 4, queries + 4, 64), dtype)
    check(q, slice(queries - 1), "causal")
    check(q, slice(queries - 1), None, 2)


@pytest.mark.parametrize("how", ["causal", "bool", "additive"])
@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_of_rows_that_see_no_key(rng, native, how, sinks):
    """Theirs are 0, and the gradients of keys, values and sinks come from the other rows."""
    q, k, v = inputs(rng, (1, 2, 1, 9, 6, 16), mx.float32, outliers=False)
    arrays = [q, k, v] + ([draw(rng, (2,), mx.float32)] if sinks else [])
    seen = np.arange(6) <= np.arange(-3, 6)[:, None]
    numbers = mx.array(np.where(seen, rng.standard_normal(seen.shape), -np.inf)).astype(mx.float32)
    mask = {"causal": "causal", "bool": mx.array(seen), "additive": numbers}[how]
    attend = lambda q, k, v, *sinks, mask=mask: mm.scaled_dot_product_attention(
        q, k, v, scale=0.25, mask=mask, sinks=sinks[0] if sinks else None)  # fmt: skip
    others = lambda q, *more: attend(q[:, :, 3:], *more, mask=mask if how == "causal" else mask[3:])
    cotangent = draw(rng, q.shape, mx.float32, False)
    found = mx.vjp(attend, arrays, [cotangent])[1]
    expected = mx.vjp(others, arrays, [cotangent[:, :, 3:]])[1]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_near(a, b, f"gradient {i}")
    tangents = [draw(rng, a.shape, mx.float32, False) for a in arrays]
    y = mx.jvp(attend, arrays, tangents)[1][0]
    assert_near(y[:, :, 3:], mx.jvp(others, arrays, tangents)[1][0], "jvp")
    assert not mx.any(y[:, :, :3] != 0) and not mx.any(found[0][:, :, :3] != 0)


@pytest.mark.parametrize("queries", [1, 33])
def test_scores_beyond_float16(rng, executor, queries):
    """Products that overflow float16 are finite in float32; mx has NaN there."""
    q, k, v = inputs(rng, (1, 2, 1, queries, 40, 64), mx.float16, outliers=False)
    y = run(lambda: mm.scaled_dot_product_attention(q * 300, k * 300, v, scale=1.0))
    exact = exact_of(q * 300, k * 300, v, 1.0)
    assert np.abs(np.array(y) - exact.value).max() <= FLOAT16_TWICE * np.abs(exact.value).max()
    small = run(lambda: mm.scaled_dot_product_attention(q * 1e-4, k * 1e-4, v, scale=1.0))
    np.testing.assert_allclose(np.array(small)[0, :, 0], np.array(v.mean(2))[0].repeat(2, 0), atol=FLOAT16_TWICE)


@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity(rng, dtype, executor, queries, value):
    q, k, v = inputs(rng, (1, 2, 1, queries, 40, 64), dtype, outliers=False)
    with_key, with_value, with_query = k + 0, v + 0, mx.abs(q)
    with_key[0, 0, 11, 5] = value
    with_value[0, 0, 11, 5] = value
    with_query[0, 1, queries - 1, 5] = value
    for arrays in ((mx.abs(q), with_key, v), (q, k, with_value), (with_query, mx.abs(k), v)):
        y = run(lambda arrays=arrays: mm.scaled_dot_product_attention(*arrays, scale=0.125))
        with mx.stream(mx.cpu):
            twin = MX(*(a.astype(mx.float32) for a in arrays), scale=0.125)
        assert_near(mx.nan_to_num(y, 7, 8, 9), mx.nan_to_num(twin, 7, 8, 9), str(value), GRADIENTS_16_BIT)
        assert mx.array_equal(mx.isnan(y), mx.isnan(twin)).item()


@pytest.mark.parametrize("queries, keys", [(1, 6), (1, 1200), (20, 70)])
@pytest.mark.parametrize("how", ["plain", "sinks", "causal"])
def test_values_near_the_largest_float(rng, native, queries, keys, how):
    """Their sums overflow on the way, their averages do not."""
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, 64), mx.float32, outliers=False)
    v[..., 3] = 3e38
    v[..., 7] = -3e38
    mask, sinks = "causal" if how == "causal" else None, mx.zeros(2) if how == "sinks" else None
    y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask, sinks=sinks))
    exact = exact_of(q, k, v, 0.1, mask, sinks)
    assert np.all(np.isfinite(np.array(y)))
    assert_attention_right(y, None, exact, mx.float32)


def check_hidden(rng, dtype, queries, how, width, keys=40):
    """Keys and values are NaN, infinite or huge. Rows that do not see them are right; rows that see NaN are NaN."""
    hidden = hidden_keys(rng, how, queries, keys, dtype)
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, width), dtype, outliers=False)
    call = lambda k, v: run(
        lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask=hidden.mask, window=hidden.window)
    )
    exact = exact_of(q, k, v, 0.125, hidden.mask, window=hidden.window)
    with mx.stream(mx.cpu):
        twin = MX(q, k, v, scale=0.125, mask=twin_mask(hidden.mask, hidden.window, queries, keys))
    for value in (np.nan, np.inf, float(mx.finfo(dtype).max)):
        spoilt = poisoned(v, hidden.keys, value, slice(3, 50, 11))
        y = call(k, spoilt)
        assert_attention_right(without(y, hidden.hits, exact), twin, exact, dtype)
        if not np.isfinite(value):
            found = np.isfinite(np.array(y.astype(mx.float32)))
            expected = np.ones(found.shape, bool)
            expected[:, :, hidden.hits, 3:50:11] = False
            np.testing.assert_array_equal(found, expected)
            y = call(poisoned(k, hidden.keys, value), spoilt)
            assert_attention_right(without(y, hidden.hits, exact), twin, exact, dtype)
    y = call(poisoned(k, hidden.keys, np.nan), v)
    assert_attention_right(without(y, hidden.hits, exact), twin, exact, dtype)
    assert not np.isfinite(np.array(y.astype(mx.float32)))[:, :, hidden.hits].any()


@pytest.mark.parametrize(
    "queries, width, how",
    [(n, width, how) for n, width in ((1, 64), (1, 80), (4, 64), (24, 64), (24, 80)) for how in hides(n)],
)
def test_what_is_hidden_does_not_matter(rng, dtype, executor, queries, width, how):
    check_hidden(rng, dtype, queries, how, width)


@pytest.mark.parametrize("how", HIDES)
@pytest.mark.parametrize("queries, dtype", [(4, mx.float32), (24, mx.float32), (4, mx.float16), (24, mx.bfloat16)])
def test_what_is_hidden_does_not_matter_by_the_rules_for_nvidia(rng, nvidia_kernels, queries, dtype, how):
    check_hidden(rng, dtype, queries, how, 64)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("ratio", [1, 8])
def test_what_is_hidden_from_a_whole_split_does_not_matter(rng, executor, dtype, ratio):
    """Its sum overflows, and counts nothing. Queries of any cache that has room for more."""
    keys = 600
    q, k, v = inputs(rng, (1, ratio, 1, 1, keys, 128), dtype, outliers=False)
    seen = mx.array(np.arange(keys) < 70)
    call = lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask=seen)
    exact = exact_of(q, k, v, 0.125, seen)
    for value in (mx.finfo(dtype).max, float("nan")):
        v[:, :, 70:] = value
        mm.stats(reset=True)
        assert_attention_right(run(call), None, exact, dtype)
        kernels = str(mm.stats()["scaled_dot_product_attention"]["kernels"])
        assert executor == "native" or "combine" in kernels, kernels


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("queries, width", [(1, 64), (4, 64), (24, 64), (24, 80)])
def test_rows_that_see_nothing_are_finite(rng, dtype, executor, queries, width, value):
    """Whatever the keys and values hold."""
    q, k, v = inputs(rng, (1, 2, 1, queries, 40, width), dtype, outliers=False)
    keys = np.arange(40) % 7 == 3
    seen = mx.zeros((queries, 40), mx.bool_)
    y = run(lambda: mm.scaled_dot_product_attention(
        q, poisoned(k, keys, value), poisoned(v, keys, value, slice(5, 9)), scale=0.125, mask=seen))  # fmt: skip
    assert y.dtype == dtype and not mx.any(y != 0)


def test_the_end_of_a_cache_does_not_matter(rng, dtype, executor):
    """Keys after a view's end, which share the last tile with it."""
    for queries, width, keys in ((1, 64, 37), (4, 128, 37), (24, 64, 53), (24, 80, 53)):
        q, k, v = inputs(rng, (1, 4, 2, queries, keys, width), dtype, outliers=False)
        room = mx.full((1, 2, 64 - keys, width), float("nan"), dtype)
        caches = [mx.concatenate([a, room], 2)[:, :, :keys] for a in (k, v)]
        y = run(lambda q=q, caches=caches: mm.scaled_dot_product_attention(q, *caches, scale=0.125, mask="causal"))
        assert_attention_right(y, None, exact_of(q, k, v, 0.125, "causal"), dtype)


@pytest.mark.parametrize("how", HIDES)
def test_gradients_of_what_sees_nothing_hidden(rng, native, how):
    """NaN among hidden keys and values reaches no gradient that does not depend on them."""
    queries, keys = 9, 30
    hidden = hidden_keys(rng, how, queries, keys, mx.float32)
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, 16), mx.float32, outliers=False)
    clear = mx.array(~hidden.hits)[:, None]
    attend = lambda q, k, v: mm.scaled_dot_product_attention(
        q, k, v, scale=0.25, mask=hidden.mask, window=hidden.window)  # fmt: skip
    rows = mx.array(np.flatnonzero(~hidden.hits))
    spoilt = [poisoned(a, hidden.keys, np.nan) for a in (k, v)]
    cotangent = mx.where(clear, draw(rng, q.shape, mx.float32), 0)
    found = mx.vjp(attend, [q, *spoilt], [cotangent])[1]
    expected = mx.vjp(attend, [q, k, v], [cotangent])[1]
    assert_near(found[0][:, :, rows], expected[0][:, :, rows], "gradient of the queries")
    if not hidden.hits.any():
        for a, b, name in zip(found[1:], expected[1:], ("keys", "values"), strict=True):
            assert_near(a, b, f"gradient of the {name}")
    tangents = [draw(rng, a.shape, mx.float32) for a in (q, k, v)]
    found, expected = (mx.jvp(attend, arrays, tangents)[1][0] for arrays in ([q, *spoilt], [q, k, v]))
    assert_near(found[:, :, rows], expected[:, :, rows], "jvp")


@pytest.mark.parametrize("what", ["cotangent", "value"])
def test_gradients_of_what_a_row_that_is_not_finite_does_not_see(rng, native, what):
    """Two blocks of rows, each with its own keys: infinities and NaN in one leave the other's gradients alone."""
    q, k, v = inputs(rng, (1, 2, 1, 4, 4, 16), mx.float32, outliers=False)
    seen = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool))
    mask = mx.array(np.where(seen, 0, -np.inf)).astype(mx.float32)
    cotangent = draw(rng, q.shape, mx.float32, False)
    names = ("queries", "keys", "values", "mask")
    of = lambda k, v, mask, cotangent: dict(zip(names, mx.vjp(
        lambda *a: mm.scaled_dot_product_attention(*a[:3], scale=0.25, mask=a[3]), [q, k, v, mask], [cotangent])[1],
        strict=True))  # fmt: skip
    expected = of(k, v, mask, cotangent)
    if what == "cotangent":
        cotangent[:, :, 0, 3] = np.inf
        del expected["values"]  # a product with the cotangent itself
    else:
        v[:, :, 0] = np.nan
    found = of(k, v, mask, cotangent)
    for name, right in expected.items():
        assert_near(found[name][..., 2:, :], right[..., 2:, :], f"gradient of the {name}")
    assert not mx.isfinite(found["queries"][:, :, 0]).any() and not mx.isfinite(found["keys"][:, :, :2]).any()
    assert not np.array(found["mask"])[~seen].any()
    seen = mx.array(seen)
    attend = lambda k: mm.scaled_dot_product_attention(q, k, v, scale=0.25, mask=seen)
    by_bool = mx.vjp(attend, [k], [cotangent])[1][0]
    assert_near(by_bool[:, :, 2:], expected["keys"][:, :, 2:], "gradient of the keys by a mask of bools")


@pytest.mark.parametrize("how", HIDES)
@pytest.mark.parametrize("what", ["key of -inf", "key of NaN", "values"])
def test_vmap_over_sinks_of_what_is_not_finite(rng, native, how, what):
    """A composition of mx's operations equals the op for keys and values that some rows see."""
    queries, keys = 9, 30
    hidden = hidden_keys(rng, how, queries, keys, mx.float32)
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, 16), mx.float32, outliers=False)
    q, sinks = mx.abs(q), draw(rng, (3, 2), mx.float32, False)
    if what == "values":
        v = poisoned(poisoned(v, hidden.keys, np.inf, slice(0, 4)), hidden.keys, np.nan, slice(3, 6))
        v[:, :, keys // 2, 7:9] = -np.inf
        v[:, :, 3, 8:10] = np.inf
        k[:, :, 3] = -1000.0  # its weight is 0
    else:
        k = poisoned(k, hidden.keys, -np.inf if what == "key of -inf" else np.nan, slice(5, 6))
    one = lambda sinks: mm.scaled_dot_product_attention(
        q, k, v, scale=0.25, mask=hidden.mask, window=hidden.window, sinks=sinks)  # fmt: skip
    found, each = mx.vmap(one)(sinks), mx.stack([one(s) for s in sinks])
    np.testing.assert_allclose(np.array(found), np.array(each), rtol=SUMS, atol=SUM)
    if what == "key of -inf":
        assert mx.isfinite(found).all()


@pytest.mark.parametrize("queries, key_heads, keys", [(1, 1, 40), (1, 2, 600), (4, 2, 40), (24, 1, 40)])
def test_queries_that_are_broadcast(rng, executor, queries, key_heads, keys):
    """Arguments that a kernel is told to leave alone claim no more memory than there is."""
    _, k, v = inputs(rng, (2, 4, key_heads, queries, keys, 64), mx.float16)
    q = mx.broadcast_to(draw(rng, (1, 1, 1, 64), mx.float16), (2, 4, queries, 64))
    attend(q, k, v, 0.125, "causal")


def test_error_is_at_most_that_of_mx(rng, dtype, executor):
    for queries in (1, 40):
        q, k, v = inputs(rng, (1, 4, 2, queries, 128, 128), dtype, outliers=False)
        y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=128**-0.5))
        with mx.stream(mx.cpu):
            twin = MX(q, k, v, scale=128**-0.5)
        exact = exact_of(q, k, v, 128**-0.5)
        assert_attention_right(y, twin, exact, dtype)
        assert_error_at_most_that_of_mx(y, twin, exact)


@pytest.mark.parametrize("queries, keys", [(1, 64), (20, 40)])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive", "row"])
@pytest.mark.parametrize("sinks", [False, True])
def test_gradients(rng, executor, queries, keys, mask, sinks):
    shape = (2, 4, 2, queries, keys, 64)
    arrays = list(inputs(rng, shape, mx.float32, outliers=False))
    mask = mask_of(rng, mask, shape, mx.float32)
    differentiable = isinstance(mask, mx.array) and mask.dtype == mx.float32
    arrays += [mask] if differentiable else []
    arrays += [draw(rng, (4,), mx.float32)] if sinks else []

    def of(function):
        def call(q, k, v, *rest):
            more = {"mask": rest[0] if differentiable else mask, "sinks": rest[-1] if sinks else None}
            return function(q, k, v, scale=0.125, **more)

        return call

    cotangent = draw(rng, (2, 4, queries, 64), mx.float32)
    ours = run(lambda: mx.vjp(of(mm.scaled_dot_product_attention), arrays, [cotangent])[1])
    with mx.stream(mx.cpu):
        twins = mx.vjp(of(MX), arrays, [cotangent])[1]
    for i, (a, b) in enumerate(zip(ours, twins, strict=True)):
        assert_near(a, b, f"gradient {i}", SUMS)
    tangents = [draw(rng, a.shape, mx.float32) for a in arrays]
    if differentiable:
        tangents[3] = mx.where(mx.isinf(arrays[3]), 0, tangents[3])
    ours = run(lambda: mx.jvp(of(mm.scaled_dot_product_attention), arrays, tangents)[1])
    with mx.stream(mx.cpu):
        assert_near(ours[0], mx.jvp(of(MX), arrays, tangents)[1][0], "jvp", LAYERS)


def test_gradients_in_pieces_are_exact(rng, native):
    """More scores than are held at once; by finite differences in float64."""
    q, k, v = inputs(rng, (1, 8, 4, 1100, 1000, 8), mx.float32, outliers=False)
    mask, cotangent = draw(rng, (1, 1000), mx.float32, False), draw(rng, q.shape, mx.float32)
    function = lambda *a: mm.scaled_dot_product_attention(*a[:3], scale=0.3, mask=a[3], sinks=a[4], window=300)
    arrays = [q, k, v, mask, draw(rng, (8,), mx.float32, False)]
    gradients = mx.vjp(function, arrays, [cotangent])[1]
    wide = [np.array(a, np.float64) for a in arrays]
    weight = np.array(cotangent, np.float64)

    def loss(q, k, v, mask, sinks):
        scores = 0.3 * q @ k.repeat(2, 1).swapaxes(-1, -2) + mask
        position, key = np.arange(1100)[:, None] - 100, np.arange(1000)
        scores = np.where((key <= position) & (key > position - 300), scores, -np.inf)
        scores = np.concatenate([np.broadcast_to(sinks[:, None, None], (1, 8, 1100, 1)), scores], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (weight * (weights[..., 1:] @ v.repeat(2, 1))).sum()

    for i, gradient in enumerate(gradients):
        direction, h = rng.standard_normal(wide[i].shape), 1e-5
        ahead, behind = (loss(*wide[:i], wide[i] + s * direction, *wide[i + 1 :]) for s in (h, -h))
        slope = (np.array(gradient, np.float64) * direction).sum()
        size = np.linalg.norm(np.array(gradient, np.float64))
        assert abs(slope - (ahead - behind) / (2 * h)) <= SUMS * size, f"gradient {i}"


def test_gradients_hold_no_full_scores(rng, native):
    q, k, v = inputs(rng, (1, 16, 16, 1500, 1500, 8), mx.float32)
    loss = lambda *a: mm.scaled_dot_product_attention(*a, scale=0.3, mask="causal").sum()
    scores = 16 * 1500 * 1500 * 4
    mx.clear_cache()
    mx.reset_peak_memory()
    mx.eval(mx.grad(loss, argnums=(0, 1, 2))(q, k, v))
    assert mx.get_peak_memory() < 2.5 * scores, "mx.fast's takes five times the scores"


def test_second_derivative(rng, native):
    q, k, v = inputs(rng, (1, 2, 1, 6, 9, 8), mx.float32, outliers=False)
    second = lambda f: mx.grad(lambda q: (mx.grad(lambda q: mx.sin(f(q, k, v, scale=0.3)).sum())(q) ** 2).sum())(q)
    assert_near(second(mm.scaled_dot_product_attention), second(MX), "second derivative", LAYERS)


def test_gradients_in_half_types(rng, dtype, native):
    arrays = inputs(rng, (1, 4, 2, 30, 40, 64), dtype, outliers=False)
    loss = lambda f: mx.grad(lambda *a: f(*a, scale=0.125, mask="causal").sum(), argnums=(0, 1, 2))
    exact = loss(MX)(*(a.astype(mx.float32) for a in arrays))
    for a, b in zip(loss(mm.scaled_dot_product_attention)(*arrays), exact, strict=True):
        assert a.dtype == dtype
        assert_near(a, b, "gradient", SUMS if dtype == mx.float32 else GRADIENTS_16_BIT)


@pytest.mark.parametrize(
    "axes",
    [(0, 0, 0, 0, None), (1, None, 0, None, None), (2, 0, 0, None, None), (None, 1, 1, 2, None), (0, 0, 0, 0, 0)],
)
def test_vmap_and_compile(rng, executor, axes):
    size, batch = 3, 2
    shapes = [(batch, 4, 5, 64), (batch, 2, 20, 64), (batch, 2, 20, 64), (1, 5, 20), (4,)]
    full = [s if a is None else (*s[:a], size, *s[a:]) for s, a in zip(shapes, axes)]
    arrays = [draw(rng, s, mx.float32, False) for s in full]
    one = mx.compile(lambda q, k, v, m, s: mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask=m, sinks=s))
    pick = lambda i: [a if x is None else mx.take(a, i, axis=x) for a, x in zip(arrays, axes)]
    each = run(lambda: mx.stack([one(*pick(i)) for i in range(size)]))
    assert_near(run(lambda: mx.vmap(one, in_axes=axes)(*arrays)), each, "vmap")


@pytest.mark.parametrize("axis", range(5))
@pytest.mark.parametrize("mask", ["causal", "bool", "none"])
def test_vmap_of_derivatives(rng, native, axis, mask):
    """Over keys, wherever the new axis is."""
    shape = (1, 2, 1, 4, 5, 16)
    q, k, v = inputs(rng, shape, mx.float32, outliers=False)
    mask, tangent = mask_of(rng, mask, shape, mx.float32), draw(rng, q.shape, mx.float32, False)
    several = draw(rng, (3, *k.shape), mx.float32, False)
    attend = lambda k: lambda q: mm.scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask)
    for name, of in (("jvp", mx.jvp), ("vjp", mx.vjp)):
        one = lambda k, of=of: of(attend(k), [q], [tangent])[1][0]
        found = mx.vmap(one, in_axes=axis)(mx.moveaxis(several, 0, axis))
        assert_near(found, mx.stack([one(k) for k in several]), name)


@pytest.mark.parametrize("order", [(40, 1, 40), (1, 40, 1), (1, 3, 20)])
def test_compiled_for_any_shape(rng, executor, order):
    """A prompt and a step that splits its keys, each in a graph that was traced with the other."""
    step = lambda q, k, v: mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal") * 1
    compiled = mx.compile(step, shapeless=True)
    for queries in order:
        q, k, v = inputs(rng, (1, 4, 2, queries, 150, 64), mx.float32)
        y = run(lambda: compiled(q, k, v))
        assert_attention_right(y, None, exact_of(q, k, v, 0.125, "causal"), mx.float32)


def test_a_graph_that_is_built_outside_the_simulator(rng, native):
    q, k, v = inputs(rng, (1, 4, 2, 1, 150, 64), mx.float32)
    y = mm.scaled_dot_product_attention(q, k, v, scale=0.125)
    with mm.simulator.enabled():
        mx.eval(y)
    assert_attention_right(y, None, exact_of(q, k, v, 0.125), mx.float32)


def test_streams_and_threads(rng, native):
    arrays = [inputs(rng, (1, 8, 2, queries, 300, 64), mx.float16) for queries in (1, 3, 40, 100)]
    expected = [mm.scaled_dot_product_attention(*a, scale=0.125, mask="causal") for a in arrays]
    mx.eval(expected)
    wrong = []

    def work(seed):
        stream = mx.new_stream(mx.cpu)
        for i in np.random.default_rng(seed).integers(0, len(arrays), 20):
            y = mm.scaled_dot_product_attention(*arrays[i], scale=0.125, mask="causal", stream=stream)
            if not mx.array_equal(y, expected[i], stream=stream).item():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "shape", [(0, 2, 1, 3, 4, 8), (1, 2, 1, 0, 4, 8), (1, 2, 1, 3, 0, 8), (1, 2, 1, 3, 4, 0)], ids=str
)
@pytest.mark.parametrize("mask", ["none", "causal", "bool"])
def test_empty(rng, native, shape, mask):
    q, k, v = inputs(rng, shape, mx.float32, 5)
    mask = mask_of(rng, mask, shape, mx.float32)
    for sinks in (None, mx.zeros((2,))):
        y = mm.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask, sinks=sinks)
        twin = MX(q, k, v, scale=1.0, mask=mask, sinks=sinks)
        assert y.shape == twin.shape and mx.allclose(y, twin).item()
        gradient = mx.grad(lambda q: mm.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask).sum())(q)
        assert gradient.shape == q.shape


def test_types_are_promoted(rng, native):
    q, k, v = inputs(rng, (1, 2, 1, 3, 9, 16), mx.float32)
    for types in ((mx.float16, mx.float32, mx.float16), (mx.bfloat16, mx.bfloat16, mx.float32)):
        arrays = [a.astype(t) for a, t in zip((q, k, v), types)]
        y, twin = (f(*arrays, scale=0.25) for f in (mm.scaled_dot_product_attention, MX))
        assert y.dtype == twin.dtype and mx.allclose(y, twin, SUMS, SUMS).item()


def test_what_falls_back_to_mx(rng, native):
    q, k, v = (a.astype(mx.float64) for a in inputs(rng, (1, 2, 1, 6, 9, 16), mx.float32))
    with pytest.raises(RuntimeError, match=r"\[scaled_dot_product_attention\] strict mode: .*float64"):
        mm.scaled_dot_product_attention(q, k, v, scale=0.25)
    with mm.strict(False):
        for mask in (None, "causal", mx.array(rng.random((6, 9)) < 0.7), draw(rng, (6, 9), mx.float32)):
            for window in (None, 4):
                y = mm.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask, window=window)
                twin = mx_attention(q, k, v, 0.25, mask, None, window)
                np.testing.assert_allclose(np.array(y), np.array(twin), rtol=FLOAT64_ROUNDINGS)


@pytest.mark.parametrize("how", ["causal", "bool", "additive", "window"])
def test_rows_that_see_no_key_are_zero_by_mx(rng, lenient, native, how):
    q, k, v = (a.astype(mx.float64) for a in inputs(rng, (1, 2, 1, 6, 4, 16), mx.float32))
    seen = np.arange(4) <= np.arange(-2, 4)[:, None]
    mask = {"causal": "causal", "bool": mx.array(seen), "additive": mx.array(np.where(seen, 0, -np.inf))}.get(how)
    attend = lambda q: mm.scaled_dot_product_attention(
        q, k, v, scale=0.25, mask=mask, window=2 if how == "window" else None)  # fmt: skip
    y, gradient = attend(q), mx.grad(lambda q: attend(q).sum())(q)
    for found in (np.array(y), np.array(gradient)):
        assert not found[:, :, :2].any() and np.isfinite(found).all() and found[:, :, 3:].all()


T = mx.zeros


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": T((2, 3, 8))}, ValueError, r"q has shape \(2,3,8\): expected four dimensions"),
        ({"k": T((2, 5, 8))}, ValueError, r"k has shape \(2,5,8\): expected four dimensions"),
        ({"v": T((8,))}, ValueError, r"v has shape \(8\): expected four dimensions"),
        ({"q": T((2, 4, 3, 8))}, ValueError, r"queries have shape \(2,4,3,8\), .*: expected the same batch size"),
        ({"v": T((2, 2, 5, 8))}, ValueError, r"values \(2,2,5,8\): expected the same batch size"),
        ({"q": T((1, 4, 3, 9))}, ValueError, r"queries have shape \(1,4,3,9\), keys \(1,2,5,8\): .* last dimension"),
        ({"v": T((1, 1, 5, 8))}, ValueError, r"keys have 2 heads, values have 1: expected the same number"),
        ({"v": T((1, 2, 6, 8))}, ValueError, r"there are 5 keys and 6 values: expected the same number"),
        ({"q": T((1, 3, 3, 8))}, ValueError, r"queries have 3 heads, keys have 2: expected a multiple"),
        ({"q": T((1, 0, 3, 8))}, ValueError, r"queries have 0 heads, keys have 2"),
        ({"k": T((1, 0, 5, 8)), "v": T((1, 0, 5, 8))}, ValueError, r"queries have 4 heads, keys have 0"),
        ({"mask": T((3, 4))}, ValueError, r"mask has shape \(3,4\): expected one that broadcasts to \(1,4,3,5\)"),
        ({"mask": T((3, 3, 5))}, ValueError, r"mask has shape \(3,3,5\)"),
        ({"mask": T((1, 1, 1, 3, 5))}, ValueError, r"mask has shape \(1,1,1,3,5\)"),
        ({"mask": T((3, 5), mx.complex64)}, mm.DtypeError, r"mask has dtype complex64: expected bool"),
        ({"q": T((1, 4, 3, 8), mx.float16), "k": T((1, 2, 5, 8), mx.float16), "v": T((1, 2, 5, 8), mx.float16),
          "mask": T((3, 5))}, mm.DtypeError, r"mask has dtype float32: expected bool, or one that promotes to float16"),
        ({"mask": "lower"}, ValueError, r"mask is 'lower': expected 'causal', an array or None"),
        ({"mask": ""}, ValueError, r"mask is ''"),
        ({"window": 0}, ValueError, r"window is 0: expected None or a positive number"),
        ({"window": -3}, ValueError, r"window is -3"),
        ({"sinks": T((2,))}, ValueError, r"sinks has shape \(2\): expected one number for each of 4 heads"),
        ({"sinks": T((4, 1))}, ValueError, r"sinks has shape \(4,1\)"),
        ({"sinks": T((4,), mx.complex64)}, mm.DtypeError, r"sinks has dtype complex64"),
        ({"q": T((1, 4, 3, 8), mx.int32), "k": T((1, 2, 5, 8), mx.int32), "v": T((1, 2, 5, 8), mx.int32)},
         mm.DtypeError, r"q has dtype int32: expected float32"),
    ],
)  # fmt: skip
def test_bad_input(change, error, message):
    arguments = {"q": T((1, 4, 3, 8)), "k": T((1, 2, 5, 8)), "v": T((1, 2, 5, 8)), "scale": 1.0, **change}
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(error, match=r"\[scaled_dot_product_attention\] .*" + message):
        mm.scaled_dot_product_attention(q, k, v, **arguments)


@pytest.mark.parametrize(
    "change", [{"scale": None}, {"scale": "1"}, {"mask": 3}, {"window": 2.5}, {"window": "2"}], ids=str
)
def test_wrong_kind_of_object(change):
    q, k, v = T((1, 4, 3, 8)), T((1, 2, 5, 8)), T((1, 2, 5, 8))
    with pytest.raises(TypeError):
        mm.scaled_dot_product_attention(q, k, v, **{"scale": 1.0, **change})


def test_compiled_for_any_shape_and_called_with_one_that_no_kernel_covers():
    compiled = mx.compile(lambda q, k, v: mm.scaled_dot_product_attention(q, k, v, scale=1.0), shapeless=True)
    with mx.stream(mx.cpu), mm.simulator.enabled():
        compiled(*(mx.zeros((1, 2, 3, 64)) for _ in range(3)))
        narrow = [mx.zeros((1, 2, 3, 40)), mx.zeros((1, 2, 3, 40)), mx.ones((1, 2, 3, 40))]
        with pytest.raises(RuntimeError, match=r"\[scaled_dot_product_attention\] strict mode: .* heads of width 40"):
            mx.eval(compiled(*narrow))
        with mm.strict(False):
            assert mx.array_equal(compiled(*narrow), narrow[2])


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_a_mask_of_bools_that_comes_from_what_is_differentiated(rng, native, transform):
    """It passes nothing on, as mx's own attention has it."""
    q, k, v = inputs(rng, (1, 2, 1, 3, 20, 16), mx.float32)
    router = mx.array(rng.normal(size=16).astype(np.float32))
    direction = draw(rng, k.shape, mx.float32, False)

    def of(k, mask):
        return mm.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask(k)).sum()

    seen = (k @ router > 0)[:, :, None] | (mx.arange(20) == 0)
    chosen = lambda k: (k @ router > 0)[:, :, None] | (mx.arange(20) == 0)
    if transform == "grad":
        found, expected = (mx.grad(lambda k, m=m: of(k, m))(k) for m in (chosen, lambda k: seen))
    else:
        found, expected = (mx.jvp(lambda k, m=m: of(k, m), [k], [direction])[1][0] for m in (chosen, lambda k: seen))
    assert_same_bits(found, expected, transform)


@pytest.mark.parametrize("queries", [1, 40])
def test_windows_without_an_end(rng, executor, queries):
    """The largest integer, as some say that there is none; also in gradients and where mx computes a call."""
    q, k, v = inputs(rng, (1, 2, 1, queries, 50, 64), mx.float32)
    of = lambda window, k=k, width=64: mm.scaled_dot_product_attention(
        q[..., :width], k[..., :width], v[..., :width], scale=0.125, mask="causal", window=window
    )
    assert_same_bits(of(2**31 - 1), of(50), "attention")
    gradients = (mx.grad(lambda k, w=w: of(w, k).sum())(k) for w in (2**31 - 1, 50))
    assert_same_bits(*gradients, "gradient of the keys")


def test_windows_without_an_end_by_mx(rng, lenient):
    q, k, v = inputs(rng, (1, 2, 1, 40, 50, 40), mx.float32)
    with mm.simulator.enabled(gpu="m2-max"):
        y, expected = (
            mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal", window=window)
            for window in (2**31 - 1, 50)
        )
        assert_same_bits(y, expected, "attention")


def attention_reasons(gpu, batch, heads, key_heads):
    q, k = (mx.zeros((batch, n, 1, 64), mx.float16) for n in (heads, key_heads))
    with mm.simulator.enabled(gpu=gpu):
        mm.stats(reset=True)
        mm.scaled_dot_product_attention(q, k, k, scale=0.125)
    return list(mm.stats().get("scaled_dot_product_attention", {"mx": {}})["mx"])


def test_more_heads_than_an_nvidia_gpu_launches(native, lenient):
    """Windows of images come as a batch: their heads are more than the last axis of a CUDA grid has threadgroups."""
    assert attention_reasons("nvidia", 8192, 8, 8) == ["more than 65535 heads of all sequences"]
    assert not attention_reasons("nvidia", 4096, 32, 8) and not attention_reasons("m2-max", 8192, 8, 8)


def test_vmap_over_more_heads_than_an_nvidia_gpu_launches(native, lenient):
    q = mx.ones((66000, 1, 1, 1, 8), mx.float16)
    with mm.simulator.enabled(gpu="nvidia"):
        attend = lambda q: mm.scaled_dot_product_attention(q, q, q, scale=0.125)
        assert mx.array_equal(mx.vmap(attend)(q), q)


def test_a_mask_beyond_what_kernels_count(native, lenient):
    """As DeepSeek's additive ones of long prompts: 128 heads, 2,048 queries and more than 16,384 keys."""
    q, k = mx.zeros((1, 128, 2048, 64), mx.float16), mx.zeros((1, 128, 16400, 64), mx.float16)
    mask = mx.broadcast_to(mx.zeros((), mx.float16), (1, 128, 2048, 16400))
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        mm.scaled_dot_product_attention(q, k, k, scale=0.125, mask=mask)
        assert list(mm.stats()["scaled_dot_product_attention"]["mx"]) == ["a mask of 2**32 elements or more"]
