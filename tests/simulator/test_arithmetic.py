"""Float32 in the simulator: half turns, powers, subnormal numbers, and products that are added."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import tolerances

import mlx_mittens as mm


def run(source, x, **options):
    """The number that a kernel writes for each element of x."""
    x = mx.array(x)
    kernel = mm.simulator.metal_kernel("arithmetic", ["x"], ["y"], f"uint i = thread_position_in_grid.x; {source}")
    sizes = {"grid": (x.size, 1, 1), "threadgroup": (x.size, 1, 1), "output_shapes": [x.shape]}
    with mm.simulator.enabled(**options):
        return np.array(kernel(inputs=[x], output_dtypes=[mx.float32], **sizes)[0])


INFINITE = float("inf")
TURNS = [-2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 1e8 + 8]
HALF_TURNS = {
    "sinpi": [-1, 0, 1, 0, -1, 0, 1, 0, -1, 0, 1, 0],
    "cospi": [0, 1, 0, -1, 0, 1, 0, -1, 0, 1, 0, 1],
    "tanpi": [-INFINITE, 0, INFINITE, 0, -INFINITE, 0, INFINITE, 0, -INFINITE, 0, INFINITE, 0],
}


@pytest.mark.parametrize("name", HALF_TURNS)
@pytest.mark.parametrize("space", ["", "precise::", "fast::"])
def test_half_turns_are_exact_at_quarters(name, space):
    np.testing.assert_array_equal(run(f"y[i] = {space}{name}(x[i]);", TURNS), np.float32(HALF_TURNS[name]))


@pytest.mark.parametrize("name", HALF_TURNS)
def test_half_turns_between_quarters(name):
    x = np.float32(np.random.default_rng(0).uniform(-3, 3, 256))
    exact = getattr(np, name[:-2])(np.pi * np.float64(x))
    error = np.abs(run(f"y[i] = {name}(x[i]);", x) - exact)
    assert (error <= 4 * 2.0**-24 * np.maximum(np.abs(exact), 2.0**-24)).all()


@pytest.mark.parametrize("call", ["powr(x[i], 2.0f)", "float(powr(half(x[i]), 2.0h))", "fast::powr(float2(x[i]), 2).y"])
def test_powr_takes_no_negative_base(call):
    np.testing.assert_array_equal(run(f"y[i] = {call};", [-2.0, -0.5, 0.0, 0.5, 2.0]), [np.nan, np.nan, 0, 0.25, 4])


LEAST = 2.0**-126  # normal
SUBNORMAL = {
    "a result": ("y[i] = x[i] * 0.5f;", LEAST, LEAST / 2),
    "an operand": ("y[i] = x[i] * 0x1p20f;", LEAST / 4, LEAST * 2.0**18),
    "a constant": ("float t = 0x1p-126f * 0.5f; y[i] = as_type<uint>(t + 0 * x[i]) != 0;", 1.0, 1),
    "a comparison": ("y[i] = x[i] > 0;", LEAST / 2, 1),
    "a half, which stays": ("half h = as_type<half>(ushort(3)) + half(x[i]); y[i] = as_type<ushort>(h);", 0.0, 3),
}


@pytest.mark.parametrize("name", SUBNORMAL)
def test_subnormal_numbers_are_kept_or_flushed(name):
    source, x, kept = SUBNORMAL[name]
    assert run(source, [x]) == kept
    assert run(source, [x], subnormals="flush") == (kept if "half" in name else 0)
    assert np.float32(LEAST) * np.float32(0.5) > 0, "the thread is as it was"


def test_a_fault_leaves_subnormal_numbers_as_they_were():
    with pytest.raises(mm.simulator.Fault):
        run("y[i + 1] = x[i];", [1.0], subnormals="flush")
    assert np.float32(LEAST) * np.float32(0.5) > 0


FUSED = {
    "an expression": ("y[i] = x[i] * (2 - x[i]) - 1.0f;", True),
    "vectors": ("y[i] = (float2(x[i]) * float2(2 - x[i]) - float2(1)).y;", True),
    "an expression beside fma": ("y[i] = x[i] * (2 - x[i]) - fma(x[i], 0.0f, 1.0f);", True),
    "two statements": ("float p = x[i] * (2 - x[i]); y[i] = p - 1.0f;", False),
    "a function's result": ("y[i] = clamp(x[i] * (2 - x[i]), 0.0f, 2.0f) - 1.0f;", False),
}


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_products_are_fused_within_an_expression(name, watch):
    source, fuses = FUSED[name]
    x = [1 + 2.0**-23]
    assert run(source, x, watch=watch) == 0
    assert run(source, x, watch=watch, fuse=True) == (-(2.0**-46) if fuses else 0)


def test_ops_take_the_settings():
    a = mx.array(np.float32([[LEAST / 2, 1.0, -2.0, 0.5]]))
    with mm.simulator.enabled(subnormals="flush", fuse=True):
        y = mm.softmax(a, axis=-1, stream=mx.cpu)
        mx.eval(y)
    assert np.abs(np.array(y) - np.array(mx.softmax(a, axis=-1))).max() <= tolerances.FUSED


def test_settings_of_blocks_nest():
    source = "y[i] = x[i] * 0.5f;"
    with mm.simulator.enabled(subnormals="flush"):
        assert run(source, [LEAST]) > 0, "the inner block keeps them"
    assert run(source, [LEAST]) > 0
    with pytest.raises(ValueError, match="subnormals is 'zero': expected 'keep' or 'flush'"):
        run(source, [LEAST], subnormals="zero")
