"""mm.nn.BatchRotatingQuantizedKVCache: each row holds, bit for bit, the words of mx.quantize for its last tokens."""

import copy
import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.pages import MODELS
from helpers.support import assert_same_bits
from helpers.tolerances import assert_near

import mlx_mittens as mm
from mlx_mittens import _ext

pytest.importorskip("mlx_lm")

from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

HEADS, WIDTH, MOST = 2, 64, 12
Cache = mm.nn.BatchRotatingQuantizedKVCache


def draw(rng, rows, tokens, heads=HEADS):
    return mx.array(rng.standard_normal((rows, heads, tokens, WIDTH)).astype(np.float32))


class Rows:
    """A batch beside all tokens of each of its rows, which are not quantized."""

    def __init__(self, rng, lengths, bits=8, group_size=64, most=MOST):
        self.rng, self.format, self.most = rng, (group_size, bits), most
        self.own = [[draw(rng, 1, length) for _ in range(2)] for length in lengths]
        singles = []
        for keys, values in self.own:
            singles.append(Cache(most, [0], *self.format))
            if keys.shape[2]:
                singles[-1].update_and_fetch(keys, values)
        self.batch = Cache.merge(singles)

    def append(self, tokens, lengths=None):
        """New tokens of every row, or `lengths` of each and padding behind them; the keys that they see."""
        fresh = [draw(self.rng, len(self.own), tokens) for _ in range(2)]
        seen = self.batch.update_and_fetch(*fresh)
        for i, row in enumerate(self.own):
            count = tokens if lengths is None else lengths[i]
            row[:] = [mx.concatenate([a, b[i : i + 1, :, :count]], axis=2) for a, b in zip(row, fresh)]
        return seen

    def packed(self, row, tokens):
        """The last tokens of a row as mx.quantize packs them."""
        return [mx.quantize(a[:, :, a.shape[2] - tokens :], *self.format) for a in self.own[row]]

    def check(self):
        assert self.batch.offset.tolist() == [keys.shape[2] for keys, _ in self.own]
        for i, (keys, _) in enumerate(self.own):
            one = self.batch.extract(i)
            assert type(one) is Cache and (one.max_size, one.group_size, one.bits) == (self.most, *self.format)
            total = keys.shape[2]
            assert one.offset.tolist() == [total] and one.left_padding.tolist() == [0]
            assert min(total, self.most - 1) <= one.size() <= self.most
            assert one.is_trimmable() == (one.size() == total and self.batch.is_trimmable())
            if total:
                for ours, theirs in zip(one.keys_and_values(), self.packed(i, one.size()), strict=True):
                    for a, b in zip(ours, theirs, strict=True):
                        assert_same_bits(a, b, f"row {i}")


@pytest.fixture
def small_steps(monkeypatch):
    """Caches that grow by 8 tokens."""
    monkeypatch.setattr(Cache, "step", 8)


@pytest.mark.parametrize("bits, group_size", [(8, 64), (4, 32), (3, 64)])
@pytest.mark.parametrize("most", [1, 5, 12, 40])
@pytest.mark.parametrize("lengths", [(5, 1, 30), (0, 7), (0, 0), (12,)])
def test_merged_and_appended(rng, native, small_steps, lengths, most, bits, group_size):
    rows = Rows(rng, lengths, bits, group_size, most)
    assert rows.batch.empty() == (max(lengths) == 0) == (rows.batch.nbytes == 0)
    rows.check()
    for tokens in (1, 3, 1, 9, *[1] * 12, 20, 2):
        before = rows.batch.size()
        seen = rows.append(tokens)
        assert seen[0][0].shape[2] == min(before, most - 1) + tokens
        rows.check()
    assert rows.batch.keys[0].shape[2] <= most - 1 + 3 * 8 + max(20, *lengths)


