"""The predicted time of launches on Apple GPUs: what the simulator counts, in the machine code that Mesa makes.

The machine code has the instructions of each basic block. The simulator counts loads, stores, SIMD-group operations and
products of matrices. `block_counts` finds from both how often each block is executed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..apple import agx_compiler, machine_code
from ..apple.chips import Chip, find_chip
from ..apple.machine_code import MachineCode
from ..apple.model import Instructions, Prediction, Work, chain, predict
from ..frontend import CompileError
from . import user_sources
from .block_counts import Executions, executions, simdgroups
from .profile import Launch, profiled

# A prediction whose counts are missed by more says so.
MISMATCH = 0.1

# Threadgroup memory of a core, which bounds how many threadgroups it holds.
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
        launch: What it did in the simulator.
        code: Its machine code; None where it does not compile.
        executions: How often each block of the machine code is executed; None where it does not compile.
        problem: Why it does not compile, in the compiler's words; else empty.
        chip: The chip.
    """

    launch: Launch
    code: MachineCode | None
    executions: Executions | None
    problem: str
    chip: Chip

    @cached_property
    def work(self) -> Work | None:
        """What it executes; None where it does not compile."""
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

    @cached_property
    def prediction(self) -> Prediction | None:
        """The time by itself, and what limits it; None where the kernel does not compile."""
        return None if self.work is None else predict(self.work, self.chip)

    def on(self, chip: Chip) -> PredictedLaunch:
        """The same launch on another chip."""
        return replace(self, chip=chip)

    def __str__(self) -> str:
        name = f"{self.launch.file}: {self.launch.kernel}"
        if self.prediction is None or self.code is None:
            return f"{name}: not compiled"
        text = (
            f"{name}: {self.prediction.microseconds:.1f} us on {self.chip.name}, limited by {self.prediction.limit}; "
            f"{self.code.half_registers} half registers, {self.code.threads_a_core} threads a core"
        )
        if self.uncounted:
            number = (
                "1 loop that only computes is"
                if self.uncounted == 1
                else f"{self.uncounted} loops that only compute are"
            )
            text += f"; {number} taken to run once"
        if self.mismatch > MISMATCH:
            text += f"; its counts are missed by {self.mismatch:.0%}"
        return text


def work_of(launch: Launch, code: MachineCode, executed: Executions, chip: Chip) -> Work:
    """What a launch executes.

    Args:
        launch: What it did in the simulator.
        code: Its machine code, which is that of the M1 and M2.
        executed: How often each block is executed.
        chip: The chip. Where it has instructions for bfloat16, those that widen it are left out.
    """
    dtype = _dtype(launch.kernel)
    widening = {"bfi"} if dtype == "bfloat16" and chip.native_bfloat else set()
    threads = math.prod(launch.threads)
    instructions = dict.fromkeys((*_FIELDS_OF_KINDS.values(), *_FIELDS.values()), 0.0)
    rounds = 0.0
    for block in code.blocks:
        times = executed.blocks[block.label]
        # Loads of one block are on their way together; those of the next wait for what this one makes of them.
        rounds += times if block.opcodes.get("device_load") else 0
        for opcode, count in block.opcodes.items():
            if opcode in widening:
                continue
            name = _FIELDS.get(opcode) or _FIELDS_OF_KINDS[machine_code.kind_of(opcode)]
            instructions[name] += times * count
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
        rounds=rounds / simdgroups(launch),
        matrix_dtype=dtype,
    )


def predict_launches(launches: Sequence[Launch], chip: Chip) -> list[PredictedLaunch]:
    """Compiles the kernels of launches, and predicts the time of each.

    Raises:
        RuntimeError: There is no Mesa compiler; the message says how to get it.
    """
    return [_predicted(launch, chip) for launch in launches]


def total(launches: Sequence[PredictedLaunch]) -> Prediction | None:
    """The time of launches one after another, each waiting for the one before; None where one does not compile."""
    works = [launch.work for launch in launches]
    if not works or None in works:
        return None
    return chain([work for work in works if work is not None], launches[0].chip)


@contextlib.contextmanager
def predicted(chip: str) -> Iterator[list[PredictedLaunch]]:
    """Predicts the time of every launch that the simulator runs in the block; the list has them once it is left.

        with mm.simulator.enabled(), mm.simulator.predicted(chip="m2-max") as launches:
            mx.eval(mm.softmax(x, axis=-1, stream=mx.cpu))
        print(launches[0])

    The times are predictions, which no Mac has measured: docs/apple.md has the model's errors. What mx runs itself is
    not in the list. The simulator runs at its own speed, some ten thousand times slower than a GPU.

    Args:
        chip: An Apple GPU, such as ``"m2-max"``.

    Raises:
        ValueError: If the chip is unknown; the message lists the known ones.
        RuntimeError: If there is no Mesa compiler; the message says how to get it.
    """
    known = find_chip(chip)
    agx_compiler.find()
    launches: list[PredictedLaunch] = []
    with profiled() as recorded:
        yield launches
    launches += predict_launches(recorded, known)


def _predicted(launch: Launch, chip: Chip) -> PredictedLaunch:
    file = user_sources.register(launch.library, launch.file)
    constants: dict[int, object] = dict(launch.constants)
    try:
        code = machine_code.compile(file, launch.kernel, math.prod(launch.threads), constants)
    except CompileError as error:
        return PredictedLaunch(launch, None, None, str(error), chip)
    return PredictedLaunch(launch, code, executions(code, launch), "", chip)


def _dtype(kernel: str) -> str:
    """The type that a kernel's name has, ours or MLX's."""
    if "bfloat16" in kernel:
        return "bfloat16"
    return "float16" if "float16" in kernel or "half" in kernel else "float32"
