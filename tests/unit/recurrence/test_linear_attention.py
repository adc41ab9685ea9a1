"""Linear attention: decays, states, gradients, and what its arguments have to be."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits, launched_on_apple
from helpers.tolerances import DIFFERENCES, SUMS, assert_near, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs.recurrent_ops import exact_linear_attention

NAMES = ("q", "k", "v", "decay", "state")
SCALE = 0.25


def draw(rng, batch, steps, key_heads, heads, rows, columns, dtype=mx.float32):
    """Queries, keys, values, decays and a state."""
    keys = (batch, steps, key_heads, columns)
    q, k, v = (
        mx.array(rng.normal(size=s).astype(np.float32)).astype(dtype) for s in (keys, keys, (batch, steps, heads, rows))
    )
    decay = mx.array(rng.uniform(0.5, 1, heads).astype(np.float32))
    return [q, k, v, decay, mx.array(rng.normal(size=(batch, heads, rows, columns)).astype(np.float32))]


def ours(q, k, v, decay, state):
    return mm.linear_attention(q, k, v, decay=decay, scale=SCALE, state=state)


def exact(q, k, v, decay, state):
    return [e.value for e in exact_linear_attention(q, k, v, decay, SCALE, state)]


def exact_gradients(arrays, cotangents):
    """In float64, of the sums over all pairs of tokens."""
    q, k, v, decay, first = arrays
    (steps, key_heads, columns), heads = q.shape[1:], v.shape[2]
    q, k = (a.repeat(heads // key_heads, 2) for a in (q * SCALE, k))
    dy, dlast = cotangents
    t = np.arange(steps)
    apart = np.maximum(t[:, None] - t, 0)
    seen = (t[:, None] >= t).astype(float)
    decays = decay[:, None, None] ** apart * seen
    slopes = apart * decay[:, None, None] ** (apart - 1.0) * seen
    since, left = decay[:, None] ** (t + 1), decay[:, None] ** (steps - 1 - t)
    qk, dv_v = np.einsum("bthc,bshc->bhts", q, k), np.einsum("bthr,bshr->bhts", dy, v)
    of_first = np.einsum("bthr,bhrc,bthc->ht", dy, first, q)
    of_last = np.einsum("bhrc,bshr,bshc->hs", dlast, v, k)
    dq = np.einsum("bhts,bshc->bthc", dv_v * decays, k) + np.einsum("ht,bthr,bhrc->bthc", since, dy, first)
    dk = np.einsum("bhts,bthc->bshc", dv_v * decays, q) + np.einsum("hs,bhrc,bshr->bshc", left, dlast, v)
    dv = np.einsum("bhts,bthr->bshr", qk * decays, dy) + np.einsum("hs,bhrc,bshc->bshr", left, dlast, k)
    ddecay = (qk * dv_v * slopes).sum((0, 2, 3)) + ((t + 1) * decay[:, None] ** t * of_first).sum(1)
    ddecay += ((steps - 1 - t) * decay[:, None] ** (steps - 2.0 - t) * of_last).sum(1)
    ddecay += steps * decay ** (steps - 1) * (dlast * first).sum((0, 2, 3))
    dfirst = np.einsum("ht,bthr,bthc->bhrc", since, dy, q) + (decay**steps)[:, None, None] * dlast
    dq, dk = (a.reshape(*a.shape[:2], key_heads, -1, columns).sum(3) for a in (dq * SCALE, dk))
    return [dq, dk, dv, ddecay, dfirst]


# Odd sizes, a token, batches, grouped heads, over the chunks of native code (32 steps) and of products (64).
SHAPES = [(1, 1, 1, 2, 5, 24), (2, 37, 1, 2, 9, 20), (1, 70, 2, 2, 6, 33), (3, 5, 2, 6, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients_beside_float64(rng, executor, dtype, shape):
    arrays = draw(rng, *shape, dtype)
    outputs = ours(*arrays)
    assert [a.dtype for a in outputs] == [dtype, mx.float32]
    wide = [specs.widen(a) for a in arrays]
    for name, output, expected in zip(("y", "state"), outputs, exact(*wide), strict=True):
        assert_near(output, expected, name, max(SUMS, units(2, output.dtype)))
    cotangents = [mx.array(rng.normal(size=a.shape).astype(np.float32)).astype(a.dtype) for a in outputs]
    expected = exact_gradients(wide, [specs.widen(a) for a in cotangents])
    found = mx.vjp(lambda *a: list(ours(*a)), arrays, cotangents)[1]
    for name, gradient, of_float64, array in zip(NAMES, found, expected, arrays, strict=True):
        assert gradient.dtype == array.dtype
        assert_near(gradient, of_float64, name, max(SUMS, units(2, array.dtype)))


def test_the_float64_gradients_are_derivatives(rng):
    """By differences."""
    arrays = [specs.widen(a) for a in draw(rng, 1, 4, 1, 2, 3, 8)]
    cotangents = [rng.normal(size=a.shape) for a in exact(*arrays)]

    def value(arrays):
        return sum((e * c).sum() for e, c in zip(exact(*arrays), cotangents))

    for i, gradient in enumerate(exact_gradients(arrays, cotangents)):
        direction = rng.normal(size=arrays[i].shape)
        ends = [[a + (sign * 1e-6 * direction if j == i else 0) for j, a in enumerate(arrays)] for sign in (1, -1)]
        slope = (value(ends[0]) - value(ends[1])) / 2e-6
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=DIFFERENCES, atol=DIFFERENCES)


def test_a_prompt_is_its_tokens(rng, dtype, executor):
    """Bit for bit, with the state handed on in place."""
    *arrays, decay, state = draw(rng, 2, 5, 2, 4, 9, 40, dtype)
    y, last = ours(*arrays, decay, state)
    mx.eval(y, last)
    state = state + 0
    for t in range(5):
        result, state = ours(*(a[:, t : t + 1] for a in arrays), decay, state)
        mx.eval(result, state)
        assert_same_bits(result, y[:, t : t + 1], "y")
    assert_same_bits(state, last, "state")


@pytest.mark.parametrize("decay", [None, 0.75, "of heads"])
def test_a_token_is_one_launch(rng, decay):
    """Without an operation of mx beside it."""
    q, k, v, decays, state = draw(rng, 1, 1, 2, 4, 16, 64, mx.float16)
    mx.eval(q, k, v, decays, state)
    given = decays if decay == "of heads" else decay
    run = lambda: mm.linear_attention(q, k, v, decay=given, scale=0.3, state=state)
    assert launched_on_apple(run) == ["linear_attention_float16"]


@pytest.mark.parametrize("half", [mx.float16, mx.bfloat16])
def test_y_is_rounded_once(rng, executor, half):
    """It is the rounding of what the same inputs give in float32, whatever the scale."""
    *arrays, decay, state = draw(rng, 2, 3, 1, 4, 33, 24, half)
    y, exact = (
        mm.linear_attention(*given, decay=decay, scale=0.3, state=state)[0]
        for given in (arrays, [a.astype(mx.float32) for a in arrays])
    )
    assert_same_bits(y, exact.astype(half), "y")


def test_defaults_and_types(rng, dtype, executor):
    """No decay is 1, no scale that of attention, no state zeros."""
    q, k, v, decay, state = draw(rng, 1, 3, 2, 4, 9, 16, dtype)
    zeros = mx.zeros_like(state)
    for a, b in zip(mm.linear_attention(q, k, v), ours(q, k, v, mx.ones(4), zeros), strict=True):
        assert_same_bits(a, b, str(a.shape))
    for a, b in zip(ours(q, k, v, 0.75, zeros), ours(q, k, v, mx.full(4, 0.75), zeros), strict=True):
        assert_same_bits(a, b, str(a.shape))
    assert mm.linear_attention(q, k, v, state=state.astype(mx.float16))[1].dtype == mx.float16
    assert mm.linear_attention(q, k, v.astype(mx.float32), decay=decay.astype(dtype))[0].dtype == mx.float32


def test_nothing(rng, executor):
    """No tokens leave the state; keys without columns give zeros."""
    *arrays, state = draw(rng, 2, 0, 1, 2, 5, 8)
    y, last = ours(*arrays, state)
    assert y.shape == (2, 0, 2, 5)
    assert_same_bits(last, state, "state")
    y, last = mm.linear_attention(mx.zeros((1, 3, 1, 0)), mx.zeros((1, 3, 1, 0)), mx.ones((1, 3, 2, 4)))
    assert last.shape == (1, 2, 4, 0)
    assert_same_bits(y, mx.zeros((1, 3, 2, 4)), "y")


def test_compiled(rng, executor):
    arrays = draw(rng, 1, 3, 2, 4, 9, 40)
    for compiled, beside in zip(mx.compile(ours)(*arrays), ours(*arrays), strict=True):
        assert_near(compiled, beside, str(beside.shape))


BAD = [
    (0, (2, 3, 16), r"q has shape \(2,3,16\): expected \[batch, steps, key heads, columns\]"),
    (1, (2, 3, 1, 8), r"k has shape \(2,3,1,8\), q has shape \(2,3,1,16\): expected the same shape"),
    (2, (2, 4, 2, 8), r"v has shape \(2,4,2,8\), .*the heads a multiple of the key heads"),
    (3, (2, 3, 2), r"decay has shape \(2,3,2\): expected a number or \(2\)"),
    (4, (2, 2, 16, 8), r"state has shape \(2,2,16,8\): expected \(2,2,8,16\)"),
]


@pytest.mark.parametrize(("i", "shape", "text"), BAD, ids=[text[:8] for _, _, text in BAD])
def test_bad_shapes(rng, i, shape, text):
    arrays = draw(rng, 2, 3, 1, 2, 8, 16)
    arrays[i] = mx.zeros(shape)
    with pytest.raises(ValueError, match=rf"\[linear_attention\] {text}"):
        ours(*arrays)


def test_bad_numbers_and_types(rng):
    q, k, v, decay, state = arrays = draw(rng, 2, 3, 1, 2, 8, 16)
    for bad in (0, -0.5, 1.25, float("nan")):
        with pytest.raises(ValueError, match="decay is .*: expected more than 0, and at most 1"):
            mm.linear_attention(q, k, v, decay=bad)
    with pytest.raises(ValueError, match="scale is inf: expected a finite number"):
        mm.linear_attention(q, k, v, scale=float("inf"))
    for i in (3, 4):
        given = [a.astype(mx.int32) if j == i else a for j, a in enumerate(arrays)]
        with pytest.raises(mm.DtypeError, match=f"{NAMES[i]} has dtype int32: expected float32, float16 or bfloat16"):
            ours(*given)
    with pytest.raises(mm.DtypeError, match="q has dtype int32"):
        mm.linear_attention(*(a.astype(mx.int32) for a in (q, k, v)))


def test_on_an_apple_gpu_many_steps_are_products(rng, lenient):
    few, many = (draw(rng, 2, steps, 1, 2, 8, 32) for steps in (8, 9))
    with mm.simulator.enabled():
        mm.stats(reset=True)
        mx.eval(ours(*few))
        stats = mm.stats()["linear_attention"]
        assert (sum(stats["kernels"].values()), list(stats["mx"])) == (1, [])
        mm.stats(reset=True)
        outputs = ours(*many)
        mx.eval(outputs)
        stats = mm.stats()["linear_attention"]
        assert not stats["kernels"]
        assert list(stats["mx"]) == ["more than 8 steps on an Apple GPU, which mx multiplies as matrices"]
    for a, b in zip(outputs, exact(*map(specs.widen, many)), strict=True):
        assert_near(a, b, str(a.shape))
