"""The state-space step: masks, lengths, states, gradients, and checks of its arguments."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits, launched_on_apple
from helpers.tolerances import DIFFERENCES, ROUNDINGS, SUMS, assert_near, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs.recurrent_ops import exact_state_space

NAMES = ("hidden_states", "A_log", "B", "C", "D", "dt", "dt_bias", "state")


def draw(rng, batch, steps, groups, heads, rows, columns, dtype=mx.float32):
    """Inputs, rates of decay, B, C, D, time steps, their bias and a state."""
    per_head, keys = (batch, steps, heads), (batch, steps, groups, columns)
    shapes = [(*per_head, rows), (heads,), keys, keys, (heads,), per_head, (heads,), (batch, heads, rows, columns)]
    arrays = [mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    return [*(a.astype(dtype) for a in arrays[:7]), arrays[7]]


def exact_gradients(arrays, cotangents, limits, mask=None):
    """In float64, by the definition, backwards over the states of all steps."""
    x, a_log, b, c, d, raw, bias, state = arrays
    (batch, steps, groups, columns), heads = b.shape, x.shape[2]
    b, c = (a.repeat(heads // groups, 2) for a in (b, c))
    soft = np.logaddexp(raw + bias, 0)
    dt, rate = np.clip(soft, *limits), np.exp(a_log)
    states = [state]
    for t in range(steps):
        seen = None if mask is None else mask[:, t : t + 1]
        step = [a[:, t : t + 1] for a in (x, b, c, raw)]
        states.append(
            exact_state_space(step[0], a_log, step[1], step[2], d, step[3], bias, states[-1], limits, seen)[1].value
        )
    dy, ds = cotangents
    dx, db, dc, ddt, drate = dy * d[:, None], np.zeros(b.shape), np.zeros(c.shape), np.zeros(dt.shape), np.zeros(heads)
    for t in reversed(range(steps)):
        seen = np.ones((batch, 1, 1, 1)) if mask is None else mask[:, t].reshape(batch, 1, 1, 1)
        of_y = dy[:, t, :, :, None] * seen
        dc[:, t] = (of_y * states[t + 1]).sum(-2)
        of_state = (ds + of_y * c[:, t, :, None, :]) * seen
        written = (of_state * b[:, t, :, None, :]).sum(-1)
        dx[:, t] += dt[:, t, :, None] * written
        db[:, t] = (of_state * (dt[:, t, :, None] * x[:, t])[..., None]).sum(-2)
        decay = np.exp(-rate * dt[:, t])[..., None, None]
        of_decay = (of_state * states[t] * decay).sum((-2, -1))
        ddt[:, t] = (written * x[:, t]).sum(-1) - rate * of_decay
        drate -= (dt[:, t] * of_decay).sum(0)
        ds = of_state * decay + ds * (1 - seen)
    within = (soft > limits[0]) & (soft < limits[1])
    draw_ = ddt * within / (1 + np.exp(-(raw + bias)))
    db, dc = (a.reshape(batch, steps, groups, -1, columns).sum(3) for a in (db, dc))
    return [dx, drate * rate, db, dc, (dy * x).sum((0, 1, 3)), draw_, draw_.sum((0, 1)), ds]


def gradients(arrays, cotangents, limits, mask=None):
    return mx.vjp(lambda *a: list(mm.ssm_update(*a, limits, mask)), arrays, cotangents)[1]


LIMITS = (0.05, 2.0)


# Over the chunks of the gradients: 32 steps of native code, 64 of products.
@pytest.mark.parametrize(
    ("shape", "masked"), [((1, 1, 1, 2, 5, 24), False), ((2, 37, 1, 2, 9, 20), True), ((1, 70, 2, 4, 6, 33), False)]
)
def test_gradients_beside_float64(rng, executor, dtype, shape, masked):
    arrays = draw(rng, *shape, dtype)
    mask = mx.array(rng.random(shape[:2]) < 0.7) if masked else None
    outputs = mm.ssm_update(*arrays, LIMITS, mask)
    cotangents = [mx.array(rng.normal(size=a.shape).astype(np.float32)).astype(a.dtype) for a in outputs]
    wide = [specs.widen(a) for a in cotangents]
    limits = tuple(float(np.float32(limit)) for limit in LIMITS)
    expected = exact_gradients([specs.widen(a) for a in arrays], wide, limits, None if mask is None else np.array(mask))
    found = gradients(arrays, cotangents, LIMITS, mask)
    for name, gradient, exact, array in zip(NAMES, found, expected, arrays, strict=True):
        assert gradient.dtype == array.dtype
        assert_near(gradient, exact, name, max(SUMS, units(2, array.dtype)))


def test_the_float64_gradients_are_derivatives(rng):
    """By differences."""
    arrays = [specs.widen(a) for a in draw(rng, 1, 4, 1, 2, 3, 8)]
    mask = np.array([[True, False, True, True]])
    cotangents = [rng.normal(size=a.value.shape) for a in exact_state_space(*arrays, LIMITS, mask)]

    def value(arrays):
        return sum((e.value * c).sum() for e, c in zip(exact_state_space(*arrays, LIMITS, mask), cotangents))

    for i, gradient in enumerate(exact_gradients(arrays, cotangents, LIMITS, mask)):
        direction = rng.normal(size=arrays[i].shape)
        ends = [[a + (sign * 1e-6 * direction if j == i else 0) for j, a in enumerate(arrays)] for sign in (1, -1)]
        slope = (value(ends[0]) - value(ends[1])) / 2e-6
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=DIFFERENCES, atol=DIFFERENCES)


@pytest.mark.parametrize("steps", [1, 40])
def test_beside_mlx_lm(rng, executor, steps):
    """A state, groups, a mask of padding on the left; results, and the types of results."""
    from mlx_lm.models.ssm import ssm_attn

    *arrays, state = draw(rng, 2, steps, 2, 4, 8, 32, mx.float16)
    arrays[1] = arrays[1].astype(mx.float32)  # mlx-lm takes its exponential in its type
    mask = mx.arange(steps)[None] >= mx.array([[0], [steps // 3]])
    ours = mm.ssm_update(*arrays, state, (0.001, 100.0), mask)
    beside = ssm_attn(*arrays, state, (0.001, 100.0), mask)
    seen = mask[..., None, None]
    assert [a.dtype for a in ours] == [a.dtype for a in beside]
    assert_near(mx.where(seen, ours[0], 0), mx.where(seen, beside[0], 0), "y", units(4, mx.float16))
    assert_near(ours[1], beside[1], "state")


def test_masks_and_lengths(rng, dtype, executor):
    """Hidden steps change no state, and give D * x."""
    *arrays, state = draw(rng, 3, 6, 1, 2, 5, 24, dtype)
    x, d = arrays[0], arrays[4]
    lengths = mx.array([6, 4, -1])
    mask = mx.arange(6)[None] < lengths[:, None]
    y, last = mm.ssm_update(*arrays, state, mask=mask)
    assert_same_bits(mx.where(mask[..., None, None], 0, y), mx.where(mask[..., None, None], 0, x * d[:, None]), "y")
    for ours in (
        mm.ssm_update(*arrays, state, lengths=lengths),
        mm.ssm_update(*arrays, state, (0.001, 100.0), mask, lengths),
    ):
        assert_same_bits(ours[0], y, "y")
        assert_same_bits(ours[1], last, "state")
    assert_same_bits(last[2], state[2], "state")
    parts = [a[1:2, :4] if a.ndim > 1 else a for a in arrays]
    assert_same_bits(mm.ssm_update(*parts, state[1:2])[1], last[1:2], "state")


def test_a_prompt_is_its_tokens(rng, dtype, executor):
    """Bit for bit, with the state handed on in place."""
    *arrays, state = draw(rng, 2, 5, 2, 4, 9, 40, dtype)
    y, last = mm.ssm_update(*arrays, state)
    mx.eval(y, last)
    state = state + 0
    for t in range(5):
        result, state = mm.ssm_update(*(a[:, t : t + 1] if a.ndim > 1 else a for a in arrays), state)
        mx.eval(result, state)
        assert_same_bits(result, y[:, t : t + 1], "y")
    assert_same_bits(state, last, "state")


def test_types_and_a_missing_state(rng, executor):
    *arrays, state = draw(rng, 1, 3, 2, 4, 9, 40, mx.float16)
    for ours, beside in zip(mm.ssm_update(*arrays), mm.ssm_update(*arrays, mx.zeros_like(state))):
        assert_same_bits(ours, beside, str(ours.shape))
    assert [a.dtype for a in mm.ssm_update(*arrays)] == [mx.float16, mx.float32]
    assert mm.ssm_update(*arrays, state.astype(mx.float16))[1].dtype == mx.float16
    arrays[4] = arrays[4].astype(mx.float32)
    assert mm.ssm_update(*arrays)[0].dtype == mx.float32


@pytest.mark.parametrize("wide", [False, True], ids=["", "A_log, D and dt_bias in float32"])
def test_a_token_is_one_launch(rng, wide):
    """Of the parts of a layer's projection, which lie in one row, and without an operation of mx beside it."""
    heads, rows, columns = 4, 16, 64
    sizes = [heads * rows, columns, columns, heads]
    row = mx.array(rng.normal(size=(1, 1, sum(sizes))).astype(np.float32)).astype(mx.float16)
    x, b, c, dt = mx.split(row, np.cumsum(sizes)[:-1].tolist(), axis=-1)
    x, b, c = x.reshape(1, 1, heads, rows), b.reshape(1, 1, 1, columns), c.reshape(1, 1, 1, columns)
    a_log, d, bias = (
        mx.array(rng.normal(size=heads).astype(np.float32)).astype(mx.float32 if wide else mx.float16) for _ in range(3)
    )
    state = mx.array(rng.normal(size=(1, heads, rows, columns)).astype(np.float32))
    mx.eval(x, a_log, b, c, d, dt, bias, state)
    run = lambda: mm.ssm_update(x, a_log, b, c, d, dt, bias, state)
    assert launched_on_apple(run) == ["state_space_float16"]


