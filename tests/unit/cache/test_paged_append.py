"""New tokens into blocks that a table names."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.attention import exact_of, mx_attention, run
from helpers.matrices import draw
from helpers.support import assert_same_bits
from helpers.tolerances import assert_attention_right

import mlx_mittens as mm

HEADS, BLOCK, BLOCKS = 2, 16, 9


def drawn(rng, batch, tokens, dtype, width=64, value_width=64, blocks=BLOCKS):
    new = [draw(rng, (batch, HEADS, tokens, n), dtype) for n in (width, value_width)]
    pools = [draw(rng, (blocks, HEADS, BLOCK, n), dtype) for n in (width, value_width)]
    return new, pools


def expected(pool, new, table, positions):
    """Token by token, in NumPy."""
    pool, new = np.array(pool.astype(mx.float32)), np.array(new.astype(mx.float32))
    for row, position in enumerate(positions):
        for token in range(new.shape[2]):
            at = position + token
            if 0 <= at < len(table[row]) * BLOCK and 0 <= table[row][at // BLOCK] < len(pool):
                pool[table[row][at // BLOCK], :, at % BLOCK] = new[row, :, token]
    return pool


def numbers(a):
    return np.array(a.astype(mx.float32))


def append(new, pools, table, positions, **options):
    return run(
        lambda: mm.paged_append(*new, *pools, mx.array(table, mx.int32), mx.array(positions, mx.int32), **options)
    )


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("widths", [(64, 64), (80, 80), (128, 64), (33, 7)])
def test_tokens(rng, dtype, executor, tokens, widths):
    """Across the edges of blocks."""
    new, pools = drawn(rng, 3, tokens, dtype, *widths)
    table, positions = [[4, 2, 7], [1, 8, 0], [6, 3, 5]], [0, 15, 28 - tokens]
    *found, lengths = append(new, pools, table, positions)
    assert lengths.tolist() == [position + tokens for position in positions]
    for a, pool, fresh in zip(found, pools, new, strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(numbers(a), expected(pool, fresh, table, positions))


@pytest.mark.parametrize("bits, group_size", [(8, 64), (8, 32), (4, 128), (6, 32), (3, 64)])
def test_packed(rng, dtype, executor, bits, group_size):
    """The result of mx.quantize on the device, as words."""
    new, pools = drawn(rng, 2, 5, dtype, 128, 128)
    packed = [mx.quantize(a, group_size, bits) for a in pools]
    table, positions = [[4, 2], [1, 8]], [13, 0]
    *found, _ = append(new, packed, table, positions, bits=bits, group_size=group_size)
    exact = {"simulator": 1}.get(executor, 0)  # halves are rounded away from zero there, as on GPUs
    for triple, held, fresh in zip(found, packed, new, strict=True):
        wide, before, right = (
            numbers(mx.dequantize(w, s.astype(mx.float32), b.astype(mx.float32), group_size, bits))
            for w, s, b in (triple, held, mx.quantize(fresh, group_size, bits))
        )
        for row in range(2):
            for token in range(5):
                at = positions[row] + token
                ours = wide[table[row][at // BLOCK], :, at % BLOCK]
                steps = np.repeat(numbers(mx.quantize(fresh, group_size, bits)[1])[row, :, token], group_size, -1)
                assert (np.abs(ours - right[row, :, token]) <= exact * np.abs(steps) * 1.01).all()
                before[table[row][at // BLOCK], :, at % BLOCK] = ours
        np.testing.assert_array_equal(wide, before)  # nothing else has changed


@pytest.mark.parametrize("position, entry", [(-3, 4), (30, 4), (-(2**31), 4), (2**31 - 1, 4), (10, -1), (10, BLOCKS)])
@pytest.mark.parametrize("packed", [False, True])
def test_what_goes_nowhere(rng, dtype, executor, position, entry, packed):
    """Tokens before the first key, beyond the table, and of blocks that are not in the pool."""
    new, pools = drawn(rng, 2, 5, dtype)
    held = [mx.quantize(a, 64, 8) for a in pools] if packed else pools
    table, positions = [[entry, 2], [1, 8]], [position, 14]
    *found, lengths = append(new, held, table, positions)
    assert lengths[1].item() == 19
    if packed:
        found, pools = ([mx.dequantize(*a, 64, 8) for a in triples] for triples in (found, held))
        new = [mx.dequantize(*mx.quantize(a, 64, 8), 64, 8) for a in new]
    for a, pool, fresh in zip(found, pools, new, strict=True):
        right = expected(pool, fresh, table, positions)
        untouched = right == numbers(pool)
        np.testing.assert_array_equal(numbers(a)[untouched], right[untouched])
        assert packed or np.array_equal(numbers(a), right)


def test_then_attention(rng, dtype, executor):
    """A row has the keys that were appended, token by token and several at once."""
    q = draw(rng, (2, 4, 1, 64), dtype)
    keys, values = (draw(rng, (2, HEADS, 40, 64), dtype) for _ in range(2))
    pools = [mx.zeros((BLOCKS, HEADS, BLOCK, 64), dtype)] * 2
    table = mx.array([[5, 1, 4], [0, 8, 3]])
    lengths = mx.array([0, 0])
    for first, last in ((0, 30), (30, 31), (31, 36), (36, 40)):
        new = keys[:, :, first:last], values[:, :, first:last]
        *pools, lengths = mm.paged_append(*new, *pools, table, lengths)
    y = run(lambda: mm.paged_attention(q, *pools, table, lengths, scale=0.125))
    twin = mx_attention(q, keys, values, 0.125, None, None)
    assert_attention_right(y, twin, exact_of(q, keys, values, 0.125, None, None), dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_in_place(rng, native, transposed, packed):
    """A pool that nobody else holds keeps its memory, as a view in another order too; another's is copied."""
    new, pools = drawn(rng, 2, 1, mx.float32)
    table, positions = mx.array([[4, 2], [1, 8]]), mx.array([3, 20])
    if packed:
        pools = [mx.quantize(a, 64, 8) for a in pools]

    def arrays(pools):
        return [a for pool in pools for a in (pool if packed else [pool])]

    flat = arrays(pools)
    if transposed:
        flat = [mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2) for a in flat]
    mx.eval(flat)
    at = [np.asarray(memoryview(a)).__array_interface__["data"][0] for a in flat]
    del pools
    for _ in range(3):
        pools = [tuple(flat[:3]), tuple(flat[3:])] if packed else flat
        del flat
        *pools, positions = mm.paged_append(*new, *pools, table, positions)
        flat = arrays(pools)
        del pools
        mx.eval(flat, positions)
    now = [np.asarray(memoryview(a)).__array_interface__["data"][0] for a in flat]
    assert now == at
    if not packed:
        kept = list(flat)
        mx.eval(mm.paged_append(*new, *flat, table, positions))
        for a, b in zip(kept, flat, strict=True):
            assert_same_bits(a, b)


