"""The gated delta rule: masks, states, gradients, and checks of its arguments."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits
from helpers.tolerances import DIFFERENCES, SUMS, assert_near, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs.recurrent_ops import exact_recurrence

NAMES = ("q", "k", "v", "gamma", "beta", "initial_state")


def draw(rng, batch, steps, key_heads, heads, rows, columns, dtype=mx.float32, per_column=False):
    """Queries, keys, values, gates, rates and a state."""
    per_head = (batch, steps, heads)
    keys = rng.normal(size=(2, batch, steps, key_heads, columns)) / columns**0.5
    gates = rng.uniform(0.3, 1, (*per_head, columns) if per_column else per_head)
    arrays = [*keys, rng.normal(size=(*per_head, rows)), gates, rng.uniform(size=per_head)]
    q, k, v, gamma, beta = (mx.array(a.astype(np.float32)) for a in arrays)
    state = mx.array(rng.normal(size=(batch, heads, rows, columns)).astype(np.float32))
    return [*(a.astype(dtype) for a in (q, k, v)), gamma, beta.astype(dtype), state]


def exact_gradients(arrays, cotangents, mask=None):
    """In float64, by the definition, backwards over the states of all steps."""
    q, k, v, gates, rates, state = arrays
    (batch, steps, key_heads, columns), heads = q.shape, v.shape[2]
    group = heads // key_heads
    per_column = gates.ndim == 4
    gates = gates if per_column else gates[..., None]
    q, k = q.repeat(group, 2), k.repeat(group, 2)
    states = [state]
    for t in range(steps):
        step = [a[:, t : t + 1] for a in (q, k, v, gates, rates)]
        states.append(exact_recurrence(*step, states[-1], None if mask is None else mask[:, t : t + 1])[1].value)
    dq, dk, dv, dgates, drates = (np.zeros(a.shape) for a in (q, k, v, gates, rates))
    dy, ds = cotangents
    for t in reversed(range(steps)):
        seen = np.ones((batch, 1, 1, 1)) if mask is None else mask[:, t].reshape(batch, 1, 1, 1)
        key, query, gate = (a[:, t, :, None, :] for a in (k, q, gates))
        rate = rates[:, t, :, None]
        decayed = states[t] * gate
        error = v[:, t] - (decayed * key).sum(-1)
        update = (rate * error)[..., None]
        of_y = dy[:, t, :, :, None] * seen
        dq[:, t] = (of_y * states[t + 1]).sum(-2)
        of_state = (ds + of_y * query) * seen
        of_update = (of_state * key).sum(-1)
        drates[:, t] = (of_update * error).sum(-1)
        dv[:, t] = rate * of_update
        of_decayed = of_state - dv[:, t][..., None] * key
        dk[:, t] = (of_state * update - dv[:, t][..., None] * decayed).sum(-2)
        of_gates = of_decayed * states[t]
        dgates[:, t] = of_gates.sum(-2) if per_column else of_gates.sum((-2, -1))[..., None]
        ds = of_decayed * gate + ds * (1 - seen)
    dq, dk = (a.reshape(batch, steps, key_heads, group, columns).sum(3) for a in (dq, dk))
    return [dq, dk, dv, dgates if per_column else dgates[..., 0], drates, ds]


def gradients(arrays, cotangents, mask=None):
    return mx.vjp(lambda *a: list(mm.gated_delta_update(*a, mask)), arrays, cotangents)[1]


# Over the chunks of the gradients: 32 steps of native code, 64 of products, 16 of gates per column.
SHAPES = [
    ((1, 1, 1, 2, 5, 24), False, False),
    ((2, 37, 1, 2, 9, 20), False, True),
    ((1, 70, 2, 2, 6, 33), False, False),
    ((1, 19, 2, 4, 5, 64), True, True),
]


@pytest.mark.parametrize(("shape", "per_column", "masked"), SHAPES)
def test_gradients_beside_float64(rng, executor, dtype, shape, per_column, masked):
    arrays = draw(rng, *shape, dtype, per_column)
    mask = mx.array(rng.random(shape[:2]) < 0.7) if masked else None
    outputs = mm.gated_delta_update(*arrays, mask)
    cotangents = [mx.array(rng.normal(size=a.shape).astype(np.float32)).astype(a.dtype) for a in outputs]
    wide = [specs.widen(a) for a in cotangents]
    expected = exact_gradients([specs.widen(a) for a in arrays], wide, None if mask is None else np.array(mask))
    found = gradients(arrays, cotangents, mask)
    for name, gradient, exact, array in zip(NAMES, found, expected, arrays, strict=True):
        assert gradient.dtype == array.dtype
        assert_near(gradient, exact, name, max(SUMS, units(2, array.dtype)))


def test_the_float64_gradients_are_derivatives(rng):
    """By differences."""
    arrays = [specs.widen(a) for a in draw(rng, 1, 4, 1, 2, 3, 8, per_column=True)]
    mask = np.array([[True, False, True, True]])
    cotangents = [rng.normal(size=a.value.shape) for a in exact_recurrence(*arrays, mask)]

    def value(arrays):
        return sum((e.value * c).sum() for e, c in zip(exact_recurrence(*arrays, mask), cotangents))

    for i, gradient in enumerate(exact_gradients(arrays, cotangents, mask)):
        direction = rng.normal(size=arrays[i].shape)
        ends = [[a + (sign * 1e-6 * direction if j == i else 0) for j, a in enumerate(arrays)] for sign in (1, -1)]
        slope = (value(ends[0]) - value(ends[1])) / 2e-6
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=DIFFERENCES, atol=DIFFERENCES)


def test_keys_that_are_all_the_same(rng, executor):
    """Where a series for the triangular system would cancel."""
    arrays = draw(rng, 1, 64, 1, 1, 4, 16)
    arrays[1] = mx.broadcast_to(
        arrays[1][:, :1] / mx.linalg.norm(arrays[1][:, :1], axis=-1, keepdims=True), (1, 64, 1, 16)
    )
    arrays[3], arrays[4] = mx.full((1, 64, 1), 0.999), mx.full((1, 64, 1), 0.95)
    cotangents = [mx.array(rng.normal(size=s).astype(np.float32)) for s in ((1, 64, 1, 4), (1, 1, 4, 16))]
    expected = exact_gradients([specs.widen(a) for a in arrays], [specs.widen(a) for a in cotangents])
    for name, gradient, exact in zip(NAMES, gradients(arrays, cotangents), expected, strict=True):
        assert_near(gradient, exact, name)


def test_masks(rng, dtype, executor):
    """Steps that the mask hides change nothing, and give 0."""
    *arrays, state = draw(rng, 2, 6, 1, 2, 5, 24, dtype)
    mask = mx.array([[False, True, True, False, True, True], [True] * 4 + [False] * 2])
    y, last = mm.gated_delta_update(*arrays, state, mask)
    assert not np.array(y.astype(mx.float32))[~np.array(mask)].any()
    seen = [mx.array([1, 2, 4, 5]), mx.array([0, 1, 2, 3])]
    kept = [mx.concatenate([mx.take(a[i : i + 1], seen[i], axis=1) for i in range(2)]) for a in arrays]
    y_of_kept, last_of_kept = mm.gated_delta_update(*kept, state)
    assert_same_bits(last, last_of_kept, "state")
    assert_same_bits(mx.concatenate([mx.take(y[i : i + 1], seen[i], axis=1) for i in range(2)]), y_of_kept, "y")


def test_a_prompt_is_its_tokens(rng, dtype, executor):
    """Bit for bit, with the state handed on in place."""
    *arrays, state = draw(rng, 2, 5, 2, 4, 9, 40, dtype)
    y, last = mm.gated_delta_update(*arrays, state)
    mx.eval(y, last)
    state = state + 0
    for t in range(5):
        result, state = mm.gated_delta_update(*(a[:, t : t + 1] for a in arrays), state)
        mx.eval(result, state)
        assert_same_bits(result, y[:, t : t + 1], "y")
    assert_same_bits(state, last, "state")


def test_without_a_state_it_begins_with_zeros(rng, dtype, executor):
    *arrays, state = draw(rng, 1, 3, 2, 4, 9, 40, dtype)
    for ours, beside in zip(mm.gated_delta_update(*arrays), mm.gated_delta_update(*arrays, mx.zeros_like(state))):
        assert_same_bits(ours, beside, str(ours.shape))
    assert mm.gated_delta_update(*arrays)[1].dtype == mx.float32
    assert mm.gated_delta_update(*arrays, state.astype(mx.float16))[1].dtype == mx.float16


def test_views_and_types(rng, executor):
    """Slices and broadcasts are read as they are; rates and gates in other types than the values'."""
    q, k, v, gamma, beta, state = draw(rng, 2, 3, 1, 2, 8, 16, mx.float16)
    wide = mx.concatenate([q, k, mx.zeros_like(q)], axis=-1)
    ours = mm.gated_delta_update(
        wide[..., :16],
        wide[..., 16:32],
        v,
        mx.broadcast_to(gamma[:, :, :1], gamma.shape),
        beta.astype(mx.float32),
        state,
    )
    expected = exact_recurrence(
        *map(specs.widen, (q, k, v)), specs.widen(gamma[:, :, :1]).repeat(2, 2), specs.widen(beta), specs.widen(state)
    )
    assert ours[0].dtype == mx.float16
    assert_near(ours[0], expected[0].value, "y", units(2, mx.float16))
    assert_near(ours[1], expected[1].value, "state")


