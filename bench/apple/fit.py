"""Fits the constants of the model to published points, also without each chip in turn."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from works import Launches, Point, launches, predict_point, read_points

from mlx_mittens.apple.chips import Chip, find_chip
from mlx_mittens.apple.model import CONSTANTS, Constants

HELD_OUT = Path(__file__).parent / "held_out.csv"

KINDS = {
    "gemm": "matmul",
    "gemm_skinny": "matmul",
    "gemv": "gemv",
    "qmv": "4-bit",
    "qmm": "matmul",
    "gemv_llama": "4-bit",
    "sdpa_decode": "attention",
    "softmax": "norm",
    "layer_norm": "norm",
    "reduce_all": "norm",
    "elementwise": "elementwise",
    "copy": "elementwise",
    "launch": "launch",
    "decode_model": "decode",
    "prefill_model": "prefill",
}
# Bounds within which the fit searches. Other constants are published, or follow from how the machine works.
FITTED = {
    "base_efficiency": (0.6, 1.0),
    "pro_efficiency": (0.6, 1.0),
    "max_efficiency": (0.6, 1.0),
    "ultra_efficiency": (0.6, 1.0),
    "fragment_store": (1.0, 2.0),
    "dependent_us": (2.5, 12.0),
    "early_dispatch_cycles": (30.0, 120.0),
    "later_dispatch_cycles": (30.0, 120.0),
    "later_latency_ns": (50.0, 500.0),
    "complex_efficiency": (0.4, 1.0),
    "fragment_slots": (1.0, 12.0),
    "tensor_efficiency": (0.4, 1.0),
    "later_reduction_slots": (2.0, 20.0),
    "overlap": (1.5, 12.0),
}


def excluded(point: Point) -> str | None:
    """Why a point is no measurement of a kernel that the model can be held to; None if it is one."""
    if "time derived" in point.note:
        return "no time was published, and how the rate counts the causal half is not said"
    if point.family == "gemm" and "x1000000 dim=1000000x" in point.shape:  # a sum of a million products
        return "which kernel ran depends on MLX's version: times of one shape differ by a factor of 14"
    if point.overhead_us > 0.75 * point.time_us:
        return "the host's round trip is more than three quarters of the time, and is rounded to 10 us"
    return None


@functools.cache
def used() -> tuple[Entry, ...]:
    """The points that the model is held to, with their launches."""
    return tuple((p, find_chip(p.chip), launches(p)) for p in read_points() if excluded(p) is None)


Entry = tuple[Point, Chip, Launches]


def _misses(constants: Constants, points: Iterable[Entry]) -> list[float]:
    """Size of the logarithm of predicted over measured, for each point."""
    return [
        abs(math.log(predict_point(p, constants, chip, works).microseconds / p.time_us)) for p, chip, works in points
    ]


def _loss(misses: Sequence[float], kinds: Sequence[str]) -> float:
    """Mean miss. A kind weighs as the root of its number of points, so that the many do not drown the few."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for miss, kind in zip(misses, kinds):
        by_kind[kind].append(miss)
    weights = {kind: math.sqrt(len(values)) for kind, values in by_kind.items()}
    return sum(weights[kind] * statistics.fmean(values) for kind, values in by_kind.items()) / sum(weights.values())


def _least(function: Callable[[float], float], low: float, high: float, steps: int) -> float:
    """Golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = low, high
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = function(c), function(d)
    for _ in range(steps):
        if at_c < at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = function(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = function(d)
    return (a + b) / 2


def fit(points: Sequence[Entry], start: Constants, rounds: int = 4) -> Constants:
    """Fits the constants one after another, in ever narrower surroundings of the last value.

    Predictions rise or fall with a constant throughout, so a point that has the same one at both ends is not computed.
    """
    kinds = [KINDS[point.family] for point, _, _ in points]
    best, misses = start, _misses(start, points)
    for turn in range(rounds):
        for name, (low, high) in FITTED.items():
            width = (high - low) / 2 / 2**turn
            bottom, top = max(low, getattr(best, name) - width), min(high, getattr(best, name) + width)
            at_ends = [_misses(dataclasses.replace(best, **{name: value}), points) for value in (bottom, top)]
            moved = [i for i in range(len(points)) if at_ends[0][i] != at_ends[1][i]]
            those = [points[i] for i in moved]

            def with_value(value: float) -> list[float]:
                found = list(misses)
                for i, miss in zip(moved, _misses(dataclasses.replace(best, **{name: value}), those)):
                    found[i] = miss
                return found

            value = _least(lambda v: _loss(with_value(v), kinds), bottom, top, 8)
            value = float(f"{value:.3g}")
            found = with_value(value)
            if _loss(found, kinds) < _loss(misses, kinds):
                best, misses = dataclasses.replace(best, **{name: value}), found
    return best


def design(chip: str) -> str:
    """`m1-max` of `m1-max-24`: chips of one design share clock, memory and caches, and are left out together."""
    return re.sub(r"-\d+$", "", chip)


def without(name: str) -> Constants:
    """Constants fitted without the points of any chip of this design."""
    return fit([entry for entry in used() if design(entry[0].chip) != name], CONSTANTS, rounds=2)


def designs() -> list[str]:
    """The designs that have points, in the order of the points."""
    return list(dict.fromkeys(design(point.chip) for point, _, _ in used()))


def write_held_out() -> None:
    """Fits the constants without each design in turn and keeps them, as that takes minutes."""
    with HELD_OUT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["left_out", *FITTED])
        for name in designs():
            constants = without(name)
            writer.writerow([name, *(getattr(constants, fitted) for fitted in FITTED)])


@functools.cache
def held_out() -> dict[str, Constants]:
    """For each design, the constants fitted without it."""
    found = {}
    for row in csv.DictReader(HELD_OUT.read_text().splitlines()):
        name = row.pop("left_out")
        found[name] = dataclasses.replace(CONSTANTS, **{fitted: float(value) for fitted, value in row.items()})
    return found
