"""Predicts every published point, and prints the errors by kind and by chip.

python bench/apple/errors.py          writes bench/results/apple-model.md, the table of docs/apple.md, and errors.csv of
                                      the package
python bench/apple/errors.py --fit    fits the constants and prints them, for mlx_mittens/apple/model.py; writes those
                                      fitted without each chip to held_out.csv
python bench/apple/errors.py --points prints each point
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import io
import itertools
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fit import FITTED, KINDS, design, excluded, fit, held_out, used, write_held_out
from works import Point, launches, predict_point, read_points

from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import CONSTANTS, LANES, SCHEDULERS, Prediction

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "bench" / "results" / "apple-model.md"
PAGE = ROOT / "docs" / "apple.md"
EXPECTED = ROOT / "mlx_mittens" / "apple" / "errors.csv"
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"
WHAT = {
    "matmul": "products of matrices, dense or 4-bit weights",
    "gemv": "product with a vector, dense weights",
    "4-bit": "product with a vector, 2-bit and 4-bit weights",
    "attention": "attention of one to eight queries",
    "norm": "softmax, norms, sums",
    "elementwise": "maps and copies",
    "launch": "a chain of tiny kernels",
    "decode": "a token of a whole model",
    "prefill": "a prompt of a whole model",
}


def known_limits(point: Point) -> set[str] | None:
    """The limits that measurements allow, or None where they do not tell.

    They tell where one resource is used at nearly its peak and memory and computing not both, where bytes come faster
    than memory can deliver them, and where the same chip reads as many bytes in less time with other work.
    """
    chip = find_chip(point.chip)
    computing = {"issue slots", "complex unit", "tensor units"}
    if "x8 axi" in point.shape:
        return {"dispatch"}  # 2,097,152 threadgroups of 8 values each: from it come the rates of dispatch
    if point.family == "launch":
        return {"launch"}
    seconds = point.kernel_us * 1e-6
    of_memory = point.bytes / seconds / (chip.nominal_GBps * 1e9)
    of_peak = point.flops / seconds / (chip.cores * chip.clock_GHz * 1e9 * SCHEDULERS * LANES * 2)
    if "hot" in point.timing:
        return computing | {"second cache"}  # no memory, as its weights are in the system cache
    if not point.overhead_us:
        if of_memory > 1:
            return computing | {"second cache"}
        if of_peak > 1:
            return {"tensor units"}
        if any(_reads_as_much(point, other) and other.time_us < 0.9 * point.time_us for other in read_points()):
            return computing | {"second cache", "latency"}
    if of_peak >= 0.6 and of_memory < 0.5:
        return {"issue slots"}
    if of_memory >= 0.75 and of_peak < 0.5:
        return {"device memory"}
    return None


def _reads_as_much(point: Point, other: Point) -> bool:
    same = ("chip", "bytes", "source", "family", "timing")
    return point.bytes > 0 and all(getattr(point, name) == getattr(other, name) for name in same)


@dataclasses.dataclass(frozen=True)
class Row:
    """A point beside its prediction.

    Attributes:
        held_out: The prediction with constants fitted without this chip's points.
    """

    point: Point
    prediction: Prediction
    held_out: Prediction

    @property
    def kind(self) -> str:
        return KINDS[self.point.family]

    def error(self, held_out: bool = False) -> float:
        """Relative error, with its sign."""
        found = self.held_out if held_out else self.prediction
        return found.microseconds / self.point.time_us - 1


@functools.cache
def rows() -> tuple[Row, ...]:
    """All points beside both predictions."""
    found = []
    for point, chip, works in used():
        # A chip that is left out counts as unmeasured, its latency included.
        unmeasured = dataclasses.replace(chip, device_memory_ns=None)
        constants = held_out()[design(point.chip)]
        found.append(
            Row(point, predict_point(point, CONSTANTS, chip, works), predict_point(point, constants, unmeasured, works))
        )
    return tuple(found)


def percent(values: Iterable[float], of: Callable[[list[float]], float] = statistics.median) -> float:
    """A statistic of the size of relative errors, in percent."""
    return 100 * of([abs(value) for value in values])


def nine_in_ten(values: list[float]) -> float:
    """The value that nine of ten do not exceed."""
    return sorted(values)[max(0, math.ceil(0.9 * len(values)) - 1)]


def ratio_errors(some: Sequence[Row]) -> list[float]:
    """Relative errors of ratios of two held-out predictions: of one chip and table, at most a factor of 4 apart."""
    found = []
    for a, b in itertools.combinations(some, 2):
        one, other = a.point, b.point
        together = (one.chip, one.source, one.version) == (other.chip, other.source, other.version)
        if together and 0.25 <= one.time_us / other.time_us <= 4:
            predicted = a.held_out.microseconds / b.held_out.microseconds
            found.append(predicted / (one.time_us / other.time_us) - 1)
    return found


def by_kind() -> dict[str, list[Row]]:
    """The rows of each kind, in the order of WHAT."""
    return {kind: [row for row in rows() if row.kind == kind] for kind in WHAT}


def limits_of(some: Iterable[Row]) -> tuple[int, int]:
    """How many of the known limits are named right, and how many are known."""
    known = [(row, limits) for row in some if (limits := known_limits(row.point))]
    return sum(row.prediction.limit in limits for row, limits in known), len(known)


def _cells(name: str, some: Sequence[Row]) -> list[str]:
    errors, held = [row.error() for row in some], [row.error(held_out=True) for row in some]
    right, known = limits_of(some)
    return [
        name,
        str(len(some)),
        f"{percent(errors):.1f}",
        f"{percent(errors, statistics.fmean):.1f}",
        f"{100 * statistics.median(errors):+.1f}",
        f"{percent(held):.1f}",
        f"{percent(held, nine_in_ten):.0f}",
        f"{right} of {known}" if known else "",
    ]


def _table(head: Sequence[str], body: Iterable[Sequence[str]], texts: int = 1) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * texts + "--:|" * (len(head) - texts)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)])


HEAD = ["points", "median", "mean", "bias", "median, chip left out", "nine in ten, chip left out", "limit right"]


def table_by_kind() -> str:
    """Errors of each kind and of all."""
    body = [_cells(f"{kind}: {WHAT[kind]}", some) for kind, some in by_kind().items()]
    return _table(["kind", *HEAD], [*body, _cells("all", rows())])


def table_by_chip() -> str:
    """Errors of each chip."""
    names = dict.fromkeys(point.chip for point, _, _ in used())
    return _table(["chip", *HEAD], [_cells(n, [row for row in rows() if row.point.chip == n]) for n in sorted(names)])


def expected() -> str:
    """The package's errors.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["kind", "points", "median_pct", "nine_in_ten_pct", "ratio_median_pct"])
    for kind, some in by_kind().items():
        errors, ratios = [row.error(held_out=True) for row in some], ratio_errors(some)
        ratio = f"{percent(ratios):.1f}" if ratios else ""
        writer.writerow([kind, len(some), f"{percent(errors):.1f}", f"{percent(errors, nine_in_ten):.1f}", ratio])
    return text.getvalue()


