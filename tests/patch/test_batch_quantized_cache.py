"""mm.nn.BatchQuantizedKVCache: each row equals, bit for bit, mlx-lm's QuantizedKVCache of this request."""

import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.support import assert_same_bits
from helpers.tolerances import assert_near

import mlx_mittens as mm
from mlx_mittens import _ext

pytest.importorskip("mlx_lm")

from mlx_lm.generate import BatchGenerator
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

HEADS, WIDTH = 2, 64


def draw(rng, rows, tokens, dtype=mx.float32):
    return tuple(mx.array(rng.standard_normal((rows, HEADS, tokens, WIDTH))).astype(dtype) for _ in range(2))


def filled(rng, lengths, bits=8, group_size=64):
    """Caches of single requests."""
    caches = []
    for length in lengths:
        caches.append(QuantizedKVCache(group_size, bits))
        if length:
            caches[-1].update_and_fetch(*draw(rng, 1, length))
    return caches


def assert_holds(batch, caches):
    """Each row is the cache of its request."""
    for i, cache in enumerate(caches):
        row = batch.extract(i)
        assert type(row) is QuantizedKVCache and row.offset == cache.offset
        assert (row.group_size, row.bits) == (cache.group_size, cache.bits)
        if cache.offset:
            for ours, theirs in zip(
                sum(map(tuple, row.keys_and_values()), ()), sum(map(tuple, cache.keys_and_values()), ())
            ):
                assert_same_bits(ours, theirs, f"row {i}")
    assert batch.offset.tolist() == [cache.offset for cache in caches]


@pytest.mark.parametrize("bits, group_size", [(8, 64), (4, 32), (3, 64)])
@pytest.mark.parametrize("lengths", [(5, 1, 300), (0, 7), (0, 0), (256,)])
def test_merged_and_appended(rng, native, bits, group_size, lengths):
    caches = filled(rng, lengths, bits, group_size)
    batch = mm.nn.BatchQuantizedKVCache.merge(caches)
    assert batch.empty() == (max(lengths) == 0) == (batch.nbytes == 0) and batch.size() == max(lengths)
    assert_holds(batch, caches)
    for tokens in (1, 3, 1):
        keys, values = draw(rng, len(lengths), tokens)
        seen = batch.update_and_fetch(keys, values)
        assert seen[0][0].shape[2] == batch.size()
        for i, cache in enumerate(caches):
            cache.update_and_fetch(keys[i : i + 1], values[i : i + 1])
    assert_holds(batch, caches)
    assert batch.nbytes > 0


def test_padding(rng, native):
    """A prompt that is padded on its right, and one on its left, hold the same then."""
    lengths = (3, 9, 6)
    keys, values = draw(rng, 3, 9)
    caches = filled(rng, (0, 0, 0))
    right, left = mm.nn.BatchQuantizedKVCache([0] * 3), mm.nn.BatchQuantizedKVCache([0] * 3)
    right.prepare(lengths=list(lengths), right_padding=[9 - length for length in lengths])
    left.prepare(left_padding=[9 - length for length in lengths])
    right.update_and_fetch(keys, values)
    right.finalize()
    moved = [
        mx.concatenate([mx.roll(a[i : i + 1], 9 - length, axis=2) for i, length in enumerate(lengths)])
        for a in (keys, values)
    ]
    left.update_and_fetch(*moved)
    for i, cache in enumerate(caches):
        cache.update_and_fetch(keys[i : i + 1, :, : lengths[i]], values[i : i + 1, :, : lengths[i]])
    assert_holds(right, caches)
    assert_holds(left, caches)
    assert right.left_padding.tolist() == left.left_padding.tolist() == [6, 0, 3]
    right.finalize()  # once is enough
    assert_holds(right, caches)
    with pytest.raises(ValueError, match=r"left_padding is given, and the cache holds 9 tokens"):
        left.prepare(left_padding=[1, 1, 1])