# From time steps that are next to nothing to such as e to their power is infinite.
RAW = np.concatenate([np.linspace(-80, 100, 61), np.linspace(-2, 2, 40), [-1e-3, 0, 1e-3]]).astype(np.float32)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.25, 3.0)])
def test_time_steps_and_decays_beside_float64(executor, limits):
    """Relative to each: a state of zeros becomes the time step, a state of ones the decay."""
    heads = len(RAW)
    a_log, one, zero = mx.linspace(-4, 0, heads), mx.ones((1, 1, 1, 1)), mx.zeros((heads,))
    bias = mx.full((heads,), 0.125)
    dt = mx.array(RAW - np.float32(0.125)).reshape(1, 1, heads)
    raw = np.array(dt, np.float64).reshape(-1) + 0.125

    def states(x, state):
        values = mx.full((1, 1, heads, 1), x)
        last = mm.ssm_update(values, a_log, one, one, zero, dt, bias, mx.full((1, heads, 1, 1), state), limits)[1]
        return np.array(last).reshape(-1)

    step = np.clip(np.logaddexp(raw, 0), *limits)
    np.testing.assert_allclose(states(1.0, 0.0), step, rtol=ROUNDINGS)
    left = np.exp(-np.exp(specs.widen(a_log)) * step)
    # The error of an exponential's argument, which may be large, becomes its relative error.
    argument = np.maximum(1, -np.log(left))
    np.testing.assert_array_less(np.abs(states(0.0, 1.0) - left), ROUNDINGS * left * argument + np.float32(1e-38))


