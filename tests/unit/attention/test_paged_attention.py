"""Attention over blocks that a table names: as over each row's keys one after the other."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.attention import exact_of, mx_attention, run
from helpers.matrices import draw
from helpers.tolerances import assert_attention_right, assert_near

import mlx_mittens as mm
from mlx_mittens.specs.attention import seen_of_rows

SCALE = 0.125
LENGTHS = {16: [0, 1, 16, 17, 63, 95], 32: [0, 1, 32, 33, 63, 95], 64: [0, 1, 64, 65, 127, 130]}


class Paged:
    """Keys and values of rows, in blocks of a pool whose order is shuffled and whose free blocks hold NaN.

    The first `shared` keys are in the same blocks for all rows that have as many.
    """

    def __init__(self, rng, lengths, block=16, key_heads=2, width=64, dtype=mx.float16, packed=False, shared=0):
        self.lengths, self.block, self.packed = mx.array(lengths, mx.int32), block, packed
        entries = max(-(-max(lengths, default=0) // block), 1) + 1
        count = len(lengths) * entries + 3
        order = rng.permutation(count)
        table = order[: len(lengths) * entries].reshape(len(lengths), entries)
        for row, length in zip(table, lengths):
            if length >= shared:
                row[: shared // block] = table[0, : shared // block]
        pools = [draw(rng, (count, key_heads, block, width), dtype) for _ in range(2)]
        self.table = mx.array(table.astype(np.int32))
        held = np.zeros((count, 1, block, 1), bool)
        for row, length in zip(table, lengths):
            for key in range(length):
                held[row[key // block], 0, key % block] = True
        if packed:  # words have no NaN, scales do
            self.pools = [tuple(mx.quantize(a, 64 if width % 64 == 0 else 32, 8)) for a in pools]
            wide = [(w, scales.astype(mx.float32), biases.astype(mx.float32)) for w, scales, biases in self.pools]
            dense = [mx.dequantize(*a, 64 if width % 64 == 0 else 32, 8) for a in wide]
            self.pools = [(w, *(mx.where(mx.array(held), s, mx.array(np.nan, dtype)) for s in more))
                          for w, *more in self.pools]  # fmt: skip
        else:
            dense = pools
            self.pools = [mx.where(mx.array(held), a, mx.array(np.nan, dtype)) for a in pools]
        self.dense = [self._rows(a, table) for a in dense]
        mx.eval(self.pools, self.dense)

    def _rows(self, pool, table):
        rows = pool[mx.array(table)].swapaxes(1, 2)  # [batch, heads, entries, block, width]
        return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])

    def attend(self, q, **options):
        if self.packed and q.shape[-1] % 64:
            options["group_size"] = 32
        return run(lambda: mm.paged_attention(q, *self.pools, self.table, self.lengths, scale=SCALE, **options))

    def check(self, q, y, causal=False, window=None, sinks=None):
        batch, _, queries, _ = q.shape
        seen = seen_of_rows(None, self.lengths, causal, window, batch, queries, self.dense[0].shape[2])
        within = mx.arange(seen.shape[-1])[None, :] < self.lengths[:, None]
        rows = [mx.where(within[:, None, :, None], a, 0) for a in self.dense]
        twin = mx_attention(q, *(a.astype(q.dtype) for a in rows), SCALE, mx.array(seen), sinks)
        assert y.dtype == q.dtype
        assert_attention_right(y, twin, exact_of(q, *rows, SCALE, mx.array(seen), sinks), q.dtype)


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths(rng, dtype, executor, block, packed):
    paged = Paged(rng, LENGTHS[block], block, dtype=dtype, packed=packed)
    q = draw(rng, (6, 4, 1, 64), dtype)
    paged.check(q, paged.attend(q))


@pytest.mark.parametrize("queries", [2, 5, 20])
@pytest.mark.parametrize("packed", [False, True])
def test_several_queries(rng, dtype, executor, queries, packed):
    """Drafts and prompts, causal; a row may have fewer keys than queries."""
    paged = Paged(rng, [70, 3, 33], dtype=dtype, packed=packed)
    q = draw(rng, (3, 4, queries, 64), dtype)
    paged.check(q, paged.attend(q, mask="causal"), causal=True)


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("queries", [1, 18])
def test_widths(rng, dtype, executor, width, queries):
    paged = Paged(rng, [37, 64], 32, width=width, dtype=dtype)
    q = draw(rng, (2, 6, queries, width), dtype)
    paged.check(q, paged.attend(q, mask="causal"), causal=True)


@pytest.mark.parametrize("width", [96, 128])
@pytest.mark.parametrize("queries", [1, 18])
def test_widths_of_packed(rng, dtype, executor, width, queries):
    paged = Paged(rng, [37, 64], 32, width=width, dtype=dtype, packed=True)
    q = draw(rng, (2, 6, queries, width), dtype)
    paged.check(q, paged.attend(q, mask="causal"), causal=True)


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("packed", [False, True])
def test_windows_and_sinks(rng, dtype, executor, queries, packed):
    """With a window, entries of blocks that no query sees may be anything."""
    paged = Paged(rng, [200, 45, 9], dtype=dtype, packed=packed)
    q, sinks = draw(rng, (3, 4, queries, 64), dtype), draw(rng, (4,), dtype)
    table = np.array(paged.table)
    for row, length in zip(table, [200, 45, 9]):
        row[: max(length - queries - 20, 0) // 16] = -1
    paged.table = mx.array(table)
    paged.check(q, paged.attend(q, window=21, sinks=sinks), window=21, sinks=sinks)


def test_shared_blocks(rng, dtype, executor):
    paged = Paged(rng, [70, 40, 64], shared=32, dtype=dtype)
    q = draw(rng, (3, 4, 1, 64), dtype)
    paged.check(q, paged.attend(q))


@pytest.mark.parametrize("packed", [False, True])
def test_many_keys(rng, executor, packed):
    """Several threadgroups share the keys of a row."""
    paged = Paged(rng, [1500, 700, 0, 1], packed=packed)
    q = draw(rng, (4, 4, 1, 64), mx.float16)
    paged.check(q, paged.attend(q))


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("queries", [1, 20])
def test_blocks_as_vllm_lays_them_out(rng, dtype, executor, side_by_side, queries):
    """Tokens of a block before its heads: transposed views, also of one array with keys and values of a token."""
    paged = Paged(rng, [70, 40], dtype=dtype)
    q = draw(rng, (2, 4, queries, 64), dtype)
    if side_by_side:
        both = mx.concatenate(paged.pools, -1)
        both = mx.contiguous(both.swapaxes(1, 2)).swapaxes(1, 2)
        paged.pools = [both[..., :64], both[..., 64:]]
    else:
        paged.pools = [mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2) for a in paged.pools]
    mx.eval(paged.pools)
    mm.stats(reset=True)
    y = paged.attend(q, mask="causal")
    if executor != "native":  # nothing is copied first
        counts = mm.stats(reset=True)["paged_attention"]["kernels"]
        assert all(" attention_" in name for name in counts), counts
    paged.check(q, y, causal=True)


def test_part_of_a_table(rng, executor):
    paged = Paged(rng, [70, 40])
    q = draw(rng, (2, 4, 1, 64), mx.float16)
    wide = mx.concatenate([paged.table, paged.table], 1)
    paged.table = wide[:, : paged.table.shape[1]]
    paged.check(q, paged.attend(q))


@pytest.mark.parametrize("entry", [-1, 1000, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("packed", [False, True])
def test_a_block_that_is_not_there(rng, dtype, executor, entry, packed):
    """Queries that see a key of it are NaN; others are right, and other rows as they are without it."""
    paged = Paged(rng, [40, 40], dtype=dtype, packed=packed)
    q = draw(rng, (2, 4, 10, 64), dtype)
    right = paged.attend(q, mask="causal")
    table = np.array(paged.table)
    table[0, 2] = entry  # keys 32 to 39, of queries 2 to 9
    paged.table = mx.array(table)
    y = paged.attend(q, mask="causal")
    assert mx.all(mx.isnan(y[0, :, 2:])).item()
    assert mx.array_equal(y[1], right[1]).item()
    assert mx.all(mx.isnan(paged.attend(q)[0])).item()
    paged.lengths = paged.lengths - 8
    paged.check(q[:, :, :2], y[:, :, :2], causal=True)


@pytest.mark.parametrize("entry", [-1, 1000])
@pytest.mark.parametrize("at", [0, 40, 93])
def test_a_block_that_is_not_there_among_many(rng, executor, entry, at):
    paged = Paged(rng, [1500, 1500])
    table = np.array(paged.table)
    table[1, at] = entry
    paged.table = mx.array(table)
    y = paged.attend(draw(rng, (2, 4, 1, 64), mx.float16))
    assert mx.all(mx.isnan(y[1])).item() and not mx.any(mx.isnan(y[0])).item()


@pytest.mark.parametrize("length", [-1, 49, -(2**31), 2**31 - 1])
def test_a_length_that_is_none(rng, dtype, executor, length):
    paged = Paged(rng, [32, 32], dtype=dtype)
    q = draw(rng, (2, 4, 3, 64), dtype)
    right = paged.attend(q)
    paged.lengths = mx.array([length, 32])
    y = paged.attend(q)
    assert mx.all(mx.isnan(y[0])).item() and mx.array_equal(y[1], right[1]).item()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite(rng, dtype, executor, number):
    """A value of a key that is seen reaches its row alone."""
    paged = Paged(rng, [40, 40], dtype=dtype)
    block = int(paged.table[1, 1].item())
    paged.pools[1][block, 1, 7, 3] = number
    y = np.array(paged.attend(draw(rng, (2, 4, 1, 64), dtype)).astype(mx.float32))
    hit = np.zeros(y.shape, bool)
    hit[1, 2:, 0, 3] = True
    np.testing.assert_array_equal(~np.isfinite(y), hit)


def test_scores_beyond_float16(rng, executor):
    paged = Paged(rng, [40, 100], dtype=mx.float16)
    q = draw(rng, (2, 4, 1, 64), mx.float16) * 200
    paged.check(q, paged.attend(q))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_exact(rng, executor, queries, packed):
    """A query among drafts and in a batch has the bits of one alone, also from a shorter table."""
    paged = Paged(rng, [1100, 40], packed=packed)
    q = draw(rng, (2, 4, queries, 64), mx.float16)
    y = paged.attend(q, mask="causal", exact=True)
    with mm.patched(exact=True):
        assert mx.array_equal(paged.attend(q, mask="causal"), y).item()
    table, lengths = paged.table, paged.lengths
    for row in range(2):
        for i in range(queries):
            length = lengths[row : row + 1] - (queries - 1 - i)
            entries = -(-length.item() // paged.block)
            paged.table, paged.lengths = table[row : row + 1, :entries], length
            alone = paged.attend(q[row : row + 1, :, i : i + 1], exact=True)
            assert mx.array_equal(alone[0, :, 0], y[row, :, i]).item()


def test_exact_without_a_kernel(rng, executor, lenient):
    """An error where mx would compute the call, in no order that is known."""
    paged = Paged(rng, [40, 17], width=72, dtype=mx.float16)
    q = draw(rng, (2, 4, 1, 72), mx.float16)
    if executor == "native":
        paged.attend(q, exact=True)
        return
    with pytest.raises(ValueError, match="is to be exact, and no kernel computes the call"):
        paged.attend(q, exact=True)


@pytest.mark.parametrize("case", ["plain", "causal", "window", "sinks", "packed", "long", "composed"])
def test_logsumexp(rng, dtype, executor, lenient, case):
    """As over the same keys one after the other."""
    lengths = [1500, 700, 0, 1] if case == "long" else [70, 3, 0, 33]
    width = 72 if case == "composed" else 64
    paged = Paged(rng, lengths, dtype=dtype, packed=case == "packed", width=width)
    q = draw(rng, (4, 4, 1 if case == "long" else 3, width), dtype)
    options = {
        "causal": {"mask": "causal"},
        "window": {"window": 5},
        "sinks": {"sinks": draw(rng, (4,), dtype)},
    }.get(case, {})
    y, sums = paged.attend(q, return_logsumexp=True, **options)
    assert sums.shape == q.shape[:3] and sums.dtype == mx.float32
    paged.check(q, y, causal=case == "causal", window=options.get("window"), sinks=options.get("sinks"))
    table, asked = np.array(paged.table), {"ends": paged.lengths, "return_logsumexp": True}
    if case == "packed":  # whose integers are unpacked to halves
        rows = [tuple(paged._rows(a, table) for a in pool) for pool in paged.pools]
        _, right = run(lambda: mm.quantized_scaled_dot_product_attention(q, *rows, SCALE, **asked))
    else:
        wide = {name: a.astype(mx.float32) if name == "sinks" else a for name, a in options.items()}
        rows = [paged._rows(a, table).astype(mx.float32) for a in paged.pools]
        right_of = lambda: mm.scaled_dot_product_attention(q.astype(mx.float32), *rows, scale=SCALE, **asked, **wide)
        _, right = run(right_of)
    np.testing.assert_array_equal(np.isinf(np.array(sums)), np.isinf(np.array(right)))
    seen = mx.isfinite(right)
    assert_near(mx.where(seen, sums, 0), mx.where(seen, right, 0), "row")


def test_logsumexp_of_nothing(rng, executor):
    """NaN where the result is: of a length that is none, and of a block that is not there."""
    paged = Paged(rng, [40, 40, 40])
    table = np.array(paged.table)
    table[1, 2] = -1
    paged.table, paged.lengths = mx.array(table), mx.array([40, 40, -1])
    y, sums = paged.attend(draw(rng, (3, 4, 2, 64), mx.float16), return_logsumexp=True)
    assert mx.array_equal(mx.isnan(sums), mx.isnan(y[..., 0])).item()
    assert not mx.any(mx.isnan(sums[0])).item() and mx.all(mx.isnan(sums[1:])).item()
    pool, q = mx.zeros((0, 2, 16, 64)), mx.zeros((2, 4, 1, 64))
    sinks = mx.arange(4.0)
    for given in (None, sinks):
        _, sums = mm.paged_attention(
            q, pool, pool, mx.zeros((2, 0), mx.int32), mx.array([0, 3]), scale=1.0, sinks=given, return_logsumexp=True
        )
        assert mx.array_equal(sums[0, :, 0], mx.full(4, -mx.inf) if given is None else sinks).item()
        assert mx.all(mx.isnan(sums[1])).item()


@pytest.mark.parametrize("what", ["width", "bits", "values"])
def test_what_has_no_kernel(rng, executor, lenient, what):
    """Gathered and computed by mx where there is no native code."""
    q = draw(rng, (2, 4, 3, 72 if what == "width" else 64), mx.float32)
    paged = Paged(rng, [40, 17], width=q.shape[-1], dtype=mx.float32)
    table = np.array(paged.table)
    table[1, 1] = -1
    pools, dense = paged.pools, paged.dense
    options = {}
    if what == "bits":
        clean = [mx.where(mx.isnan(a), 0, a) for a in pools]
        pools = [mx.quantize(a, 64, 4) for a in clean]
        dense = [paged._rows(mx.dequantize(*a, 64, 4), np.array(paged.table)) for a in pools]
        options = {"bits": 4}
    elif what == "values":
        pools, dense = (pools[0], pools[1][..., :32]), (dense[0], dense[1][..., :32])
    y = run(
        lambda: mm.paged_attention(
            q, *pools, mx.array(table), paged.lengths, scale=SCALE, mask="causal", sinks=q[0, :, 0, 0], **options
        )
    )
    assert mx.all(mx.isnan(y[1, :, 2])).item() and not mx.any(mx.isnan(y[1, :, :2])).item()
    seen = seen_of_rows(None, paged.lengths, True, None, 2, 3, dense[0].shape[2])
    keys = mx.arange(seen.shape[-1])[None, :] < paged.lengths[:, None]
    rows = [mx.where(keys[:, None, :, None], a, 0) for a in dense]
    right = mx_attention(q, *rows, SCALE, mx.array(seen), q[0, :, 0, 0])
    assert_near(y[0], right[0], "row")
    assert_near(y[1, :, :2], right[1, :, :2], "row")


def test_launches(rng, native):
    """The kernels of decoding and of prompts, and one that puts parts together."""
    paged = Paged(rng, [40, 17])
    for queries, kind in ((1, "decode"), (20, "prompt")):
        mm.stats(reset=True)
        with mm.simulator.enabled():
            paged.attend(draw(rng, (2, 4, queries, 64), mx.float16), mask="causal")
        counts = mm.stats(reset=True)["paged_attention"]["kernels"]
        assert any(f"attention_paged_{kind}_64_64" in name for name in counts), counts


def test_gradients_and_vmap(rng, native):
    paged = Paged(rng, [9, 20], dtype=mx.float32)
    pools = [mx.where(mx.isnan(a), 0, a) for a in paged.pools]
    q = draw(rng, (2, 4, 2, 64), mx.float32)

    def ours(q, *pools):
        return mm.paged_attention(q, *pools, paged.table, paged.lengths, scale=SCALE, mask="causal")

    def twin(q, *pools):
        rows = [paged._rows(a, np.array(paged.table)) for a in pools]
        seen = seen_of_rows(None, paged.lengths, True, None, 2, 2, rows[0].shape[2])
        return mx.fast.scaled_dot_product_attention(q, *rows, scale=SCALE, mask=mx.array(seen))

    cotangent = [draw(rng, q.shape, mx.float32)]
    found, right = (mx.vjp(f, [q, *pools], cotangent)[1] for f in (ours, twin))
    for a, b in zip(found, right, strict=True):
        assert_near(a, b, "gradient")
    found, right = (mx.jvp(f, [q, *pools], [q, *pools])[1][0] for f in (ours, twin))
    assert_near(found, right, "tangent")
    mapped = mx.vmap(ours, in_axes=(0, None, None))(mx.stack([q, q * 2]), *pools)
    assert_near(mapped[1], ours(q * 2, *pools), "mapped")
    tables = mx.stack([paged.table, paged.table[::-1]])
    mapped = mx.vmap(lambda t: mm.paged_attention(q, *pools, t, paged.lengths[::-1], scale=SCALE))(tables)
    assert_near(mapped[1], mm.paged_attention(q, *pools, tables[1], paged.lengths[::-1], scale=SCALE), "mapped table")


def test_gradients_of_packed(rng, native):
    paged = Paged(rng, [9, 20], dtype=mx.float32, packed=True)
    q = draw(rng, (2, 4, 1, 64), mx.float32)
    words, scales, biases = paged.pools[0]

    def ours(scales):
        keys = (words, scales, biases)
        return mm.paged_attention(q, keys, paged.pools[1], paged.table, paged.lengths, scale=SCALE)

    with pytest.raises(ValueError, match="no gradients with respect to packed keys and values"):
        mx.eval(mx.vjp(ours, [scales], [q]))


@pytest.mark.parametrize("none", ["batch", "queries", "blocks", "entries"])
def test_nothing(executor, none):
    sizes = {"batch": 2, "queries": 3, "blocks": 4, "entries": 2} | {none: 0}
    q = mx.ones((sizes["batch"], 4, sizes["queries"], 64))
    pool = mx.ones((sizes["blocks"], 2, 16, 64))
    table = mx.zeros((sizes["batch"], sizes["entries"]), mx.int32)
    lengths = mx.array([0, 5])[: sizes["batch"]]
    y = run(lambda: mm.paged_attention(q, pool, pool, table, lengths, scale=SCALE))
    assert y.shape == q.shape
    if none in ("blocks", "entries"):
        assert mx.all(y[0] == 0).item() and mx.all(mx.isnan(y[1])).item()


def test_arguments(native):
    q, pool = mx.zeros((2, 4, 1, 64)), mx.zeros((5, 2, 16, 64))
    table, lengths = mx.zeros((2, 3), mx.int32), mx.zeros(2, mx.int32)

    def fails(text, q=q, keys=pool, values=pool, table=table, lengths=lengths, error=ValueError, **options):
        with pytest.raises(error, match=text):
            mm.paged_attention(q, keys, values, table, lengths, scale=1.0, **options)

    fails(r"\[paged_attention\] q has shape \(4,1,64\): expected four dimensions", q=q[0])
    fails(r"key_blocks has shape \(2,16,64\): expected four dimensions", keys=pool[0])
    fails(r"value_blocks \(4,2,16,64\): expected the same number of blocks", values=pool[:4])
    fails(r"expected the same last dimension", q=mx.zeros((2, 4, 1, 128)))
    fails(r"q has 3 heads, key_blocks has 2: expected a multiple", q=mx.zeros((2, 3, 1, 64)))
    for keys in (8, 24):
        short = mx.zeros((5, 2, keys, 64))
        fails(rf"blocks of {keys} keys: expected 16, 32, 64 or another power of two", keys=short, values=short)
    fails(r"block_table has shape \(1,3\): expected two dimensions, the first of 2", table=table[:1])
    fails(r"block_table has dtype int64: expected int32", table=table.astype(mx.int64), error=mm.DtypeError)
    fails(r"lengths has shape \(1\): expected \(2\)", lengths=lengths[:1])
    fails(r"lengths has dtype float32: expected int32", lengths=lengths.astype(mx.float32), error=mm.DtypeError)
    fails(r"key_blocks has an array of dtype float16, q has dtype float32", keys=pool.astype(mx.float16),
          error=mm.DtypeError)  # fmt: skip
    fails(r"mask is 'no': expected 'causal'", mask="no")
    fails(r"window is 0", window=0)
    fails(r"key_blocks is a triple and the other an array", keys=mx.quantize(pool, 64, 8))
