"""The counts of docs/kernels.md are those of the kernels as they are."""

import re
import runpy
from pathlib import Path

import pytest

from mlx_mittens import frontend

COUNTS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "counts.py"))
CASES = [
    pytest.param(counted, marks=[pytest.mark.nightly] * counted.slow, id=f"{counted.op} {counted.case}")
    for counted in COUNTS["CASES"]
]
STALE = "run python docs/counts.py --write"


@pytest.mark.parametrize("counted", CASES)
def test_a_case_has_the_counts_of_the_page(counted, native):
    if COUNTS["made_with"]() not in COUNTS["in_docs"]():
        pytest.skip(f"the page was written with another compiler: {COUNTS['in_docs']().splitlines()[0]}")
    assert COUNTS["rows"](counted) in COUNTS["in_docs"](), STALE


def test_the_page_has_the_cases_of_the_table():
    headings = re.findall(r"^\| \*\*.*$", COUNTS["in_docs"](), re.M)
    assert headings == [COUNTS["heading"](counted) for counted in COUNTS["CASES"]], STALE


def test_every_kernel_file_is_counted():
    counted = set(re.findall(r"^\| `(\w+)`", COUNTS["in_docs"](), re.M))
    missing = [file for file in frontend.files() if not counted & {variant.name for variant in frontend.variants(file)}]
    assert missing == ["runtime/copy.metal"], "docs/counts.py needs a case for each"
