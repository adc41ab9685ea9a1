"""Rotary embedding and the append to a quantized cache: mx.quantize's words, memory, transformations, bad input."""

import functools
import math

import mlx.core as mx
import numpy as np
import pytest
from helpers import appends
from helpers.appends import case_of
from helpers.support import assert_same_bits
from helpers.tolerances import SUMS, assert_near, assert_right

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.ops.custom import Output, launch
from mlx_mittens.peer import mlx_sources

OP = specs.get("quantized_rope_append")
PARTS = ("words", "scales", "biases")
FORMATS = [(64, 4), (64, 8), (32, 2), (32, 3), (128, 3), (64, 5), (32, 6), (128, 6), (128, 2), (128, 8)]
draw, run = functools.partial(appends.draw, OP), functools.partial(appends.run, OP)


def normal(rng, shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def empty_cache(batch, heads, capacity, width, group_size, bits, dtype):
    shape = (batch, heads, capacity)
    groups = (*shape, width // group_size)
    return mx.zeros((*shape, width * bits // 32), mx.uint32), mx.zeros(groups, dtype), mx.zeros(groups, dtype)


def quantized_by_mx(a: mx.array, group_size: int, bits: int, executor: str) -> list[mx.array]:
    """As MLX packs it there: in the simulator by its kernel for Apple GPUs."""
    if executor != "simulator":
        return mx.quantize(a, group_size, bits)
    a = mx.contiguous(a)
    file, kernel = mlx_sources.instance("quantized", "affine_quantize", mlx_sources.TYPES[a.dtype], group_size, bits)
    groups = (*a.shape[:-1], a.shape[-1] // group_size)
    outputs = [Output((*a.shape[:-1], a.shape[-1] * bits // 8), mx.uint8), *2 * [Output(groups, a.dtype)]]
    arguments = {0: a, **dict(enumerate(outputs, 1))}
    packed, scales, biases = launch(file, kernel, arguments, [math.prod(groups)], [32])
    return [packed.view(mx.uint32), scales, biases]


def assert_packed(triple, a: mx.array, group_size: int, bits: int, executor: str, what: str):
    for part, ours, theirs in zip(PARTS, triple, quantized_by_mx(a, group_size, bits, executor), strict=True):
        assert_same_bits(ours, theirs, f"{what}, {part}")


def test_values(dtype, executor, rng):
    for case in OP.tests:
        assert_right(OP, case, draw(rng, case, dtype))


@pytest.mark.parametrize("group_size, bits", FORMATS)
def test_words_are_those_of_mx(dtype, executor, rng, group_size, bits):
    """Byte for byte, of the keys that rope_append writes; around them nothing changes."""
    tokens, start, capacity, width = 3, 5, 9, 128 if group_size == 128 else 64
    norms = [1 + normal(rng, (width,), dtype) / 4 for _ in range(2)]
    for options in (
        {"base": 1e4, "offset": 5},
        {"base": 1e4, "offset": 40, "traditional": True},
        {"freqs": mx.exp(normal(rng, (width // 4,))), "offset": 7, "dims": width // 2},
        {"base": 1e4, "offset": mx.array([9, -3]), "query_norm": norms[0], "key_norm": norms[1], "eps": 1e-5},
    ):
        heads = normal(rng, (2, tokens, 7, width), dtype).swapaxes(1, 2)
        turn = {"dims": width, "start": start, **options}
        plain = [mx.zeros((2, 2, capacity, width), dtype) for _ in range(2)]
        queries, *plain = mm.rope_append(heads, *plain, **turn)
        before = [mx.quantize(normal(rng, (2, 2, capacity, width), dtype), group_size, bits) for _ in range(2)]
        copies = [[mx.array(np.array(a.astype(mx.float32))).astype(a.dtype) for a in t[1:]] for t in before]
        copies = [[mx.array(np.array(t[0])), *rest] for t, rest in zip(before, copies)]
        ours, *caches = mm.quantized_rope_append(heads, *map(tuple, before), **turn, group_size=group_size, bits=bits)
        mx.eval(ours, caches)
        assert_same_bits(ours, queries, "queries")
        new = slice(start, start + tokens)
        for what, cache, old, buffer in zip(("keys", "values"), caches, copies, plain, strict=True):
            assert_packed([a[:, :, new] for a in cache], buffer[:, :, new], group_size, bits, executor, what)
            for part, a, b in zip(PARTS, cache, old, strict=True):
                assert_same_bits(a[:, :, :start], b[:, :, :start], f"{what} before, {part}")
                assert_same_bits(a[:, :, start + tokens :], b[:, :, start + tokens :], f"{what} after, {part}")


GROUPS = {
    "of one sign": lambda rng: -1 - rng.random(64),
    "of the other": lambda rng: 1 + rng.random(64),
    "of zeros": lambda rng: np.zeros(64),
    "of one number": lambda rng: np.full(64, -2.5),
    "tiny": lambda rng: 1e-7 * rng.standard_normal(64),
    "between two integers": lambda rng: rng.integers(-15, 16, 64) / 2,
    "with an outlier": lambda rng: np.where(np.arange(64) == 17, 300, rng.standard_normal(64)),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_groups_on_the_edge(dtype, executor, rng, bits, group):
    """Position 0 turns nothing."""
    heads = normal(rng, (1, 3, 1, 64), dtype)
    heads[0, 1, 0] = mx.array(GROUPS[group](rng).astype(np.float32)).astype(dtype)
    heads[0, 2, 0] = mx.array(GROUPS[group](rng).astype(np.float32)).astype(dtype)
    caches = [empty_cache(1, 1, 4, 64, 64, bits, dtype) for _ in range(2)]
    _, *caches = mm.quantized_rope_append(heads, *caches, 64, base=1e4, offset=0, start=2, bits=bits)
    for what, cache, head in zip(("keys", "values"), caches, (1, 2), strict=True):
        assert_packed([a[:, :, 2:3] for a in cache], heads[:, head : head + 1], 64, bits, executor, what)


def test_many_tokens_and_batches(dtype, native, rng):
    for shape in ((3, 4, 2, 517, 64), (1, 2, 1, 1300, 128), (70, 1, 1, 3, 64)):
        for options in ({"bits": 4}, {"base": None, "eps": 1e-5, "bits": 3}):
            case = case_of(*shape, **options)
            assert_right(OP, case, draw(rng, case, dtype))


def test_nvidia_gpus_take_the_same_kernel(dtype, rng, nvidia_kernels):
    for case in OP.tests:
        assert_right(OP, case, draw(rng, case, dtype))
    kernels = {name for name in nvidia_kernels() if not name.startswith("copy")}
    name = str(dtype).removeprefix("mlx.core.")
    assert kernels == {f"quantized_rope_append_{name}", f"quantized_rope_append_normed_{name}"}


VIEWS = {
    "tokens first": lambda a: mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2),
    "heads of more": lambda a: mx.concatenate([a, a], axis=1)[:, : a.shape[1]],
    "every second column": lambda a: mx.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: mx.contiguous(a[:, :, ::-1])[:, :, ::-1],
    "odd offset": lambda a: mx.concatenate([a.reshape(-1)[:1], a.reshape(-1)])[1:].reshape(a.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(dtype, executor, rng, view):
    case = case_of(2, 3, 2, 3, 64, eps=1e-5, bits=6)
    arrays = draw(rng, case, dtype)
    viewed = [VIEWS[view](a) for a in arrays[:7]] + arrays[7:]
    mx.eval([a for a in viewed if a is not None])
    for i, (a, b) in enumerate(zip(run(case, viewed), run(case, arrays), strict=True)):
        assert_same_bits(a, b, f"output {i}")


def address(a: mx.array) -> int:
    return np.asarray(memoryview(a)).ctypes.data


def test_buffers_are_updated_in_place(native, rng):
    """But not buffers that something else still refers to, which keep their contents."""
    case = case_of(1, 2, 1, 1, 64, bits=4)
    heads, *buffers = (a for a in draw(rng, case) if a is not None)
    buffers = [a + 0 for a in buffers]
    mx.eval(buffers)
    places = [address(a) for a in buffers]
    for offset in range(4):
        queries, keys, values = mm.quantized_rope_append(
            heads, tuple(buffers[:3]), tuple(buffers[3:]), 64, base=1e4, offset=offset, bits=4
        )
        buffers = [*keys, *values]
        del keys, values
        mx.eval(queries, buffers)
        assert [address(a) for a in buffers] == places
    held = buffers[1]
    before = np.array(held)
    queries, keys, values = mm.quantized_rope_append(
        heads, tuple(buffers[:3]), tuple(buffers[3:]), 64, base=1e4, offset=9, bits=4
    )
    del buffers
    mx.eval(queries, keys, values)
    assert address(keys[1]) != places[1]
    assert [address(a) for i, a in enumerate([*keys, *values]) if i != 1] == [p for i, p in enumerate(places) if i != 1]
    np.testing.assert_array_equal(np.array(held), before)


def test_a_cache_over_many_steps(dtype, executor, rng):
    """As a model uses it, up to its last room: each step's buffers are the next one's."""
    caches = [empty_cache(2, 2, size, 64, 32, 3, dtype) for size in (12, 13)]
    plain = [mx.zeros((2, 2, size, 64), dtype) for size in (12, 13)]
    for offset in range(12):
        heads = normal(rng, (2, 6, 1, 64), dtype)
        _, *caches = mm.quantized_rope_append(heads, *caches, 64, base=1e4, offset=offset, group_size=32, bits=3)
        _, *plain = mm.rope_append(heads, *plain, 64, base=1e4, offset=offset)
    for what, cache, a in zip(("keys", "values"), caches, plain, strict=True):
        assert_packed([b[:, :, :12] for b in cache], a[:, :, :12], 32, 3, executor, what)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_special_values_stay_in_their_head(dtype, executor, rng, value):
    case = case_of(1, 2, 2, 2, 64, bits=4)
    arrays = draw(rng, case, dtype)
    clean = run(case, arrays)
    heads = mx.array(arrays[0])
    heads[0, 2, 1, 3] = value  # of keys
    heads[0, 5, 0, 60] = value  # of values
    touched = run(case, [heads, *arrays[1:]])
    offset = OP.arguments(case)["offset"]
    assert_same_bits(touched[0], clean[0], "queries")
    for first, (head, token) in ((1, (0, 1)), (4, (1, 0))):
        for part, a, b in zip(PARTS, touched[first : first + 3], clean[first : first + 3], strict=True):
            a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
            a[0, head, offset + token] = b[0, head, offset + token] = 0
            np.testing.assert_array_equal(a, b, err_msg=part)


@pytest.mark.parametrize("shape", [(0, 3, 1, 2, 64), (1, 3, 1, 0, 64), (2, 3, 0, 2, 64)], ids=str)
def test_empty(dtype, executor, rng, shape):
    case = case_of(*shape, bits=4)
    arrays = draw(rng, case, dtype)
    queries, *buffers = run(case, arrays)
    assert queries.shape == (shape[0], 3, *shape[3:]) and queries.dtype == dtype
    for i, (a, b) in enumerate(zip(buffers, arrays[1:7], strict=True)):
        assert_same_bits(a, b, f"buffer {i}")


def test_gradients(native, rng):
    """Those of mx.quantize: of queries, scales and biases."""
    for case in (case_of(2, 3, 2, 3, 64, bits=4), case_of(1, 2, 1, 2, 64, base=None, eps=1e-5, bits=8)):
        arrays = draw(rng, case)
        there = [i for i, a in enumerate(arrays) if a is not None and a.dtype == mx.float32 and i != 7]

        def of(function, case=case, arrays=arrays, there=there):
            def loss(*these):
                filled = list(arrays)
                for i, a in zip(there, these):
                    filled[i] = a
                results = specs.run(OP, function, case, filled)
                return sum((a**3).sum() for a in results if a.dtype == mx.float32)

            return loss

        primals = [arrays[i] for i in there]
        ours, twins = (mx.grad(of(f), list(range(len(there))))(*primals) for f in (OP.ours, OP.twin))
        for i, a, b in zip(there, ours, twins, strict=True):
            assert_near(a, b, f"gradient of {OP.parameters[i][0]}", SUMS)


def test_vmap_and_compile(executor, rng):
    case = case_of(1, 3, 1, 2, 64, bits=4)
    several = [draw(rng, case)[:7] for _ in range(3)]

    def f(heads, *buffers):
        queries, keys, values = mm.quantized_rope_append(
            heads, buffers[:3], buffers[3:], 64, base=1e4, offset=4, bits=4
        )
        return queries, *keys, *values

    each = [f(*arrays) for arrays in several]
    mapped = mx.vmap(f)(*(mx.stack(group) for group in zip(*several)))
    for i, one in enumerate(each):
        for a, b in zip(OP.compared(case, [a[i] for a in mapped]), OP.compared(case, one), strict=True):
            assert_near(a, b, "vmap", SUMS)
    for a, b in zip(mx.compile(f)(*several[0]), each[0], strict=True):
        assert_same_bits(a, b, "compiled")
    nothing = mx.vmap(f)(*(mx.stack(group)[:0] for group in zip(*several)))
    assert [a.dtype for a in nothing] == [a.dtype for a in each[0]]
    assert [a.shape for a in nothing] == [(0, *a.shape) for a in each[0]]


def test_other_types_fall_back_to_mx(lenient, native, rng):
    case = case_of(1, 2, 1, 1, 64, bits=4)
    heads, *buffers = (a for a in draw(rng, case) if a is not None)
    mm.stats(reset=True)
    results = run(case, [heads.astype(mx.float16), *buffers, None, None, None])
    assert [a.dtype for a in results] == [mx.float16, *(a.dtype for a in buffers)]
    assert "buffers of another type" in str(mm.stats())


HEADS = mx.zeros((2, 8, 3, 64))
CACHE = empty_cache(2, 2, 9, 64, 64, 4, mx.float32)


def changed(**parts) -> tuple[mx.array, mx.array, mx.array]:
    return tuple(parts.get(name, a) for name, a in zip(PARTS, CACHE, strict=True))


BAD = {
    "heads of three dimensions": ({"heads": HEADS[0]}, ["heads", "(8,3,64)", "four dimensions"]),
    "words of three dimensions": ({"keys": changed(words=CACHE[0][0])}, ["keys has", "(2,9,8)", "four dimensions"]),
    "another batch": ({"values": tuple(a[:1] for a in CACHE)}, ["values", "(1,2,9,8)", "(2,8,3,64)", "batch"]),
    "other bits": ({"bits": 8}, ["keys has words of shape (2,2,9,8)", "16 words a row", "8 bits"]),
    "other groups": ({"group_size": 32}, ["scales of (2,2,9,1)", "(2,2,9,2)", "groups of 32"]),
    "groups of more than a head": ({"group_size": 128}, ["(2,8,3,64)", "multiple of the group size 128"]),
    "biases of another shape": ({"keys": changed(biases=mx.zeros((2, 2, 8, 1)))}, ["biases of (2,2,8,1)"]),
    "bits that there are not": ({"bits": 7}, ["bits", "7"]),
    "groups that there are not": ({"group_size": 48}, ["group_size", "48"]),
    "other heads": ({"values": tuple(a[:, :1] for a in CACHE)}, ["keys has 2 heads", "values has 1"]),
    "no queries": ({"heads": HEADS[:, :4]}, ["4 heads", "more than 4"]),
    "no room": ({"offset": 7}, ["room for 9", "3 of them from 7"]),
    "negative start": ({"start": -1}, ["from -1"]),
    "offsets without a start": ({"offset": mx.zeros(2, mx.int32)}, ["offset is an array", "start is not given"]),
    "odd dims": ({"dims": 7}, ["dims is 7", "even"]),
    "neither": ({"base": None}, ["neither base nor freqs"]),
    "one norm": ({"query_norm": mx.ones((64,))}, ["query_norm is given without key_norm"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    changes, words = BAD[what]
    options = {"heads": HEADS, "keys": CACHE, "values": CACHE, "dims": 64, "base": 1e4, "offset": 0, "bits": 4}
    with pytest.raises(ValueError) as caught:
        mm.quantized_rope_append(**{**options, **changes})
    for word in ("[quantized_rope_append]", *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_bad_type():
    call = {"dims": 64, "base": 1e4, "offset": 0, "bits": 4}
    with pytest.raises(mm.DtypeError, match=r"\[quantized_rope_append\] heads has dtype int32"):
        mm.quantized_rope_append(HEADS.astype(mx.int32), CACHE, CACHE, **call)
    with pytest.raises(mm.DtypeError, match=r"\[quantized_rope_append\] keys has words of dtype int32"):
        mm.quantized_rope_append(HEADS, changed(words=CACHE[0].astype(mx.int32)), CACHE, **call)
