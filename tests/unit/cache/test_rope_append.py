"""Rotary embedding and the append to a cache: values, memory, transformations, bad input."""

import copy
import functools
import math

import mlx.core as mx
import numpy as np
import pytest
from helpers import appends
from helpers.appends import case_of
from helpers.support import assert_same_bits
from helpers.tolerances import FLOAT16_TWICE, SUM, SUMS, assert_near, assert_right, of_roundings, units

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.specs import reference

OP = specs.get("rope_append")


draw, run = functools.partial(appends.draw, OP), functools.partial(appends.run, OP)


def test_values(dtype, executor, rng):
    for case in OP.tests:
        assert_right(OP, case, draw(rng, case, dtype))


def test_many_tokens_and_batches(dtype, native, rng):
    for shape in ((3, 4, 2, 517, 64), (1, 2, 1, 1300, 128), (70, 1, 1, 3, 64)):
        for options in ({}, {"base": None, "eps": 1e-5}):
            case = case_of(*shape, **options)
            assert_right(OP, case, draw(rng, case, dtype))


def test_far_positions(dtype, executor, rng):
    """Angles of a hundred thousand radians are as exact as their float32 product."""
    for base, offset in ((1e4, 4000), (5e5, 131000), (1e4, 1000000)):
        heads, keys, values, *_ = draw(rng, case_of(1, 2, 1, 2, 64), dtype)
        y, *_ = mm.rope_append(heads, keys, values, 64, base=base, offset=offset, start=0)
        value, _, inner = reference.rope(specs.widen(heads[:, :2]), 64, base, offset)
        error = specs.error(y, specs.Exact(value, inner=inner))
        assert error <= units(4 if dtype == mx.float32 else 1, dtype), (base, offset, error)


def test_scale_and_start(dtype, executor, rng):
    heads, keys, values, *_ = draw(rng, case_of(2, 3, 2, 2, 64), dtype)
    y, all_keys, all_values = mm.rope_append(heads, keys, values, 64, base=1e4, scale=0.25, offset=12, start=5)
    twin = lambda a: mx.fast.rope(
        a.astype(mx.float32), 64, traditional=False, base=1e4, scale=0.25, offset=12
    )  # fmt: skip
    assert_near(y, twin(heads[:, :3]), "queries", of_roundings(dtype))
    assert_near(all_keys[:, :, 5:7], twin(heads[:, 3:5]), "keys", of_roundings(dtype))
    assert_same_bits(all_values[:, :, 5:7], heads[:, 5:], "values")
    for buffer, result in ((keys, all_keys), (values, all_values)):
        assert_same_bits(result[:, :, :5], buffer[:, :, :5], "before")
        assert_same_bits(result[:, :, 7:], buffer[:, :, 7:], "after")


@pytest.mark.parametrize("options", [{}, {"base": None}, {"eps": 1e-5}, {"traditional": True}], ids=str)
def test_an_offset_for_each_row(dtype, executor, rng, options):
    """A row has the bits of a call with its offset; before left padding ends offsets are negative."""
    case = case_of(3, 2, 1, 2, 64, **options)
    heads, keys, values, freqs, query_norm, key_norm = draw(rng, case, dtype)
    arguments = OP.arguments(case)
    rest = {
        "base": arguments["base"],
        "freqs": freqs,
        "traditional": arguments["traditional"],
        "query_norm": query_norm,
        "key_norm": key_norm,
    }
    rest |= {"start": 4, "eps": arguments["eps"] or 1e-6}
    offsets = [9, -3, 500]
    rows = mm.rope_append(heads, keys, values, 64, offset=mx.array(offsets), **rest)
    for i, offset in enumerate(offsets):
        alone = mm.rope_append(*(a[i : i + 1] for a in (heads, keys, values)), 64, offset=offset, **rest)
        for name, a, b in zip(("queries", "keys", "values"), rows, alone, strict=True):
            assert_same_bits(a[i : i + 1], b, name)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_an_array_of_one_offset_is_for_all_rows(executor, rng, batch, shape):
    heads, keys, values, *_ = draw(rng, case_of(batch, 2, 1, 2, 64))
    rest = {"base": 1e4, "start": 4}
    arrays = mm.rope_append(heads, keys, values, 64, offset=mx.array(9).reshape(shape), **rest)
    for name, a, b in zip(
        ("queries", "keys", "values"), arrays, mm.rope_append(heads, keys, values, 64, offset=9, **rest), strict=True
    ):
        assert_same_bits(a, b, name)


