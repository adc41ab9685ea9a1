"""Counts of launches in the simulator, for tuning a kernel or predicting its time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import _ext
from ..table import aligned, html


@dataclass(frozen=True)
class LineCounts:
    """Accesses of one kind by the simdgroups of a launch at one line of the source.

    Attributes:
        file: The file; of a kernel of ``mx.fast.metal_kernel`` its name with ``.metal``. A line of a header is listed
            under the header, whichever kernel includes it.
        line: The line in it, from 1.
        operation: ``load``, ``store``, ``atomic``, ``barrier``, ``simd`` (a SIMD-group or quad-group function) or
            ``matrix`` (a product of SIMD-group matrices).
        memory: ``device`` or ``threadgroup``, of an access; else empty.
        executions: How often simdgroups executed the line, summed over them: in a loop, its rounds. A loop of few,
            known rounds is unrolled and executes its lines once. If a line stands in several places of the
            compiled code, as an inlined function's does, the place that was executed most often counts.
        operations: Accesses, merged as `Launch` says, or operations between threads, in all places.

    Example:
        >>> with mm.simulator.enabled(), mm.simulator.profiled() as launches:
        ...     mx.eval(mm.softmax(mx.ones((4, 1024)), axis=-1, stream=mx.cpu))
        >>> busiest = max(launches[0].lines, key=lambda line: line.operations)
        >>> busiest.operation, busiest.line > 0
        ('simd', True)
    """

    file: str
    line: int
    operation: str
    memory: str
    executions: int
    operations: int


@dataclass(frozen=True)
class Launch:
    """The counts of one launch of a kernel.

    Lines are of 128 bytes of device memory. Loads and stores are counted by simdgroup, merged: neighbouring accesses of
    a thread count once where a compiler makes one vector access of them, of at most four elements and 16 bytes. They
    are in one basic block, and no store to the same array lies between. An access that is a neighbour in some
    executions only, as in a gather, is not merged. Structs of params, which a GPU keeps at hand, are not counted.

    Attributes:
        file: The .metal file.
        kernel: The kernel's name in it.
        library: The compiled file that ran.
        constants: Function constants by index, as C++ writes them.
        threadgroups: How many there were in each dimension.
        threads: Threads of a threadgroup in each dimension.
        distinct_lines: Lines that the launch loaded or stored. A line that several threads touch counts once.
        distinct_lines_loaded: Of these, lines that were loaded.
        distinct_lines_stored: Of these, lines that were stored. A line may be in both.
        threadgroup_lines: The sum over threadgroups of the distinct lines that each touched.
        device_loads: Loads from device memory.
        device_stores: Stores to device memory.
        threadgroup_loads: Loads from threadgroup memory.
        threadgroup_stores: Stores to threadgroup memory.
        lines: Accesses, barriers, SIMD-group and matrix operations by line of the source, in the order of the lines.
        counts: The simulator's other counts, by name.

    Example:
        >>> with mm.simulator.enabled(), mm.simulator.profiled() as launches:
        ...     mx.eval(mm.softmax(mx.ones((4, 1024)), axis=-1, stream=mx.cpu))
        >>> launches[0].file, launches[0].threadgroups
        ('norm/softmax.metal', (4, 1, 1))
    """

    file: str
    kernel: str
    library: str
    constants: dict[int, str]
    threadgroups: tuple[int, int, int]
    threads: tuple[int, int, int]
    distinct_lines: int
    distinct_lines_loaded: int
    distinct_lines_stored: int
    threadgroup_lines: int
    device_loads: int
    device_stores: int
    threadgroup_loads: int
    threadgroup_stores: int
    lines: tuple[LineCounts, ...]
    counts: dict[str, int]

    def _repr_html_(self) -> str:
        return html(self._rows(), 4, [f"{self.file}: {self.kernel}, {_times(self.threadgroups)} threadgroups"])

    def _rows(self) -> list[list[str]]:
        """A head, and the lines of the source, the most executed first."""
        rows = [["file", "line", "operation", "memory", "executions", "operations"]]
        for line in sorted(self.lines, key=lambda line: -line.executions):
            counts = [f"{line.executions:,}", f"{line.operations:,}"]
            rows.append([line.file, str(line.line), line.operation, line.memory, *counts])
        return rows

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> Launch:
        """A launch as ``_ext.simulator_record`` gives it."""
        if "lines" not in recorded:
            raise ValueError(
                f"[profiled] {recorded['kernel']} ran with watch=False, so that its accesses were not seen: "
                "expected mm.simulator.enabled(watch=True)"
            )
        counts = dict(recorded["counts"])
        own = {name: counts.pop(name) for name in _PROFILED}
        lines = tuple(LineCounts(*line) for line in recorded["lines"])
        head = {name: recorded[name] for name in ("file", "kernel", "library", "constants", "threadgroups", "threads")}
        return cls(**head, **own, lines=lines, counts=counts)


class ProfiledLaunches(list[Launch]):
    """The launches of a block in their order; printed as a table with a line for each.

    Example:
        >>> with mm.simulator.enabled(), mm.simulator.profiled() as launches:
        ...     mx.eval(mm.softmax(mx.ones((4, 1024)), axis=-1, stream=mx.cpu))
        >>> print(str(launches).split()[:3])
        ['kernel', 'threadgroups', 'threads']
    """

    def __str__(self) -> str:
        return aligned(self._rows(), left=1)

    def _repr_html_(self) -> str:
        return html(self._rows(), left=1)

    def _rows(self) -> list[list[str]]:
        of_memory = ["lines of memory", "loads", "stores", "group loads", "group stores"]
        rows = [["kernel", "threadgroups", "threads", *of_memory, "simd", "matrix", "barriers"]]
        for launch in self:
            accesses = launch.device_loads, launch.device_stores, launch.threadgroup_loads, launch.threadgroup_stores
            operations = [launch.counts[f"{kind}_operations"] for kind in ("simd", "matrix")]
            counts = [launch.distinct_lines, *accesses, *operations, launch.counts["threadgroup_barriers"]]
            sizes = [_times(launch.threadgroups), _times(launch.threads)]
            rows.append([launch.kernel, *sizes, *(f"{count:,}" for count in counts)])
        return rows


def _times(size: tuple[int, int, int]) -> str:
    """A size without dimensions of one."""
    return " x ".join(str(n) for n in size if n > 1) or "1"


_PROFILED = [name for name, kind in Launch.__annotations__.items() if kind == "int"]


_recording = threading.Lock()


@contextlib.contextmanager
def profiled() -> Iterator[ProfiledLaunches]:
    """Profiles every launch that the simulator runs in the block; the list holds them once the block is left.

    The profile takes a part of the simulator's speed, so it is off outside of such a block. Kernels of
    ``mm.simulator.metal_kernel`` need no ``enabled``. There is one record in a process: blocks do not nest.

    Raises:
        RuntimeError: Within another such block, or a block of ``predicted``.
        ValueError: A kernel ran with ``watch=False``.

    Example:
        >>> with mm.simulator.enabled(), mm.simulator.profiled() as launches:
        ...     mx.eval(mm.softmax(mx.ones((4, 1024)), axis=-1, stream=mx.cpu))
        >>> launches[0].distinct_lines_loaded  # four rows of 4 KB, in lines of 128 bytes
        128
    """
    launches = ProfiledLaunches()
    if not _recording.acquire(blocking=False):
        raise RuntimeError("[profiled] launches are being profiled already: there is one record in a process")
    recorded: list[dict[str, Any]] = []
    try:
        _ext.simulator_record(True, profile=True)
        yield launches
    finally:
        recorded = _ext.simulator_record(False)
        _recording.release()
    launches += map(Launch.of, recorded)
