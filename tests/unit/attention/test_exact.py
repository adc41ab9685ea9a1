"""Exact attention: several queries at once get, bit for bit, the results of each one alone."""

import subprocess
import sys
from functools import partial

import mlx.core as mx
import pytest
from helpers.attention import exact_of, inputs, mask_of, mx_attention
from helpers.matrices import draw, quantize
from helpers.support import assert_same_bits, child_environment
from helpers.tolerances import assert_attention_right

import mlx_mittens as mm
from mlx_mittens import _ext

MASKS = ("none", "causal", "bool", "additive", "window")


def check(attend, q, keys, values, mask, window, sinks):
    """A call of all queries beside one of each; keys and values are lists of arrays."""
    queries, count = q.shape[2], keys[0].shape[2]
    ranged = window is not None or mask == "causal"
    y = attend(q, keys, values, mask=mask, window=window, sinks=sinks)
    for i in range(queries):
        end = count - queries + i + 1 if ranged else count
        row = mask[..., i : i + 1, :end] if isinstance(mask, mx.array) else mask
        fronts = ([a[:, :, :end] for a in arrays] for arrays in (keys, values))
        alone = attend(q[:, :, i : i + 1], *fronts, mask=row, window=window, sinks=sinks)
        assert_same_bits(y[:, :, i : i + 1], alone, f"query {i} of {queries}, {count} keys")
    return y


def dense(q, keys, values, **options):
    return mm.scaled_dot_product_attention(q, *keys, *values, scale=q.shape[3] ** -0.5, exact=True, **options)


def packed(q, keys, values, *, mask, group_size, bits, **options):
    return mm.quantized_scaled_dot_product_attention(
        q, tuple(keys), tuple(values), q.shape[3] ** -0.5, mask, group_size, bits, exact=True, **options
    )


def arguments(rng, kind, shape, dtype):
    """A mask and a window by their name, and sinks for some."""
    mask = mask_of(rng, kind, shape, dtype) if kind in ("causal", "bool", "additive") else None
    sinks = mx.array(rng.standard_normal(shape[1])).astype(dtype) if rng.integers(2) else None
    return mask, 37 if kind == "window" else None, sinks


def cases(rng, queries):
    """Kinds of masks, each with two numbers of keys: few, at the edges of blocks and of shares, and any."""
    keys = (queries, queries + 1, 64, 512 + queries // 2, int(rng.integers(queries, 701)))
    return [(kind, keys[(i + j) % 5]) for i, kind in enumerate(MASKS) for j in (0, 2)]


@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("ratio", [1, 4])
def test_dense(rng, dtype, native, queries, width, ratio):
    for kind, keys in cases(rng, queries):
        shape = (1, 2 * ratio, 2, queries, keys, width)
        q, k, v = inputs(rng, shape, dtype)
        mask, window, sinks = arguments(rng, kind, shape, dtype)
        y = check(dense, q, [k], [v], mask, window, sinks)
        if queries == 5:
            twin = mx_attention(q, k, v, width**-0.5, mask, sinks, window)
            assert_attention_right(y, twin, exact_of(q, k, v, width**-0.5, mask, sinks, window), dtype)


@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size, width, value_width", [(64, 64, 64), (32, 128, 96)])
def test_packed(rng, dtype, native, queries, bits, group_size, width, value_width):
    attend = partial(packed, group_size=group_size, bits=bits)
    for kind, keys in cases(rng, queries):
        shape = (1, 4, 2, queries, keys, width)
        q = inputs(rng, shape, dtype)[0]
        k, v = (quantize(rng, (1, 2, keys, n), dtype, group_size, bits) for n in (width, value_width))
        check(attend, q, k, v, *arguments(rng, kind, shape, dtype))


@pytest.mark.parametrize("kind, queries, keys", [("causal", 3, 1030), ("window", 5, 90), ("bool", 2, 33)])
@pytest.mark.parametrize("bits", [0, 4])
def test_kernels(rng, executor, kind, queries, keys, bits):
    shape = (1, 4, 1, queries, keys, 64)
    q, k, v = inputs(rng, shape, mx.float16)
    options = arguments(rng, kind, shape, mx.float16)
    if bits:
        k, v = (quantize(rng, k.shape, mx.float16, 64, bits) for _ in range(2))
        check(partial(packed, group_size=64, bits=bits), q, k, v, *options)
    else:
        check(dense, q, [k], [v], *options)


def test_windows_longer_than_a_share(rng, executor):
    """Their first keys lie on both sides of a step, which must not change the shares of a row."""
    q, k, v = inputs(rng, (1, 2, 1, 3, 1300, 64), mx.float16)
    check(dense, q, [k], [v], None, 1107, None)


@pytest.mark.parametrize("queries, keys, window", [(5, 1130, 104), (2, 4024, 3000)])
@pytest.mark.parametrize("bits", [0, 4])
def test_windows_that_begin_in_another_share(rng, executor, queries, keys, window, bits):
    """With sinks, which a share of the keys counts."""
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, 64), mx.float32)
    sinks = mx.array(rng.standard_normal(2)).astype(mx.float32)
    if bits:
        k, v = (quantize(rng, k.shape, mx.float32, 64, bits) for _ in range(2))
        check(partial(packed, group_size=64, bits=bits), q, k, v, None, window, sinks)
    else:
        check(dense, q, [k], [v], None, window, sinks)


