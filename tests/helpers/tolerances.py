"""The limits on errors that the tests have, the reason for each, and the assertions that apply them.

A unit is the distance from 1 to the next number of a type (`specs.EPSILON`): 2^-23, about 1.2e-7, of float32, 2^-10 of
float16, 2^-7 of bfloat16. A rounding moves a result by half a unit of it at most.

Results of the table of ops are judged by `specs.compare`: an element's error is taken relative to the largest of its
value, its row's root mean square and the size of the terms it sums up, and may be twice mx's or `specs.tolerance`. The
limits here are for other comparisons: relative to the element, or to the largest element, which shows how large the
terms are that an element may have cancelled from. The fuzzer computes a bound for each draw instead
(tests/verification/fuzz).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_mittens import specs
from mlx_mittens.specs.attention import UNITS

# Float32. The same mathematics in another order or another form.
#
# A handful of roundings: eight units. The norm of a short row, a softmax, an exponential.
ROUNDINGS = 1e-6
# The norm of a row of equal numbers, whose roundings all go the same way: half of the error of the sum of squares,
# which is half a unit for each addition of a chain. Of 16, and then of 16 such sums, it is eight units at most.
EQUAL_NUMBERS = 4 * 2.0**-23
# The mean over such rows where each pack has a sum of its own: its chains are too short for a unit to be lost.
SHORT_CHAINS = 0.5 * 2.0**-23
# Probabilities of a few numbers, whose sum is rounded another way where products and sums are fused: two units at 1.
FUSED = 2.0**-22
# A mean with float32 exponentials as weights. Each is some units off: 25 units.
WEIGHTED_MEAN = 3e-6
# A sum of some hundred terms in another order. The roundings of its partial sums add up like a random walk, to half a
# unit times the square root of the terms, of sums that may be some times as large as the final one: 84 units.
SUM = 1e-5
# A sum whose terms come out of another one: gradients, attention of projections. It multiplies the relative
# error of the first as its own terms cancel, to a tenth of their size or so for normal numbers: 840 units.
SUMS = 1e-4
# Some layers of a model, derivatives of derivatives, products of two such sums: another tenth.
LAYERS = 1e-3
# Gradients of products of numbers where some are 20 times as large as the rest, relative to the element: twice as
# much of it may have cancelled. `of_terms` is for gradients that cancel to nothing.
OUTLIERS = 2e-4
# The variance of numbers that lie around 1000 with a deviation of 1. A value is off by 2^-14, half a unit at 1000, and
# the norm of it by some times as much in the worst of a row.
FAR_FROM_ZERO = 5e-3

# The mean of the errors of such products as `of_tf32_products` is for, whose signs are even: an eighth of a unit. Upper
# parts that are cut and not rounded would make it two units.
TF32_BIAS = 2.0**-26

# 16-bit types.
#
# One rounding and the float32 errors before it: a little more than a unit, so that the neighbour of the right number is
# right too.
FLOAT16 = 1e-3
BFLOAT16 = 8e-3
# Two roundings, as of a product of two rounded numbers.
FLOAT16_TWICE = 2e-3
# Gradients, whose terms are rounded to the type: 20 units of float16, and of bfloat16, whose sums are float32, 2.5.
GRADIENTS_16_BIT = 2e-2

# MLX's own kernels, which round to their type on the way, as ours need not: relative to the largest element.
PEER = {mx.float32: SUM, mx.float16: 4e-3, mx.bfloat16: 3e-2}

# Products whose normal input is rounded to 8 bits: the root mean square of their errors, relative to the results'. A
# step is a 127th of the largest of up to 128 numbers, which is 2.8 deviations, and its errors are a square root of 12
# less.
INT8_ACTIVATIONS = 8e-3

# Float64.
#
# A sum in another order: millions of units of 2^-52.
FLOAT64 = 1e-9
FLOAT64_ROUNDINGS = 1e-10
# Differences of float64 over steps of 1e-6: 2^-52 / 1e-6 for the rounding of the values, and as much for the curvature.
DIFFERENCES = 1e-6
DIFFERENCES_FLOOR = 1e-7

# A model whose weights have changed against one that has not noticed: this part of the change in its results.
PART_OF_A_CHANGE = 0.02


def units(count: int, dtype: mx.Dtype) -> float:
    """So many units in the last place of a type."""
    return count * specs.EPSILON[dtype]


def of_terms(size: int) -> float:
    """The absolute limit of a float32 sum of terms of about this size, however little is left of it."""
    return SUM * size


def of_roundings(dtype: mx.Dtype) -> float:
    """The limit between mx and ours where each rounds the result and a number before it: four units.

    Both are off by half a unit twice, and the largest element, which this is relative to, may be anywhere between two
    powers of two.
    """
    return units(4, dtype)


def of_tf32_products(terms: np.ndarray, addends: np.ndarray | float = 0.0) -> np.ndarray:
    """The limit of float32 products that are made of three in TF32, by the size of their terms and of their addends.

    A term loses up to three units by the cut of each lower part, and four as the product of both is left out; sums are
    rounded five times.
    """
    return units(1, mx.float32) * (16 * terms + np.abs(addends))


def of_layer(dtype: mx.Dtype) -> float:
    """The limit of a layer's attention: its norms, rotations and products each round to the type.

    In float32 they are sums, whose roundings add up as in `SUM`.
    """
    return units(8 if dtype != mx.float32 else 32, dtype)


def of_product(dtype: mx.Dtype) -> float:
    """Of a product with outliers, relative to the size of its terms: its rounding to 16 bits, or sums in float32."""
    return units(64 if dtype == mx.float32 else 1, dtype)


def assert_right(
    op: specs.Op, case: specs.Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()
):
    """A case of the table is right against float64, and no worse than twice mx or one unit in the last place.

    mx computes on the CPU: on an NVIDIA GPU its gradient of layer_norm is no measure.
    """
    check = specs.check(op, case, arrays, cotangents, mx.Device(mx.cpu))
    assert check.passed, f"{op.name} {case.name}: {check.detail}"


def _assert_error(y: mx.array, exact: specs.Exact, dtype: mx.Dtype, allowed: float):
    assert y.dtype == dtype, f"{y.dtype}, expected {dtype}"
    found = specs.error(y, exact)
    assert found <= allowed, f"error {found:.2e}, allowed {allowed:.2e}; {specs.worst(y, exact.value)}"


def assert_product_right(y: mx.array, exact: specs.Exact, dtype: mx.Dtype):
    """A product is within rounding of float64."""
    _assert_error(y, exact, dtype, of_product(dtype))


def assert_attention_right(y: mx.array, twin: mx.array | None, exact: specs.Exact, dtype: mx.Dtype):
    """Attention is right against float64, and no worse than twice mx or what rounding explains."""
    twin_error = specs.error(twin, exact) if twin is not None else 0.0
    _assert_error(y, exact, dtype, specs.tolerance(dtype, twin_error, float32_units=UNITS))


def assert_error_at_most_that_of_mx(y: mx.array, twin: mx.array, exact: specs.Exact):
    """By root mean squares, against float64: a largest error comes from one number's rounding, which luck decides.

    A number in the middle of two 16-bit ones to within float32's rounding goes to either, hence 1.01. The order of a
    sum in float32 explains eight units of it.
    """
    ours, theirs = (np.sqrt(np.mean((specs.widen(a) - exact.value) ** 2)) for a in (y, twin))
    explained = units(8, mx.float32) * np.sqrt(np.mean(exact.value**2))
    assert ours <= max(1.01 * theirs, explained), f"error {ours:.2e}, mx's {theirs:.2e}, float32's {explained:.2e}"


def assert_near(a: mx.array, b: mx.array | np.ndarray, what: str, tolerance: float = SUMS):
    """Near in float32, relative to the largest element."""
    a, b = (specs.widen(value) if isinstance(value, mx.array) else value for value in (a, b))
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    distance = np.abs(a - b).max(initial=0)
    assert distance <= tolerance * max(np.abs(b).max(initial=0), 1e-3), f"{what}: {distance} off"
