"""Properties that all recurrences share: places of states, contents of hidden steps, and compositions."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits
from helpers.tolerances import SUMS, assert_near

import mlx_mittens as mm
from mlx_mittens import _ext

BATCH, HEADS, ROWS, COLUMNS = 2, 2, 8, 16


@contextlib.contextmanager
def composing(composed=True):
    """Whether compositions run in the place of native code."""
    _ext.prefer_composed(composed)
    try:
        yield
    finally:
        _ext.prefer_composed(False)


def arrays(rng, *shapes):
    return [mx.array(rng.normal(size=shape).astype(np.float32) / shape[-1] ** 0.5) for shape in shapes]


def gated_delta_update(rng, steps, per_column=False):
    """A call as a function of a state and a mask, and the arrays that hold something for each step."""
    q, k = arrays(rng, *[(BATCH, steps, 1, COLUMNS)] * 2)
    (v,) = arrays(rng, (BATCH, steps, HEADS, ROWS))
    shape = (BATCH, steps, HEADS, COLUMNS)[: 4 if per_column else 3]
    gamma, beta = (mx.array(rng.uniform(0.3, 1, s).astype(np.float32)) for s in (shape, (BATCH, steps, HEADS)))
    return lambda state, mask, each: mm.gated_delta_update(*each, state, mask), [q, k, v, gamma, beta]


def ssm_update(rng, steps):
    b, c = arrays(rng, *[(BATCH, steps, 1, COLUMNS)] * 2)
    x, dt = arrays(rng, (BATCH, steps, HEADS, ROWS), (BATCH, steps, HEADS))
    a_log, d, bias = arrays(rng, *[(HEADS,)] * 3)
    return lambda state, mask, each: mm.ssm_update(
        each[0], a_log, each[1], each[2], d, each[3], bias, state, mask=mask
    ), [x, b, c, dt]


OPS = {
    "gated_delta_update": gated_delta_update,
    "gated_delta_update, gates of columns": lambda rng, steps: gated_delta_update(rng, steps, per_column=True),
    "ssm_update": ssm_update,
}


@pytest.fixture(params=OPS)
def op(request, rng):
    return lambda steps: OPS[request.param](rng, steps)


def test_a_state_that_lies_anywhere(op, rng, executor):
    """It is written in place only where the widest stores may write it."""
    run, each = op(1)
    flat = mx.array(rng.normal(size=1 + BATCH * HEADS * ROWS * COLUMNS).astype(np.float32))
    whole = flat[1:].reshape(BATCH, HEADS, ROWS, COLUMNS)
    expected = run(mx.contiguous(whole + 0), None, each)
    mx.eval(expected)
    state = mx.array(flat)[1:].reshape(whole.shape)
    mx.eval(state)
    results = run(state, None, each)
    del state
    mx.eval(results)
    for a, b in zip(results, expected, strict=True):
        assert_same_bits(a, b, str(a.shape))


@pytest.mark.parametrize("name", ["gated_delta_update", "gated_delta_update, gates of columns", "ssm_update"])
@pytest.mark.parametrize("composed", [False, True], ids=["", "composed"])
def test_hidden_steps_hold_anything(name, rng, native, composed):
    """NaN reaches neither the states and the results of other steps nor their gradients."""
    run, each = OPS[name](rng, 20)
    (state,) = arrays(rng, (BATCH, HEADS, ROWS, COLUMNS))
    seen = np.ones((BATCH, 20), bool)
    seen[0, [0, 3, 17]] = seen[1, 5:9] = False
    mask = mx.array(seen)
    hidden = lambda a, value: mx.where(mx.expand_dims(mask, list(range(2, a.ndim))), a, value)

    def results(value):
        """The last state, y of the steps that are seen, and the gradients of these."""
        given = [hidden(a, value) for a in each]

        def outputs(state, *given):
            y, last = run(state, mask, given)
            return last, hidden(y, 0.0)

        loss = lambda *arguments: sum(a.sum() for a in outputs(*arguments))
        of_state, *of_each = mx.grad(loss, list(range(1 + len(given))))(state, *given)
        return *outputs(state, *given), of_state, *(hidden(gradient, 0.0) for gradient in of_each)

    with composing(composed):
        found, expected = results(float("nan")), results(0.5)
        mx.eval(found, expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


def test_more_steps_than_a_type_of_lengths_counts(rng, native):
    run, (x, b, c, dt) = ssm_update(rng, 300)
    a_log, d, bias = arrays(rng, *[(HEADS,)] * 3)
    lengths = np.array([200, 100])
    expected = mm.ssm_update(x, a_log, b, c, d, dt, bias, lengths=mx.array(lengths))
    for dtype in (mx.uint8, mx.int16, mx.uint64):
        found = mm.ssm_update(x, a_log, b, c, d, dt, bias, lengths=mx.array(lengths, dtype))
        for a, e in zip(found, expected, strict=True):
            assert_same_bits(a, e, f"{dtype}, {a.shape}")
    before = mm.ssm_update(x[1:, :100], a_log, b[1:, :100], c[1:, :100], d, dt[1:, :100], bias)[1]
    assert_near(expected[1][1:], before, "the state of the shorter one", SUMS)


@pytest.mark.parametrize("composed", [False, True], ids=["", "composed"])
def test_hidden_time_steps_have_no_part_in_gradients_of_all_steps(rng, native, composed):
    """Those of A_log and of the bias, whatever a hidden step holds."""
    _, (x, b, c, dt) = ssm_update(rng, 12)
    a_log, d, bias = arrays(rng, *[(HEADS,)] * 3)
    seen = np.ones((BATCH, 12), bool)
    seen[0, 2] = seen[1, 9:] = False
    mask = mx.array(seen)

    def gradients(value):
        given = mx.where(mask[..., None], dt, value)
        loss = lambda a_log, bias: mm.ssm_update(x, a_log, b, c, d, given, bias, mask=mask)[0].sum()
        return mx.grad(loss, (0, 1))(a_log, bias)

    with composing(composed):
        found, expected = gradients(float("nan")), gradients(0.5)
        mx.eval(found, expected)
    for a, e in zip(found, expected, strict=True):
        assert_same_bits(a, e, str(a.shape))
