"""A token of a gated delta layer: views of projections, states, gradients, and checks of its arguments."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits, assert_state_in_place, launched_on_apple
from helpers.tolerances import SUMS, assert_near, units

import mlx_mittens as mm
from mlx_mittens import specs

NAMES = ("q", "k", "v", "z", "a", "b", "conv_state", "conv_weight", "A_log", "dt_bias", "norm_weight", "state")
OP = specs.get("gated_delta_token")


def draw(rng, *shape, dtype=mx.float32):
    """For batch, taps, key heads, heads, rows and columns."""
    return OP.draw(rng, specs.Case("", shape), dtype)


def by_steps(q, k, v, z, a, b, conv_state, conv_weight, a_log, dt_bias, norm_weight, state, eps=1e-6):
    """The layer's parts one after the other, as mlx-lm computes them, in float32."""
    q, k, v, z, a, b, conv_state, conv_weight, a_log, dt_bias, norm_weight = (
        x.astype(mx.float32) for x in (q, k, v, z, a, b, conv_state, conv_weight, a_log, dt_bias, norm_weight)
    )
    return OP.twin(q, k, v, z, a, b, conv_state, conv_weight, a_log, dt_bias, norm_weight, state)


def test_beside_the_parts_of_a_layer(rng, executor):
    arrays = draw(rng, 2, 4, 2, 4, 24, 32)
    for name, ours, theirs in zip(
        ("y", "conv_state", "state"), mm.gated_delta_token(*arrays), by_steps(*arrays), strict=True
    ):
        assert_near(ours, theirs, name, 4 * SUMS)


def test_views_of_projections_take_no_copy(rng):
    """Parts of one key head lie together in Qwen3-Next: one launch, and the same bits as of arrays of their own."""
    batch, key_heads, group, rows, columns = 2, 2, 2, 16, 32
    width = 2 * columns + 2 * group * rows
    arrays = draw(rng, batch, 4, key_heads, key_heads * group, rows, columns, dtype=mx.float16)
    q, k, v, z, a, b = arrays[:6]
    flat = [x.reshape(batch, key_heads, -1) for x in (q, k, v, z)]
    mixed, gates = mx.concatenate(flat, axis=-1), mx.concatenate([b, a], axis=-1)
    mx.eval(mixed, gates, arrays)
    start = 2 * columns
    views = [
        mixed[..., :columns],
        mixed[..., columns:start],
        mixed[..., start : start + group * rows].reshape(v.shape),
        mixed[..., start + group * rows : width].reshape(v.shape),
        gates[..., group:],
        gates[..., :group],
    ]
    assert launched_on_apple(lambda: mm.gated_delta_token(*views, *arrays[6:])) == ["gated_delta_token_float16"]
    for ours, beside in zip(mm.gated_delta_token(*views, *arrays[6:]), mm.gated_delta_token(*arrays), strict=True):
        assert_same_bits(ours, beside, str(ours.shape))


def test_the_convolution_is_that_of_mx(rng, dtype, executor):
    """Over five tokens, one state handed on to the next: a causal convolution of all of them."""
    tokens, (batch, taps, key_heads, heads, rows, columns) = 5, (1, 4, 1, 2, 9, 8)
    each = [draw(rng, batch, taps, key_heads, heads, rows, columns, dtype=dtype) for _ in range(tokens)]
    shared, past, state = each[0][7:11], mx.zeros_like(each[0][6]), each[0][11]
    for arrays in each:
        _, past, state = mm.gated_delta_token(*arrays[:6], past, *shared, state)
        mx.eval(past, state)
    mixed = [mx.concatenate([part.reshape(batch, 1, -1) for part in arrays[:3]], -1) for arrays in each]
    assert_same_bits(past, mx.concatenate(mixed[-3:], axis=1), "conv_state")


def test_the_state_is_written_in_place(rng, executor):
    assert_state_in_place(mm.gated_delta_token, draw(rng, 1, 4, 2, 4, 16, 32))


def test_a_held_state_stays(rng, executor):
    arrays = draw(rng, 1, 4, 1, 2, 16, 32)
    before = [mx.array(np.array(arrays[i])) for i in (6, 11)]
    mx.eval(mm.gated_delta_token(*arrays))
    for array, copy in zip((arrays[6], arrays[11]), before):
        assert_same_bits(array, copy, str(array.shape))


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
def test_gradients_are_those_of_the_parts(rng, taps):
    arrays = draw(rng, 1, taps, 1, 2, 5, 8)
    cotangents = [mx.array(rng.normal(size=a.shape).astype(np.float32)) for a in mm.gated_delta_token(*arrays)]
    found = mx.vjp(lambda *a: list(mm.gated_delta_token(*a)), arrays, cotangents)[1]
    if taps == 1:  # mx's convolution takes no state without elements
        return
    expected = mx.vjp(lambda *a: list(by_steps(*a)), arrays, cotangents)[1]
    for name, ours, theirs in zip(NAMES, found, expected, strict=True):
        assert_near(ours, theirs, name, 16 * SUMS)


