"""The table's launches are right in a thread order other than the natural one.

test_quick.py has the runs that reach every variant, in the same order; these are the others.
"""

import zlib

import pytest
from helpers.variants import simulate
from verification import quick

from mlx_mittens import specs

# test_macos_recording.py has another order, and the tests of the ops draw one.
SEED = quick.SEED

pytestmark = pytest.mark.usefixtures("native")


# By default a case runs in one type, at night in all.
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", specs.DTYPES)
@pytest.mark.parametrize("op", specs.OPS, ids=lambda op: op.name)
def test_every_other_launch_is_right(op, dtype, every, rng):
    chosen, place = quick.chosen(), list(specs.DTYPES).index(dtype)
    is_its_type = lambda case: (zlib.crc32(case.name.encode()) + place) % every == 0
    wanted = lambda case, i: is_its_type(case) and (op.name, case.name, dtype, i) not in chosen
    for case, _, check in simulate(op, specs.DTYPES[dtype], SEED, rng, wanted):
        assert check.passed, f"{op.name} {case.name}: {check.detail}"