def test_in_place_while_work_is_pending(rng, native):
    """A later step's writes are not seen by an attention that was asked for before."""
    new, pools = drawn(rng, 2, 1, mx.float32)
    q, table, lengths = draw(rng, (2, 4, 1, 64), mx.float32), mx.array([[4, 2], [1, 8]]), mx.array([0, 0])
    eager, lazy = [], []
    for results, evaluates in ((eager, True), (lazy, False)):
        held, now = [mx.array(a) for a in pools], lengths
        for step in range(5):
            *held, now = mm.paged_append(*(a * (step + 1) for a in new), *held, table, now)
            results.append(mm.paged_attention(q, *held, table, now, scale=0.125))
            if evaluates:
                mx.eval(results, held, now)
    for a, b in zip(eager, lazy, strict=True):
        assert_same_bits(a, b)


def test_gradients_and_vmap(rng, native):
    new, pools = drawn(rng, 2, 3, mx.float32)
    table, positions = mx.array([[4, -1], [1, 8]]), mx.array([14, -1])

    def ours(*arrays):
        return mm.paged_append(*arrays, table, positions)[:2]

    def taken(pool, fresh):
        """The part of the gradient that the pool keeps, and the part that goes to the tokens."""
        stays, goes = np.ones(pool.shape), np.zeros(fresh.shape)
        stays[4, :, 14:] = stays[1, :, :2] = 0
        goes[0, :, :2] = goes[1, :, 1:] = 1
        return stays, goes

    cotangents = [draw(rng, a.shape, mx.float32) for a in pools]
    found = mx.vjp(ours, [*new, *pools], cotangents)[1]
    for fresh, pool, gradient, cotangent, g_new in zip(new, pools, found[2:], cotangents, found[:2], strict=True):
        stays, goes = taken(pool, fresh)
        np.testing.assert_array_equal(np.array(gradient), np.array(cotangent) * stays)
        c = np.array(cotangent)
        right = np.zeros(fresh.shape)
        right[0, :, :2] = c[4, :, 14:]
        right[1, :, 1:] = c[1, :, :2]
        np.testing.assert_array_equal(np.array(g_new), right * goes)
    two = [mx.stack([a, a * 2]) for a in new]
    mapped = mx.vmap(ours, in_axes=(0, 0, None, None))(*two, *pools)
    for a, b in zip(mapped, ours(*(a * 2 for a in new), *pools), strict=True):
        assert_same_bits(a[1], b)


