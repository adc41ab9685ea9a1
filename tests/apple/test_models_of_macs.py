"""The first table of the README and of the site: what bench/apple/models.py makes of the predictions that are kept."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models():
    sys.path.insert(0, str(ROOT / "bench" / "apple"))
    try:
        import models
    finally:
        sys.path.pop(0)
    return models


def test_the_pages_have_the_tables(models):
    found = json.loads(models.FILE.read_text())
    assert models.PAGE.read_text() == models.document(found)
    for place in models.PLACES:
        (table,) = models.PATTERN.findall(place.read_text())
        assert table == f"\n{models.summary(found)}\n", f"{place.name}: run python bench/apple/models.py --write"


def test_every_model_has_a_row_for_tokens(models):
    found = json.loads(models.FILE.read_text())
    for name in models.MODELS:
        chips = [chip for chip in models.CHIPS if models.fits(name, chip, "token")]
        assert list(found[models.key(name, "token")]) == chips, name


def test_the_first_screen_says_that_nothing_was_measured(models):
    for place in models.PLACES:
        head = place.read_text().partition("\n## ")[2]
        assert "no Mac has run" in re.sub(r"\s+", " ", head.partition("\n## ")[0])
        assert "mlx-mittens bench --predict --model" in head.partition("\n## ")[0]


def test_a_cell_has_mx_s_number_and_ours(models):
    assert models.pair(93.4, 145.2) == "93 → **145**"
    assert models.pair(4.26, 9.96) == "4.3 → **10.0**"


def test_what_does_not_fit_is_left_out(models):
    assert not models.fits("qwen3-30b-a3b", "m1", "token") and models.fits("qwen3-30b-a3b", "m2-pro", "token")
    assert not models.fits("qwen3-0.6b", "m5", "prompt") and models.fits("qwen3-0.6b", "m5", "token")