def test_time_steps_that_are_no_numbers(executor):
    """As mx has them: infinite ones end at the limits, and NaN stays NaN."""
    raw = mx.array([np.inf, -np.inf, np.nan, 1.0]).reshape(1, 1, 4)
    one, heads = mx.ones((1, 1, 1, 1)), mx.zeros((4,))
    last = mm.ssm_update(mx.ones((1, 1, 4, 1)), heads, one, one, heads, raw, heads, None, (0.5, 2.0))[1]
    np.testing.assert_allclose(np.array(last).reshape(-1), [2, 0.5, np.nan, np.logaddexp(1, 0)], rtol=ROUNDINGS)


@pytest.mark.parametrize("half", [mx.float16, mx.bfloat16])
def test_y_is_rounded_once(rng, executor, half):
    """Where D is float32 so is y. A y of the half type is its rounding."""
    arrays = draw(rng, 2, 3, 1, 4, 33, 24, half)
    wide = [a.astype(mx.float32) if i == 4 else a for i, a in enumerate(arrays)]
    mask = mx.array([[True, False, True], [True, True, True]])
    y, exact = (mm.ssm_update(*given, mask=mask)[0] for given in (arrays, wide))
    assert (y.dtype, exact.dtype) == (half, mx.float32)
    assert_same_bits(y, exact.astype(half), "y")


