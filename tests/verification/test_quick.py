"""Every kernel variant is launched by an op on one shape at least, and right, in under a minute."""

import pytest
from helpers.variants import simulate
from verification import quick

from mlx_mittens import specs

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", specs.DTYPES)
@pytest.mark.parametrize("op", specs.OPS, ids=lambda op: op.name)
def test_one_shape_for_each_variant(op, dtype, native, rng):
    wanted = lambda case, i: quick.is_wanted((op.name, case.name, dtype, i))
    for case, _, check in simulate(op, specs.DTYPES[dtype], 1, rng, wanted):
        assert check.passed, f"{op.name} {case.name} {dtype}: {check.detail}"


def test_the_chosen_runs_are_of_the_table():
    assert quick.chosen() <= quick.every_key(), "run PYTHONPATH=tests python -m verification.quick --write"