def test_memory_is_bounded_by_the_window(rng, native, small_steps):
    rows = Rows(rng, (40, 3))
    for _ in range(60):
        rows.append(1)
    assert rows.batch.keys[0].shape[2] <= MOST - 1 + 2 * 8
    rows.check()


def test_padding_on_the_right(rng, native, small_steps):
    """Prompts in chunks, where the shorter ones have ended: their padding pushes no token out of the window."""
    rows = Rows(rng, (0, 0, 0))
    lengths = np.array([3, 30, 14])
    rows.batch.prepare(lengths=lengths.tolist(), right_padding=(30 - lengths).tolist())
    for first in range(0, 30, 10):
        rows.append(10, np.clip(lengths - first, 0, 10).tolist())
    rows.batch.finalize()
    rows.check()
    rows.batch.finalize()  # once is enough
    rows.append(1)
    rows.check()
    with pytest.raises(ValueError, match="right_padding is given without lengths"):
        rows.batch.prepare(right_padding=[1, 0, 0])
    with pytest.raises(
        ValueError, match=r"BatchRotatingQuantizedKVCache.prepare\] left_padding is given, and the cache"
    ):
        rows.batch.prepare(left_padding=[1, 0, 0])


def test_padding_on_the_left(rng, native, small_steps):
    rows = Rows(rng, (0, 0))
    rows.batch.prepare(left_padding=[4, 0])
    keys = draw(rng, 2, 9)
    rows.batch.update_and_fetch(keys, keys)
    rows.own = [[keys[i : i + 1, :, left:]] * 2 for i, left in enumerate((4, 0))]
    rows.check()
    rows.append(6)
    rows.check()


def test_rows_come_and_go(rng, native, small_steps):
    rows, others = Rows(rng, (4, 30, 2, 7)), Rows(rng, (20, 1))
    rows.batch.filter([2, 0, 3])
    rows.own = [rows.own[i] for i in (2, 0, 3)]
    assert rows.batch.size() == 7 and rows.batch.left_padding.tolist() == [5, 3, 0]
    rows.check()
    for batch in (others.batch, Cache(MOST, [0, 0])):
        rows.batch.extend(batch)
    rows.own += [*others.own, *([draw(rng, 1, 0)] * 2 for _ in range(2))]
    rows.own[-2:] = [list(row) for row in rows.own[-2:]]
    for tokens in (2, 1, 15, *[1] * 20):
        rows.append(tokens)
        rows.check()
    rows.batch.filter(mx.array([6]))
    rows.own = rows.own[6:7]
    rows.check()


def test_trim_state_and_copies(rng, native, small_steps):
    rows = Rows(rng, (4, 10))
    assert rows.batch.is_trimmable() and rows.batch.trim(3) == 3
    rows.own = [[a[:, :, : a.shape[2] - 3] for a in row] for row in rows.own]
    rows.check()
    kept = copy.deepcopy(rows.batch)
    before = list(map(list, rows.own))
    for tokens in (9, *[1] * 12):
        rows.append(tokens)
    assert not rows.batch.is_trimmable()
    other = Cache(3, [0])
    other.state = rows.batch.state
    rows.batch = other
    rows.check()
    rows.batch, rows.own = kept, before
    rows.check()


def test_what_does_not_fit_is_refused(rng, native):
    with pytest.raises(ValueError, match=r"caches with windows of 12, 5 tokens: expected the same for all"):
        Cache.merge([Cache(12, [0]), Cache(5, [0])])
    with pytest.raises(ValueError, match=r"windows of 12, None tokens"):
        Cache(12, [0]).extend(mm.nn.BatchQuantizedKVCache([0]))
    with pytest.raises(ValueError, match=r"group sizes and bits \[\(64, 4\), \(64, 8\)\]: expected the same"):
        Cache.merge([Cache(12, [0], 64, 4), Cache(12, [0], 64, 8)])
    with pytest.raises(ValueError, match=r"caches of 8 bits in groups of 64 and of 4 bits in groups of 32"):
        Cache(12, [0]).extend(Cache(12, [0], 32, 4))
    with pytest.raises(ValueError, match=r"max_size is 0: expected a positive number"):
        Cache(0, [0])
    with pytest.raises(ValueError, match=r"keeps its first 4 tokens: expected none that it keeps"):
        Cache.quantized(RotatingKVCache(12, 4), 64, 8)