def test_prompts_and_odd_shapes(rng, dtype, native):
    """More queries than are taken at once; heads of many queries, widths that fill no vector, views."""
    for shape, value_width in (((1, 2, 1, 40, 600, 64), 64), ((2, 20, 1, 3, 530, 72), 40), ((1, 3, 3, 4, 1500, 7), 3)):
        q, k, v = inputs(rng, shape, dtype, value_width)
        check(dense, q, [k], [v], "causal", None, None)
        views = [mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (q, k, v)]
        y = dense(views[0], views[1:2], views[2:], mask="causal")
        assert_same_bits(y, dense(q, [k], [v], mask="causal"), "views")


def test_tokens_that_come_later_do_not_matter(rng, dtype, native):
    """Whatever they hold: a rejected draft's keys and values, NaN among them."""
    q, k, v = inputs(rng, (1, 4, 2, 5, 530, 64), dtype)
    expected = dense(q, [k], [v], mask="causal")
    for bad in (mx.array(float("nan")), mx.array(float("inf")), mx.array(1e4)):
        spoilt = [mx.concatenate([a[:, :, :-2], mx.broadcast_to(bad, (1, 2, 2, 64)).astype(dtype)], 2) for a in (k, v)]
        y = dense(q, [spoilt[0]], [spoilt[1]], mask="causal")
        assert_same_bits(y[:, :, :3], expected[:, :, :3], f"{bad}")
        assert not mx.array_equal(y[:, :, 3:], expected[:, :, 3:])


def test_rows_that_see_no_key(rng, native):
    q, k, v = inputs(rng, (1, 4, 2, 20, 3, 64), mx.float32)
    y = dense(q, [k], [v], mask="causal")
    assert not mx.any(y[:, :, :17] != 0)
    for i in range(3):
        alone = dense(q[:, :, 17 + i : 18 + i], [k[:, :, : i + 1]], [v[:, :, : i + 1]])
        assert_same_bits(y[:, :, 17 + i : 18 + i], alone, f"query {17 + i}")


PROGRAM = """
import hashlib
import mlx.core as mx, mlx_mittens as mm
mx.random.seed(7)
sums = hashlib.sha256()
for heads, queries, keys in ((1, 1, 700), (2, 5, 1300), (8, 16, 3000), (32, 3, 40)):
    q, k, v = (mx.random.normal((1, h, n, 64)).astype(mx.float16) for h, n in
               ((4 * heads, queries), (heads, keys), (heads, keys)))
    y = mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal", exact=True)
    sums.update(bytes(memoryview(mx.contiguous(y).view(mx.uint8))))
print(sums.hexdigest())
"""


def test_any_number_of_threads():
    def digest(threads):
        environment = {**child_environment(), "MLX_MITTENS_THREADS": str(threads)}
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100).stdout

    assert len({digest(threads) for threads in (1, 2, 7)}) == 1


@pytest.mark.parametrize("kind", MASKS)
def test_what_goes_to_mx(rng, lenient, native, kind):
    """One query after the other there, also under the patch."""
    shape = (1, 4, 2, 5, 90, 64)
    mask, window, sinks = arguments(rng, kind, shape, mx.float32)
    q, k, v = (a.astype(mx.float64) for a in inputs(rng, shape, mx.float32))
    check(dense, q, [k], [v], mask, window, sinks)
    q = inputs(rng, shape, mx.float16)[0]
    k, v = (quantize(rng, (1, 2, 90, 64), mx.float16, 32, 6) for _ in range(2))
    mask = mask.astype(mx.float16) if kind == "additive" else mask
    check(partial(packed, group_size=32, bits=6), q, k, v, mask, window, None)


def test_the_patch_makes_all_calls_exact(rng, lenient, native):
    for dtype in (mx.float32, mx.float64):
        q, k, v = (a.astype(dtype) for a in inputs(rng, (1, 4, 2, 5, 600, 64), mx.float32))
        options = {"scale": 0.125, "mask": "causal"}
        with mm.patched(exact=True):
            patched = mx.fast.scaled_dot_product_attention(q, k, v, **options)
            direct = mm.scaled_dot_product_attention(q, k, v, **options)
            with mm.patched():
                inner = mx.fast.scaled_dot_product_attention(q, k, v, **options)
        expected = mm.scaled_dot_product_attention(q, k, v, **options, exact=True)
        assert_same_bits(patched, expected, "under the patch")
        assert_same_bits(direct, expected, "a direct call under the patch")
        other = (mm if dtype != mx.float64 else mx.fast).scaled_dot_product_attention(q, k, v, **options)
        assert_same_bits(inner, other, "inside of a patch that is not exact")
        assert dtype == mx.float64 or not mx.array_equal(expected, other), "the two differ, or this shows nothing"


def test_a_step_of_a_cache_is_exact_under_the_patch(rng, native):
    """Rotary embedding, append and attention of a token in one primitive."""
    heads = draw(rng, (1, 8, 1, 64), mx.float16)
    buffers = [draw(rng, (1, 2, 1024, 64), mx.float16) for _ in range(2)]
    turned, keys, values = mm.rope_append(heads, buffers[0] + 0, buffers[1] + 0, 64, base=1e4, offset=700)
    keys, values = keys[:, :, :701], values[:, :, :701]
    mx.eval(turned, keys, values)

    def step():
        copies = [a + 0 for a in buffers]
        mx.eval(copies)
        y = _ext.attend_with_cache(heads, *copies, _ext.Rotary(64, base=1e4), 700, 0.125)
        mx.eval(y)
        return y.reshape(1, 4, 1, 64)

    expected = mm.scaled_dot_product_attention(turned, keys, values, scale=0.125, exact=True)
    with mm.patched(exact=True):
        assert_same_bits(step(), expected, "a step")
    plain = mm.scaled_dot_product_attention(turned, keys, values, scale=0.125)
    assert_same_bits(step(), plain, "a step without the patch")