def test_rows_come_and_go(rng, native):
    caches = filled(rng, (4, 12, 2, 7))
    batch = mm.nn.BatchQuantizedKVCache.merge(caches)
    batch.filter([2, 0, 3])
    caches = [caches[i] for i in (2, 0, 3)]
    assert batch.size() == 7 and batch.left_padding.tolist() == [5, 3, 0]
    assert_holds(batch, caches)
    others = filled(rng, (20, 1))
    batch.extend(mm.nn.BatchQuantizedKVCache.merge(others))
    caches += others
    assert_holds(batch, caches)
    new = filled(rng, (0, 0))
    batch.extend(mm.nn.BatchQuantizedKVCache([0, 0]))
    caches += new
    assert_holds(batch, caches)
    keys, values = draw(rng, len(caches), 2)
    batch.update_and_fetch(keys, values)
    for i, cache in enumerate(caches):
        cache.update_and_fetch(keys[i : i + 1], values[i : i + 1])
    assert_holds(batch, caches)
    empty = mm.nn.BatchQuantizedKVCache([0])
    empty.extend(batch)
    assert_holds(empty, [QuantizedKVCache(64, 8), *caches])
    batch.filter(mx.array([6]))
    assert batch.size() == 2
    assert_holds(batch, caches[6:7])


def test_trim_and_state(rng, native):
    caches = filled(rng, (4, 12))
    batch = mm.nn.BatchQuantizedKVCache.merge(caches)
    assert batch.is_trimmable() and batch.trim(3) == 3
    for cache in caches:
        cache.trim(3)
    assert_holds(batch, caches)
    other = mm.nn.BatchQuantizedKVCache([0])
    other.state = batch.state
    assert_holds(other, caches)
    assert batch.trim(100) == 9 and batch.size() == 0


def test_other_formats_are_refused(rng, native):
    with pytest.raises(ValueError, match=r"group sizes and bits \[\(64, 4\), \(64, 8\)\]: expected the same"):
        mm.nn.BatchQuantizedKVCache.merge(filled(rng, (3,), 4) + filled(rng, (3,), 8))
    with pytest.raises(ValueError, match=r"caches of 8 bits in groups of 64 and of 4 bits in groups of 32"):
        mm.nn.BatchQuantizedKVCache([0]).extend(mm.nn.BatchQuantizedKVCache([0], 32, 4))


@pytest.mark.parametrize("bits", [4, 8])
def test_attention_over_it(rng, native, bits):
    """As over each row's own cache, with kernels that read no padding."""
    caches = filled(rng, (30, 5), bits)
    batch = mm.nn.BatchQuantizedKVCache.merge(caches)
    for tokens in (1, 4):
        q = mx.array(rng.standard_normal((2, 4, tokens, WIDTH)).astype(np.float32))
        keys, values = draw(rng, 2, tokens)
        with mm.patched():
            mask = batch.make_mask(tokens)
            y = scaled_dot_product_attention(q, *batch.update_and_fetch(keys, values), batch, 0.125, mask)
            for i, cache in enumerate(caches):
                mask = cache.make_mask(tokens, return_array=False, window_size=None)
                rows = cache.update_and_fetch(keys[i : i + 1], values[i : i + 1])
                alone = scaled_dot_product_attention(q[i : i + 1], *rows, cache, 0.125, mask)
                assert_near(y[i : i + 1], alone, "attention of a row")


def test_mlx_lm_merges_by_it(rng, native):
    """Layers of both kinds; caches that mlx-lm merges by itself stay its own."""
    module = sys.modules["mlx_lm.generate"]  # the package has a function of this name
    requests = [[cache, KVCache()] for cache in filled(rng, (3, 5))]
    with mm.patched():
        merged = module._merge_caches(requests)
        assert [type(cache).__name__ for cache in merged] == ["BatchQuantizedKVCache", "BatchKVCache"]
        assert [type(cache).__name__ for cache in module._merge_caches([[KVCache()]])] == ["BatchKVCache"]
        assert module._merge_caches([]) == []
    with pytest.raises(ValueError, match="does not yet support batching"):
        module._merge_caches(requests)