def test_each_input_may_be_of_another_type(rng, executor):
    arrays = draw(rng, 2, 3, 1, 2, 5, 24)
    types = (mx.float16, mx.bfloat16, mx.float16, mx.float16, mx.bfloat16, mx.float32, mx.float16, mx.bfloat16)
    given = [a.astype(t) for a, t in zip(arrays, types, strict=True)]
    found = mm.ssm_update(*given)
    assert [a.dtype for a in found] == [mx.float32, mx.bfloat16]
    for ours, exact in zip(found, exact_state_space(*map(specs.widen, given)), strict=True):
        assert_near(ours, exact.value, str(ours.shape), max(SUMS, units(1, ours.dtype)))


def test_vmap(rng, executor):
    """Over the elements of a batch, with the numbers of heads shared."""
    arrays = draw(rng, 3, 2, 1, 2, 5, 24)
    one = [a if a.ndim == 1 else a[:, None] for a in arrays]
    axes = tuple(None if a.ndim == 1 else 0 for a in arrays)
    for mapped, whole in zip(
        mx.vmap(lambda *a: mm.ssm_update(*a), in_axes=axes)(*one), mm.ssm_update(*arrays), strict=True
    ):
        assert_near(mapped[:, 0], whole, str(whole.shape))


def test_compiled(rng, executor):
    arrays = draw(rng, 1, 3, 2, 4, 9, 40)
    for ours, beside in zip(mx.compile(mm.ssm_update)(*arrays), mm.ssm_update(*arrays)):
        assert_near(ours, beside, str(ours.shape))


BAD = [
    (0, (2, 3, 16), r"hidden_states has shape \(2,3,16\): expected \[batch, steps, heads, rows\]"),
    (1, (2, 3), r"A_log has shape \(2,3\): expected \(2\)"),
    (2, (2, 3, 4, 16), r"B has shape \(2,3,4,16\), .*the heads a multiple of the groups"),
    (3, (2, 3, 1, 8), r"C has shape \(2,3,1,8\): expected \(2,3,1,16\)"),
    (4, (3,), r"D has shape \(3\): expected \(2\)"),
    (5, (2, 3, 1), r"dt has shape \(2,3,1\): expected \(2,3,2\)"),
    (6, (1,), r"dt_bias has shape \(1\): expected \(2\)"),
    (7, (2, 2, 16, 8), r"state has shape \(2,2,16,8\): expected \(2,2,8,16\)"),
]


@pytest.mark.parametrize(("i", "shape", "text"), BAD, ids=[text[:8] for _, _, text in BAD])
def test_bad_shapes(rng, i, shape, text):
    arrays = draw(rng, 2, 3, 1, 2, 8, 16)
    arrays[i] = mx.zeros(shape)
    with pytest.raises(ValueError, match=rf"\[ssm_update\] {text}"):
        mm.ssm_update(*arrays)


