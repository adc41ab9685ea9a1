"""Every kernel variant is launched by an op on one shape at least, and right, in under a minute."""

import pytest
from verification import levels, quick

from mlx_mittens import frontend, specs

pytestmark = pytest.mark.quick

STALE = "run PYTHONPATH=tests python -m verification.quick --write"


@pytest.mark.parametrize("dtype", specs.DTYPES)
@pytest.mark.parametrize("op", specs.OPS, ids=lambda op: op.name)
def test_one_shape_for_each_variant(op, dtype, native, rng):
    chosen = quick.chosen()
    for key, check, launched in quick.run(op, dtype, rng, chosen):
        assert check.passed, f"{key}: {check.detail}"
        assert chosen[key] <= launched, f"{key} does not launch {sorted(chosen[key] - launched)}: {STALE}"


def test_the_chosen_runs_are_of_the_table():
    assert set(quick.chosen()) <= quick.every_key(), STALE


def test_the_chosen_runs_are_for_every_variant():
    """The test above holds each run to the variants that it is there for.

    Kernels for matrix units run on a simulated M5 alone, in `tests/unit/matmul/test_qmm_int8.py`.
    """
    files = [file for file in frontend.files() if not frontend.is_for_matrix_units(file)]
    missing = set(levels.variants(files)) - set().union(*quick.chosen().values())
    assert missing == set(), STALE


def test_the_choice_covers_what_is_reached():
    reached = {"a": {"1", "2"}, "b": {"2", "3"}, "c": {"1", "2", "3", "4"}, "d": {"4"}}
    best = quick.cover(reached, {"a": 1.0, "b": 1.0, "c": 10.0, "d": 1.0})
    assert best == {"a": {"1", "2"}, "b": {"3"}, "d": {"4"}}
