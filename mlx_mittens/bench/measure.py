"""Times an op beside its mx twin.

Ours and the twin are timed in turns (`timing` says how) in one run, over inputs that rotate through more memory
than the caches hold. The medians of all turns are reported, and their spread. Results are checked against float64 in
the same run. On a CPU a copy takes turns with large cases.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .. import _ext, specs
from ..peer import mlx_metal
from . import machine, timing

# MLX's buffer-cache limit on the CPU (default 32 MB): beyond it outputs would measure page faults, not the kernel.
_CPU_KEPT_BYTES = 1 << 30

# Seconds of one contender's turn: a short call alone would time the waking of threads, and cold caches.
_SHORTEST_SAMPLE = {"cpu": 4e-3, "gpu": 10e-3}

# A call that takes this many seconds, as mx's may on a CPU, is timed twice: it hardly scatters.
_SLOW = 0.1

# Turns after which the times may be clear.
_FEWEST_CLEAR = 3

# On a CPU a copy takes turns with cases that move this many bytes, since its bandwidth on a shared machine changes by
# the second.
_COPIED_BYTES = 4 << 20

# A spread that leaves a time without meaning: the call is shorter than the links of its chain, which are taken off.
UNCLEAR = 1.0

# The share of the copy bandwidth that we hold ourselves to.
FLOOR = {"cpu": 0.6, "gpu": 0.8}


@dataclass(frozen=True)
class Row:
    """One line of the result: a case, in one type, ours beside mx."""

    op: str
    case: str
    dtype: str
    device: str
    executor: str
    mittens_ms: float
    mx_ms: float
    speedup: float
    gb_s: float
    error: float
    mx_error: float
    peer_ms: float | None = None  # of MLX's own Metal kernel, where it was asked for and there is one
    copy_gb_s: float | None = None  # of a copy in turns with them: on a CPU, for large cases
    mittens_host_ms: float | None = None  # the host's time for a call: on a GPU, where it is no part of the
    mx_host_ms: float | None = None  # other times
    spread: float = 0.0  # half the interquartile range of the times, relative
    calibrated: bool = False  # whether a calibration of this machine knew the call

    @property
    def is_clear(self) -> bool:
        """Whether the times scatter by less than themselves."""
        return self.spread < UNCLEAR


@dataclass(frozen=True)
class Outcome:
    """A row, and whether its results are right."""

    row: Row
    passed: bool
    detail: str


@dataclass(frozen=True)
class Budget:
    """How long one row may be measured, and how often at least and at most."""

    seconds: float
    fewest: int
    most: int


FULL = Budget(seconds=0.3, fewest=5, most=101)
QUICK = Budget(seconds=0.2, fewest=3, most=51)


def plan(names: Sequence[str], device: str, quick: bool) -> list[tuple[specs.Op, specs.Case, str]]:
    """Items that a run measures, in order; a quick one has each case in one type, in turn."""
    cases = [
        (op, case)
        for op in specs.OPS
        if op.name in names
        for case in op.cases
        if (case.quick or not quick) and case.runs_on(device)
    ]
    dtypes = [list(op.dtypes(case)) for op, case in cases]
    if quick:
        dtypes = [[types[i % len(types)]] for i, types in enumerate(dtypes)]
    return [(*item, dtype) for item, types in zip(cases, dtypes) for dtype in types]


def take_turns(
    samplers: Mapping[str, Callable[[int], float]],
    device: str,
    budget: Budget,
    shortest: float | None = None,
    is_clear: Callable[[Mapping[str, Sequence[float]]], bool] = lambda times: False,
) -> dict[str, list[float]]:
    """Lets the contenders take turns until the budget is spent; gives the seconds of a call in each turn.

    Args:
        samplers: A function for each contender, which times a number of calls.
        device: ``cpu`` or ``gpu``.
        budget: How many turns.
        shortest: Seconds of a turn at least; by default the benchmark's.
        is_clear: Whether times say enough, so that no more turns are taken; asked of three turns or more, and of slow
            calls beside the first times of the others.
    """
    shortest = _SHORTEST_SAMPLE[device] if shortest is None else shortest
    counts, first = {}, {}
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for name, sample in samplers.items():
        seconds, count = sample(1), 1
        if device == "cpu" and seconds > _SLOW:
            times[name].append(seconds)
        else:
            seconds = sample(1)  # the first call of a kernel may have compiled it
        while seconds * count < shortest and count < 1 << 16:
            count = max(2 * count, math.ceil(shortest / max(seconds, 1e-9)))
            seconds = sample(count)
        counts[name], first[name] = count, [seconds]
    slow = [name for name in samplers if times[name]]
    order = [name for name in samplers if name not in slow]
    if slow and is_clear(first):
        return first
    for name in slow:  # their second time, before the others are at work
        times[name].append(samplers[name](counts[name]))
    end = time.perf_counter() + budget.seconds
    for turn in range(budget.most if order else 0):
        for name in order if turn % 2 == 0 else reversed(order):
            times[name].append(samplers[name](counts[name]))
        if turn + 1 >= budget.fewest and time.perf_counter() > end:
            break
        if turn + 1 >= _FEWEST_CLEAR and is_clear(times):
            break
    return times


def _copy_gb_s(times: dict[str, list[float]], seconds: float) -> float:
    """Bandwidth of a copy in the time of our median: by the median of the turns' ratios, not by its own."""
    ratio = statistics.median(copy / ours for copy, ours in zip(times["copy"], times["mittens"]))
    return machine.cpu_copy().bytes_moved / (ratio * seconds) / 1e9


