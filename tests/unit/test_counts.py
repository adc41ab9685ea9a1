"""The counts on the pages of docs/kernels agree with today's kernels."""

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
LOADED_AND_STORED = re.compile(r"^(\| (?:MLX: )?`\w+` \| [^|]+ \|) [\d,]+ \| [\d,]+ \|", re.M)


def of_any_compiler(rows: str) -> str:
    """Rows without bytes loaded and stored: a compiler merges accesses and leaves out accesses that it does not need.

    Barriers, SIMD and matrix operations and threadgroup arrays are calls of the simulator, which it has to leave alone.
    """
    return LOADED_AND_STORED.sub(r"\1 * | * |", rows)


@pytest.mark.parametrize("counted", CASES)
def test_a_case_has_the_counts_of_the_page(counted, native):
    rows, page = COUNTS["rows"](counted), COUNTS["in_docs"](COUNTS["family"](counted.op))
    if COUNTS["made_with"]() not in page:
        rows, page = of_any_compiler(rows), of_any_compiler(page)
    assert rows in page, STALE


def test_of_another_compiler_all_but_loads_and_stores_is_compared():
    page = COUNTS["in_docs"]()
    kernels = re.findall(r"^\| (?:MLX: )?`.*$", page, re.M)
    rows = [line for line in of_any_compiler(page).splitlines() if "`" in line]
    assert len(rows) == len(kernels) and len(kernels) >= len(CASES)
    for row, kernel in zip(rows, kernels):
        cells = kernel.split(" | ")
        assert row.split(" | ") == [*cells[:2], "*", "*", *cells[4:]]


def test_the_page_has_the_cases_of_the_table():
    headings = re.findall(r"^\| \*\*.*$", COUNTS["in_docs"](), re.M)
    cases = [case for name in COUNTS["FAMILIES"] for case in COUNTS["CASES"] if COUNTS["family"](case.op) == name]
    assert headings == [COUNTS["heading"](counted) for counted in cases] and len(cases) == len(COUNTS["CASES"]), STALE


def test_every_kernel_file_is_counted():
    counted = set(re.findall(r"^\| `(\w+)`", COUNTS["in_docs"](), re.M))
    files = [file for file in frontend.files() if not frontend.is_for_matrix_units(file)]
    missing = [file for file in files if not counted & {variant.name for variant in frontend.variants(file)}]
    assert missing == ["runtime/copy.metal"], "docs/counts.py needs a case for each"
