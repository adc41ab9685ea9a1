"""Every variant climbs every rung; the README says so."""

import pytest
import rungs


@pytest.fixture(scope="module")
def climbed():
    return {rung.name: have for rung, have in rungs.climb()}


@pytest.mark.parametrize("rung", rungs.RUNGS, ids=lambda rung: rung.name)
def test_no_variant_is_left_behind(rung, climbed):
    if rung.missing():
        pytest.skip(rung.missing())
    assert set(rungs.variants()) - climbed[rung.name] == set()


def test_the_readme_is_current(climbed):
    if set(climbed) != {rung.name for rung in rungs.RUNGS}:
        pytest.skip("not every rung can be climbed here")
    assert rungs.in_readme() == rungs.markdown(climbed), "run python tests/rungs.py --write"


def test_a_hole_shows():
    table = rungs.markdown({rung.name: set(rungs.variants()[1:]) for rung in rungs.RUNGS})
    count = len(rungs.variants())
    assert table.count(f"{count - 1} of {count}") == len(rungs.RUNGS)
