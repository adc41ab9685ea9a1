"""Key-value caches that steps update in place: their contents, whoever looks at them and whenever it is evaluated."""

import itertools
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.support import assert_same_bits
from helpers.tolerances import SUM, assert_near
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

import mlx_mittens as mm
from mlx_mittens import _ext

ROTARY = _ext.Rotary(64, 1e4)
SCALE = 0.125
ROOM = 24
QUERIES, KEYS = 4, 2


def normal(rng, heads: int, tokens: int, batch: int = 1, width: int = 64) -> mx.array:
    return mx.array(rng.normal(size=(batch, heads, tokens, width)).astype(np.float32))


def heads_of(rng, tokens: int = 1, batch: int = 1) -> mx.array:
    return normal(rng, QUERIES + 2 * KEYS, tokens, batch)


class Cache:
    """The buffers of a layer, and their expected contents: each call on arrays of its own, evaluated at once."""

    def __init__(self, rng, tokens: int = ROOM):
        self.keys, self.values = normal(rng, KEYS, tokens), normal(rng, KEYS, tokens)
        mx.eval(self.keys, self.values)
        self.expected = [np.array(self.keys), np.array(self.values)]

    def _call(self, function, first_arrays, *rest):
        result = function(*first_arrays, self.keys, self.values, *rest)
        alone = [mx.array(a) for a in self.expected]
        expected = function(*first_arrays, *alone, *rest)
        mx.eval(expected, alone)
        self.expected = [np.array(a) for a in alone]
        if isinstance(result, mx.array):
            return result, np.array(expected)
        return list(zip(result, [np.array(a) for a in expected], strict=True))

    def attend(self, heads, first: int):
        return self._call(_ext.attend_with_cache, [heads], ROTARY, first, SCALE)

    def turn(self, heads, first: int):
        return self._call(_ext.turn_into_cache, [heads], ROTARY, first)

    def append(self, keys, values, first: int):
        return self._call(_ext.append_to_cache, [], keys, values, first)

    def buffers(self):
        return list(zip((self.keys, self.values), self.expected, strict=True))


def check(*pairs):
    for i, (a, expected) in enumerate(pairs):
        np.testing.assert_array_equal(np.array(a), expected, err_msg=str(i))


def address(a: mx.array) -> int:
    return np.asarray(memoryview(a)).ctypes.data


def test_a_token_attends_with_its_cache(rng, native):
    cache, heads = Cache(rng), heads_of(rng)
    for first in (0, 5, ROOM - 1):
        queries, *expected = mm.rope_append(heads, cache.keys, cache.values, 64, base=1e4, offset=first)
        mx.eval(queries, expected)
        y = _ext.attend_with_cache(heads, cache.keys, cache.values, ROTARY, first, SCALE)
        k, v = (a[:, :, : first + 1] for a in expected)
        attended = mx.fast.scaled_dot_product_attention(queries, k, v, scale=SCALE).reshape(1, 1, -1)
        assert_near(y, attended, "attention", SUM)
        assert_same_bits(cache.keys, expected[0], "keys")
        assert_same_bits(cache.values, expected[1], "values")


def test_calls_without_room_or_kernel_leave_the_buffers_alone(rng, native):
    cache = Cache(rng)
    buffers = cache.keys, cache.values
    heads, fresh = heads_of(rng), normal(rng, KEYS, 4)
    assert _ext.attend_with_cache(heads, *buffers, ROTARY, ROOM, SCALE) is None
    assert _ext.attend_with_cache(heads_of(rng, 2), *buffers, ROTARY, 0, SCALE) is None
    assert _ext.attend_with_cache(heads[:, :4], *buffers, ROTARY, 0, SCALE) is None  # no queries
    assert _ext.attend_with_cache(heads.astype(mx.float16), *buffers, ROTARY, 0, SCALE) is None
    assert _ext.turn_into_cache(heads_of(rng, 3), *buffers, ROTARY, ROOM - 2) is None
    assert _ext.append_to_cache(*buffers, fresh, fresh, ROOM - 3) is None
    assert _ext.append_to_cache(*buffers, fresh, fresh[:, :1], 0) is None
    assert _ext.append_to_cache(*buffers, fresh, fresh, -1) is None
    check(*cache.buffers())


