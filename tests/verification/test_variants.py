"""The table's launches are right in a thread order other than the natural one.

test_levels.py checks that they reach every variant.
"""

import pytest
from helpers.variants import simulate

from mlx_mittens import specs

# test_macos_recording.py simulates the whole table in another order, and the tests of the ops draw one.
SEED = 1

pytestmark = pytest.mark.usefixtures("native")


@pytest.mark.parametrize("op", specs.OPS, ids=lambda op: op.name)
def test_every_launch_is_right(op, dtype, rng):
    for case, _, check in simulate(op, dtype, SEED, rng):
        assert check.passed, f"{op.name} {case.name}: {check.detail}"