def test_bad_masks_lengths_limits_and_types(rng):
    arrays = draw(rng, 2, 3, 1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"mask has shape \(3\): expected \(2,3\)"):
        mm.ssm_update(*arrays, mask=mx.array([True] * 3))
    with pytest.raises(mm.DtypeError, match="mask has dtype float32: expected bool"):
        mm.ssm_update(*arrays, mask=mx.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"lengths has shape \(3\): expected \(2\)"):
        mm.ssm_update(*arrays, lengths=mx.array([1, 2, 3]))
    with pytest.raises(mm.DtypeError, match="lengths has dtype float32: expected an integer type"):
        mm.ssm_update(*arrays, lengths=mx.zeros((2,)))
    with pytest.raises(ValueError, match=r"time_step_limit is \(2, 1\): expected the least and the greatest"):
        mm.ssm_update(*arrays, (2.0, 1.0))
    for i in (1, 4, 5, 6, 7):
        given = [a.astype(mx.int32) if j == i else a for j, a in enumerate(arrays)]
        with pytest.raises(mm.DtypeError, match=f"{NAMES[i]} has dtype int32: expected float32, float16 or bfloat16"):
            mm.ssm_update(*given)


def test_patched_it_is_mlx_lms(rng, lenient):
    """But for lengths without a mask, which mean something else there."""
    from mlx_lm.models import ssm

    *arrays, state = draw(rng, 1, 4, 1, 2, 8, 32)
    with mm.patched():
        mm.stats(reset=True)
        ours = ssm.ssm_update(*arrays, state)
        mx.eval(ours)
        assert sum(mm.stats()["ssm_update"]["kernels"].values()) == 1
        mx.eval(ssm.ssm_attn(*arrays, state, lengths=mx.array([3])))
        assert sum(mm.stats()["ssm_update"]["kernels"].values()) == 1
    for a, b in zip(ours, mm.ssm_update(*arrays, state), strict=True):
        assert_same_bits(a, b, str(a.shape))


@pytest.mark.parametrize("dtype_of_d", [mx.float16, mx.float32])
def test_patched_a_token_of_mlx_lms_kernel_is_ours(rng, dtype_of_d):
    """The results and their types are as from mlx-lm's kernel, which takes two launches."""
    from mlx_lm.models import ssm

    *arrays, state = draw(rng, 2, 1, 2, 4, 8, 32, mx.float16)
    arrays[4] = arrays[4].astype(dtype_of_d)
    with mm.simulator.enabled(gpu="m2-max", pretend_metal=True):
        theirs = ssm.ssm_update_kernel(*arrays, state, (0.001, 100.0))
        mx.eval(theirs)
        with mm.patched():
            mm.stats(reset=True)
            ours = ssm.ssm_update_kernel(*arrays, state, (0.001, 100.0))
            mx.eval(ours)
            assert sum(mm.stats()["ssm_update"]["kernels"].values()) == 1
    assert [a.dtype for a in ours] == [a.dtype for a in theirs] == [mx.float16, mx.float32]
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, str(a.shape), max(SUMS, units(1, a.dtype)))


@pytest.mark.parametrize("gpu", ["m2-max", "nvidia"])
def test_on_an_apple_gpu_many_steps_are_mxs(rng, lenient, gpu):
    """Products of matrices over chunks of steps; mlx-lm's own under a patch, unless it is strict."""
    from mlx_lm.models import ssm

    *arrays, state = draw(rng, 2, 9, 1, 2, 8, 32)
    few = [a[:, :8] if a.ndim > 1 else a for a in arrays]
    expected = exact_state_space(*map(specs.widen, (*arrays, state)))
    reason = "more than 8 steps on an Apple GPU, which mx multiplies as matrices"
    left = (1, []) if gpu == "nvidia" else (0, [reason])

    def run(*inputs):
        """Results, launches of kernels, and why calls went to mx; under no patch, a patch and a strict one."""
        for patch in (contextlib.nullcontext(), mm.patched(), mm.patched(strict=True)):
            with patch:
                function = mm.ssm_update if isinstance(patch, contextlib.nullcontext) else ssm.ssm_attn
                mm.stats(reset=True)
                outputs = function(*inputs)
                mx.eval(outputs)
                stats = mm.stats()["ssm_update"]
            yield outputs, sum(stats["kernels"].values()), list(stats["mx"])

    with mm.simulator.enabled(gpu=gpu):
        assert [result[1:] for result in run(*few, state)] == [(1, [])] * 3
        results = list(run(*arrays, state))
        assert [result[1:] for result in results] == [left, left, (1, [])]
    for outputs, *_ in results:
        for ours, exact in zip(outputs, expected, strict=True):
            assert_near(ours, exact.value, str(ours.shape))