def test_tokens_go_into_their_cache(rng, native):
    cache = Cache(rng)
    for first in (0, 3, ROOM - 4):
        expected = np.array(cache.keys), np.array(cache.values)
        fresh = normal(rng, KEYS, 4), normal(rng, KEYS, 4)
        seen = _ext.append_to_cache(cache.keys, cache.values, *fresh, first)
        for buffer, whole, new, view in zip((cache.keys, cache.values), expected, fresh, seen, strict=True):
            whole[:, :, first : first + 4] = np.array(new)
            check((buffer, whole), (view, whole[:, :, : first + 4]))
        heads = heads_of(rng, 3)
        queries, *whole = mm.rope_append(heads, cache.keys, cache.values, 64, base=1e4, offset=first)
        turned, *seen = _ext.turn_into_cache(heads, cache.keys, cache.values, ROTARY, first)
        assert_same_bits(turned, queries, "queries")
        for buffer, all_, view in zip((cache.keys, cache.values), whole, seen, strict=True):
            assert_same_bits(buffer, all_, "buffer")
            assert_same_bits(view, all_[:, :, : first + 3], "view")


def test_a_step_ahead(executor, rng):
    """A loop that hands over a step before the last is done, as generation does: one buffer, and the same values."""
    cache = Cache(rng, 40)
    place, waited, attended = address(cache.keys), None, []
    for offset in range(40):
        attended.append(cache.attend(heads_of(rng), offset))
        mx.async_eval(attended[-1][0])
        if waited is not None:
            mx.eval(waited)
        waited = attended[-1][0]
    mx.eval(cache.keys, cache.values)
    assert executor == "gpu" or address(cache.keys) == place
    check(*attended, *cache.buffers())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_steps_at_one_place_in_any_order(executor, rng, order):
    """Attention before a trim must not see keys from after it, though all are evaluated later."""
    for at_once in (True, False):
        cache = Cache(rng)
        steps = [cache.attend(heads_of(rng), 5) for _ in range(3)]
        if at_once:
            mx.eval([steps[i][0] for i in order])
        check(*(steps[i] for i in order), *cache.buffers())


def test_two_steps_from_the_same_buffers(executor, rng):
    cache = Cache(rng)
    twins = [mx.array(cache.keys), mx.array(cache.values)]
    a = cache.attend(heads_of(rng), 5)
    heads = heads_of(rng)
    b = _ext.attend_with_cache(heads, *twins, ROTARY, 5, SCALE)
    mx.eval(a[0], b)
    check(a, *cache.buffers())
    assert not mx.array_equal(twins[0], cache.keys)
    assert_near(twins[1][:, :, 5], heads[:, -KEYS:, 0], "values", 0)


@pytest.mark.parametrize("tokens", [1, 4])
def test_trimmed_caches_of_a_converted_model(rng, tokens):
    """Candidates scored one after the other, and evaluated together."""
    model = mm.nn.convert(tiny.build("llama-3.2-1b", mx.float32, 4))
    prompt = mx.array(rng.integers(1, 300, (1, 6)))
    candidates = [mx.array(rng.integers(1, 300, (1, tokens))) for _ in range(4)]

    def scores(evaluate):
        caches = make_prompt_cache(model)
        model(prompt, cache=caches)
        found = []
        for candidate in candidates:
            found.append(model(candidate, cache=caches))
            trim_prompt_cache(caches, tokens)
            evaluate(found[-1])
        mx.eval(found)
        return [np.array(a) for a in found]

    expected = scores(mx.eval)
    for evaluate in (mx.async_eval, lambda a: None):
        check(*zip(scores(evaluate), expected, strict=True))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same stream", "other stream"])
