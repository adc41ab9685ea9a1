"""Times a call in mx and in our plans, and says which is the fastest.

First our plans take turns with that which the tables give. Then the tables' plan, the fastest of the others and mx do,
with more turns: the fastest of many noisy times looks faster than it is. If the tables' plan does not win, they do so
again, and the second time counts. Turns end where each time of the fastest is far below each of the others'.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from .. import _ext, specs
from ..bench import timing
from ..bench.measure import Budget, scatter, take_turns
from .grid import Item
from .store import Row

FULL = Budget(seconds=0.1, fewest=5, most=31)
QUICK = Budget(seconds=0.08, fewest=5, most=21)
_SCREENING = Budget(seconds=0.01, fewest=3, most=5)
_SHORTEST_SAMPLE = {"cpu": 2e-3, "gpu": 1e-3}

# log2 of how many times the GPU's cores a plan is to count with, at most.
_MOST_PARALLELISM = 2

# Seconds of mx, and its time relative to ours, beyond which larger shapes are left out: they may take minutes.
_SLOW = 0.02
_MUCH_SLOWER = 4

# A result is clear where the slowest time of the fastest plan, times this, is below the fastest time of any other.
_CLEAR = 1.3


# Numbers that are drawn for inputs; larger arrays repeat them, which no row length divides.
_DRAWN = 2**16 + 1

# How far the results of two plans may differ, in units of the largest: they add up in different orders, in float32.
_UNITS = {mx.float32: 64, mx.float16: 4, mx.bfloat16: 4}


@dataclass(frozen=True)
class Plan:
    """A way to compute a call: by mx, or by our plan of some schedule and parallelism."""

    mx: bool = False
    schedule: str = ""
    parallelism: int = 0


MX = Plan(mx=True)
TABLES = Plan()  # the tables' choice


@dataclass(frozen=True)
class Time:
    """A median in seconds, and half the interquartile range of the times, relative."""

    seconds: float
    spread: float


class Clock(Protocol):
    """Times one call."""

    def __call__(self, plans: Sequence[Plan], budget: Budget) -> dict[Plan, Time]:
        """Lets plans take turns."""


Problem = tuple[str, str, int, tuple[int, int, int, int]]


@contextlib.contextmanager
def forced(plan: Plan) -> Iterator[None]:
    """Our ops follow one plan, whatever the tables and calibrations say."""
    _ext.calibration_force((False, plan.schedule, plan.parallelism))
    try:
        yield
    finally:
        _ext.calibration_force(None)


class Stopwatch:
    """The clock of this machine; contenders rotate through the same inputs."""

    def __init__(self, op: specs.Op, case: specs.Case, arrays: Sequence[mx.array | None], device: str) -> None:
        self._op, self._case, self._device = op, case, device
        self._sets = timing.rotation(arrays, device, op.updated(case), short=True)

    def __call__(self, plans: Sequence[Plan], budget: Budget) -> dict[Plan, Time]:
        samplers = {str(i): self._sampler(plan, i * len(self._sets) // len(plans)) for i, plan in enumerate(plans)}
        times = take_turns(samplers, self._device, budget, _SHORTEST_SAMPLE[self._device], _is_clear)
        return {plan: _time(times[str(i)]) for i, plan in enumerate(plans)}

    def _sampler(self, plan: Plan, first: int) -> Callable[[int], float]:
        op, case = self._op, self._case
        function = op.twin if plan.mx else op.ours
        build = lambda group: specs.run(op, function, case, group)
        sample = timing.sampler(build, op.link(case), op.updated(case), self._sets, first, self._device)

        def forced_sample(count: int) -> float:
            with forced(plan):
                return sample(count)

        return sample if plan.mx else forced_sample


def _time(times: Sequence[float]) -> Time:
    return Time(statistics.median(times), scatter(times) if len(times) > 1 else 0.0)


def _is_clear(times: Mapping[str, Sequence[float]]) -> bool:
    """Whether one contender is the fastest beyond doubt."""
    fastest = min(times, key=lambda name: statistics.median(times[name]))
    return all(_CLEAR * max(times[fastest]) < min(times[name]) for name in times if name != fastest)


class _Repeated:
    """Random numbers for inputs; few are drawn, since a time does not depend on them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __getattr__(self, name: str) -> Callable[..., Any]:
        draw = getattr(self._rng, name)
        place = {"standard_normal": 0, "random": 0, "exponential": 1, "integers": 2, "uniform": 2}[name]

        def drawn(*arguments: Any, **options: Any) -> np.ndarray:
            given = list(arguments)
            shape = options["size"] if "size" in options else given[place]
            few = min(math.prod(shape) if isinstance(shape, tuple) else shape, _DRAWN)
            if "size" in options:
                options["size"] = few
            else:
                given[place] = few
            return np.resize(draw(*given, **options), shape)

        return drawn


def draw(item: Item, rng: np.random.Generator) -> list[mx.array | None]:
    """The inputs of an item."""
    return item.op.draw(cast(np.random.Generator, _Repeated(rng)), item.case, specs.DTYPES[item.dtype])


def _results(op: specs.Op, case: specs.Case, arrays: Sequence[mx.array | None]) -> list[mx.array]:
    results = specs.run(op, op.ours, case, arrays)
    mx.eval(results)
    return results


@dataclass(frozen=True)
class Asked:
    """Questions of a call to the calibration.

    Attributes:
        problems: Of the call's op; none where no kernel covers the call.
        planned: Whether a plan asks too, which follows a schedule or a parallelism.
    """

    problems: list[Problem]
    planned: bool = False


