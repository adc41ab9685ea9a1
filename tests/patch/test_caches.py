"""mlx-lm's caches of other kinds: the append with the rotary embedding in one kernel, and their contents afterwards."""

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
    assert tiny.kernels("rope_append") == len(lengths) * len(model.layers)


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


def append_all(made, lengths, rows=1, width=64, traditional=False, together=1):
    """A cache after heads of random numbers, turned by the current functions; the queries and its last result."""
    rng = np.random.default_rng(3)
    pending, queries = [], []
    for tokens in lengths:
        heads = [mx.array(rng.standard_normal((rows, n, tokens, width)).astype(np.float32)) for n in (4, 2, 2)]
        mx.eval(heads)
        q, k, v = (a * 1 for a in heads)
        turn = {"traditional": traditional, "base": 1e4, "scale": 1.0, "offset": made.offset}
        q, k = (mx.fast.rope(a, width, **turn) for a in (q, k))
        seen = made.update_and_fetch(k, v)
        queries.append(q)
        pending += [q, seen]
        if len(queries) % together == 0:
            mx.eval(pending)
            pending = []
    mx.eval(pending)
    return queries, seen


@pytest.fixture
def small_steps(monkeypatch):
    """Caches that grow by 16 tokens."""
    for kind in (cache.KVCache, cache.QuantizedKVCache, cache.BatchRotatingKVCache):
        monkeypatch.setattr(kind, "step", 16)


LENGTHS = [5, 1, 1, 3, 1, 4, 1, 1, 1, 1, 7, 1, 9, 1, 1]


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("width, group_size, bits", [
    (64, 64, 2), (64, 32, 3), (64, 64, 4), (64, 32, 5), (64, 64, 6), (64, 64, 8), (128, 128, 4), (128, 64, 3)
], ids=str)  # fmt: skip
def test_tokens_into_a_quantized_cache(native, small_steps, width, group_size, bits, together):
    """Its words, scales and biases are mx.quantize's, of the keys in a plain cache, also where it grows."""
    plain, quantized = cache.KVCache(), cache.QuantizedKVCache(group_size, bits)
    with mm.patched():
        expected, _ = append_all(plain, LENGTHS, width=width, together=together)
        mm.stats(reset=True)
        found, seen = append_all(quantized, LENGTHS, width=width, together=together)
    assert quantized.offset == plain.offset == sum(LENGTHS) and quantized.keys[0].shape[2] == plain.keys.shape[2]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))
    for ours, part, a in zip(seen, (quantized.keys, quantized.values), (plain.keys, plain.values), strict=True):
        for x, whole, y in zip(ours, part, mx.quantize(a[:, :, : plain.offset], group_size, bits), strict=True):
            np.testing.assert_array_equal(np.array(x), np.array(y))
            np.testing.assert_array_equal(np.array(whole[:, :, : plain.offset]), np.array(y))
    assert tiny.kernels("quantized_rope_append") == len(LENGTHS)


def test_a_quantized_cache_is_read_by_who_holds_its_arrays(native, small_steps):
    """As mx's own assignment to a part of an array: other names of an array see a token, other arrays do not."""
    quantized = cache.QuantizedKVCache(64, 4)
    with mm.patched():
        append_all(quantized, [5, 1])
        words, before = quantized.keys[0], mx.array(quantized.keys[0])
        mx.eval(before)
        old = np.array(before)
        mm.stats(reset=True)
        append_all(quantized, [1])
    assert tiny.kernels("quantized_rope_append") == 1
    assert words is quantized.keys[0] and not mx.array_equal(words, before)
    np.testing.assert_array_equal(np.array(before), old)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
def test_generation_with_a_quantized_cache(native, lenient, name, bits):
    model, prompt = tiny.build(name, mx.float32), [int(i) for i in np.arange(9) * 7 % 300]
    options = {"kv_bits": bits, "kv_group_size": 64, "quantized_kv_start": 0}
    expected = tiny.tokens(model, prompt, 12, **options)
    mm.stats(reset=True)
    with mm.patched():
        assert tiny.tokens(model, prompt, 12, **options) == expected
    # A part of the prompt, its last token, and one token ahead.
    assert sum(mm.stats()["quantized_rope_append"]["kernels"].values()) == 13 * len(model.layers)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_converted_model_with_a_quantized_cache(native, lenient, small_steps, bits):
    """Also where it grows."""
    plain, prompt = tiny.build("qwen3-0.6b", mx.float32), [int(i) for i in np.arange(9) * 7 % 300]
    options = {"kv_bits": bits, "kv_group_size": 64, "quantized_kv_start": 0}
    expected = tiny.tokens(plain, prompt, 20, **options)
    model = mm.nn.convert(plain)
    mm.stats(reset=True)
    assert tiny.tokens(model, prompt, 20, **options) == expected
    assert sum(mm.stats()["quantized_rope_append"]["kernels"].values()) == 21 * len(model.layers)


