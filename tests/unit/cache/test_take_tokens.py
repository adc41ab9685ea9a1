"""What only take_tokens promises."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw
from helpers.support import launched_on_apple
from helpers.tolerances import assert_right

import mlx_mittens as mm
from mlx_mittens import specs

OP = specs.get("take_tokens")


def assert_same(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(*(np.array(a.astype(mx.float32)) for a in (found, expected)))


def of_mx(keys, values, indices):
    return OP.twin(keys, values, indices)


@pytest.mark.parametrize("case", OP.tests, ids=lambda case: case.name)
def test_values(dtype, executor, rng, case):
    assert_right(OP, case, OP.draw(rng, case, dtype))


def test_bits(executor, rng, dtype):
    """NaN, infinities and negative zeros are taken as they are."""
    keys, values, indices = OP.draw(rng, OP.tests[0], dtype)
    keys[0, 0, :3, 0], values[0, 0, :, 1] = mx.array([mx.nan, mx.inf, -0.0]), -0.0
    for found, expected in zip(mm.take_tokens(keys, values, indices), of_mx(keys, values, indices), strict=True):
        assert_same(found, expected)
        assert_same(1 / found, 1 / expected)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32])
def test_indices_out_of_range(executor, rng, dtype):
    keys, values = draw(rng, (1, 2, 5, 8), mx.float32), draw(rng, (1, 2, 5, 3), mx.float32)
    wrong = [5, 2**31 - 1, -6, -(2**31)] if dtype == mx.int32 else [5, 2**31 - 1, 2**31, 2**32 - 1]
    found = mm.take_tokens(keys, values, mx.array([[[4, *wrong, 0]]], dtype))
    for part, rows in zip(found, (keys, values), strict=True):
        assert mx.isnan(part[:, :, 1:-1]).all()
        assert_same(part[:, :, ::5], rows[:, :, ::-4])


def test_the_front_of_a_cache(executor, rng):
    """Rows that are and are not whole loads of 16 bytes, behind another's."""
    for width, value_width in ((64, 32), (12, 7)):
        cache = [draw(rng, (2, 1, 20, n), mx.float16) for n in (width, value_width)]
        front = [a[:, :, 1:18] for a in cache]
        indices = mx.argpartition(draw(rng, (2, 1, 17), mx.float32), kth=-6, axis=-1)[..., -6:]
        found = mm.take_tokens(*front, indices)
        for a, b in zip(found, of_mx(*front, indices), strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8, 3, 4), (1, 0, 5, 8, 3, 4), (1, 2, 5, 0, 3, 4), (1, 2, 5, 8, 3, 0)])
def test_nothing_to_take(executor, shape):
    batch, heads, tokens, width, value_width, count = shape
    rows = [mx.ones((batch, heads, tokens, n)) for n in (width, value_width)]
    found = mm.take_tokens(*rows, mx.zeros((batch, 1 if heads else 0, count), mx.int32))
    assert [a.shape for a in found] == [(batch, heads, count, n) for n in (width, value_width)]
    assert all(bool((a == 1).all()) for a in found)


def test_no_tokens(executor):
    with pytest.raises(ValueError, match="expected a token to take"):
        mm.take_tokens(mx.zeros((1, 1, 0, 8)), mx.zeros((1, 1, 0, 4)), mx.zeros((1, 1, 2), mx.int32))


def test_gradients_are_those_of_mx(executor, rng):
    keys, values = draw(rng, (1, 2, 5, 8), mx.float32), draw(rng, (1, 2, 5, 3), mx.float32)
    indices = mx.array([[[3, 3, -1], [0, 2, 3]]])
    ours, theirs = (
        mx.grad(lambda k, v, op=op: sum((a**2).sum() for a in op(k, v, indices)), argnums=(0, 1))(keys, values)
        for op in (mm.take_tokens, of_mx)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


def test_vmap(executor, rng):
    keys, values = draw(rng, (2, 1, 2, 5, 8), mx.float32), draw(rng, (2, 1, 2, 5, 3), mx.float32)
    indices = mx.array(rng.integers(-5, 5, (1, 1, 4, 2)).astype(np.int32))
    found = mx.vmap(mm.take_tokens, in_axes=(0, 0, 3))(keys, values, indices)
    for i in range(2):
        for a, b in zip(found, of_mx(keys[i], values[i], indices[..., i]), strict=True):
            assert_same(a[i], b)


def test_compiled_without_shapes(rng):
    step = mx.compile(mm.take_tokens, shapeless=True)
    for shape in ((1, 1, 9, 64, 32, 5), (2, 3, 7, 33, 5, 4)):
        arrays = OP.draw(rng, specs.Case("test", shape), mx.float32)
        for a, b in zip(step(*arrays), of_mx(*arrays), strict=True):
            assert_same(a, b)


def test_one_launch(rng):
    arrays = OP.draw(rng, specs.Case("test", (1, 1, 40, 512, 64, 16)), mx.float16)
    mx.eval(arrays)
    assert launched_on_apple(lambda: mm.take_tokens(*arrays)) == ["take_tokens_float16"]


def test_what_is_left_to_mx(rng):
    keys, values, indices = OP.draw(rng, OP.tests[0], mx.float32)
    with mm.strict(False):
        mm.stats(reset=True)
        found = mm.take_tokens(keys, values.astype(mx.float16), indices)
        assert [a.dtype for a in found] == [mx.float32, mx.float16]
        wide = mm.take_tokens(keys.astype(mx.float64), values.astype(mx.float64), indices, stream=mx.cpu)
        assert wide[0].dtype == mx.float64
        assert set(mm.stats()["take_tokens"]["mx"]) == {"keys and values of two dtypes", "float64"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": mx.ones((3, 5, 8))}, r"keys has shape \(3,5,8\): expected four dimensions"),
        ({"values": mx.ones((2, 3, 6, 4))}, r"keys has shape \(2,3,5,8\), values \(2,3,6,4\): expected the same batch"),
        ({"indices": mx.zeros((2, 2, 3), mx.int32)}, r"indices has shape \(2,2,3\), keys \(2,3,5,8\): expected"),
        ({"indices": mx.zeros((2, 1, 3))}, "indices has dtype float32: expected int32 or uint32"),
        ({"keys": mx.ones((2, 3, 5, 8), mx.int32)}, "keys has dtype int32: expected float32"),
    ],
)
def test_bad_input(arguments, message):
    right = {"keys": mx.ones((2, 3, 5, 8)), "values": mx.ones((2, 3, 5, 4)), "indices": mx.zeros((2, 1, 3), mx.int32)}
    with pytest.raises(ValueError, match=r"\[take_tokens\] " + message):
        mm.take_tokens(**{**right, **arguments})
