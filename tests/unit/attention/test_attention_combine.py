"""The second kernel of decode attention by itself, with more splits than a simulated call has."""

import ml_dtypes
import numpy as np
import pytest
from helpers import simulate
from helpers.tolerances import BFLOAT16, FLOAT16, ROUNDINGS, WEIGHTED_MEAN

ROWS, HEADS = 3, 3
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def combine(rng, dtype, splits, width, has_sinks, unseen=()):
    """The kernel's result and the exact one, where some splits see no key."""
    base = np.e if dtype == "float32" else 2.0
    sums = rng.normal(size=(splits, ROWS, width)).astype(np.float32)
    maxima = rng.normal(scale=3, size=(ROWS, splits)).astype(np.float32)
    totals = rng.uniform(1, 50, size=(ROWS, splits)).astype(np.float32)
    sums[list(unseen)], maxima[:, list(unseen)], totals[:, list(unseen)] = 0, -np.inf, 0
    sinks = rng.normal(size=HEADS).astype(TYPES[dtype])
    partials = np.concatenate([sums.ravel(), maxima.ravel(), totals.ravel()])
    y = np.zeros((ROWS, width), TYPES[dtype])
    params = np.array([ROWS, HEADS, 1, width, splits, has_sinks], np.uint32).tobytes()
    simulate.run(
        "attention/attention_combine.metal",
        f"attention_combine_{dtype}",
        [partials, sinks, y, params],
        threadgroups=[ROWS, -(-width // 32), 1],
        threads=256,
    )

    unit = 1.0 if dtype == "float32" else np.log2(np.e)
    sink = sinks.astype(np.float64) * unit if has_sinks else np.full(ROWS, -np.inf)
    top = np.maximum(maxima.max(axis=1), sink)
    weights = base ** (maxima - top[:, None]).astype(np.float64)
    total = (weights * totals).sum(axis=1) + base ** (sink - top)
    return y.astype(np.float64), np.einsum("rs,srw->rw", weights, sums.astype(np.float64)) / total[:, None]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 31, 32, 33, 64, 127, 128, 129, 160, 161, 257, 300])
def test_splits(rng, splits, has_sinks):
    """Four rounds of 32 lanes, and of 32 sharers, are one turn of the loops."""
    got, exact = combine(rng, "float32", splits, 64, has_sinks)
    np.testing.assert_allclose(got, exact, rtol=WEIGHTED_MEAN, atol=ROUNDINGS * np.abs(exact).max())


@pytest.mark.parametrize("dtype, tolerance", [("float32", WEIGHTED_MEAN), ("float16", FLOAT16), ("bfloat16", BFLOAT16)])
@pytest.mark.parametrize("width", [64, 72, 80, 96, 128, 192, 256])
def test_widths(rng, dtype, tolerance, width):
    got, exact = combine(rng, dtype, 40, width, True)
    np.testing.assert_allclose(got, exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())


@pytest.mark.parametrize("has_sinks", [False, True])
def test_splits_that_see_nothing_count_for_nothing(rng, has_sinks):
    got, exact = combine(rng, "bfloat16", 150, 64, has_sinks, unseen=[0, 5, 33, 128, 149])
    np.testing.assert_allclose(got, exact, rtol=BFLOAT16, atol=BFLOAT16 * np.abs(exact).max())