def latency_case() -> Row:
    """The point that no bandwidth and no rate of instructions explains: 100,000 keys of 256 on an M1 Ultra."""
    return next(row for row in rows() if row.point.chip == "m1-ultra" and row.kind == "attention")


def _constants_table() -> str:
    body = []
    for name in FITTED:
        values = [getattr(constants, name) for constants in held_out().values()]
        body.append([f"`{name}`", f"{getattr(CONSTANTS, name):g}", f"{min(values):g} to {max(values):g}"])
    return _table(["constant", "value", "range with a chip left out"], body)


def _worst_table(number: int) -> str:
    head = ["chip", "kind", "shape", "version", "limit", "measured, us", "predicted, us", "error, %"]
    worst = sorted(rows(), key=lambda row: -abs(math.log(1 + row.error())))[:number]
    body = [
        [
            *(row.point.chip, row.kind, row.point.shape, row.point.version, row.prediction.limit),
            *(f"{time:,.0f}" for time in (row.point.time_us, row.prediction.microseconds)),
            f"{100 * row.error():+.0f}",
        ]
        for row in worst
    ]
    return _table(head, body, texts=5)


def _comparison() -> str:
    """This model beside the earlier one, on the points that both predict."""
    both = [(row, row.point.first_model_us) for row in rows() if row.point.first_model_us]
    errors = {
        "earlier model": [first / row.point.time_us - 1 for row, first in both],
        "this model": [row.error() for row, _ in both],
        "this model, chip left out": [row.error(held_out=True) for row, _ in both],
    }
    body = [[name, f"{percent(e):.1f}", f"{percent(e, statistics.fmean):.1f}"] for name, e in errors.items()]
    return f"On the {len(both)} of these points that an earlier model predicted:\n\n" + _table(
        ["", "median", "mean"], body
    )


