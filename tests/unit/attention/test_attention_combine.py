"""The second kernel of decode attention by itself, with more splits than a simulated call has."""

import ml_dtypes
import numpy as np
import pytest
from helpers import simulate
from helpers.tolerances import BFLOAT16, FLOAT16, ROUNDINGS, WEIGHTED_MEAN

ROWS = 3
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

both = pytest.mark.parametrize("simdgroups", [1, 8])  # of a threadgroup


def combine(rng, dtype, splits, width, simdgroups, unseen=()):
    """The kernel's result and the exact one, and so the logsumexp, where some splits see no key."""
    base = np.e if dtype == "float32" else 2.0
    sums = rng.normal(size=(splits, ROWS, width)).astype(np.float32)
    maxima = rng.normal(scale=3, size=(ROWS, splits)).astype(np.float32)
    totals = rng.uniform(1, 50, size=(ROWS, splits)).astype(np.float32)
    sums[list(unseen)], maxima[:, list(unseen)], totals[:, list(unseen)] = 0, -np.inf, 0
    partials = np.concatenate([sums.ravel(), maxima.ravel(), totals.ravel()])
    y, logsumexp = np.zeros((ROWS, width), TYPES[dtype]), np.zeros(ROWS, np.float32)
    simulate.run(
        "attention/attention_combine.metal",
        f"attention_combine_{simdgroups}_{dtype}",
        [partials, ("output", y), ("output", logsumexp), np.array([ROWS, width, splits, 1], np.uint32).tobytes()],
        threadgroups=[ROWS, -(-width // 32), 1],
        threads=32 * simdgroups,
    )

    top = maxima.max(axis=1)
    weights = base ** (maxima - top[:, None]).astype(np.float64)
    total = (weights * totals).sum(axis=1)
    exact = np.einsum("rs,srw->rw", weights, sums.astype(np.float64)) / total[:, None]
    np.testing.assert_allclose(logsumexp, top * np.log(base) + np.log(total), rtol=WEIGHTED_MEAN, atol=ROUNDINGS)
    return y.astype(np.float64), exact


@both
@pytest.mark.parametrize("splits", [1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 160, 161, 257, 300])
def test_splits(rng, splits, simdgroups):
    """Four rounds of 32 lanes, and of 4 or 32 sharers, are one turn of the loops."""
    got, exact = combine(rng, "float32", splits, 64, simdgroups)
    np.testing.assert_allclose(got, exact, rtol=WEIGHTED_MEAN, atol=ROUNDINGS * np.abs(exact).max())


@both
@pytest.mark.parametrize("dtype, tolerance", [("float32", WEIGHTED_MEAN), ("float16", FLOAT16), ("bfloat16", BFLOAT16)])
@pytest.mark.parametrize("width", [64, 72, 80, 96, 128, 192, 256])
def test_widths(rng, dtype, tolerance, width, simdgroups):
    got, exact = combine(rng, dtype, 40, width, simdgroups)
    np.testing.assert_allclose(got, exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())


@both
def test_splits_that_see_nothing_count_for_nothing(rng, simdgroups):
    got, exact = combine(rng, "bfloat16", 150, 64, simdgroups, unseen=[0, 5, 33, 128, 149])
    np.testing.assert_allclose(got, exact, rtol=BFLOAT16, atol=BFLOAT16 * np.abs(exact).max())