def test_an_offset_for_each_row_is_composed(native, rng):
    """Under transformations too."""
    heads, keys, values, *_ = draw(rng, case_of(3, 2, 1, 2, 64))
    offsets = mx.array([9, -3, 40])

    def queries(heads):
        return mm.rope_append(heads, keys, values, 64, base=1e4, offset=offsets, start=4)[0]

    twin = lambda heads: mx.fast.rope(heads[:, :2], 64, traditional=False, base=1e4, scale=1.0, offset=offsets)
    assert_near(queries(heads), twin(heads), "queries", SUM)
    slopes = [mx.grad(lambda heads: (f(heads) ** 3).sum())(heads) for f in (queries, twin)]
    assert_near(*slopes, "gradient", SUMS)


def test_the_last_room_and_different_capacities(dtype, executor, rng):
    heads, keys, values, *_ = draw(rng, case_of(1, 2, 1, 3, 64), dtype)
    keys, values = keys[:, :, :10], values[:, :, :11]
    results = mm.rope_append(heads, keys, values, 64, base=1e4, offset=7)
    assert [a.shape[2] for a in results] == [3, 10, 11]
    whole = mm.rope_append(heads, mx.contiguous(keys), mx.contiguous(values), 64, base=1e4, offset=7)
    for name, a, b in zip(("queries", "keys", "values"), results, whole, strict=True):
        assert_same_bits(a, b, name)


