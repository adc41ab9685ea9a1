"""`bench --compare A.json B.json`: which times moved by more than they scatter."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..table import Column, show
from .bench_files import Key, key, read
from .options import UsageError

_COLUMNS = (
    Column("op", left=True),
    Column("case", left=True),
    Column("dtype", left=True),
    Column("A ms", 1),
    Column("B ms", 2),
    Column("time"),
    Column("+-", 3),
    Column("A / mx", 5),
    Column("B / mx", 4),
)

# The spread of times in a file that has none.
_UNKNOWN_SPREAD = 0.05


@dataclass(frozen=True)
class Move:
    """A row of two files.

    Attributes:
        key: Op, case and type.
        a: The row of the first file.
        b: That of the second.
    """

    key: Key
    a: dict[str, Any]
    b: dict[str, Any]

    @property
    def ratio(self) -> float:
        """B's time by A's: below 1 is faster."""
        return self.b["mittens_ms"] / self.a["mittens_ms"]

    @property
    def spread(self) -> float:
        """By how much the ratio scatters: the spreads of both."""
        return sum(row.get("spread", _UNKNOWN_SPREAD) for row in (self.a, self.b))

    @property
    def moved(self) -> bool:
        """Whether the time changed by more than the spread, or results have become wrong or right."""
        ratio = max(self.ratio, 1 / self.ratio)
        return ratio > 1 + self.spread or ("wrong" in self.a) != ("wrong" in self.b)


def moves(a: dict[str, Any], b: dict[str, Any]) -> list[Move]:
    """The rows that both files have, in the order of the first."""
    others = {key(row): row for row in b["rows"]}
    return [Move(key(row), row, others[key(row)]) for row in a["rows"] if key(row) in others]


def run(arguments: argparse.Namespace) -> int:
    """Prints the changes; 0.

    Raises:
        UsageError: A file cannot be compared, or other options are given.
    """
    a, b = (read("--compare", path) for path in arguments.compare)
    found = moves(a, b)
    if not found:
        raise UsageError(f"--compare: {' and '.join(arguments.compare)} have no row in common")
    for letter, path, file in zip("AB", arguments.compare, (a, b), strict=True):
        print(f"{letter}: {path}: {_of(file)}")
    moved = [move for move in found if move.moved]
    if moved:
        print()
        show(_COLUMNS, [_cells(move) for move in moved], [_style(move) for move in moved])
        print()
    print(_summary(found, moved))
    for letter, path, one, other in (("A", arguments.compare[0], a, b), ("B", arguments.compare[1], b, a)):
        alone = len({key(row) for row in one["rows"]} - {key(row) for row in other["rows"]})
        if alone:
            print(f"Only in {letter} ({path}): {alone} rows.")
    calibrated = [sum(bool(row.get("calibrated")) for row in file["rows"]) for file in (a, b)]
    if min(calibrated) == 0 < max(calibrated):
        with_it, without = ("A", "B") if calibrated[0] else ("B", "A")
        rows = f"{with_it} was planned by a calibration of its machine in {max(calibrated)} rows"
        print(f"{rows}, {without} by the tables alone: set MLX_MITTENS_CALIBRATION=off to measure both alike.")
    if any("spread" not in row for move in found for row in (move.a, move.b)):
        print(f"Where a file has no spread, {_UNKNOWN_SPREAD:.0%} is taken.")
    return 0


def _of(file: dict[str, Any]) -> str:
    machine = file["machine"]
    name = machine["gpu"] if machine["device"] == "gpu" else machine["processor"]
    versions = machine["versions"]
    return f"{name}, {machine['date']}, mlx-mittens {versions['mlx_mittens']}, mlx {versions['mlx']}"


def _cells(move: Move) -> list[str]:
    times = [f"{row['mittens_ms']:.3g}" for row in (move.a, move.b)]
    speeds = [f"{row['speedup']:.2f}x" for row in (move.a, move.b)]
    change = "WRONG" if "wrong" in move.b else f"{move.ratio - 1:+.1%}"
    return [*move.key, *times, change, f"{move.spread:.1%}", *speeds]


def _style(move: Move) -> str:
    return "1;31" if "wrong" in move.b else "33" if move.ratio > 1 else "32"


def _summary(found: Sequence[Move], moved: Sequence[Move]) -> str:
    slower = sum(move.ratio > 1 for move in moved)
    mean = statistics.geometric_mean(move.ratio for move in found)
    return (
        f"{len(found)} rows in both: {slower} slower in B, {len(moved) - slower} faster, "
        f"{len(found) - len(moved)} within the spread; geometric mean of the times {mean:.3f}x A's."
    )
