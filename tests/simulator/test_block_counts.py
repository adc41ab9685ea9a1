"""The solver of executions: its own algebra against numpy's, and the same solution from any start."""

import numpy as np
import pytest

from mlx_mittens.prediction import block_counts


@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
def test_solutions_are_those_of_numpy(size, rng):
    matrix = rng.normal(size=(size + 30, size))
    gram = block_counts._product(matrix.T, matrix)
    assert gram == pytest.approx(matrix.T @ matrix, rel=1e-9, abs=1e-9)
    gram += np.eye(size)
    right = rng.normal(size=(size, 2))
    assert block_counts._solution(gram, right) == pytest.approx(np.linalg.solve(gram, right), rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("size", [5, 80])
def test_weights_are_the_nearest_that_are_not_negative(size, rng):
    """At the least squares the slope is zero where a weight is above zero, and leads below zero nowhere else."""
    matrix, wanted = np.vstack([rng.normal(size=(2 * size, size)), np.eye(size)]), rng.normal(size=3 * size)
    found = block_counts._nonnegative_least_squares(matrix, wanted, np.ones(size, bool))
    slope = matrix.T @ (matrix @ found - wanted)
    assert (found >= 0).all() and (found > 0).any() and (found == 0).any()
    assert slope[found > 0] == pytest.approx(0, abs=1e-8) and (slope[found == 0] > -1e-8).all()
    for start in (np.zeros(size, bool), rng.random(size) < 0.5):
        other = block_counts._nonnegative_least_squares(matrix, wanted, start)
        assert other == pytest.approx(found, rel=1e-8, abs=1e-10)


def test_large_systems_end(monkeypatch):
    """Where no solution comes near, as of codes of many loops, it is given up after a number of steps."""
    steps = []

    def solution(a, b):
        steps.append(len(a))
        return np.full_like(b, -1.0 if len(steps) % 2 else 1.0)

    monkeypatch.setattr(block_counts, "_solution", solution)
    size = 700
    wanted = np.where(np.arange(size) % 2, 1.0, -1.0)
    found = block_counts._nonnegative_least_squares(np.eye(size), wanted, np.ones(size, bool))
    assert (found >= 0).all() and len(steps) <= block_counts._FEWEST_STEPS
