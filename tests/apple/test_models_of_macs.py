"""The first table of the README and of the site, which bench/apple/models.py makes from the kept predictions."""

import json
import re

import pytest
from helpers import scripts

from mlx_mittens import frontend
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.bench.models import DTYPES
from mlx_mittens.cli import predicted_models
from mlx_mittens.patching.patches import patched


@pytest.fixture(scope="module")
def models():
    return scripts.load("apple/models")


def test_the_pages_have_the_tables(models):
    found = json.loads(models.FILE.read_text())
    assert models.PAGE.read_text() == models.document(found)
    for place in models.PLACES:
        (table,) = models.PATTERN.findall(place.read_text())
        assert table == f"\n{models.summary(found)}\n", f"{place.name}: run python bench/apple/models.py --write"


def test_every_model_has_a_row(models):
    found = json.loads(models.FILE.read_text())
    assert list(found) == list(models.MODELS)
    for name in models.MODELS:
        assert list(found[name]) == [chip for chip in models.CHIPS if models.fits(name, chip)], name


@pytest.mark.skipif(bool(frontend.compiler_problem()), reason=frontend.compiler_problem())
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_the_table_has_the_launches_of_today(models, native, lenient, name):
    weights, _ = models.MODELS[name]
    model = predicted_models.short_model(name, weights, DTYPES[predicted_models.usual_dtype(weights)])
    with patched():
        found = predicted_models.token(model, find_chip(models.PLANNED_FOR))
    kept = {rows[0][0] for rows in json.loads(models.FILE.read_text())[name].values()}
    assert kept == {found.count(name)}, f"delete {name} from {models.FILE.name} and run python bench/apple/models.py"


def test_the_first_screen_says_that_nothing_was_measured(models):
    for place in models.PLACES:
        head = place.read_text().partition("\n## ")[2]
        assert "no Mac has run" in re.sub(r"\s+", " ", head.partition("\n## ")[0])
        assert "mlx-mittens bench --predict --model" in head.partition("\n## ")[0]


def test_a_cell_has_mx_s_number_and_ours(models):
    assert models.pair(93.4, 145.2) == "93 → **145**"
    assert models.pair(4.26, 9.96) == "4.3 → **10.0**"


def test_what_does_not_fit_is_left_out(models):
    assert not models.fits("qwen3-30b-a3b", "m1") and models.fits("qwen3-30b-a3b", "m2-pro")