def test_derivatives_of_derivatives(rng, executor):
    arrays = draw(rng, 1, 3, 1, 2, 4, 16)

    def penalty(*a):
        return (
            mx.grad(lambda v: (mm.gated_delta_update(a[0], a[1], v, *a[2:])[0] ** 2).sum())(mx.ones((1, 3, 2, 4))) ** 2
        ).sum()

    others = [arrays[i] for i in (0, 1, 3, 4, 5)]
    found = mx.grad(penalty)(*others)
    step = 1e-2 * mx.array(rng.normal(size=others[0].shape).astype(np.float32))
    slope = (penalty(others[0] + step, *others[1:]) - penalty(others[0] - step, *others[1:])) / 2
    assert_near((found * step).sum(), np.array(slope), "slope", 20 * SUMS)


def test_many_threads_sum_alike(rng, native):
    """Results do not depend on how tasks are shared out."""
    arrays = draw(rng, 2, 40, 4, 8, 70, 64)
    first = mm.gated_delta_update(*arrays)
    mx.eval(first)
    for _ in range(3):
        for ours, beside in zip(mm.gated_delta_update(*arrays), first):
            assert_same_bits(ours, beside, str(ours.shape))


BAD = [
    (0, (2, 3, 16), r"q has shape \(2,3,16\): expected \[batch, steps, key heads, columns\]"),
    (1, (2, 3, 1, 8), r"k has shape \(2,3,1,8\), q has shape \(2,3,1,16\): expected the same shape"),
    (2, (2, 4, 2, 8), r"v has shape \(2,4,2,8\), .*the heads a multiple of the key heads"),
    (3, (2, 3, 1), r"gamma has shape \(2,3,1\): expected \(2,3,2\) or \(2,3,2,16\)"),
    (4, (2, 3, 2, 1), r"beta has shape \(2,3,2,1\): expected \(2,3,2\)"),
    (5, (2, 2, 16, 8), r"initial_state has shape \(2,2,16,8\): expected \(2,2,8,16\)"),
]