def scatter(times: Sequence[float]) -> float:
    """Half the interquartile range of times, relative to their median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def measure(
    op: specs.Op,
    case: specs.Case,
    dtype: str,
    device: str,
    budget: Budget,
    rng: np.random.Generator,
    with_peer: bool = False,
) -> Outcome:
    """Checks and times one case; ``with_peer`` also runs MLX's own Metal kernel beside them."""
    arrays = op.draw(rng, case, specs.DTYPES[dtype])
    cotangents = op.cotangents(rng, case, specs.DTYPES[dtype])
    _ext.calibration_record(True)
    try:
        check = specs.check(op, case, arrays, cotangents)
    finally:
        asked = _ext.calibration_record(False)

    sets = timing.rotation([*arrays, *cotangents], device, op.updated(case))
    contenders = {"mittens": op.ours, "mx": op.twin}
    if with_peer and (twin := mlx_metal.of(op, case)):
        contenders["peer"] = twin
    bytes_moved = op.bytes_moved(case, specs.DTYPES[dtype])
    copied = device == "cpu" and bytes_moved >= _COPIED_BYTES
    samplers = {}
    for i, (name, function) in enumerate(contenders.items()):
        # Each starts in a part of the rotation of its own: none finds another's inputs in the cache.
        build = lambda group, function=function: specs.run(
            op, function, case, group[: len(arrays)], group[len(arrays) :]
        )
        first = i * len(sets) // len(contenders)
        samplers[name] = timing.sampler(build, op.link(case), op.updated(case), sets, first, device)
    turns: Mapping[str, Callable[[int], float]] = samplers
    if copied:  # next to ours in every turn
        copy = lambda count: statistics.mean(machine.cpu_copy()() for _ in range(count))
        turns = {"mittens": samplers["mittens"], "copy": copy, **samplers}
    times = take_turns(turns, device, budget)

    median = {name: statistics.median(values) for name, values in times.items()}
    host = {name: statistics.median(samplers[name].host) for name in contenders if samplers[name].host}
    row = Row(
        op=op.name,
        case=case.name,
        dtype=dtype,
        device=device,
        executor=machine.executor(),
        mittens_ms=median["mittens"] * 1e3,
        mx_ms=median["mx"] * 1e3,
        speedup=median["mx"] / median["mittens"],
        gb_s=bytes_moved / median["mittens"] / 1e9,
        error=check.error,
        mx_error=check.twin_error,
        peer_ms=median["peer"] * 1e3 if "peer" in median else None,
        copy_gb_s=_copy_gb_s(times, median["mittens"]) if copied else None,
        mittens_host_ms=host["mittens"] * 1e3 if "mittens" in host else None,
        mx_host_ms=host["mx"] * 1e3 if "mx" in host else None,
        spread=round(max(scatter(times[name]) for name in contenders), 4),
        calibrated=any(known for *_, known, _ in asked),
    )
    return Outcome(row, check.passed, check.detail)


@contextlib.contextmanager
def kept_memory(device: str) -> Iterator[None]:
    if device == "gpu":
        yield
        return
    before = mx.set_cache_limit(_CPU_KEPT_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
