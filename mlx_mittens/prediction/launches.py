"""The predicted time of launches on Apple GPUs: the simulator's counts, in the machine code that Mesa makes.

The machine code has the instructions of each basic block. The simulator counts loads, stores, SIMD-group operations and
products of matrices. `block_counts` finds from both how often each block is executed.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, overload

import mlx.core as mx

from .. import _ext, frontend
from ..apple import agx_compiler, machine_code, shipped
from ..apple.chips import Chip, find_chip
from ..apple.machine_code import NOT_COMPILED, MachineCode
from ..apple.model import Instructions, Prediction, Work, chain, gaps, predict
from ..frontend import CompileError
from ..simulator import user_sources
from ..simulator.profile import Launch, profiled
from ..table import aligned, html
from . import matrix_units, mlx_graph, mlx_launches, mlx_tiles
from .block_counts import Executions, counts_of, executions, simdgroups
from .mlx_tiles import Call

# A prediction whose counts are missed by more says so; in tables a mark does.
MISMATCH = 0.1
MARK = "*"
MARKED = f"{MARK} counts of the simulator are missed by more than {MISMATCH:.0%}"

# Threadgroup memory of a core of the M1 and M2, which bounds how many threadgroups it holds. That of later cores is a
# part of a cache; the model leaves this bound out for them (chips.py).
_THREADGROUP_MEMORY = 60 * 1024

_FIELDS = {
    **dict.fromkeys(("convert", "floor", "ceil", "trunc", "roundeven"), "conversions"),
    **dict.fromkeys(("log2", "exp2", "sin_pt_1", "sin_pt_2"), "exponentials"),
    **dict.fromkeys(("rsqrt", "srsqrt"), "rsqrts"),
    **dict.fromkeys(("simd_reduce", "simd_prefix"), "reductions"),
    "rcp": "reciprocals",
}
_FIELDS_OF_KINDS = {
    "float": "floats",
    "integer": "integers",
    "complex": "multiplies",
    "simd": "shuffles",
    "matrix": "matrix",
    "load": "loads",
    "store": "stores",
    "control": "control",
}


@dataclass(frozen=True)
class PredictedLaunch:
    """A launch, and its time on a chip.

    Attributes:
        launch: Its counts in the simulator.
        code: Its machine code; None where it does not compile.
        executions: How often each block of the machine code is executed; None where it does not compile.
        problem: Why it does not compile, in the compiler's words; else empty.
        chip: The chip.

    Example:
        >>> with mm.simulator.enabled(), mm.simulator.predicted("m2-max") as launches:
        ...     mx.eval(mm.softmax(mx.ones((64, 1024)), axis=-1, stream=mx.cpu))
        >>> launches[0].code.spills, launches[0].prediction.limit != ""
        (0, True)
    """

    launch: Launch
    code: MachineCode | None
    executions: Executions | None
    problem: str
    chip: Chip

    @property
    def is_counted(self) -> bool:
        """Whether its work comes from the simulator's counts, as nothing here compiles a kernel for matrix units."""
        has_units = self.chip.tensor_flop_per_core_cycle is not None
        return has_units and self.code is None and matrix_units.are_used(self.launch)

    @cached_property
    def work(self) -> Work | None:
        """Work that it executes; None where it does not compile and is not counted."""
        if self.is_counted:
            return matrix_units.work_of(self.launch)
        if self.code is None or self.executions is None:
            return None
        return work_of(self.launch, self.code, self.executions, self.chip)

    @property
    def uncounted(self) -> int:
        """Loops that only compute: how often they run is not known, and they are taken to run once."""
        return 0 if self.executions is None else self.executions.uncounted

    @property
    def mismatch(self) -> float:
        """By how much the machine code's instructions miss the simulator's counts, as a share of the worst count."""
        return 0.0 if self.executions is None else self.executions.mismatch

    @property
    def is_missed(self) -> bool:
        """Whether the counts are missed by so much that tables mark the launch."""
        return self.mismatch > MISMATCH

    @cached_property
    def prediction(self) -> Prediction | None:
        """The time by itself, and the resource that limits it; None where there is no work."""
        return None if self.work is None else predict(self.work, self.chip)

    def on(self, chip: Chip) -> PredictedLaunch:
        """The same launch on another chip."""
        return replace(self, chip=chip)

    def _repr_html_(self) -> str:
        return html([], 0, [str(self)])

    def __str__(self) -> str:
        name = f"{self.launch.file}: {self.launch.kernel}"
        if self.prediction is None:
            return f"{name}: {NOT_COMPILED}"
        text = (
            f"{name}: {self.prediction.microseconds:.1f} us on {self.chip.name}, limited by {self.prediction.limit}; "
        )
        if self.code is None:
            return text + matrix_units.COUNTED
        text += f"{self.code.half_registers} half registers, {self.code.threads_a_core} threads a core"
        if self.uncounted:
            number = (
                "1 loop that only computes is"
                if self.uncounted == 1
                else f"{self.uncounted} loops that only compute are"
            )
            text += f"; {number} taken to run once"
        if self.is_missed:
            text += f"; its counts are missed by {self.mismatch:.0%}"
        return text


