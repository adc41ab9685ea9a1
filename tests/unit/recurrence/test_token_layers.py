"""One token of layers with a short convolution: states, biases, gradients, and checks of arguments."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits, assert_state_in_place, launched_on_apple
from helpers.tolerances import SUMS, assert_near, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs.token_layers import exact_short_conv_token, exact_ssm_token

CONVOLUTION, SPACE = specs.get("short_conv_token"), specs.get("ssm_token")


def draw(op, rng, *shape, dtype=mx.float32):
    return op.draw(rng, specs.Case("", shape), dtype)


def numbers(rng, *shape):
    return mx.array(rng.normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_a_convolution_with_a_bias(rng, executor, dtype, taps):
    arrays = [*draw(CONVOLUTION, rng, 2, taps, 130, dtype=dtype), numbers(rng, 130).astype(dtype)]
    exact = exact_short_conv_token(*map(specs.widen, arrays))
    for name, ours, one in zip(("y", "conv_state"), mm.short_conv_token(*arrays), exact, strict=True):
        assert ours.dtype == dtype
        assert_near(ours, one.value, name, max(4 * SUMS, units(2, dtype)))


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 40])
def test_several_tokens(rng, executor, dtype, taps, tokens):
    """Fewer than a window, and more than one thread has; with a bias."""
    arrays = [*draw(CONVOLUTION, rng, 2, taps, 130, tokens, dtype=dtype), numbers(rng, 130).astype(dtype)]
    exact = exact_short_conv_token(*map(specs.widen, arrays))
    mx.eval(arrays)
    for name, ours, one in zip(("y", "conv_state"), mm.short_conv_token(*arrays), exact, strict=True):
        assert ours.dtype == dtype and ours.shape == one.value.shape
        assert_near(ours, one.value, name, max(4 * SUMS, units(2, dtype)))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_several_tokens_are_each_alone(rng, executor, dtype, taps, has_bias):
    """To the last bit, zeros with their signs too."""
    projected, past, weight = draw(CONVOLUTION, rng, 2, taps, 70, 21, dtype=dtype)
    weight[5], weight[7] = 0.0, -0.0
    bias = numbers(rng, 70).astype(dtype) if has_bias else None
    together, state = mm.short_conv_token(projected, past, weight, bias)
    each = []
    for t in range(21):
        y, past = mm.short_conv_token(projected[:, t], past, weight, bias)
        mx.eval(y, past)
        each.append(y)
    assert_same_bits(together, mx.stack(each, 1), "y")
    assert_same_bits(state, past, "conv_state")


def test_no_tokens(rng, executor):
    _, past, weight = draw(CONVOLUTION, rng, 2, 3, 70)
    y, state = mm.short_conv_token(mx.zeros((2, 0, 210)), past, weight)
    assert y.shape == (2, 0, 70)
    assert_same_bits(state, past, "conv_state")


def test_transformations_of_several_tokens(rng, executor):
    arrays = [draw(CONVOLUTION, rng, 2, 3, 20, 5) for _ in range(2)]
    stacked = [mx.stack(both) for both in zip(*arrays)]
    for name, ours, *each in zip(
        ("y", "conv_state"), mx.vmap(mm.short_conv_token)(*stacked), *(mm.short_conv_token(*a) for a in arrays)
    ):
        assert_near(ours, mx.stack(each), name, SUMS)
    sums = lambda function: lambda *a: sum((y * y).sum() for y in function(*a))
    gradients = (mx.grad(sums(f), argnums=(0, 1, 2))(*arrays[0]) for f in (mm.short_conv_token, CONVOLUTION.twin))
    for ours, expected in zip(*gradients, strict=True):
        assert_near(ours, expected, "gradient", 4 * SUMS)
    compiled = mx.compile(lambda *a: mm.short_conv_token(*a), shapeless=True)
    for tokens in (3, 5, 18):
        some = draw(CONVOLUTION, rng, 2, 3, 20, tokens)
        for ours, expected in zip(compiled(*some), CONVOLUTION.twin(*some), strict=True):
            assert_near(ours, expected, f"{tokens} tokens", 4 * SUMS)


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_space_with_options(rng, executor, taps, has_bias):
    """Bounded time steps, no gate, and a convolution without a bias."""
    arrays = draw(SPACE, rng, 2, taps, 2, 4, 17, 24)
    wide = [*map(specs.widen, arrays)]
    if not has_bias:
        arrays[3], wide[3] = None, np.zeros(arrays[3].shape)
    for limits, gated in (((0.5, 0.7), True), ((0.0, np.inf), False)):
        found = mm.ssm_token(*arrays, time_step_limit=limits, gated=gated)
        exact = exact_ssm_token(*wide, limits=limits, gated=gated)
        for name, ours, one in zip(("y", "conv_state", "state"), found, exact, strict=True):
            assert_near(ours, one.value, name, 4 * SUMS)


def test_tokens_hand_the_convolution_on(rng, executor, dtype):
    """Over five tokens, one state handed on to the next: the last inputs of all of them."""
    each = [draw(CONVOLUTION, rng, 1, 3, 40, dtype=dtype) for _ in range(5)]
    past = mx.zeros_like(each[0][1])
    for projected, _, _ in each:
        _, past = mm.short_conv_token(projected, past, each[0][2])
        mx.eval(past)
    products = [projected[:, :40] * projected[:, 80:] for projected, _, _ in each]
    assert_same_bits(past, mx.stack(products[-2:], axis=1), "conv_state")
    each = [draw(SPACE, rng, 1, 4, 1, 2, 9, 8, dtype=dtype) for _ in range(5)]
    shared, past, state = each[0][2:7], mx.zeros_like(each[0][1]), each[0][7]
    for arrays in each:
        _, past, state = mm.ssm_token(arrays[0], past, *shared, state)
        mx.eval(past, state)
    mixed = [arrays[0][:, 18 : 18 + past.shape[2]] for arrays in each]
    assert_same_bits(past, mx.stack(mixed[-3:], axis=1), "conv_state")


def test_the_state_is_written_in_place(rng, executor):
    assert_state_in_place(mm.ssm_token, draw(SPACE, rng, 1, 4, 2, 4, 16, 32))


def test_the_window_is_moved_on_in_place(rng, executor, dtype):
    for taps in (2, 3, 5):
        arrays = draw(CONVOLUTION, rng, 2, taps, 70, dtype=dtype)
        expected = mm.short_conv_token(*arrays)
        past = mx.contiguous(arrays[1] + 0)
        mx.eval(expected, past)
        where = np.asarray(memoryview(past.view(mx.uint8))).ctypes.data
        held = [arrays[0], past, arrays[2]]
        del past
        y, after = mm.short_conv_token(*held)
        del held
        mx.eval(y, after)
        assert np.asarray(memoryview(after.view(mx.uint8))).ctypes.data == where
        for ours, beside in zip((y, after), expected, strict=True):
            assert_same_bits(ours, beside, f"{taps} taps")


def test_held_states_stay(rng, executor):
    arrays = draw(CONVOLUTION, rng, 1, 3, 64)
    before = mx.array(np.array(arrays[1]))
    mx.eval(mm.short_conv_token(*arrays))
    assert_same_bits(arrays[1], before, "conv_state")
    arrays = draw(SPACE, rng, 1, 4, 1, 2, 16, 32)
    before = [mx.array(np.array(arrays[i])) for i in (1, 7)]
    mx.eval(mm.ssm_token(*arrays))
    for array, copy in zip((arrays[1], arrays[7]), before, strict=True):
        assert_same_bits(array, copy, str(array.shape))


def test_one_launch(rng):
    arrays = draw(SPACE, rng, 1, 4, 1, 4, 16, 32, dtype=mx.float16)
    mx.eval(arrays)
    views = [arrays[0][:, None].reshape(1, -1), arrays[1], arrays[2][..., None], *arrays[3:]]
    assert launched_on_apple(lambda: mm.ssm_token(*views)) == ["ssm_token_float16"]
    arrays = draw(CONVOLUTION, rng, 1, 3, 64, dtype=mx.float16)
    mx.eval(arrays)
    assert launched_on_apple(lambda: mm.short_conv_token(*arrays)) == ["short_conv_token_float16"]


def test_views(rng, executor, dtype):
    """Rows that do not lie side by side are copied first."""
    for op, call, shape in ((SPACE, mm.ssm_token, (3, 4, 1, 2, 9, 24)), (CONVOLUTION, mm.short_conv_token, (3, 3, 50))):
        arrays = draw(op, rng, *shape, dtype=dtype)
        views = [mx.concatenate([a[:, :1], a], axis=1)[:, 1:] if a.ndim > 1 else a for a in arrays]
        for ours, beside in zip(call(*views), call(*arrays), strict=True):
            assert_same_bits(ours, beside, str(ours.shape))


def test_nan_and_overflow_stay_where_they_are(executor, rng):
    """In their channel, or in their head."""
    arrays = draw(CONVOLUTION, rng, 1, 3, 200, dtype=mx.float16)
    clean = specs.widen(mm.short_conv_token(*arrays)[0])
    arrays[0][0, 7] = float("nan")
    arrays[0][0, 9], arrays[0][0, 409] = 6e4, 6e4
    y, past = map(specs.widen, mm.short_conv_token(*arrays))
    assert np.isnan(y[0, 7]) and np.isinf(past[0, -1, 9]) and not np.isfinite(y[0, 9])
    rest = [i for i in range(200) if i not in (7, 9)]
    np.testing.assert_array_equal(y[0, rest], clean[0, rest])
    arrays = draw(SPACE, rng, 1, 4, 1, 3, 8, 16)
    clean = specs.widen(mm.ssm_token(*arrays)[0])
    arrays[0][0, -2] = float("nan")  # the time step of the second head
    y, _, state = map(specs.widen, mm.ssm_token(*arrays))
    assert np.isnan(y[0, 8:16]).all() and np.isnan(state[0, 1]).all()
    np.testing.assert_array_equal(np.delete(y[0], np.s_[8:16]), np.delete(clean[0], np.s_[8:16]))


def test_gradients_are_those_of_the_parts(rng):
    for op, call, shape in ((SPACE, mm.ssm_token, (1, 4, 1, 2, 5, 8)), (CONVOLUTION, mm.short_conv_token, (2, 3, 9))):
        arrays = draw(op, rng, *shape)
        cotangents = [numbers(rng, *a.shape) for a in call(*arrays)]
        found = mx.vjp(lambda *a, call=call: list(call(*a)), arrays, cotangents)[1]
        expected = mx.vjp(lambda *a, op=op: list(op.twin(*a)), arrays, cotangents)[1]
        for (name, _), ours, theirs in zip(op.parameters, found, expected, strict=True):
            assert_near(ours, theirs, name, 16 * SUMS)


def test_types(rng, executor):
    """The results have the types of the projections and of the states given; numbers of heads may be of any."""
    arrays = draw(SPACE, rng, 1, 4, 1, 2, 9, 24)
    given = [arrays[0].astype(mx.bfloat16), arrays[1], *(a.astype(mx.float16) for a in arrays[2:])]
    assert [a.dtype for a in mm.ssm_token(*given)] == [mx.bfloat16, mx.float32, mx.float16]
    arrays = draw(CONVOLUTION, rng, 1, 3, 24)
    given = [arrays[0].astype(mx.bfloat16), arrays[1], arrays[2].astype(mx.float16)]
    assert [a.dtype for a in mm.short_conv_token(*given)] == [mx.bfloat16, mx.float32]


def test_many_rows_go_to_mx(rng, lenient):
    arrays = draw(SPACE, rng, 1, 2, 1, 1, 520, 8)
    expected = mm.ssm_token(*arrays)
    with mm.simulator.enabled():
        mm.stats(reset=True)
        found = mm.ssm_token(*arrays)
        mx.eval(found)
        assert list(mm.stats()["ssm_token"]["mx"]) == ["more than 512 rows"]
    for ours, beside in zip(found, expected, strict=True):
        assert_near(ours, beside, str(ours.shape), 4 * SUMS)


BAD_SPACES = [
    (7, (2, 6, 8), r"state has shape \(2,6,8\): expected \[batch, heads, rows, columns\]"),
    (2, (144, 1, 4), r"conv_weight has shape \(144,1,4\): expected \[channels, taps\] or \[channels, taps, 1\]"),
    (2, (145, 4), r"conv_weight has 145 channels, state .* \(2,6,8,16\): expected heads \* rows \+ 2 \* groups"),
    (0, (2, 100), r"projected has shape \(2,100\): expected \(2,198\)"),
    (1, (2, 4, 144), r"conv_state has shape \(2,4,144\): expected \(2,3,144\)"),
    (3, (143,), r"conv_bias has shape \(143\): expected \(144\)"),
    (4, (5,), r"A_log has shape \(5\): expected \(6\)"),
    (5, (6, 1), r"D has shape \(6,1\): expected \(6\)"),
    (6, (1,), r"dt_bias has shape \(1\): expected \(6\)"),
]
BAD_CONVOLUTIONS = [
    (2, (8,), r"conv_weight has shape \(8\): expected \[channels, taps\] or \[channels, taps, 1\]"),
    (0, (2, 8), r"projected has shape \(2,8\): expected \[batch, 24\]"),
    (1, (2, 3, 8), r"conv_state has shape \(2,3,8\): expected \(2,2,8\)"),
    (3, (9,), r"conv_bias has shape \(9\): expected \(8\)"),
]


@pytest.mark.parametrize(("i", "shape", "text"), BAD_SPACES)
def test_bad_shapes_of_spaces(rng, i, shape, text):
    arrays = draw(SPACE, rng, 2, 4, 3, 6, 8, 16)
    assert arrays[2].shape == (144, 4)
    arrays[i] = mx.zeros(shape)
    with pytest.raises(ValueError, match=rf"\[ssm_token\] {text}"):
        mm.ssm_token(*arrays)


@pytest.mark.parametrize(("i", "shape", "text"), BAD_CONVOLUTIONS)
def test_bad_shapes_of_convolutions(rng, i, shape, text):
    arrays = [*draw(CONVOLUTION, rng, 2, 3, 8), mx.zeros(8)]
    arrays[i] = mx.zeros(shape)
    with pytest.raises(ValueError, match=rf"\[short_conv_token\] {text}"):
        mm.short_conv_token(*arrays)


def test_bad_types_and_limits(rng):
    for op, call, shape in ((SPACE, mm.ssm_token, (1, 4, 1, 2, 5, 8)), (CONVOLUTION, mm.short_conv_token, (2, 3, 9))):
        arrays = draw(op, rng, *shape)
        for i, (name, _) in enumerate(op.parameters):
            given = [a.astype(mx.int32) if j == i else a for j, a in enumerate(arrays)]
            with pytest.raises(mm.DtypeError, match=f"{name} has dtype int32: expected float32, float16 or"):
                call(*given)
    with pytest.raises(ValueError, match=r"time_step_limit is \(2, 1\): expected the least and the greatest"):
        mm.ssm_token(*draw(SPACE, rng, 1, 4, 1, 2, 5, 8), time_step_limit=(2.0, 1.0))