def _texts(model, prompts, bits, tokens=12):
    """Tokens of requests that come at once, each from a quantized cache of its own."""
    caches = [[QuantizedKVCache(64, bits) for _ in make_prompt_cache(model)] for _ in prompts]
    generator = BatchGenerator(model, stop_tokens=[])
    uids = generator.insert(prompts, [tokens] * len(prompts), caches=caches)
    found = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    generator.close()
    return [found[uid] for uid in uids]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_gives_each_request_what_it_gives_it_alone(rng, native, bits):
    model = tiny.build("llama-3.2-1b", mx.float32)
    prompts = [rng.integers(1, 60, n).tolist() for n in (9, 1, 23)]
    with mm.patched():
        together = _texts(model, prompts, bits)
        alone = [_texts(model, [prompt], bits)[0] for prompt in prompts]
    assert together == alone and len(together[0]) == 12


def test_a_token_of_every_row_is_appended_in_one_launch(rng, native):
    """Rotary embedding, quantization and append."""
    batch = mm.nn.BatchQuantizedKVCache.merge(filled(rng, (30, 5)))
    keys, values = draw(rng, 2, 1)
    with mm.patched(), mm.simulator.enabled():
        _ext.simulator_record(True)
        queries = mx.fast.rope(keys * 2, WIDTH, traditional=False, base=1e4, scale=1.0, offset=batch.offset)
        turned = mx.fast.rope(keys, WIDTH, traditional=False, base=1e4, scale=1.0, offset=batch.offset)
        seen = batch.update_and_fetch(turned, values)
        mx.eval(queries, seen)
        kernels = [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)
    assert len(kernels) == 1 and kernels[0].startswith("quantized_rope_append"), kernels


def _server(model, **options):
    """The check of mlx-lm's server whether a request can join a batch."""
    arguments = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0, **options}
    return SimpleNamespace(
        cli_args=SimpleNamespace(**arguments), model_provider=SimpleNamespace(is_batchable=True, model=model)
    )


def test_the_server_batches_quantized_requests(rng, native):
    from mlx_lm.server import ResponseGenerator

    model = tiny.build("llama-3.2-1b", mx.float32)
    prompts = [rng.integers(1, 60, n).tolist() for n in (9, 1, 23)]
    request = SimpleNamespace(seed=None)
    assert not ResponseGenerator._is_batchable(_server(model), request)
    with mm.patched():
        assert ResponseGenerator._is_batchable(_server(model), request)
        generator = BatchGenerator(model, stop_tokens=[])
        for prompt in prompts:  # as the server does
            generator.insert_segments([[prompt]], [12], caches=[None])
        generator.next()
        kinds = {type(cache).__name__ for batch in (generator._prompt_batch, generator._generation_batch)
                 for cache in batch.prompt_cache}  # fmt: skip
        assert kinds == {"BatchQuantizedKVCache"}
        generator.close()
        # A request of half a cache joins quantized ones.
        merged = sys.modules["mlx_lm.generate"]._merge_caches([[KVCache()], filled(rng, (3,), 4)])
        assert merged[0].bits == 4 and merged[0].offset.tolist() == [0, 3]
        # None is quantized that nobody asks for.
        assert ResponseGenerator._is_batchable(_server(model, kv_bits=None), request)
        caches = [None]
        generator = BatchGenerator(model, stop_tokens=[])
        generator.insert_segments([[prompts[0]]], [1], caches=caches)
        assert caches == [None]
        generator.close()


@pytest.mark.parametrize(
    "options, seed", [({"quantized_kv_start": 5000}, None), ({}, 3), ({"kv_group_size": 128}, None)]
)
def test_requests_that_the_server_serves_alone(native, options, seed):
    from mlx_lm.server import ResponseGenerator

    model = tiny.build("llama-3.2-1b", mx.float32)  # heads of 64, which 128 does not divide
    with mm.patched():
        assert not ResponseGenerator._is_batchable(_server(model, **options), SimpleNamespace(seed=seed))


@pytest.mark.parametrize("name", ["gpt-oss-20b", "mamba2-2.7b"])
def test_models_that_take_no_quantized_cache(native, name):
    """Attention sinks, and a model without keys."""
    from mlx_lm.server import ResponseGenerator

    with mm.patched():
        server = _server(tiny.build(name, mx.float32))
        assert not ResponseGenerator._is_batchable(server, SimpleNamespace(seed=None))
