"""Every variant passes every level; the documentation says so."""

import pytest
from verification import levels


@pytest.fixture(scope="module")
def verified():
    return {level.name: have for level, have in levels.verify()}


@pytest.mark.parametrize("level", levels.LEVELS, ids=lambda level: level.name)
def test_no_variant_is_left_behind(level, verified):
    if level.missing():
        pytest.skip(level.missing())
    assert set(level.concerned()) - verified[level.name] == set(), "the op's row in mlx_mittens/specs needs more shapes"


def test_every_variant_is_launched_with_the_threads_that_it_declares():
    assert levels.idle_threads() == {}


def test_the_documentation_is_current(verified):
    if set(verified) != {level.name for level in levels.LEVELS}:
        pytest.skip("not every level can be run here")
    assert levels.in_docs() == levels.markdown(verified), "run PYTHONPATH=tests python -m verification.levels --write"


def test_a_hole_shows():
    table = levels.markdown({level.name: set(level.concerned()[1:]) for level in levels.LEVELS})
    for level in levels.LEVELS:
        count = len(level.concerned())
        assert f"| {level.name} | {level.shows} | {count - 1} of {count}" in table