@pytest.mark.parametrize(("i", "shape", "text"), BAD, ids=[text[:8] for _, _, text in BAD])
def test_bad_shapes(rng, i, shape, text):
    arrays = draw(rng, 2, 3, 1, 2, 8, 16)
    arrays[i] = mx.zeros(shape)
    with pytest.raises(ValueError, match=rf"\[gated_delta_update\] {text}"):
        mm.gated_delta_update(*arrays)


def test_bad_masks_and_types(rng):
    arrays = draw(rng, 2, 3, 1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"mask has shape \(3\): expected \(2,3\)"):
        mm.gated_delta_update(*arrays, mx.array([True] * 3))
    with pytest.raises(mm.DtypeError, match="mask has dtype float32: expected bool"):
        mm.gated_delta_update(*arrays, mx.zeros((2, 3)))
    for i in (3, 4, 5):
        given = [a.astype(mx.int32) if j == i else a for j, a in enumerate(arrays)]
        with pytest.raises(mm.DtypeError, match=f"{NAMES[i]} has dtype int32: expected float32, float16 or bfloat16"):
            mm.gated_delta_update(*given)


def kernels():
    counts = mm.stats(reset=True)["gated_delta_update"]
    return sum(counts["kernels"].values()), list(counts["mx"])


@pytest.mark.parametrize(
    ("heads", "width", "what"),
    [((16, 32), 128, ""), ((16, 32), 128, "a mask"), ((4, 8), 128, ""), ((16, 32), 64, "")],
    ids=str,
)
def test_on_an_apple_gpu_gates_of_heads_are_mlxs_where_it_has_a_kernel(rng, lenient, heads, width, what):
    """Its op is operations for each step elsewhere, as for a mask."""
    arrays = draw(rng, 1, 2, *heads, width, width)
    mask = mx.array([[True, False]]) if what else None
    has_kernel = (heads, width, what) == ((16, 32), 128, "")
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        ours = mm.gated_delta_update(*arrays, mask)
        mx.eval(ours)
        reason = "gates of heads on an Apple GPU, for which MLX has a kernel"
        assert kernels() == ((0, [reason]) if has_kernel else (1, []))
        for a, b in zip(ours, mx.fast.gated_delta_update(*arrays, mask), strict=True):
            assert_same_bits(a, b, str(a.shape)) if has_kernel else assert_near(a, b, str(a.shape))