@pytest.mark.parametrize("lengths", [[], [5], [30], [5, *[1] * 20], [9, 14]], ids=str)
def test_of_mlx_lms_cache(rng, native, lengths):
    """In whatever order it holds its tokens."""
    cache, own = RotatingKVCache(MOST), draw(rng, 1, 0)
    for tokens in lengths:
        fresh = draw(rng, 1, tokens)
        own = mx.concatenate([own, fresh], axis=2)
        cache.update_and_fetch(fresh, fresh)
    rows = Rows(rng, (0,))
    rows.batch, rows.own = Cache.quantized(cache, 64, 8), [[own, own]]
    rows.check()
    rows.append(3)
    rows.append(1)
    rows.check()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_over_it(rng, native, small_steps, window, bits):
    """As over each row's own last tokens, with kernels that read no padding."""
    rows = Rows(rng, (30, 5), bits)
    for tokens in (1, 4, 1, 20, 1):
        q = draw(rng, 2, tokens, 4)
        with mm.patched():
            mask = rows.batch.make_mask(tokens, window_size=window)
            y = scaled_dot_product_attention(q, *rows.append(tokens), rows.batch, 0.125, mask)
        for i, (keys, _) in enumerate(rows.own):
            seen = min(keys.shape[2], MOST - 1 + tokens)
            plain = [mx.dequantize(*part, *rows.format) for part in rows.packed(i, seen)]
            at = mx.arange(seen - tokens, seen)[:, None] - mx.arange(seen)
            mask = (at >= 0) & (at < (window or MOST))
            alone = mx.fast.scaled_dot_product_attention(q[i : i + 1], *plain, scale=0.125, mask=mask)
            assert_near(y[i : i + 1], alone, "attention of a row")


def test_a_token_of_every_row_is_appended_in_one_launch(rng, native):
    """Rotary embedding, quantization and append."""
    rows = Rows(rng, (30, 5), most=64)
    keys, values = draw(rng, 2, 1), draw(rng, 2, 1)
    with mm.patched(), mm.simulator.enabled():
        _ext.simulator_record(True)
        turn = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": rows.batch.offset}
        queries, turned = (mx.fast.rope(a, WIDTH, **turn) for a in (keys * 2, keys))
        mx.eval(queries, rows.batch.update_and_fetch(turned, values))
        kernels = [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)
    assert len(kernels) == 1 and kernels[0].startswith("quantized_rope_append"), kernels


def test_mlx_lm_merges_by_it(rng, native):
    """Also a request whose caches are not quantized with one whose are."""
    quantized, plain = [QuantizedKVCache(64, 8), Cache(MOST, [0])], [KVCache(), RotatingKVCache(MOST)]
    with mm.patched():
        for requests in ([quantized], [quantized, plain], [plain, quantized]):
            merged = sys.modules["mlx_lm.generate"]._merge_caches(requests)
            assert [type(one).__name__ for one in merged] == ["BatchQuantizedKVCache", "BatchRotatingQuantizedKVCache"]


def test_models_of_latents_refuse_quantized_caches_by_name(native):
    """mlx-lm's own call fails at an attribute."""
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    for name, layer in (("deepseek_v3", "DeepseekV3Attention"), ("kimi_linear", "KimiMLAAttention")):
        model = MODELS["build"](name, mx.float32)
        with (
            mm.patched(),
            pytest.raises(ValueError, match=rf"\[{layer}\] the cache is a QuantizedKVCache: expected one"),
        ):
            tiny.tokens(model, [1, 2, 3], 4, **options)