def apart(arrays, key_channels):
    """The arguments with states and weights of the convolution in three parts."""
    ends = [key_channels, 2 * key_channels]
    parts = [tuple(map(mx.contiguous, mx.split(arrays[i], ends, axis))) for i, axis in ((6, 2), (7, 0))]
    return [*arrays[:6], *parts, *arrays[8:]]


def kimi(rng, *shape, dtype=mx.float32):
    return OP.draw(rng, specs.Case("", shape, {"per_column": True}), dtype)


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("per_column", [False, True])
def test_convolutions_apart(rng, dtype, executor, per_column, gate):
    """Three states, each moved on by itself, equal one of all channels; so with gates of columns."""
    shape = (2, 4, 2, 4, 9, 24)
    arrays = (kimi if per_column else draw)(rng, *shape, dtype=dtype)
    y, past, state = mm.gated_delta_token(*apart(arrays, 48), gate=gate)
    whole = mm.gated_delta_token(*arrays, gate=gate)
    for name, ours, beside in zip(("y", "state"), (y, state), (whole[0], whole[2])):
        assert_near(ours, beside, name, max(4 * SUMS, units(1, ours.dtype)))
    assert_same_bits(mx.concatenate(past, axis=2), whole[1], "conv_state")
    exact = OP.exact(specs.Case("", shape, {"gate": gate}), arrays)
    assert_near(y, mx.array(exact[0].value.astype(np.float32)), "y", max(16 * SUMS, units(4, y.dtype)))
    assert_near(state, mx.array(exact[2].value.astype(np.float32)), "state", 16 * SUMS)


@pytest.mark.parametrize("heads", [2, 4])
def test_states_of_convolutions_apart_are_moved_on_in_place(rng, executor, heads):
    """Where a key head has one head; the heads of one that has several read its state."""
    arrays = apart(kimi(rng, 1, 4, 2, heads, 16, 32), 64)
    mx.eval(arrays)
    copies = [mx.array(np.array(a)) for a in arrays[6]]
    addresses = [np.asarray(memoryview(a)).ctypes.data for a in arrays[6]]
    states = arrays.pop(6)
    held = [mm.gated_delta_token(*arrays[:6], tuple(copies), *arrays[6:])]
    mx.eval(held)
    y, past, _ = mm.gated_delta_token(*arrays[:6], states, *arrays[6:])
    del states
    mx.eval(y, past)
    assert ([np.asarray(memoryview(a)).ctypes.data for a in past] == addresses) == (heads == 2)
    for ours, beside in zip((y, *past), (held[0][0], *held[0][1]), strict=True):
        assert_same_bits(ours, beside, str(ours.shape))


def test_gradients_of_convolutions_apart(rng):
    arrays = kimi(rng, 1, 4, 1, 2, 5, 8)

    def loss(split, *arrays):
        given = apart(list(arrays), 8) if split else arrays
        y, past, state = mm.gated_delta_token(*given, gate="sigmoid")
        past = mx.concatenate(past, axis=2) if split else past
        return (y**2).sum() + (past**3).sum() + (state**2).sum()

    found, expected = (mx.grad(loss, argnums=list(range(1, 13)))(split, *arrays) for split in (True, False))
    slopes = mx.grad(lambda *a: sum((x**p).sum() for x, p in zip(OP.twin(*a, gate="sigmoid"), (2, 3, 2))),
                     argnums=list(range(12)))(*arrays)  # fmt: skip
    for name, ours, beside, theirs in zip(NAMES, found, expected, slopes, strict=True):
        assert_near(ours, beside, name, SUMS)
        assert_near(ours, theirs, name, 16 * SUMS)


def test_types(rng, executor):
    """The results have the types of the activations and of the states given; numbers of heads may be of any."""
    arrays = draw(rng, 1, 4, 1, 2, 9, 24)
    half = [a.astype(mx.bfloat16) for a in arrays[:8]]
    wide = mm.gated_delta_token(*half, *arrays[8:])
    assert [a.dtype for a in wide] == [mx.bfloat16, mx.bfloat16, mx.float32]
    numbers = [a.astype(mx.float16) for a in arrays[8:]]
    given = [*half[:6], arrays[6], *half[7:], *numbers]
    found = mm.gated_delta_token(*given)
    assert [a.dtype for a in found] == [mx.bfloat16, mx.float32, mx.float16]
    given[6] = half[6]
    for ours, exact in zip(mm.gated_delta_token(*given), OP.exact(specs.Case("", (1, 4, 1, 2, 9, 24)), given)):
        assert_near(ours, exact.value, str(ours.shape), max(16 * SUMS, units(4, ours.dtype)))


