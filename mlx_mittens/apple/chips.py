"""Apple GPUs as a table: published or measured figures of each chip, with units in the names.

The rows are in `chips.csv`. An empty cell is something that nobody has published. Names are lower case with hyphens:
`m2-max` is the variant with all cores, `m2-max-30` the one with 30.
"""

from __future__ import annotations

import csv
import difflib
import functools
from dataclasses import dataclass, fields
from importlib import resources

from .. import _ext

# Half registers of a lane -> threads that a core of the M1 and M2 families holds at once.
THREADS_BY_HALF_REGISTERS: tuple[tuple[int, int], ...] = _ext.threads_by_half_registers
# The scheduler's own limit. A core of the M3 and later is taken to reach it: registers, threadgroup memory and first
# cache are one memory there ("dynamic caching"), whose size and whose share for each Apple does not publish. So neither
# registers nor threadgroup memory bound its threads here, as the 60 KB of an M1 or M2 do.
_MOST_THREADS = 3072
_OPTIONAL_INTEGERS = {"register_file_KB", "first_cache_KB", "second_cache_KB", "system_cache_MB", "dispatch_cycles"}


@dataclass(frozen=True)
class Chip:
    """One Apple GPU.

    Attributes:
        name: The name for the command line, such as `m2-max`.
        title: The name for people.
        generation: 13 (M1), 14 (M2), 15 (M3), 16 (M4), 17 (M5).
        tier: `base`, `pro`, `max` or `ultra`: how the memory is attached.
        cores: GPU cores.
        clock_GHz: The clock of the GPU under load.
        nominal_GBps: Width times clock of the memory.
        measured_GBps: Bandwidth of a plain reduction, where one was published. Predictions use the efficiency of the
            tier, which predicts a chip's other kernels as well as this does.
        register_file_KB: Registers of a core.
        first_cache_KB: Data cache of a core.
        second_cache_KB: The cache that all cores of the GPU share.
        system_cache_MB: The cache that the whole chip shares.
        first_cache_ns: Latency of a load from the first cache.
        second_cache_ns: Latency of a load from the second cache.
        system_cache_ns: Latency of a load from the system cache.
        device_memory_ns: Latency of a load from memory.
        dispatch_cycles: Cycles that a core takes to start a threadgroup, where it was measured. Predictions use those
            of the model's constants.
        matrix_half_cycles: Cycles of one scheduler for an 8x8x8 multiply of half operands.
        matrix_float_cycles: The same of float operands.
        tensor_flop_per_core_cycle: Peak of the tensor units on half operands; None where there are none.
        coissue: Whether a core issues integer instructions beside float and matrix instructions.
        dynamic_caching: Whether registers and threadgroup memory are parts of a cache, so that neither is known to
            bound the threads of a core.
        native_bfloat: Whether bfloat operands need no instructions of their own.
        eval_round_trip_us: What `mx.eval` of a small array takes as the host sees it.
        gemm_float32_TFLOPs: Measured speed of MLX's float32 product.
        sources: Where the figures come from.
    """

    name: str
    title: str
    generation: int
    tier: str
    cores: int
    clock_GHz: float
    nominal_GBps: float
    measured_GBps: float | None
    register_file_KB: int | None
    first_cache_KB: int | None
    second_cache_KB: int | None
    system_cache_MB: int | None
    first_cache_ns: float | None
    second_cache_ns: float | None
    system_cache_ns: float | None
    device_memory_ns: float | None
    dispatch_cycles: int | None
    matrix_half_cycles: float
    matrix_float_cycles: float
    tensor_flop_per_core_cycle: float | None
    coissue: bool
    dynamic_caching: bool
    native_bfloat: bool
    eval_round_trip_us: float | None
    gemm_float32_TFLOPs: float | None
    sources: str

    def resident_threads(self, half_registers: int | None = None) -> int:
        """Threads that a core holds at once.

        Args:
            half_registers: 16-bit registers of a lane, as the machine code has them. None means at most 104.

        Raises:
            ValueError: If a lane cannot have as many.
        """
        if half_registers is not None and not 0 < half_registers <= 256:
            raise ValueError(f"a lane has 1 to 256 half registers; half_registers is {half_registers}")
        if self.dynamic_caching:
            return _MOST_THREADS
        return next(threads for most, threads in THREADS_BY_HALF_REGISTERS if (half_registers or 1) <= most)


def _value(column: str, kind: str, text: str) -> object:
    if kind == "str":
        return text
    if kind == "bool":
        return {"yes": True, "no": False}[text]
    if not text and "None" in kind:
        return None
    return int(text) if kind == "int" or column in _OPTIONAL_INTEGERS else float(text)


@functools.cache
def chips() -> dict[str, Chip]:
    """All chips by name, in the order of their release."""
    text = (resources.files(__package__) / "chips.csv").read_text()
    kinds = {field.name: str(field.type) for field in fields(Chip)}
    rows = csv.DictReader(text.splitlines())
    found = [Chip(**{column: _value(column, kinds[column], cell) for column, cell in row.items()}) for row in rows]  # type: ignore[arg-type]
    return {chip.name: chip for chip in found}


def find_chip(name: str) -> Chip:
    """The chip of this name; upper case and blanks are accepted, so that `M2 Max` is `m2-max`.

    Raises:
        ValueError: If there is no such chip. The message lists those there are.
    """
    wanted = "-".join(name.lower().split())
    known = chips()
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise ValueError(f"no Apple GPU is known as {name!r}; {hint} are {', '.join(known)}")
    return known[wanted]
