"""The whole chain, from the simulator to a time, is held to published measurements of kernels that run in seconds."""

import statistics
from pathlib import Path

import pytest
from helpers import scripts

from mlx_mittens import frontend
from mlx_mittens.apple import agx_compiler

ROOT = Path(__file__).parents[2]
problem = frontend.compiler_problem() or agx_compiler.problem()
# The model's errors on published times of these kinds: nine in ten are below.
MOST = 0.20
TYPICAL = 0.05  # of half of the points


@pytest.fixture(scope="module")
def chain():
    return scripts.load("apple/chain")


@pytest.mark.skipif(bool(problem), reason=problem)
def test_published_times_are_predicted_by_the_whole_chain(chain):
    rows = list(chain.rows(chain.QUICK))
    assert len(rows) == 8 and {row.point.chip for row in rows} == {"m1", "m2", "m3", "m3-pro-14"}
    for row in rows:
        assert abs(row.error) < MOST, (row.point, row.chain)
        assert row.chain.limit == "device memory"
    assert statistics.median(abs(row.error) for row in rows) < TYPICAL
    for kernel in chain.QUICK:
        (launch,), times = chain.simulated(kernel)
        assert launch.mismatch < 0.1
        work = chain._scaled(launch.work, times)
        assert work.lines * 128 == pytest.approx(kernel.points()[0].bytes, rel=0.01)


def test_the_report_has_every_kernel(chain):
    """Each kernel of the chain has published points, and the report in bench/results has a row for each of them."""
    report = chain.REPORT.read_text()
    assert "Made by `python bench/apple/chain.py`" in report
    for kernel in chain.KERNELS:
        points = kernel.points()
        assert points
        for point in points:
            assert f"| {point.kernel} | {point.shape} | {point.dtype} | {point.chip} |" in report


def test_the_documentation_has_the_table_of_the_report(chain):
    page = chain.PAGE.read_text().partition(chain.BEGIN)[2].partition(chain.END)[0].strip()
    assert page in chain.REPORT.read_text() and page.count("\n") == len(chain.KINDS) + 2