def test_eps(rng, executor):
    """They are added to the mean square of the result, and to the sums of squares of queries and keys."""
    arrays = draw(rng, 1, 4, 1, 2, 9, 24)
    found = mm.gated_delta_token(*arrays, eps=0.5, key_eps=2.0)
    from mlx_mittens.specs.recurrent_ops import exact_gated_delta_token

    for ours, exact in zip(
        found, exact_gated_delta_token(*map(specs.widen, arrays), eps=0.5, key_eps=2.0), strict=True
    ):
        assert_near(ours, exact.value, str(ours.shape), 4 * SUMS)


def test_many_rows_go_to_mx(rng, lenient):
    """Heads of more rows than a threadgroup holds."""
    arrays = draw(rng, 1, 2, 1, 1, 520, 8)
    expected = mm.gated_delta_token(*arrays)
    with mm.simulator.enabled():
        mm.stats(reset=True)
        found = mm.gated_delta_token(*arrays)
        mx.eval(found)
        assert list(mm.stats()["gated_delta_token"]["mx"]) == ["more than 512 rows"]
    for ours, beside in zip(found, expected, strict=True):
        assert_near(ours, beside, str(ours.shape), 4 * SUMS)


BAD = [
    (0, (2, 1, 3, 16), r"q has shape \(2,1,3,16\): expected \[batch, key heads, columns\]"),
    (1, (2, 3, 8), r"k has shape \(2,3,8\): expected \(2,3,16\)"),
    (2, (2, 3, 16), r"v has shape \(2,3,16\), .*: expected \[batch, key heads, heads of each, rows\]"),
    (3, (2, 3, 2, 5), r"z has shape \(2,3,2,5\): expected \(2,3,2,8\)"),
    (4, (2, 6), r"a has shape \(2,6\): expected \(2,3,2\)"),
    (5, (2, 3, 1), r"b has shape \(2,3,1\): expected \(2,3,2\)"),
    (6, (2, 4, 144), r"conv_state has shape \(2,4,144\): expected \(2,3,144\)"),
    (7, (144, 1, 4), r"conv_weight has shape \(144,1,4\): expected \[144, taps\] or \[144, taps, 1\]"),
    (8, (5,), r"A_log has shape \(5\): expected \(6\)"),
    (9, (6, 1), r"dt_bias has shape \(6,1\): expected \(6\)"),
    (10, (16,), r"norm_weight has shape \(16\): expected \(8\)"),
    (11, (2, 6, 16, 8), r"state has shape \(2,6,16,8\): expected \(2,6,8,16\)"),
]


@pytest.mark.parametrize(("i", "shape", "text"), BAD, ids=[NAMES[i] for i, _, _ in BAD])
def test_bad_shapes(rng, i, shape, text):
    arrays = draw(rng, 2, 4, 3, 6, 8, 16)
    arrays[i] = mx.zeros(shape)
    with pytest.raises(ValueError, match=rf"\[gated_delta_token\] {text}"):
        mm.gated_delta_token(*arrays)


def test_bad_parts_of_convolutions(rng):
    arrays = apart(draw(rng, 2, 4, 3, 3, 8, 16), 48)
    q, k, v = arrays[6]
    for states, weights, text in (
        ((q, v, k), arrays[7], r"conv_state\[1\] has shape \(2,3,24\): expected \(2,3,48\)"),
        (q, arrays[7], "conv_state has 1 parts, conv_weight has 3: expected the same number"),
        ((q, k, v), arrays[7][::-1], r"conv_weight\[0\] has shape \(24,4\): expected \[48, taps\] or"),
        ((q, k, v), (*arrays[7][:2], arrays[7][2][:, :3]), "conv_weight has 4 and 3 taps: expected the same number"),
    ):
        with pytest.raises(ValueError, match=rf"\[gated_delta_token\] {text}"):
            mm.gated_delta_token(*arrays[:6], states, weights, *arrays[8:])
    with pytest.raises(ValueError, match="gate is 'tanh': expected 'silu' or 'sigmoid'"):
        mm.gated_delta_token(*arrays, gate="tanh")
    wide = mx.zeros((2, 3, 1, 16))
    for given, text in ((wide, r"dt_bias has shape \(3\): expected \(3,16\)"), (wide[..., :8], "a has shape")):
        with pytest.raises(ValueError, match=text):
            mm.gated_delta_token(*arrays[:4], given, *arrays[5:])


def test_bad_types_and_eps(rng):
    arrays = draw(rng, 1, 4, 1, 2, 8, 16)
    for i in range(12):
        given = [a.astype(mx.int32) if j == i else a for j, a in enumerate(arrays)]
        if i > 5:
            with pytest.raises(mm.DtypeError, match=f"{NAMES[i]} has dtype int32: expected float32, float16 or"):
                mm.gated_delta_token(*given)
    for name in ("eps", "key_eps"):
        with pytest.raises(ValueError, match="eps is -1: expected a finite number that is not negative"):
            mm.gated_delta_token(*arrays, **{name: -1.0})