@pytest.mark.parametrize("half", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("columns", [128, 520])
def test_gates_are_taken_in_float32_wherever_it_runs(rng, lenient, half, columns):
    """MLX's op would round them to the type of the queries: 0.999 would be 1."""
    *arrays, state = draw(rng, 1, 40, 16, 32, 128 if columns == 128 else 4, columns, half)
    arrays[3] = mx.full(arrays[3].shape, 0.999)
    with mm.simulator.enabled(gpu="m2-max"):
        y, last = mm.gated_delta_update(*arrays, state)
        mx.eval(y, last)
    assert y.dtype == half
    for name, ours, exact in zip(
        ("y", "state"), (y, last), exact_recurrence(*map(specs.widen, (*arrays, state))), strict=True
    ):
        assert_near(ours, exact.value, name, units(4, ours.dtype) if name == "y" else SUMS)


@pytest.mark.parametrize("function", ["gated_delta_ops", "gated_delta_kernel"])
def test_patched_it_is_mlx_lms(rng, lenient, function):
    """On an Apple GPU mlx-lm's kernel stays, its operations for each step do not; the types are theirs."""
    from mlx_lm.models import gated_delta

    *arrays, state = draw(rng, 1, 2, 2, 4, 32, 32, mx.float16)
    state = state.astype(mx.float16)
    of = lambda: getattr(gated_delta, function)(*arrays, state)
    with mm.simulator.enabled(gpu="m2-max", pretend_metal=True):
        theirs = of()
        mx.eval(theirs)
        with mm.patched():
            mm.stats(reset=True)
            ours = of()
            mx.eval(ours)
            reason = "gates of heads on an Apple GPU, for which mlx-lm has kernels"
            assert kernels() == ((1, []) if function == "gated_delta_ops" else (0, [reason]))
    assert [a.dtype for a in ours] == [a.dtype for a in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, str(a.shape), units(2, a.dtype) if a.dtype == mx.float16 else SUMS)


@pytest.mark.parametrize("dtypes", [(mx.float16, mx.float16, mx.float32), (mx.float16, mx.float32, mx.float16)])
def test_patched_mx_fast_has_its_types(rng, lenient, native, dtypes):
    *arrays, state = draw(rng, 1, 2, 1, 2, 8, 16)
    arrays[:3] = [a.astype(dtype) for a, dtype in zip(arrays, dtypes)]
    theirs = mx.fast.gated_delta_update(*arrays, state.astype(mx.float16))
    with mm.patched():
        mm.stats(reset=True)
        ours = mx.fast.gated_delta_update(*arrays, state.astype(mx.float16))
        mx.eval(ours)
        assert kernels() == (1, [])
    assert [a.dtype for a in ours] == [a.dtype for a in theirs]
