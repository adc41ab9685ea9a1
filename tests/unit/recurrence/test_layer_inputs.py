"""Inputs of recurrences over a prompt: masks, lengths, parts of a convolution, views, and checks of arguments."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits, launched_on_apple
from helpers.tolerances import SUMS, assert_near, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs.layer_inputs import exact_gated_delta_inputs, exact_ssm_inputs

DELTA, SPACE = specs.get("gated_delta_inputs"), specs.get("ssm_inputs")
NAMES = ("q", "k", "v", "gamma", "beta", "conv_state")
# Batch, steps, taps, key heads, heads, rows, columns.
SHAPE = (2, 19, 4, 2, 4, 9, 40)


def draw(op, rng, *shape, dtype=mx.float32, **options):
    return op.draw(rng, specs.Case("", shape, options), dtype)


def wide(arrays):
    return [None if a is None else specs.widen(a) if a.dtype in specs.EPSILON else np.array(a) for a in arrays]


def hidden(rng, batch, steps):
    mask = mx.array(rng.random((batch, steps)) < 0.6)
    return mask, mx.array(rng.integers(-1, steps + 2, (batch,)).astype(np.int32))


def assert_all_near(found, exact, dtype):
    for name, ours, one in zip(NAMES, found, exact, strict=True):
        tolerance = max(4 * SUMS, units(2, ours.dtype))
        assert ours.dtype == (mx.float32 if name in ("gamma", "beta") else dtype)
        assert_near(ours, one.value, name, tolerance)


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_masks_lengths_and_no_state(rng, executor, dtype, per_column, has_state):
    arrays = draw(DELTA, rng, *SHAPE, dtype=dtype, per_column=per_column)
    if not has_state:
        arrays[5] = None
    mask, lengths = hidden(rng, 2, 19)
    for some in ((mask, None), (None, lengths), (mask, lengths), (mask, lengths.astype(mx.int64))):
        exact = exact_gated_delta_inputs(*wide([*arrays, *some]))
        assert_all_near(mm.gated_delta_inputs(*arrays, *some), exact, dtype)


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 16, 17])
def test_fewer_steps_than_taps_and_more(rng, executor, taps, steps):
    arrays = draw(DELTA, rng, 2, steps, taps, 1, 2, 5, 12)
    assert_all_near(mm.gated_delta_inputs(*arrays), exact_gated_delta_inputs(*wide(arrays)), mx.float32)
    arrays = draw(SPACE, rng, 2, steps, taps, 70, 9)
    exact = exact_ssm_inputs(*wide(arrays), inner=70)
    for ours, one in zip(mm.ssm_inputs(*arrays, 70), exact, strict=True):
        assert_near(ours, one.value, "a part", 4 * SUMS)


@pytest.mark.parametrize("taps, columns", [(4, 128), (4, 130), (4, 260), (3, 40), (6, 200)])
def test_norms_of_many_channels_and_other_taps(rng, executor, taps, columns):
    """Kernels that keep a window in registers, and the one that does not: masks, lengths and no state."""
    arrays = draw(DELTA, rng, 2, 19, taps, 1, 2, 9, columns)
    mask, lengths = hidden(rng, 2, 19)
    for state in (arrays[5], None):
        given = [*arrays[:5], state, *arrays[6:], mask, lengths]
        assert_all_near(mm.gated_delta_inputs(*given), exact_gated_delta_inputs(*wide(given)), mx.float32)
    if executor == "simulator":
        mx.eval(given)
        name = "layer_inputs_float32" if taps == 4 and columns <= 128 else "layer_inputs_any_float32"
        assert launched_on_apple(lambda: mm.gated_delta_inputs(*arrays)) == [name]


def test_steps_are_the_same_in_pieces(rng, executor, dtype):
    """To the last bit: a sum has one order, wherever a step is."""
    arrays = draw(DELTA, rng, *SHAPE, dtype=dtype)
    whole, past, pieces = mm.gated_delta_inputs(*arrays), arrays[5], []
    for begin, end in ((0, 1), (1, 3), (3, 19)):
        steps = [a[:, begin:end] for a in arrays[:5]]
        *found, past = mm.gated_delta_inputs(*steps, past, *arrays[6:])
        mx.eval(found, past)
        pieces.append(found)
    for name, ours, *parts in zip(NAMES[:5], whole[:5], *pieces, strict=True):
        assert_same_bits(mx.concatenate(parts, axis=1), ours, name)
    assert_same_bits(past, whole[5], "conv_state")


def test_parts_of_a_convolution(rng, executor, dtype):
    """States and weights of q, of k and of v give the same results as of all channels together."""
    arrays = draw(DELTA, rng, *SHAPE, dtype=dtype)
    ends = [80, 160]
    apart = [tuple(mx.split(arrays[i], ends, axis)) for i, axis in ((5, 2), (6, 0))]
    for states in (apart[0], None):
        *expected, past = mm.gated_delta_inputs(*arrays[:5], arrays[5] if states else None, *arrays[6:])
        *found, parts = mm.gated_delta_inputs(*arrays[:5], states, apart[1], *arrays[7:])
        for name, ours, one in zip(NAMES, (*found, mx.concatenate(parts, axis=2)), (*expected, past), strict=True):
            assert_same_bits(ours, one, name)


def test_views_of_one_projection(rng, executor, dtype):
    """As Qwen3-Next has them, read where they lie, and views that have to be copied."""
    arrays = draw(DELTA, rng, *SHAPE, dtype=dtype)
    expected = mm.gated_delta_inputs(*arrays)
    q, k, v, a, b = arrays[:5]
    whole = mx.concatenate([q, k, v.reshape(2, 19, 2, 18), mx.zeros((2, 19, 2, 3), dtype)], axis=-1)
    both = mx.concatenate([b, a], axis=-1)
    views = whole[..., :40], whole[..., 40:80], whole[..., 80:98].reshape(2, 19, 2, 2, 9), both[..., 2:], both[..., :2]
    turned = [mx.contiguous(part.swapaxes(1, -1)).swapaxes(1, -1) for part in (q, k, v, a, b)]
    for each in (views, turned):
        for name, ours, one in zip(NAMES, mm.gated_delta_inputs(*each, *arrays[5:]), expected, strict=True):
            assert_same_bits(ours, one, name)


def test_numbers_that_are_not_finite_stay_where_they_are(rng, executor):
    """NaN in one channel of a step reaches the taps behind it, and a mask keeps it out."""
    mixed, past, weight, bias = draw(SPACE, rng, 1, 21, 4, 130, 8)
    spoiled = mx.array(np.array(mixed))
    spoiled[0, 5, 7] = mx.nan
    clean, found = (mm.ssm_inputs(x, past, weight, bias, 130)[0] for x in (mixed, spoiled))
    lost = np.zeros(found.shape, bool)
    lost[0, 5:9, 7] = True
    np.testing.assert_array_equal(np.isnan(np.array(found)), lost)
    np.testing.assert_array_equal(np.array(found)[~lost], np.array(clean)[~lost])
    mask = mx.arange(21)[None] != 5
    assert not mx.isnan(mm.ssm_inputs(spoiled, past, weight, bias, 130, mask)[0]).any()


def test_gradients_and_functions_for_all_shapes(rng, executor):
    arrays = draw(DELTA, rng, 1, 4, 4, 1, 2, 3, 8)
    sums = lambda function: lambda *a: sum((y * y).sum() for y in function(*a))
    gradients = (mx.grad(sums(f), argnums=(0, 2, 3, 5, 6))(*arrays) for f in (mm.gated_delta_inputs, DELTA.twin))
    for ours, expected in zip(*gradients, strict=True):
        assert_near(ours, expected, "gradient", 16 * SUMS)
    mask = mx.array([[True, False, True, True]])
    slope = mx.grad(lambda q: (mm.gated_delta_inputs(q, *arrays[1:], mask)[0] ** 2).sum())(arrays[0])
    assert float(mx.abs(slope[:, 1]).max()) == 0
    compiled = mx.compile(lambda *a: mm.gated_delta_inputs(*a), shapeless=True)
    for steps in (4, 1, 18):
        some = draw(DELTA, rng, 1, steps, 4, 1, 2, 3, 8)
        for name, ours, expected in zip(NAMES, compiled(*some), DELTA.twin(*some), strict=True):
            assert_near(ours, expected, name, 4 * SUMS)


def test_bad_arguments(rng):
    q, k, v, a, b, past, weight, a_log, bias = draw(DELTA, rng, 1, 4, 4, 1, 2, 3, 8)
    call = lambda *, q=q, k=k, v=v, a=a, past=past, weight=weight, bias=bias, **more: mm.gated_delta_inputs(
        q, k, v, a, b, past, weight, a_log, bias, **more
    )
    for given, text in (
        ({"q": q[0]}, "q has shape"),
        ({"k": k[:, 1:]}, "k has shape"),
        ({"v": v[..., 0]}, "v has shape"),
        ({"a": a[:, 1:]}, "a has shape"),
        ({"bias": bias[1:]}, "dt_bias has shape"),
        ({"past": past[:, 1:]}, "conv_state has shape"),
        ({"past": (past, past, past)}, "3 parts"),
        ({"weight": weight[1:]}, "conv_weight has shape"),
        ({"mask": mx.ones((1, 3), mx.bool_)}, "mask has shape"),
        ({"mask": mx.ones((1, 4))}, "mask has dtype"),
        ({"lengths": mx.array([1.0])}, "lengths has dtype"),
        ({"key_eps": -1.0}, "eps"),
    ):
        with pytest.raises(ValueError, match=text):
            call(**given)
    mixed, past, weight, bias = draw(SPACE, rng, 1, 4, 4, 6, 3)
    for arguments, text in (
        ((mixed[0], past, weight, bias, 6), "mixed has shape"),
        ((mixed, past, weight, bias, 5), "inner is 5"),
        ((mixed, past, weight, bias, 14), "inner is 14"),
        ((mixed, past[:, 1:], weight, bias, 6), "conv_state has shape"),
        ((mixed, past, weight, bias[1:], 6), "conv_bias has shape"),
    ):
        with pytest.raises(ValueError, match=text):
            mm.ssm_inputs(*arguments)
    compiled = mx.compile(lambda *a: mm.ssm_inputs(*a, 6), shapeless=True)
    mx.eval(compiled(mixed, past, weight, bias))
    for channels in (4, 9):
        later = draw(SPACE, rng, 1, 4, 4, channels, 0)
        with pytest.raises(ValueError, match=rf"\[ssm_inputs\] inner is 6, conv_weight has {channels} channels"):
            compiled(*later)