def work_of(launch: Launch, code: MachineCode, executed: Executions, chip: Chip) -> Work:
    """Work that a launch executes.

    Args:
        launch: Its counts in the simulator.
        code: Its machine code, as for the M1 and M2.
        executed: How often each block is executed.
        chip: The chip. Where it has instructions for bfloat16, instructions that widen it are left out.
    """
    widening = {"bfi"} if "bfloat16" in launch.kernel and chip.native_bfloat else set()
    threads = math.prod(launch.threads)
    instructions = dict.fromkeys((*_FIELDS_OF_KINDS.values(), *_FIELDS.values()), 0.0)
    for opcode, count in executed.opcodes.items():
        if opcode not in widening:
            instructions[_FIELDS.get(opcode) or _FIELDS_OF_KINDS[machine_code.kind_of(opcode)]] += count
    bytes_each = launch.counts["threadgroup_bytes"]
    threads_a_core = code.threads_a_core
    if bytes_each:
        threads_a_core = min(threads_a_core, max(1, _THREADGROUP_MEMORY // bytes_each) * threads)
    return Work(
        threadgroups=math.prod(launch.threadgroups),
        threads=threads,
        half_registers=max(1, code.half_registers),
        threads_a_core=threads_a_core,
        lines=launch.distinct_lines,
        summed_lines=launch.threadgroup_lines,
        instructions=Instructions(**instructions),
        rounds=executed.rounds / simdgroups(launch),
        matrix_dtype=_type_of_fragments(launch),
    )


def predict_launches(launches: Sequence[Launch], chip: Chip) -> list[PredictedLaunch]:
    """Compiles the kernels of launches, and predicts the time of each.

    Raises:
        RuntimeError: There is no Mesa compiler; the message says how to get it.
    """
    compiler = _Compiler(chip)
    return [compiler.predicted(launch) for launch in launches]


@dataclass(frozen=True)
class EstimatedLaunch:
    """A launch of MLX's whose kernel is not at hand, and its time on a chip as its bytes and operations have it.

    Attributes:
        name: The operation, such as ``mx.fast.rms_norm`` or ``Add``.
        work: The work of the launch.
        chip: The chip.
        source: Where the work comes from.

    Example:
        >>> with mm.simulator.predicted("m2-max", peer="metal") as launches:
        ...     mx.eval(mx.fast.rms_norm(mx.ones((64, 1024)), None, 1e-5))
        >>> launches[-1].name  # MLX's wheel lacks the text of this kernel
        'mx.fast.rms_norm'
    """

    name: str
    work: Work
    chip: Chip
    source: str = "estimated from bytes"

    @cached_property
    def prediction(self) -> Prediction:
        """The time by itself, and the resource that limits it."""
        return predict(self.work, self.chip)

    def on(self, chip: Chip) -> EstimatedLaunch:
        """The same launch on another chip."""
        return replace(self, chip=chip)

    def _repr_html_(self) -> str:
        return html([], 0, [str(self)])

    def __str__(self) -> str:
        time = f"{self.prediction.microseconds:.1f} us on {self.chip.name}, limited by {self.prediction.limit}"
        return f"{self.name}: {time}; {self.source}"


L = TypeVar("L", bound="PredictedLaunch | EstimatedLaunch")


class PredictedLaunches(list[L]):
    """The launches of a block on a chip; printed as a table of kernels, the slowest first.

    Attributes:
        chip: The chip.
        left_out: Operations of mx that no launch is known for, each with its number.

    Example:
        >>> with mm.simulator.enabled(), mm.simulator.predicted("m2-max") as launches:
        ...     mx.eval(mm.softmax(mx.ones((64, 1024)), axis=-1, stream=mx.cpu))
        >>> print(str(launches).splitlines()[-1])  # above it the table
        Predicted, not measured.
    """

    def __init__(self, chip: Chip) -> None:
        super().__init__()
        self.chip = chip
        self.left_out: Counter[str] = Counter()

    @property
    def total(self) -> Prediction | None:
        """The time of all, each waiting for the one before; None of no launches, and where one does not compile."""
        return total(self)

    def on(self, chip: Chip) -> PredictedLaunches[L]:
        """The same launches on another chip."""
        other: PredictedLaunches[L] = PredictedLaunches(chip)
        other.extend(launch.on(chip) for launch in self)  # type: ignore[misc]  # the same class as the launch
        other.left_out = self.left_out.copy()
        return other

    def __str__(self) -> str:
        rows = self._rows()
        lines = [aligned(rows, left=3)] if len(rows) > 1 else []
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        return html(self._rows(), 3, self._notes())

    def _rows(self) -> list[list[str]]:
        """A head, and a line for each kernel: the launches' own times, and the gaps before them."""
        groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
        limits: dict[tuple[str, str], str] = {}
        missed: set[tuple[str, str]] = set()
        for launch, gap in zip(self, self._gaps()):
            kernel = launch.name if isinstance(launch, EstimatedLaunch) else launch.launch.kernel
            prediction = launch.prediction
            key = kernel, _origin(launch)
            groups.setdefault(key, []).append((prediction.microseconds if prediction else 0.0, gap))
            limits[key] = prediction.limit if prediction else NOT_COMPILED
            if isinstance(launch, PredictedLaunch) and launch.is_missed:
                missed.add(key)
        sums = {key: [sum(times) for times in zip(*group)] for key, group in groups.items()}
        rows = [["kernel", "of", "limited by", "launches", "us", "gaps us"]]
        for key in sorted(groups, key=lambda key: -sums[key][0]):
            kernel, origin = key
            shown = kernel if len(kernel) <= _WIDEST else f"{kernel[: _WIDEST - 2]}.."
            us, gap = sums[key]
            times = [f"{us:.1f}{MARK * (key in missed)}", f"{gap:.1f}"]
            rows.append([shown, origin, limits[key], str(len(groups[key])), *times])
        return rows

    def _gaps(self) -> list[float]:
        return gaps([launch.work or Work() for launch in self])

    def _notes(self) -> list[str]:
        number = f"{len(self)} launch{'es' * (len(self) != 1)}"
        lines = []
        whole = self.total
        if whole is not None:
            time = f"{whole.microseconds:.0f} us on {self.chip.name}"
            lines.append(
                f"{number} one after another: {time}, {sum(self._gaps()):.0f} us of it in the gaps between them"
            )
        else:
            lines.append(f"{number} on {self.chip.name}" + ", of which some are not compiled" * bool(self))
        lines += [
            f"left out: {name}, {count} time{'s' * (count != 1)}" for name, count in sorted(self.left_out.items())
        ]
        if any(isinstance(launch, PredictedLaunch) and launch.is_missed for launch in self):
            lines.append(f"{MARKED}.")
        return [*lines, "Predicted, not measured."]


_WIDEST = 34  # name of a kernel in the table


def _origin(launch: PredictedLaunch | EstimatedLaunch) -> str:
    """Who a launch is of: MLX, this package, or a user's kernel, by the name that the user gave it."""
    if isinstance(launch, EstimatedLaunch):
        return f"MLX, {launch.source}"
    file = launch.launch.file
    if file.startswith("mlx/"):
        return "MLX"
    return "mlx_mittens" if file in frontend.files() else file.rpartition("/")[2].removesuffix(".metal")


def total(launches: Sequence[PredictedLaunch | EstimatedLaunch]) -> Prediction | None:
    """The time of launches one after another, each waiting for the one before; None where one does not compile."""
    works = [launch.work for launch in launches]
    if not works or None in works:
        return None
    return chain([work for work in works if work is not None], launches[0].chip)


@overload
def predicted(chip: str) -> AbstractContextManager[PredictedLaunches[PredictedLaunch]]: ...


@overload
def predicted(
    chip: str, peer: Literal["metal"]
) -> AbstractContextManager[PredictedLaunches[PredictedLaunch | EstimatedLaunch]]: ...


def predicted(chip: str, peer: Literal["metal"] | None = None) -> AbstractContextManager[PredictedLaunches[Any]]:
    """Predicts the time of every launch that the simulator runs in the block; the list has them once it is left.

    Ops in the block are planned for the chip. The times are predictions, which no Mac has measured: docs/apple.md has
    the model's errors. The simulator runs at its own speed, some ten thousand times slower than a GPU.

    With ``peer="metal"`` mx's own computations are in the list too, as the launches of MLX's own Metal kernels: those
    that are headers in its wheel run in the simulator, on drawn inputs of the same shapes, after the block; the others
    are estimated from the bytes that they move. So a model can be predicted with and without the patch.

    These are the operations of what ``mx.eval`` and ``mx.async_eval`` are given in the block, and of arrays whose
    values Python asks for, but for numpy's, which asks without a call. ``launches.left_out`` has the names of those
    that no launch is known for.

    Args:
        chip: An Apple GPU, such as ``"m2-max"``.
        peer: ``"metal"``: mx's computations are in the list, as MLX's Metal kernels.

    Raises:
        ValueError: If the chip is unknown; the message lists the known ones. If peer is another.
        RuntimeError: Within another such block, or one of ``profiled``. Of the list, where there is no Mesa compiler
            and a launch is not of this package's own kernels, whose machine code is in it: the message says how to get
            one.

    Example:
        >>> x, weight = mx.ones((4, 1024)), mx.ones((1024,))
        >>> with mm.simulator.enabled(), mm.simulator.predicted(chip="m2-max") as ours:
        ...     mx.eval(mm.rms_norm(x, weight, 1e-5, stream=mx.cpu))
        >>> with mm.simulator.predicted(chip="m2-max", peer="metal") as of_mx:
        ...     mx.eval(mx.fast.rms_norm(x, weight, 1e-5, stream=mx.cpu))
        >>> len(ours), len(of_mx)  # print(ours): a table of kernels and times
        (1, 1)
    """
    if peer not in (None, "metal"):
        raise ValueError(f"[predicted] peer is {peer!r}: expected 'metal' or None")
    known = find_chip(chip)
    if not shipped.is_there():
        agx_compiler.find()
    return _predicting(known, peer is not None)


@contextlib.contextmanager
def _predicting(chip: Chip, with_mx: bool) -> Iterator[PredictedLaunches[Any]]:
    launches: PredictedLaunches[Any] = PredictedLaunches(chip)
    with profiled() as recorded, contextlib.ExitStack() as stack:
        recorder = stack.enter_context(mlx_graph.Recorder()) if with_mx else None
        stack.enter_context(_planned_for(chip))
        yield launches
    launches += predict_launches(recorded, chip)
    if recorder:
        with _planned_for(chip):
            _add_launches_of_mx(launches, recorder)


@contextlib.contextmanager
def _planned_for(chip: Chip) -> Iterator[None]:
    """Ops are planned for a chip, and MLX chooses its kernels for it."""
    _ext.simulator_plan_for(chip.name)
    try:
        yield
    finally:
        _ext.simulator_plan_for("")


def _add_launches_of_mx(launches: PredictedLaunches[Any], recorder: mlx_graph.Recorder) -> None:
    """Adds MLX's launches for the operations that it evaluated; each of its kernels is simulated once a shape."""
    done: dict[tuple[object, ...], list[PredictedLaunch | EstimatedLaunch]] = {}
    estimate = lambda some: [EstimatedLaunch(each.name, each.work, launches.chip) for each in some]
    for operations, simulated in recorder.evaluations:
        for operation in operations:
            if operation.is_ours:
                if not simulated:
                    launches.left_out[f"{operation.name} (outside of mm.simulator.enabled())"] += 1
                continue
            planned = mlx_launches.plan(operation, operations)
            if planned is None:
                launches.left_out[operation.name] += 1
            elif isinstance(planned, tuple):
                launches += estimate(planned)
            else:
                if planned.key not in done:
                    done[planned.key] = _simulated(planned.call, launches.chip) or [*estimate(planned.instead)]
                launches += done[planned.key]


def _simulated(call: Call, chip: Chip) -> list[PredictedLaunch | EstimatedLaunch]:
    """The launches of a call of MLX's kernels; none where one does not compile, has a fault or takes no such shape."""
    with contextlib.suppress(_ext.SimulatorFault, CompileError, ValueError, RuntimeError):
        with profiled() as recorded:
            mx.eval(call.make())
        found = predict_launches(recorded, chip)
        works = [launch.work for launch in found if launch.work is not None]
        if len(works) == len(found) and call.tiles:
            pairs = zip(found, call.tiles.whole(works))
            return [EstimatedLaunch(each.launch.kernel, work, chip, mlx_tiles.SOURCE) for each, work in pairs]
        if len(works) == len(found):
            return [*found]
    return []


class _Compiler:
    """Compiles launches, and counts executions of their blocks: once for launches that are alike."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._codes: dict[tuple[object, ...], MachineCode | CompileError] = {}
        self._executions: dict[tuple[object, ...], Executions] = {}

    def predicted(self, launch: Launch) -> PredictedLaunch:
        """A launch with its machine code."""
        kind = launch.library, launch.kernel, math.prod(launch.threads), tuple(sorted(launch.constants.items()))
        if kind not in self._codes:
            self._codes[kind] = _compiled(launch)
        code = self._codes[kind]
        if isinstance(code, CompileError):
            return PredictedLaunch(launch, None, None, str(code), self._chip)
        alike = *kind, *counts_of(launch)
        if alike not in self._executions:
            self._executions[alike] = executions(code, launch)
        return PredictedLaunch(launch, code, self._executions[alike], "", self._chip)


def _compiled(launch: Launch) -> MachineCode | CompileError:
    file = user_sources.register(launch.library, launch.file)
    try:
        return machine_code.compile(file, launch.kernel, math.prod(launch.threads), dict(launch.constants))
    except CompileError as error:
        return error


def _type_of_fragments(launch: Launch) -> str:
    """The type of the operands of most products of matrices: MLX's kernels widen half types to floats first."""
    halves, bfloats = launch.counts["half_matrix_operations"], launch.counts["bfloat_matrix_operations"]
    floats = launch.counts["matrix_operations"] - halves - bfloats
    numbers = {"float32": floats, "float16": halves, "bfloat16": bfloats}
    return max(numbers, key=lambda name: numbers[name])