VIEWS = {
    "tokens first": lambda a: mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2),
    "heads of more": lambda a: mx.concatenate([a, a], axis=1)[:, : a.shape[1]],
    "every second column": lambda a: mx.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: mx.contiguous(a[:, :, ::-1])[:, :, ::-1],
    "odd offset": lambda a: mx.concatenate([a.reshape(-1)[:1], a.reshape(-1)])[1:].reshape(a.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(dtype, executor, rng, view):
    case = case_of(2, 3, 2, 3, 66, eps=1e-5)
    arrays = draw(rng, case, dtype)
    viewed = [VIEWS[view](a) for a in arrays[:3]] + arrays[3:]
    viewed[4:] = [mx.repeat(a, 2)[::2] for a in arrays[4:]]
    mx.eval([a for a in viewed if a is not None])
    for i, (a, b) in enumerate(zip(run(case, viewed), run(case, arrays), strict=True)):
        assert_same_bits(a, b, f"output {i}")


def address(a: mx.array) -> int:
    return np.asarray(memoryview(a)).ctypes.data


def test_buffers_are_updated_in_place(native, rng):
    """But not buffers that something else still refers to, which keep their contents."""
    heads, keys, values, *_ = draw(rng, case_of(1, 2, 1, 1, 64))
    keys, values = keys + 0, values + 0
    mx.eval(keys, values)
    places = address(keys), address(values)
    for offset in range(4):
        q, keys, values = mm.rope_append(heads, keys, values, 64, base=1e4, offset=offset)
        mx.eval(q, keys, values)
        assert (address(keys), address(values)) == places
    before = mx.array(np.array(keys))
    q, new_keys, values = mm.rope_append(heads, keys, values, 64, base=1e4, offset=9)
    mx.eval(q, new_keys, values)
    assert address(new_keys) != places[0] and address(values) == places[1]
    assert_same_bits(keys, before, "keys")
    assert not mx.array_equal(new_keys[:, :, 9], keys[:, :, 9])


def test_the_same_buffer_for_both(executor, rng):
    heads, keys, *_ = draw(rng, case_of(1, 2, 1, 1, 64))
    keys = keys + 0
    expected = mm.rope_append(heads, keys, mx.array(np.array(keys)), 64, base=1e4, offset=3)
    mx.eval(expected)
    for a, b in zip(mm.rope_append(heads, keys, keys, 64, base=1e4, offset=3), expected, strict=True):
        assert_same_bits(a, b, "shared")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_output_alone(executor, rng, which):
    case = case_of(1, 4, 2, 2, 64)
    arrays = draw(rng, case)
    all_ = run(case, arrays)
    mx.eval(all_)
    assert_same_bits(run(case, arrays)[which], all_[which], f"output {which}")


def test_a_cache_over_many_steps(dtype, executor, rng):
    """As a model uses it: each step's buffers are the next one's."""
    ours = twin = [mx.zeros((1, 2, 12, 64), dtype), mx.zeros((1, 2, 12, 64), dtype)]
    exact = case_of(1, 2, 2, 1, 64)
    for offset in range(12):
        heads = draw(rng, exact, dtype)[0]
        _, *ours = mm.rope_append(heads, *ours, 64, base=1e4, offset=offset)
        _, *twin = OP.twin(heads, *twin, None, None, None, **{**OP.options, "offset": offset})
    for a, b in zip(ours, twin, strict=True):
        assert_near(a, b, "buffers", of_roundings(dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_special_values_stay_in_their_head(dtype, executor, rng, value):
    for case in (case_of(1, 3, 1, 2, 66), case_of(1, 3, 1, 2, 66, eps=1e-5)):
        arrays = draw(rng, case, dtype)
        clean = run(case, arrays)
        for column in (3, 65):
            heads = mx.array(arrays[0])
            heads[0, 1, 1, column] = value
            touched = [heads, *arrays[1:]]
            for i, (a, b, twin) in enumerate(
                zip(run(case, touched), clean, specs.run(OP, OP.twin, case, touched), strict=True)
            ):
                a, b, twin = (specs.widen(x) for x in (a, b, twin))
                if i == 0:
                    np.testing.assert_array_equal(np.isfinite(a), np.isfinite(twin))
                    a, b = np.delete(a, 1, axis=1), np.delete(b, 1, axis=1)
                np.testing.assert_array_equal(a, b)


def test_largest_values(executor, rng):
    """Squares overflow float16, not float32."""
    case = case_of(1, 2, 1, 2, 64, eps=1e-5)
    arrays = draw(rng, case)
    arrays[0] = 4e4 * mx.array(rng.uniform(-1, 1, arrays[0].shape).astype(np.float32))
    assert_right(OP, case, [None if a is None else a.astype(mx.float16) for a in arrays])


@pytest.mark.parametrize("shape", [(0, 3, 1, 2, 64), (1, 3, 1, 0, 64), (2, 3, 0, 2, 64)], ids=str)
def test_empty(dtype, executor, rng, shape):
    case = case_of(*shape)
    arrays = draw(rng, case, dtype)
    queries, keys, values = run(case, arrays)
    assert queries.shape == (shape[0], 3, *shape[3:]) and queries.dtype == dtype
    assert_same_bits(keys, arrays[1], "keys")
    assert_same_bits(values, arrays[2], "values")
    if queries.size:
        twin = mx.fast.rope(arrays[0], 64, traditional=False, base=1e4, scale=1.0, offset=7)
        assert_near(queries, twin, "queries", of_roundings(dtype))


def test_gradients(native, rng):
    for case in (
        case_of(2, 3, 2, 3, 66),
        case_of(1, 2, 1, 2, 64, base=None, eps=1e-5),
        case_of(1, 2, 1, 2, 64, traditional=True),
    ):
        arrays = draw(rng, case)
        there = [i for i, a in enumerate(arrays) if a is not None and OP.parameters[i][0] != "freqs"]

        def of(function, case=case, arrays=arrays, there=there):
            def f(*these):
                filled = list(arrays)
                for i, a in zip(there, these):
                    filled[i] = a
                return specs.run(OP, function, case, filled)

            return f

        primals = [arrays[i] for i in there]
        cotangents = [mx.array(rng.standard_normal(a.shape).astype(np.float32)) for a in run(case, arrays)]
        tangents = [mx.array(rng.standard_normal(a.shape).astype(np.float32)) for a in primals]
        ours, twins = (mx.vjp(of(f), primals, cotangents)[1] for f in (OP.ours, OP.twin))
        for i, a, b in zip(there, ours, twins, strict=True):
            assert_near(a, b, f"gradient of {OP.parameters[i][0]}", SUMS)
        for a, b in zip(*(mx.jvp(of(f), primals, tangents)[1] for f in (OP.ours, OP.twin)), strict=True):
            assert_near(a, b, "jvp", SUMS)


def test_vmap_and_compile(executor, rng):
    case = case_of(1, 3, 1, 2, 64)
    several = [draw(rng, case)[:3] for _ in range(3)]
    f = mx.compile(lambda *arrays: mm.rope_append(*arrays, 64, base=1e4, offset=4))
    each = [f(*arrays) for arrays in several]
    mapped = mx.vmap(f)(*(mx.stack(group) for group in zip(*several)))
    for i in range(3):
        for a, b in zip(mapped, each[i], strict=True):
            assert_near(a[i], b, "vmap", SUM)
    for a, b in zip(f(*several[0]), mm.rope_append(*several[0], 64, base=1e4, offset=4), strict=True):
        assert_same_bits(a, b, "compiled")


def test_other_types_fall_back_to_mx(lenient, native, rng):
    heads, keys, values, *_ = draw(rng, case_of(1, 2, 1, 1, 64))
    for arrays, reason in (
        ((heads.astype(mx.float16), keys, values), "buffers of another type"),
        ((heads.astype(mx.float64), keys, values), "float64"),
    ):
        mm.stats(reset=True)
        with mx.stream(mx.cpu):
            results = mm.rope_append(*arrays, 64, base=1e4, offset=2)
            assert_near(results[1].astype(mx.float32), mm.rope_append(heads, keys, values, 64, base=1e4, offset=2)[1],
                        reason, FLOAT16_TWICE)  # fmt: skip
        assert [a.dtype for a in results] == [arrays[0].dtype, keys.dtype, values.dtype]
        assert reason in str(mm.stats())
    weight = mx.ones((64,), mx.float16)
    y = mm.rope_append(heads, keys, values, 64, base=1e4, offset=2, query_norm=weight, key_norm=weight)[0]
    wide = weight.astype(mx.float32)
    wider = mm.rope_append(heads, keys, values, 64, base=1e4, offset=2, query_norm=wide, key_norm=wide)
    assert_near(y, wider[0], "norms")


def test_a_copy_of_a_rotary_is_one(rng):
    rotary = _ext.Rotary(64, 1e4)
    heads, keys, values, *_ = draw(rng, case_of(1, 2, 1, 1, 64))
    with mx.stream(mx.cpu):
        a, b = (_ext.rope_append(heads, keys, values, r, 3)[0] for r in (rotary, copy.deepcopy(rotary)))
        assert_same_bits(a, b, "copy")


HEADS, KEYS = mx.zeros((2, 8, 3, 64)), mx.zeros((2, 2, 9, 64))
BAD = {
    "heads of three dimensions": ({"heads": HEADS[0]}, ["heads", "(8,3,64)", "four dimensions"]),
    "keys of three dimensions": ({"keys": KEYS[0]}, ["keys", "(2,9,64)", "four dimensions"]),
    "another batch": ({"values": KEYS[:1]}, ["values", "(1,2,9,64)", "(2,8,3,64)", "batch"]),
    "another width": ({"keys": KEYS[..., :32]}, ["keys", "(2,2,9,32)", "width"]),
    "other heads": ({"values": KEYS[:, :1]}, ["keys has 2 heads", "values has 1"]),
    "no queries": ({"heads": HEADS[:, :4]}, ["4 heads", "more than 4"]),
    "no room": ({"offset": 7}, ["room for 9", "3 of them from 7"]),
    "no room at start": ({"start": 7}, ["room for 9", "3 of them from 7"]),
    "negative start": ({"start": -1}, ["from -1"]),
    "offsets of other rows": ({"offset": mx.zeros(3, mx.int32), "start": 0}, ["offset has shape (3)", "(2), one for"]),
    "an offset of two axes": ({"offset": mx.array([[1]]), "start": 0}, ["offset has shape (1,1)", "one number"]),
    "offsets without a start": ({"offset": mx.zeros(2, mx.int32)}, ["offset is an array", "start is not given"]),
    "odd dims": ({"dims": 7}, ["dims is 7", "even"]),
    "no dims": ({"dims": 0}, ["dims is 0"]),
    "too many dims": ({"dims": 66}, ["dims is 66", "width of 64"]),
    "neither": ({"base": None}, ["neither base nor freqs"]),
    "both": ({"freqs": mx.ones((32,))}, ["both base and freqs"]),
    "base": ({"base": -1.0}, ["base is -1"]),
    "scale": ({"scale": math.inf}, ["scale is inf"]),
    "frequencies": ({"base": None, "freqs": mx.ones((31,))}, ["freqs has shape (31)", "32 elements"]),
    "one norm": ({"query_norm": mx.ones((64,))}, ["query_norm is given without key_norm"]),
    "other norm": ({"key_norm": mx.ones((64,))}, ["key_norm is given without query_norm"]),
    "norm's length": ({"query_norm": mx.ones((64,)), "key_norm": mx.ones((63,))}, ["key_norm", "63", "64"]),
    "eps": ({"query_norm": mx.ones((64,)), "key_norm": mx.ones((64,)), "eps": -1.0}, ["eps is -1"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    changes, words = BAD[what]
    options = {"heads": HEADS, "keys": KEYS, "values": KEYS, "dims": 64, "base": 1e4, "offset": 0, **changes}
    with pytest.raises(ValueError) as caught:
        mm.rope_append(**options)
    for word in ("[rope_append]", *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_bad_type():
    with pytest.raises(mm.DtypeError, match=r"\[rope_append\] heads has dtype int32"):
        mm.rope_append(HEADS.astype(mx.int32), KEYS, KEYS, 64, base=1e4, offset=0)
    with pytest.raises(mm.DtypeError, match=r"\[rope_append\] offset has dtype float32: expected an integer"):
        mm.rope_append(HEADS, KEYS, KEYS, 64, base=1e4, offset=mx.zeros(2), start=0)