@pytest.mark.parametrize("what", ["a subclass", "arrays of another type", "two arrays", "no turned keys", "1 bit"])
def test_other_quantized_caches_stay_mlx_lms(native, lenient, small_steps, what):
    class Subclass(cache.QuantizedKVCache):
        pass

    def prepared():
        bits = 1 if what == "1 bit" else 4  # which mx packs by another rule
        made = (Subclass if what == "a subclass" else cache.QuantizedKVCache)(64, bits)
        append_all(made, [5, 1])
        if what == "arrays of another type":
            made.keys = tuple(a.astype(mx.float16) if a.dtype == mx.float32 else a for a in made.keys)
        if what == "two arrays":
            made.keys = made.keys[:2]
        return made

    def appended(made, tokens):
        if what == "no turned keys":
            made.update_and_fetch(*(mx.ones((1, 2, tokens, 64)) * i for i in (1, 2)))
        else:
            append_all(made, [tokens])

    theirs, ours = prepared(), prepared()
    for tokens in (1, 11):  # the cache has room for one of them
        appended(theirs, tokens)
        mm.stats(reset=True)
        with mm.patched():
            appended(ours, tokens)
        assert "quantized_rope_append" not in mm.stats()
        for a, b in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


def batch_rotating_steps(made, lengths, together):
    """Results of attention on a batch for a prompt and the tokens behind it."""
    rng = np.random.default_rng(4)
    heads = [mx.array(rng.standard_normal((2, n, sum(lengths), 64)).astype(np.float32)) for n in (4, 2, 2)]
    pending, results, end = [], [], 0
    for tokens in lengths:
        first, end = end, end + tokens
        q, k, v = (a[:, :, first:end] * 1 for a in heads)
        q, k = (mx.fast.rope(a, 64, traditional=False, base=1e4, scale=1.0, offset=made.offset) for a in (q, k))
        mask = made.make_mask(end - first)
        keys, values = made.update_and_fetch(k, v)
        pending.append(mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask=mask))
        if len(pending) == together:
            mx.eval(pending)
            results += map(np.array, pending)
            pending = []
    results += map(np.array, pending)
    return results, [np.array(a) for a in (keys, values)]


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("most, lengths", [
    (8, [5, *[1] * 40]), (8, [20, *[1] * 40]), (24, [5, *[1] * 40]), (30, [30, *[1] * 40]),
    (8, [5, 3, 1, 4, 1, 9, 1]), (40, [5, 3, 1, 4, 1, 9, 1, 1, 16, 2, 1, 3])
], ids=str)  # fmt: skip
def test_tokens_into_a_batch_of_rotating_caches(native, lenient, small_steps, most, lengths, together):
    """A start for each row, before and after the keys rotate, and where the buffers grow."""
    caches = [cache.BatchRotatingKVCache(most, [0, 3]) for _ in range(2)]
    expected, held = batch_rotating_steps(caches[0], lengths, together)
    mm.stats(reset=True)
    with mm.patched():
        found, ours = batch_rotating_steps(caches[1], lengths, together)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        padding = 3 if i == 0 else 0  # a query before a row's start sees nothing
        np.testing.assert_allclose(a[:, :, padding:], b[:, :, padding:], atol=LAYERS, err_msg=f"step {i}")
    for a, b in zip(ours, held, strict=True):
        np.testing.assert_allclose(a, b, atol=LAYERS)
    for field in ("_idx", "_offset", "max_size", "rotated", "_lengths"):
        assert getattr(caches[0], field) == getattr(caches[1], field), field
    for field in ("offset", "left_padding"):
        assert getattr(caches[0], field).tolist() == getattr(caches[1], field).tolist(), field
    assert tiny.kernels("rope_append") == len(lengths)


def test_what_counts_positions_is_computed_at_each_step(native, small_steps, tmp_path):
    """Also where no mask reads it: otherwise a graph would grow with the tokens."""
    made = cache.BatchRotatingKVCache(8, [0, 2])
    with mm.patched():
        append_all(made, [8, *[1] * 12], rows=2)
        path = tmp_path / "graph.dot"
        mx.export_to_dot(str(path), made.left_padding, made.offset)
    assert "Subtract" not in path.read_text() and "Add" not in path.read_text()
    assert made.left_padding.tolist() == [-12, -10] and made.offset.tolist() == [20, 18]


def test_traditional_rotary_embeddings_are_in_the_append(native, small_steps):
    """Pairs of neighbours, into caches of all kinds."""
    kinds = {
        "rope_append": cache.KVCache,
        "quantized_rope_append": lambda: cache.QuantizedKVCache(64, 8),
    }
    for op, make in kinds.items():
        made, plain = make(), make()
        theirs, _ = append_all(plain, [5, 1, 1, 1], traditional=True)
        mm.stats(reset=True)
        with mm.patched():
            ours, _ = append_all(made, [5, 1, 1, 1], traditional=True)
        assert tiny.kernels(op) == 4
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b), atol=LAYERS)
        if op == "rope_append":
            np.testing.assert_allclose(np.array(made.keys[:, :, :8]), np.array(plain.keys[:, :, :8]), atol=LAYERS)
