"""Published measurements hold the model to its errors, and its limits to the measured ones."""

import dataclasses
import re
import statistics
import sys
from pathlib import Path

import pytest
from helpers import scripts

from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import CONSTANTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def errors():
    return scripts.load("apple/errors")


@pytest.fixture(scope="module")
def fitting(errors):
    return sys.modules["fit"]  # which the other has imported


def median_percent(rows, held_out=False):
    return 100 * statistics.median(abs(row.error(held_out)) for row in rows)


def test_points_are_complete_and_name_known_chips(fitting):
    points = fitting.read_points()
    assert len(points) == 554
    for point in points:
        assert find_chip(point.chip) and point.time_us > 0 and point.source
        assert point.family in fitting.KINDS or fitting.excluded(point)


def test_excluded_points_are_few_and_say_why(fitting):
    reasons = [reason for point in fitting.read_points() if (reason := fitting.excluded(point))]
    assert len(reasons) == 51
    assert len(fitting.used()) == 554 - 51


def test_work_asks_neither_for_the_time_nor_for_an_earlier_prediction(fitting):
    """A point whose result is changed has the same launches."""
    from works import launches

    for point, _, works in fitting.used():
        other = dataclasses.replace(point, time_us=1.0, first_model_us=None, note="")
        assert launches(other) == works


def test_work_is_that_of_the_bytes_and_operations_of_the_point(fitting):
    """Lines follow from the published bytes, and multiplies from the published operations."""
    for point, _, works in fitting.used():
        lines = sum(work.lines * times for work, times in works)
        multiplies = sum(work.instructions.matrix * times for work, times in works)
        if point.bytes and point.kernel != "steel_gemm" and point.family != "decode_model":
            assert lines * 128 == pytest.approx(point.bytes, rel=0.35), point
        if point.flops and point.kernel.startswith("steel_gemm"):
            assert multiplies * 1024 == pytest.approx(point.flops, rel=0.01), point


def test_errors_over_all(errors):
    assert median_percent(errors.rows()) <= 8
    assert median_percent(errors.rows(), held_out=True) <= 8


def test_errors_of_attention(errors):
    rows = errors.by_kind()["attention"]
    assert median_percent(rows) <= 12 and median_percent(rows, held_out=True) <= 12


def test_errors_of_4_bit_weights(errors):
    rows = errors.by_kind()["4-bit"]
    assert median_percent(rows) <= 20 and median_percent(rows, held_out=True) <= 20


def test_errors_of_products_of_matrices(errors):
    rows = errors.by_kind()["matmul"]
    assert median_percent(rows) <= 12 and median_percent(rows, held_out=True) <= 12
    of_4_bits = [row for row in rows if row.point.family == "qmm"]
    assert len(of_4_bits) == 5 and median_percent(of_4_bits) <= 12
    # From the M3 on, where integers cost nothing beside products: at most 15 %.
    assert all(abs(row.error()) <= 0.15 for row in of_4_bits if row.point.chip.startswith("m3"))


def test_every_chip_is_predicted_by_the_others(errors):
    for chip in {row.point.chip for row in errors.rows()}:
        rows = [row for row in errors.rows() if row.point.chip == chip]
        # The M5 Pro's tensor units and its tokens: four points, and one other chip has such units.
        assert median_percent(rows, held_out=True) <= (30 if chip == "m5-pro" else 15), chip


def test_the_limit_is_right_wherever_it_is_known(errors):
    known = [row for row in errors.rows() if errors.known_limits(row.point)]
    assert len(known) > 300
    wrong = [row for row in known if row.prediction.limit not in errors.known_limits(row.point)]
    assert not wrong, [(row.point.chip, row.point.shape, row.prediction.limit) for row in wrong]


def test_known_limits_are_of_several_kinds(errors):
    """Or a model that always says memory would pass."""
    allowed = [frozenset(limits) for row in errors.rows() if (limits := errors.known_limits(row.point))]
    for single in ("device memory", "issue slots", "dispatch", "tensor units", "launch"):
        assert frozenset({single}) in allowed
    assert sum("device memory" not in limits for limits in allowed) > 100


def test_latency_explains_the_m1_ultra(errors):
    """100,000 keys of 256: memory and instructions explain less than two thirds of the time, latency most of it."""
    row = errors.latency_case()
    terms = row.prediction.terms.named()
    assert row.prediction.limit == "latency"
    assert max(value for name, value in terms.items() if name != "latency") < 0.65 * row.point.time_us
    assert 0.75 * row.point.time_us < row.prediction.microseconds < 1.1 * row.point.time_us


def test_the_model_is_better_than_the_one_before(errors):
    both = [row for row in errors.rows() if row.point.first_model_us]
    before = 100 * statistics.median(abs(row.point.first_model_us / row.point.time_us - 1) for row in both)
    assert median_percent(both) < before


def test_written_tables_are_those_of_the_points(errors):
    for path, text in (
        (errors.REPORT, errors.report()),
        (errors.EXPECTED, errors.expected()),
        (errors.PAGE, errors.page()),
    ):
        assert path.read_text() == text, f"{path} is stale: run python bench/apple/errors.py"


def test_the_page_shows_what_its_example_prints(errors, capsys):
    code = re.search(r"## Predicted time.*?```python\n(.*?)```", errors.PAGE.read_text(), re.S)[1]
    exec(code, {})
    assert capsys.readouterr().out.strip() == code.rpartition("# ")[2].strip()


def test_constants_are_where_the_fit_ends(fitting):
    """No fitted constant can be moved by a twentieth for a smaller loss."""
    points = fitting.used()
    kinds = [fitting.KINDS[point.family] for point, _, _ in points]
    least = fitting._loss(fitting._misses(CONSTANTS, points), kinds)
    for name, (low, high) in fitting.FITTED.items():
        for factor in (0.95, 1.05):
            value = min(high, max(low, getattr(CONSTANTS, name) * factor))
            moved = dataclasses.replace(CONSTANTS, **{name: value})
            assert fitting._loss(fitting._misses(moved, points), kinds) >= 0.999 * least, (name, value)


def test_held_out_constants_are_of_every_design(fitting):
    assert list(fitting.held_out()) == fitting.designs()
    for name, constants in fitting.held_out().items():
        rest = [entry for entry in fitting.used() if fitting.design(entry[0].chip) != name]
        kinds = [fitting.KINDS[point.family] for point, _, _ in rest]
        fitted = fitting._loss(fitting._misses(constants, rest), kinds)
        assert fitted <= 1.001 * fitting._loss(fitting._misses(CONSTANTS, rest), kinds), name


@pytest.mark.nightly
def test_held_out_constants_are_fitted_without_the_chip(fitting):
    for name, kept in fitting.held_out().items():
        again = fitting.without(name)
        for fitted in fitting.FITTED:
            assert getattr(again, fitted) == pytest.approx(getattr(kept, fitted), rel=0.02), (name, fitted)


def test_the_fit_finds_constants_back(fitting):
    """Times that are predictions of other constants are fitted by those."""
    truth = dataclasses.replace(CONSTANTS, max_efficiency=0.8, complex_efficiency=0.6)
    points = [
        (dataclasses.replace(point, time_us=fitting.predict_point(point, truth, chip, works).microseconds), chip, works)
        for point, chip, works in fitting.used()
        if chip.tier == "max" and fitting.KINDS[point.family] in ("4-bit", "decode")
    ]
    found = fitting.fit(points, CONSTANTS, rounds=3)
    assert found.max_efficiency == pytest.approx(0.8, rel=0.01)
    assert found.complex_efficiency == pytest.approx(0.6, rel=0.03)