@pytest.mark.parametrize("none", ["batch", "tokens", "blocks", "entries"])
def test_nothing(executor, none):
    sizes = {"batch": 2, "tokens": 3, "blocks": 4, "entries": 2} | {none: 0}
    new, pool = mx.ones((sizes["batch"], 2, sizes["tokens"], 64)), mx.zeros((sizes["blocks"], 2, 16, 64))
    table, positions = mx.zeros((sizes["batch"], sizes["entries"]), mx.int32), mx.array([0, 5])[: sizes["batch"]]
    keys, values, lengths = run(lambda: mm.paged_append(new, new, pool, pool, table, positions))
    assert mx.array_equal(keys, pool).item() and mx.array_equal(values, pool).item()
    assert lengths.tolist() == [n + sizes["tokens"] for n in positions.tolist()]


def test_arguments(native):
    new, pool = mx.zeros((2, 2, 1, 64)), mx.zeros((5, 2, 16, 64))
    table, positions = mx.zeros((2, 3), mx.int32), mx.zeros(2, mx.int32)

    def fails(text, keys=new, values=new, kp=pool, vp=pool, table=table, positions=positions, error=ValueError):
        with pytest.raises(error, match=text):
            mm.paged_append(keys, values, kp, vp, table, positions)

    fails(r"\[paged_append\] keys has shape \(2,1,64\): expected four dimensions", keys=new[0])
    fails(r"expected the same batch, heads and tokens", values=new[:1])
    fails(r"key_blocks has an array of shape \(2,16,64\): expected four dimensions", kp=pool[0])
    fails(r"value_blocks has an array of shape \(4,2,16,64\)", vp=pool[:4])
    fails(r"blocks of 8 keys: expected 16", kp=pool[:, :, :8], vp=pool[:, :, :8])
    fails(r"block_table has shape \(1,3\)", table=table[:1])
    fails(r"block_table has dtype int64: expected int32", table=table.astype(mx.int64), error=mm.DtypeError)
    fails(r"positions has shape \(1\)", positions=positions[:1])
    fails(r"positions has dtype float32: expected int32", positions=positions.astype(mx.float32), error=mm.DtypeError)
    fails(r"values has dtype float16, keys float32", values=new.astype(mx.float16), error=mm.DtypeError)
    fails(r"key_blocks has an array of dtype float16", kp=pool.astype(mx.float16), error=mm.DtypeError)
    fails(r"value_blocks is a triple and the other an array", vp=mx.quantize(pool, 64, 8))
    packed = mx.quantize(pool, 64, 8)
    with pytest.raises(ValueError, match=r"a width that is a multiple of the group size 128"):
        mm.paged_append(new, new, packed, packed, table, positions, group_size=128)
