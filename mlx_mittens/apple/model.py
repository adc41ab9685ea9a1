"""The predicted time of a launch on an Apple GPU, and which resource limits it.

A launch takes the time to start it and the longest of its times on each resource, where memory and computing
overlap as the constant `overlap` says:

    device memory  distinct lines * 128 B / (efficiency * nominal bandwidth)
    second cache   lines summed over threadgroups * 128 B / (32 B * cores * clock)
    issue slots    slots / 4 schedulers / (cores * clock)
    complex unit   cycles of the unit that four schedulers share / (cores * clock)
    tensor units   operations / (rate reached * cores * clock); of 8-bit integers at twice the rate
    dispatch       threadgroups * cycles / (cores * clock)
    latency        a simdgroup's own time, one simdgroup after another in the places that a core has

Times on cores are scaled by the busiest core's share of the threadgroups. `CONSTANTS` is the one table of numbers
that are no property of a chip; `bench/apple/errors.py --fit` fits some of them to published measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from .chips import Chip

LINE_BYTES = 128
LANES = 32
SCHEDULERS = 4
MATRIX_FLOP = 2 * 8 * 8 * 8
# Operations of tensor units on 8-bit integers beside those on half types (tzakharko, A19).
_BYTE_RATE = 2
# Constants called early are for M1 and M2, later ones for the generations from the M3 on.
_FIRST_LATER = 15


@dataclass(frozen=True)
class Constants:
    """The numbers of the model that are no property of a single chip.

    Attributes:
        base_efficiency: Share of nominal bandwidth that chips with a single memory controller reach. Fitted.
        pro_efficiency: The same of Pro chips. Fitted.
        max_efficiency: The same of Max chips. Fitted.
        ultra_efficiency: The same of two dies joined: a part of the traffic crosses between them. Fitted.
        fragment_store: Cost of a line that is stored in pieces, as 8x8 fragments of a product are, in whole lines.
            Fitted.
        launch_us: Start of a launch. A chain of 3200 tiny kernels takes 2.75 us for each (mlx#4521).
        dependent_us: Start of a launch that reads memory and waits for the launch before: the GPU drains and fills
            again. Fitted, above all to whole models.
        early_dispatch_cycles: A core's cycles to start a threadgroup, M1 and M2. Fitted.
        later_dispatch_cycles: The same from the M3 on. Fitted.
        early_latency_ns: A load from memory on chips without a published latency, M1 and M2 (M1: 311, M2 Pro: 342).
        later_latency_ns: The same from the M3 on, where nothing is published. Fitted.
        early_complex_slots: Issue slots that a complex instruction takes from its scheduler on M1 and M2: it holds the
            port for four cycles (metal-benchmarks).
        later_complex_slots: The same from the M3 on, which issue to several units: one, to issue it.
        complex_efficiency: Share of its peak that the complex unit reaches between four schedulers. Fitted.
        fragment_slots: Slots to bring one 8x8 fragment from threadgroup memory, with addresses and the share of
            barriers. Fitted.
        tensor_efficiency: Share of their peak that tensor units reach in whole products. Fitted.
        early_reduction_slots: Slots of a sum or maximum over a simdgroup, M1 and M2 (metal-benchmarks).
        later_reduction_slots: The same from the M3 on, where nothing is published. Fitted.
        overlap: Exponent of the norm that joins the times of memory and computing: 1 adds them, infinity takes the
            longer one. They overlap, but not perfectly where they are alike. Fitted.
        shuffle_slots: Slots of a shuffle, broadcast or ballot (metal-benchmarks).
        reciprocal_cycles: Cycles of the complex unit (metal-benchmarks counts 6 of a scheduler where others take 4).
        rsqrt_cycles: The same of a reciprocal square root (8 of a scheduler).
        second_cache_bytes: Bytes a cycle that a core gets from the second cache (metal-benchmarks).
    """

    base_efficiency: float = 0.891
    pro_efficiency: float = 0.907
    max_efficiency: float = 0.926
    ultra_efficiency: float = 0.814
    fragment_store: float = 1.46
    launch_us: float = 2.5
    dependent_us: float = 7.19
    early_dispatch_cycles: float = 78.1
    later_dispatch_cycles: float = 44.9
    early_latency_ns: float = 311.0
    later_latency_ns: float = 203.0
    early_complex_slots: float = 4.0
    later_complex_slots: float = 1.0
    complex_efficiency: float = 0.735
    fragment_slots: float = 4.39
    tensor_efficiency: float = 0.687
    early_reduction_slots: float = 14.5
    later_reduction_slots: float = 3.78
    overlap: float = 4.88
    shuffle_slots: float = 2.0
    reciprocal_cycles: float = 1.5
    rsqrt_cycles: float = 2.0
    second_cache_bytes: float = 32.0

    def efficiency(self, chip: Chip) -> float:
        """Share of the nominal bandwidth that the chip's tier reaches."""
        return float(getattr(self, f"{chip.tier}_efficiency"))

    def dispatch_cycles(self, chip: Chip) -> float:
        """Cycles that a core takes to start a threadgroup."""
        return self.later_dispatch_cycles if chip.generation >= _FIRST_LATER else self.early_dispatch_cycles

    def latency_ns(self, chip: Chip) -> float:
        """Time of a load from memory."""
        if chip.device_memory_ns is not None:
            return chip.device_memory_ns
        return self.later_latency_ns if chip.generation >= _FIRST_LATER else self.early_latency_ns

    def reduction_slots(self, chip: Chip) -> float:
        """Issue slots of a sum or maximum over a simdgroup."""
        return self.later_reduction_slots if chip.generation >= _FIRST_LATER else self.early_reduction_slots


CONSTANTS = Constants()


@dataclass(frozen=True)
class Instructions:
    """Executed instructions of a launch: each counts once for every simdgroup that executes it.

    Attributes:
        floats: Add, multiply, fused multiply-add, compare, minimum, maximum of floats.
        integers: Add, logic, select, move of integers.
        conversions: Between integers and floats.
        multiplies: Integer multiplies, shifts and bit fields.
        exponentials: exp2, log2 and other functions of that cost.
        reciprocals: Reciprocals and divisions.
        rsqrts: Reciprocal square roots.
        shuffles: Shuffles, broadcasts, ballots.
        reductions: Sums and maxima over a simdgroup in one instruction.
        matrix: 8x8x8 multiplies of a simdgroup.
        fragments: 8x8 fragments loaded from threadgroup memory, where their loads and addresses are not counted one by
            one under the other kinds.
        loads: Loads from device and threadgroup memory.
        stores: Stores to either.
        control: Branches, barriers, waits.
    """

    floats: float = 0
    integers: float = 0
    conversions: float = 0
    multiplies: float = 0
    exponentials: float = 0
    reciprocals: float = 0
    rsqrts: float = 0
    shuffles: float = 0
    reductions: float = 0
    matrix: float = 0
    fragments: float = 0
    loads: float = 0
    stores: float = 0
    control: float = 0

    def __add__(self, other: Instructions) -> Instructions:
        return Instructions(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: float) -> Instructions:
        return Instructions(**{f.name: getattr(self, f.name) * times for f in fields(self)})

    __rmul__ = __mul__


@dataclass(frozen=True)
class Work:
    """The work of one launch.

    Attributes:
        threadgroups: Threadgroups of the launch.
        threads: Threads of a threadgroup.
        half_registers: 16-bit registers of a lane; None means that they do not bound the threads of a core.
        threads_a_core: Threads that a core of M1 or M2 holds at once, as registers and threadgroup memory have it,
            where they are known; else it follows from `half_registers`. Later chips have no such bound: see chips.py.
        lines: Distinct 128-byte lines read and written.
        fragment_lines: Of `lines`, how many are stored in pieces, as 8x8 fragments of a product are.
        summed_lines: Lines of each threadgroup, summed over threadgroups. 0 means that none is read twice.
        instructions: Executed instructions.
        rounds: Loads that one simdgroup waits for one after another.
        matrix_dtype: Type of the operands of matrix multiplies: `float32`, `float16`, `bfloat16`, or on tensor units
            `int8`.
        tensor_units: Whether the multiplies are written for tensor units, where the chip has them.
        cached: Whether an earlier launch left the lines in the system cache, so that memory does not bound it.
    """

    threadgroups: float = 1
    threads: int = 32
    half_registers: int | None = None
    threads_a_core: int | None = None
    lines: float = 0
    fragment_lines: float = 0
    summed_lines: float = 0
    instructions: Instructions = field(default_factory=Instructions)
    rounds: float = 0
    matrix_dtype: str = "float32"
    tensor_units: bool = False
    cached: bool = False

    def __post_init__(self) -> None:
        if self.threadgroups <= 0 or not 0 < self.threads <= 1024:
            raise ValueError(
                f"a launch has threadgroups of 1 to 1024 threads; these are {self.threadgroups} of {self.threads}"
            )
        known = ("float32", "float16", "bfloat16", *(("int8",) if self.tensor_units else ()))
        if self.matrix_dtype not in known:
            raise ValueError(f"matrix_dtype is {' or '.join(known)}; it is {self.matrix_dtype!r}")


@dataclass(frozen=True)
class Terms:
    """Microseconds that each resource would take by itself, and those to start the launch."""

    device_memory: float = 0
    second_cache: float = 0
    issue_slots: float = 0
    complex_unit: float = 0
    tensor_units: float = 0
    dispatch: float = 0
    latency: float = 0
    launch: float = 0

    def named(self) -> dict[str, float]:
        """The terms under the names of the limits."""
        return {_LIMITS[name]: value for name, value in vars(self).items()}


_LIMITS = {f.name: f.name.replace("_", " ") for f in fields(Terms)}
_JOINED = ("device memory", "second cache", "issue slots", "complex unit", "tensor units")


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a launch, or of a chain of launches.

    Attributes:
        microseconds: The time.
        limit: The resource that takes longest: a name of `Terms.named`.
        terms: All resources. Of a chain they are sums over its launches.
    """

    microseconds: float
    limit: str
    terms: Terms


def _issue_slots(work: Work, chip: Chip, constants: Constants) -> float:
    """Slots of schedulers that the launch takes, summed over simdgroups."""
    i = work.instructions
    complex_count = i.conversions + i.multiplies + i.exponentials + i.reciprocals + i.rsqrts
    tensor = work.tensor_units and chip.tensor_flop_per_core_cycle is not None
    cycles = chip.matrix_float_cycles if work.matrix_dtype == "float32" else chip.matrix_half_cycles
    floats = i.floats + (0.0 if tensor else i.matrix * cycles)  # products of matrices are computed by the float units
    if chip.coissue:
        arithmetic = max(floats, i.integers) + complex_count * constants.later_complex_slots
    else:
        arithmetic = floats + i.integers + _complex_cycles(i, constants) * constants.early_complex_slots
    return (
        arithmetic
        + i.shuffles * constants.shuffle_slots
        + i.reductions * constants.reduction_slots(chip)
        + (0.0 if tensor else i.fragments * constants.fragment_slots)
        + i.loads
        + i.stores
        + i.control
    )


def _complex_cycles(i: Instructions, constants: Constants) -> float:
    """Cycles of a core's one complex unit at its peak."""
    return (
        i.conversions
        + i.multiplies
        + i.exponentials
        + i.reciprocals * constants.reciprocal_cycles
        + i.rsqrts * constants.rsqrt_cycles
    )


def _terms(work: Work, chip: Chip, constants: Constants) -> Terms:
    cycles_us = chip.clock_GHz * 1e3
    core_cycles_us = chip.cores * cycles_us
    i = work.instructions
    # The busiest core has a whole number of threadgroups.
    balance = math.ceil(work.threadgroups / chip.cores) / (work.threadgroups / chip.cores)
    slots = _issue_slots(work, chip, constants)
    tensor = 0.0
    if work.tensor_units and chip.tensor_flop_per_core_cycle is not None:
        reached = chip.tensor_flop_per_core_cycle * constants.tensor_efficiency
        reached *= _BYTE_RATE if work.matrix_dtype == "int8" else 1
        tensor = i.matrix * MATRIX_FLOP / reached / core_cycles_us
    lines = work.lines + work.fragment_lines * (constants.fragment_store - 1)
    simdgroups_each = math.ceil(work.threads / LANES)
    simdgroups = work.threadgroups * simdgroups_each
    threads_a_core = chip.resident_threads(work.half_registers)
    if work.threads_a_core is not None and not chip.dynamic_caching:
        threads_a_core = work.threads_a_core
    places = min(simdgroups, chip.cores * max(simdgroups_each, threads_a_core // LANES))
    # A simdgroup issues at most one instruction a cycle, beside the loads that it waits for.
    alone_us = work.rounds * constants.latency_ns(chip) / 1e3 + slots / simdgroups / cycles_us
    return Terms(
        device_memory=0 if work.cached else lines * LINE_BYTES / (constants.efficiency(chip) * chip.nominal_GBps * 1e3),
        second_cache=balance
        * max(work.lines, work.summed_lines)
        * LINE_BYTES
        / (constants.second_cache_bytes * core_cycles_us),
        issue_slots=balance * slots / SCHEDULERS / core_cycles_us,
        complex_unit=balance * _complex_cycles(i, constants) / constants.complex_efficiency / core_cycles_us,
        tensor_units=balance * tensor,
        dispatch=work.threadgroups * constants.dispatch_cycles(chip) / core_cycles_us,
        latency=alone_us * simdgroups / places if work.rounds else 0.0,
        launch=constants.launch_us,
    )


def _body(terms: Terms, constants: Constants) -> tuple[float, str]:
    """The time of a launch once it has started, and the resource that limits it."""
    memory = max(terms.device_memory, terms.second_cache)
    computing = max(terms.issue_slots, terms.complex_unit, terms.tensor_units)
    most = max(memory, computing)
    joined = 0.0
    if most:
        p = constants.overlap
        joined = most * ((memory / most) ** p + (computing / most) ** p) ** (1 / p)
    body = max(joined, terms.dispatch, terms.latency)
    named = terms.named()
    parts = _JOINED if body == joined else ("dispatch", "latency")
    return body, max(parts, key=lambda name: named[name])


def predict(work: Work, chip: Chip, constants: Constants = CONSTANTS) -> Prediction:
    """Predicts the time of a single launch, from its start to its end on the GPU.

    Args:
        work: The work of the launch.
        chip: The GPU.
        constants: The model's numbers.
    """
    terms = _terms(work, chip, constants)
    body, longest = _body(terms, constants)
    return Prediction(terms.launch + body, longest if body >= terms.launch else "launch", terms)


def gaps(works: Sequence[Work], constants: Constants = CONSTANTS) -> list[float]:
    """Microseconds that launches in a row take to start beyond `launch_us`, as each waits for the one before.

    The time of a `chain` is the sum of these and of the launches' own times.
    """
    waiting = constants.dependent_us - constants.launch_us
    return [waiting if i and work.lines else 0.0 for i, work in enumerate(works)]


def chain(
    works: Sequence[Work], chip: Chip, constants: Constants = CONSTANTS, times: Sequence[int] | None = None
) -> Prediction:
    """Predicts launches that wait for one another.

    The first takes `launch_us` to start. Each other one takes `dependent_us`, or `launch_us` if it reads no memory.

    Args:
        works: The work of each launch.
        chip: The GPU.
        constants: The model's numbers.
        times: How often each of `works` is launched; once if left out.

    Raises:
        ValueError: If there is no launch.
    """
    counts = [1] * len(works) if times is None else list(times)
    if len(counts) != len(works) or sum(counts) < 1 or min(counts) < 0:
        raise ValueError(f"a chain has at least one launch, and a count for each; {len(works)} works have {counts}")
    starts = 0.0
    bodies: dict[str, float] = {}
    sums = dict.fromkeys(Terms().named(), 0.0)
    for work, count in zip(works, counts):
        if not count:
            continue
        first = 0 if starts else 1
        waiting = constants.dependent_us if work.lines else constants.launch_us
        starts += first * constants.launch_us + (count - first) * waiting
        terms = _terms(work, chip, constants)
        for name, value in terms.named().items():
            sums[name] += count * value
        body, longest = _body(terms, constants)
        bodies[longest] = bodies.get(longest, 0) + count * body
    sums["launch"] = starts
    limit = max([*bodies, "launch"], key=lambda name: bodies.get(name, starts))
    summed = Terms(**{name: sums[_LIMITS[name]] for name in _LIMITS})
    return Prediction(starts + sum(bodies.values()), limit, summed)
