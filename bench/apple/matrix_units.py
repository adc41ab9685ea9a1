"""Writes bench/results/matrix-units.md: what the model says of products on matrix units, beside what was published.

The work is MLX's kernel's, as its source has it and the simulator counts it. There is no machine code of it: no
compiler but Apple's makes any for an M5.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_mittens.apple.chips import Chip, find_chip
from mlx_mittens.apple.estimates import unit_product
from mlx_mittens.apple.model import CONSTANTS, Prediction, predict
from mlx_mittens.peer.mlx_unit_products import fused_tile

REPORT = Path(__file__).resolve().parents[1] / "results" / "matrix-units.md"
# The types of a point that names none.
_SIZE = 4096


@dataclass(frozen=True)
class Point:
    """A published rate of products.

    Attributes:
        chip: The chip.
        dtype: Of the operands.
        measured: TFLOP/s, or of integers TOP/s.
        what: The name of the measurement.
        source: Who says so.
    """

    chip: str
    dtype: str
    measured: float
    what: str
    source: str


_UNNAMED = "issue 61 of this project, which names no page"
POINTS = (
    Point("m5-max", "bfloat16", 55.0, "MLX, 4096^3, 2.4 to 2.6 ms", "ml-explore/mlx#3838"),
    Point("m5-max", "float16", 53.5, "GEMM, 83 % of the peak", _UNNAMED),
    Point("m5-pro", "float16", 20.0, "GEMM", _UNNAMED),
    Point("m5", "float16", 15.4, "GEMM, of 16.2", _UNNAMED),
    Point("m5-pro", "int8", 42.0, "products of integers, of 44", _UNNAMED),
)


def peak(chip: Chip, dtype: str) -> float:
    """TFLOP/s, or of integers TOP/s, of all matrix units of a chip, as the table of chips has their rate and clock."""
    rate = chip.tensor_flop_per_core_cycle or 0
    return rate * (2 if dtype == "int8" else 1) * chip.cores * chip.clock_GHz / 1e3


def predicted(point: Point) -> tuple[Prediction, float]:
    """The prediction of a point, and its rate in the point's unit."""
    chip = find_chip(point.chip)
    size = 1 if point.dtype == "int8" else 2
    tile, *_ = fused_tile(_SIZE, _SIZE, _SIZE, chip.tier)
    work = unit_product(1, _SIZE, _SIZE, _SIZE, point.dtype, size, tile)
    prediction = predict(work, chip)
    return prediction, 2 * _SIZE**3 / prediction.microseconds / 1e6


def report() -> str:
    """bench/results/matrix-units.md."""
    rows = []
    for point in POINTS:
        prediction, rate = predicted(point)
        terms = prediction.terms
        others = f"{terms.second_cache / 1e3:.2f}", f"{terms.device_memory / 1e3:.2f}", f"{terms.issue_slots / 1e3:.2f}"
        cells = (
            *(point.chip, point.dtype, point.what, f"{peak(find_chip(point.chip), point.dtype):.1f}"),
            *(f"{point.measured:.1f}", f"{rate:.1f}", f"{100 * (rate / point.measured - 1):+.0f}", prediction.limit),
            *(f"{terms.tensor_units / 1e3:.2f}", *others, point.source),
        )
        rows.append(f"| {' | '.join(cells)} |")
    table = "\n".join(rows)
    return f"""# Products on matrix units: predicted beside published

Made by `python bench/apple/matrix_units.py`. No machine code: no compiler but Apple's makes any for an M5. The work is
that of MLX's `steel_gemm_fused_nax`, as the simulator counts its products and its operands' loads. Where a point names
no size it is taken as {_SIZE}^3. Rates are TFLOP/s, of int8 TOP/s; the peak is the table of chips' rate of a core
times cores and clock. The last numbers are milliseconds that each resource takes by itself.

| chip | type | what | peak | published | predicted | error, % | limit | units | caches | memory | issue | source |
|---|---|---|--:|--:|--:|--:|---|--:|--:|--:|--:|---|
{table}

One constant, the share of its peak that a unit reaches ({CONSTANTS.tensor_efficiency}), stands for all of them. It is
fitted to whole prompts of llama.cpp and to the first of these points. The published rates of half types are 62 to 95 %
of the peaks here, and one constant comes no nearer than the errors above. The peak of int8 is twice that of half types,
as measured on an A19 (tzakharko); the last point's own peak is lower, and it names neither cores nor clock.
"""


if __name__ == "__main__":
    REPORT.write_text(report())
    print(f"{REPORT.name}: written")