def asked(op: specs.Op, case: specs.Case, arrays: Sequence[mx.array | None], device: str) -> Asked:
    """Questions of a call of ours to the calibration."""
    _ext.calibration_record(True)
    try:
        _results(op, case, arrays)
    except RuntimeError as error:
        if "strict mode" not in str(error):
            raise
        return Asked([])
    finally:
        found = _ext.calibration_record(False)
    mine = [one for one in found if one[0] == op.name and one[4] == device]
    problems = {(name, dtype, format, tuple(sizes)): None for name, dtype, format, sizes, *_ in mine}
    return Asked(list(problems), planned=any(planned for *_, planned in mine))


def _agree(a: mx.array, b: mx.array) -> bool:
    allowed = _UNITS[a.dtype] * specs.EPSILON[a.dtype] * mx.abs(b.astype(mx.float32)).max()
    return bool(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max() <= allowed)


class Plans:
    """Our plans for a call, without any that comes to the same launches as another."""

    def __init__(self, op: specs.Op, case: specs.Case, arrays: Sequence[mx.array | None]) -> None:
        self._op, self._case, self._arrays = op, case, arrays
        launches, self._expected = self._run(TABLES)
        self._seen = [launches]

    def _run(self, plan: Plan) -> tuple[list[Any], list[mx.array]]:
        _ext.calibration_launches(True)
        try:
            with forced(plan):
                results = _results(self._op, self._case, self._arrays)
        finally:
            launches = _ext.calibration_launches(False)
        return launches, results

    def _is_new(self, plan: Plan) -> bool:
        try:
            launches, results = self._run(plan)
        except RuntimeError:  # a plan that cannot be had here is none to choose
            return False
        if launches in self._seen or not all(map(_agree, results, self._expected)):
            return False
        self._seen.append(launches)
        return True

    def schedules(self) -> list[Plan]:
        """The schedules that give the same results as the tables' plan, but for rounding."""
        return list(filter(self._is_new, (Plan(schedule=name) for name in _ext.plan_schedules(self._op.name))))

    def with_parallelism(self, plan: Plan, choices: Iterable[int]) -> list[Plan]:
        """A plan with each parallelism that makes another of it."""
        return list(filter(self._is_new, (replace(plan, parallelism=n) for n in choices)))


def _fastest(times: Mapping[Plan, Time]) -> Plan:
    return min(times, key=lambda plan: times[plan].seconds)


def candidate(clock: Clock, plans: Plans) -> Plan:
    """The plan of ours that looks the fastest: a schedule first, then its parallelism."""
    best = TABLES
    if others := plans.schedules():
        best = _fastest(clock([TABLES, *others], _SCREENING))
    if neighbours := plans.with_parallelism(best, (-1, 1)):
        found = _fastest(clock([best, *neighbours], _SCREENING))
        further = [found.parallelism * n for n in range(2, _MOST_PARALLELISM + 1)]
        if found != best and (more := plans.with_parallelism(best, further)):  # the same way
            found = _fastest(clock([found, *more], _SCREENING))
        best = found
    return best


def is_hopeless(row: Row) -> bool:
    """Whether mx is so much slower that larger shapes need not be measured: ours serves them without a row too."""
    return not row.mx and row.mx_us > _SLOW * 1e6 and row.mx_us > _MUCH_SLOWER * row.best_us


def _faster(a: Time, b: Time) -> bool:
    """Whether one is faster than the other by more than the spread of the two."""
    return a.seconds * (1 + max(a.spread, b.spread)) < b.seconds


def winner(times: Mapping[Plan, Time]) -> tuple[Plan, Plan]:
    """The fastest plan, and the fastest of ours.

    The tables' plan stands against others that are not faster by more than the spread, and so does ours against mx.
    """
    others = [plan for plan in times if plan not in (MX, TABLES) and _faster(times[plan], times[TABLES])]
    ours = min(others, key=lambda plan: times[plan].seconds, default=TABLES)
    return (MX if _faster(times[MX], times[ours]) else ours), ours


def measure(
    item: Item,
    device: str,
    budget: Budget,
    rng: np.random.Generator,
    known: Container[Problem] = (),
) -> list[Row]:
    """Times an item, in strict mode; a row for each problem that it asks for and that is not known yet.

    Args:
        item: The op, the case and the element type.
        device: ``cpu`` or ``gpu``, which is mx's default device.
        budget: How long it may take.
        rng: Draws the inputs.
        known: Problems that have a row.
    """
    op, case = item.op, item.case
    arrays = draw(item, rng)
    wanted = asked(op, case, arrays, device)
    problems = [problem for problem in wanted.problems if problem not in known]
    if not problems:
        return []
    clock = Stopwatch(op, case, arrays, device)
    plans = [TABLES, MX]
    if device == "gpu" and wanted.planned and (best := candidate(clock, Plans(op, case, arrays))) != TABLES:
        plans.append(best)
    times = clock(plans, budget)
    if winner(times)[0] != TABLES:
        times = clock(plans, budget)  # so that no pause of the machine during one timing decides
    fastest, ours = winner(times)
    microseconds = {plan: round(time.seconds * 1e6, 3) for plan, time in times.items()}
    return [
        Row(
            *(op.name, case.name, *problem[1:]),
            mx=fastest == MX,
            schedule=ours.schedule,
            parallelism=ours.parallelism,
            mx_us=microseconds[MX],
            ours_us=microseconds[TABLES],
            best_us=microseconds[ours],
            spread=round(max(time.spread for time in times.values()), 3),
        )
        for problem in problems
    ]