@pytest.mark.parametrize("pending", ["later", "on its way", "done"])
def test_what_mx_makes_of_a_buffer(executor, rng, pending, elsewhere):
    """An op of mx's takes the memory of an array that nobody else wants."""
    cache = Cache(rng, 2000)
    for first in range(1990, 1998):
        attended = cache.attend(heads_of(rng), first)
        if pending != "later":
            mx.async_eval(attended[0])
        if pending == "done":
            mx.eval(attended[0])
        with mx.stream(mx.new_stream(mx.default_device()) if elsewhere else mx.default_device()):
            cache.keys = mx.exp(cache.keys * 0.125)
            mx.eval(cache.keys)
        check(attended)
        exact = np.exp(cache.expected[0].astype(np.float64) * 0.125)
        np.testing.assert_allclose(np.array(cache.keys), exact, rtol=SUM)
        cache.expected[0] = np.array(cache.keys)


def test_buffers_are_there_for_other_threads(native, rng):
    """A step is evaluated as a whole: its stream belongs to the thread that took it."""
    cache = Cache(rng)

    def work():
        with mx.stream(mx.new_stream(mx.cpu)):
            mx.async_eval(cache.attend(heads_of(rng), 3)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    check(*cache.buffers())


def test_what_somebody_looks_at_stays(executor, rng):
    """Views of a buffer, whether they were evaluated or not, and whether its work is done or not."""
    cache = Cache(rng)
    seen = []
    for offset in range(12):
        attended = cache.attend(heads_of(rng), offset)
        mx.async_eval(attended[0])
        for buffer, expected in cache.buffers():
            seen += [(buffer[:, :, : offset + 1], expected[:, :, : offset + 1]), (mx.array(buffer), expected)]
        if offset % 3 == 0:
            mx.async_eval([a for a, _ in seen[-4:]])
        seen.append(attended)
        seen.append(cache.attend(heads_of(rng), 0))
        if offset % 2 == 0:
            mx.async_eval(seen[-1][0])
    check(*seen, *cache.buffers())


def test_other_names_of_a_buffer_see_a_step(executor, rng):
    """As with mx's own assignment to a part of an array."""
    cache = Cache(rng)
    keys, values = cache.keys, cache.values
    before = mx.array(keys)
    old = np.array(before)
    cache.attend(heads_of(rng), 3)
    check((keys, cache.expected[0]), (values, cache.expected[1]), (before, old))


def test_nothing_keeps_the_memory_of_a_buffer(native, rng):
    """Neither the attention nor the queries of a step, once it is done."""
    cache = Cache(rng, 200_000)
    y, _ = cache.attend(heads_of(rng), 7)
    queries = mm.rope_append(heads_of(rng), cache.keys, cache.values, 64, base=1e4, offset=7)[0]
    mx.eval(y, queries)
    held, size = mx.get_active_memory(), cache.keys.nbytes + cache.values.nbytes
    del cache
    assert held - mx.get_active_memory() == size


def test_compiled_functions_that_use_a_step(native, rng):
    """A graph that was traced runs again, on arrays of its own."""
    cache = Cache(rng)
    y, expected = cache.attend(heads_of(rng), 5)
    keys, wanted = cache.keys, cache.expected[0]
    f = mx.compile(lambda x: (x * y, x + keys))
    for factor in (1.0, 2.0, 3.0):
        product, total = f(mx.array(factor))
        check((product, np.float32(factor) * expected), (total, np.float32(factor) + wanted))
        check(cache.attend(heads_of(rng), 5))
    for evaluated in ([], [y], [keys, cache.values]):
        mx.eval(evaluated)
        f = mx.compile(lambda x: (y, x + cache.keys, x + cache.values))
        result = f(mx.array(1.0))
        check((result[0], expected), *zip(result[1:], (1 + a for a in cache.expected), strict=True))
        y, expected = cache.attend(heads_of(rng), 6)
    f = mx.compile(lambda heads, k, v: (_ext.attend_with_cache(heads, k, v, ROTARY, 3, SCALE), k, v))
    for _ in range(3):
        other, heads = Cache(rng), heads_of(rng)
        results = f(heads, mx.array(other.keys), mx.array(other.values))
        check(*zip(results, [other.attend(heads, 3)[1], *other.expected], strict=True))


@pytest.mark.parametrize("count", [60])
def test_whatever_happens_between(executor, rng, count):
    """Steps, trims, views and mx's own ops in an order drawn anew, evaluated in another."""
    for _ in range(1 if executor == "simulator" else 8):
        cache, pending = Cache(rng, 12), []
        for _ in range(count):
            what = rng.choice(["attend", "attend", "turn", "append", "view", "mx", "eval", "async", "drop", "buffers"])
            some = [i for i in range(len(pending)) if rng.random() < 0.3]
            rng.shuffle(some)
            if what == "attend":
                pending.append(cache.attend(heads_of(rng), int(rng.integers(12))))
            elif what == "turn":
                pending += cache.turn(heads_of(rng, 3), int(rng.integers(10)))
            elif what == "append":
                pending += cache.append(normal(rng, KEYS, 2), normal(rng, KEYS, 2), int(rng.integers(11)))
            elif what == "view":
                end = int(rng.integers(1, 12))
                pending += [(a[:, :, :end], b[:, :, :end]) for a, b in cache.buffers()]
            elif what == "mx":
                cache.values = -cache.values
                cache.expected[1] = -cache.expected[1]
            elif what == "eval":
                mx.eval([pending[i][0] for i in some])
            elif what == "async":
                mx.async_eval([pending[i][0] for i in some])
            elif what == "drop":
                pending = [pending[i] for i in range(len(pending)) if i not in some]
            else:
                mx.async_eval(cache.keys, cache.values)
        rng.shuffle(pending)
        check(*pending, *cache.buffers())


def test_a_cache_that_someone_else_patched_too(rng, monkeypatch):
    """Another's wrapper around the patched method is called, and calls ours."""
    fresh = normal(rng, KEYS, 1)
    with mm.patched(strict=True):
        inner, calls = KVCache.update_and_fetch, []

        def outer(self, *arrays):
            calls.append(len(arrays))
            return inner(self, *arrays)

        monkeypatch.setattr(KVCache, "update_and_fetch", outer)
        cache = KVCache()
        for _ in range(3):
            keys, values = cache.update_and_fetch(fresh, -fresh)
        assert calls == [2, 2, 2] and cache.offset == 3
        assert_same_bits(keys, mx.concatenate([fresh] * 3, axis=2), "keys")
        monkeypatch.undo()
    cache.update_and_fetch(fresh, -fresh)
    assert inner(cache, fresh, -fresh)[1].shape[2] == cache.offset == 5


def test_threads_go_on_from_copies_of_a_cache(native, rng):
    """As requests that share a prompt do: several at once remove the rest of a step from MLX's graph."""
    heads, wrong = heads_of(rng), []

    def work(layers):
        with mx.stream(mx.new_stream(mx.cpu)):
            for buffers, expected in layers:
                results = [_ext.attend_with_cache(heads, *map(mx.array, buffers), ROTARY, 2, SCALE) for _ in range(3)]
                mx.eval(results)
                wrong.extend(a for a in results if not np.array_equal(np.array(a), expected))

    for _ in range(20):
        layers = []
        for _ in range(20):
            cache = Cache(rng, 4)
            mx.eval(cache.attend(heads, 1)[0])
            buffers = cache.keys, cache.values
            alone = [mx.array(a) for a in cache.expected]
            layers.append((buffers, np.array(_ext.attend_with_cache(heads, *alone, ROTARY, 2, SCALE))))
        threads = [threading.Thread(target=work, args=(layers,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_queries_that_nobody_wants_are_there_until_they_are_written():
    """Freed memory goes back to the system at once here: a write to it ends the process."""
    steps = """
import mlx.core as mx
import mlx_mittens as mm

mx.set_default_device(mx.cpu)
mx.set_cache_limit(0)
for _ in range(2000):
    keys, values = mx.zeros((1, 1, 12, 8)), mx.zeros((1, 1, 12, 8))
    for position in range(4):
        heads = mx.ones((1, 4, 1, 8))
        _, keys, values = mm.rope_append(heads, keys, values, 8, base=1e4, offset=position)
    mx.eval(keys, values)
"""
    ran = subprocess.run([sys.executable, "-c", steps], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