def _latency_text() -> str:
    case = latency_case()
    others = case.prediction.terms.named()
    latency = others.pop("latency")
    second = max(others, key=lambda name: others[name])
    work = launches(case.point)[0][0]
    places = find_chip(case.point.chip).resident_threads(work.half_registers) // LANES
    limit, taken = case.prediction.limit, others[second]
    measured, predicted = case.point.time_us, case.prediction.microseconds
    return "\n".join(
        [
            f"{case.point.shape}, {case.point.dtype}, on an M1 Ultra: measured {measured:,.0f} us, predicted",
            f"{predicted:,.0f} us, limited by {limit} ({latency:,.0f} us). The next term is {second}",
            f"({taken:,.0f} us). A simdgroup waits for two loads a key, and the registers leave room for",
            f"{places} simdgroups on a core. The source does not say if it has 48 or 64 cores; it is taken as 64.",
        ]
    )


def report() -> str:
    """bench/results/apple-model.md."""
    reasons = Counter(reason for point in read_points() if (reason := excluded(point)))
    hosts = [
        predict_point(point).microseconds / point.time_us - 1
        for point in read_points()
        if (excluded(point) or "").startswith("the host")
    ]
    with_hosts = percent([*hosts, *(row.error() for row in rows())])
    return f"""# Predicted time on Apple GPUs: errors against published measurements

Made by `python bench/apple/errors.py` from `bench/apple/points.csv`. Errors are in percent of the measured time, the
host's share of it included. "Chip left out" means that the constants were fitted without any chip of that design, and
that the chip's measured latency was not used. "Limit right" counts the points whose limit follows from measurements;
for some of them these exclude memory and leave several limits open.

## By kind

{table_by_kind()}

{_comparison()}

## By chip

{table_by_chip()}

## Points that are left out

{_table(["why", "points"], [[reason, str(count)] for reason, count in reasons.most_common()])}

The {len(hosts)} points of the host's round trip have a median error of {percent(hosts):.1f} %. With them the median
over all is {with_hosts:.1f} %.

## Fitted constants

{_constants_table()}

## A launch limited by latency

{_latency_text()}

## The largest errors

{_worst_table(15)}
"""


def page() -> str:
    """docs/apple.md with its table made anew."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    body = [
        [f"{kind}: {WHAT[kind]}", str(found[1]), found[2], found[3], found[4]]
        for kind, found in ((row.split(",")[0], row.split(",")) for row in expected().splitlines()[1:])
    ]
    head = ["kind", "measurements", "median error, %", "nine in ten within, %", "median error of a ratio, %"]
    return before + BEGIN + "\n" + _table(head, body) + "\n" + END + after


def _print_points() -> None:
    for row in rows():
        terms = {name: f"{value:.1f}" for name, value in row.prediction.terms.named().items() if value >= 0.1}
        print(
            f"{100 * row.error():+6.1f} % ({100 * row.error(held_out=True):+6.1f} %) {row.kind:11} {row.point.chip:12} "
            f"{row.point.shape}, {row.point.dtype}: {row.point.time_us:.1f} us, limit {row.prediction.limit}, {terms}"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants, and those without each chip (minutes)")
    parser.add_argument("--points", action="store_true", help="print each point")
    arguments = parser.parse_args()
    if arguments.fit:
        best = fit([*used()], CONSTANTS)
        for name in FITTED:
            now, found = getattr(CONSTANTS, name), getattr(best, name)
            print(f"{name}: {found:g}" + (f" (model.py has {now:g})" if now != found else ""))
        write_held_out()
    elif arguments.points:
        _print_points()
    else:
        for path, text in ((REPORT, report()), (EXPECTED, expected()), (PAGE, page())):
            path.write_text(text)
            print(f"{path.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
