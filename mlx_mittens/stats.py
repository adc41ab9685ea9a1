"""How many kernels of each op ran, and how many calls went on to mx."""

from __future__ import annotations

import re
from collections.abc import Iterable

from . import _ext
from .table import aligned, html

__all__ = ["Stats", "stats"]


class Stats(dict):
    """Counts by op: ``{"rms_norm": {"kernels": {"native avx512": 3}, "mx": {"float64": 1}}}``. Prints as a table."""

    def __str__(self) -> str:
        return aligned(self._rows(), left=2)

    def _repr_html_(self) -> str:
        return html(self._rows(), left=2)

    def _rows(self) -> list[tuple[str, str, str]]:
        lines = [("op", "kernel, or why mx", "count")]
        for op, counts in self.items():
            lines += [(op, kernel, str(n)) for kernel, n in counts["kernels"].items()]
            lines += [(op, f"mx: {reason}", str(n)) for reason, n in counts["mx"].items()]
        return lines


def stats(*, reset: bool = False) -> Stats:
    """Counts since the process started or counting was reset.

    A kernel counts each time that it runs, so once for every evaluation of a graph that ``mx.compile`` keeps; an op
    that takes two kernels counts both. Going on to mx is decided where an op is called: a traced graph counts once.

    Args:
        reset (bool): Whether to count anew from here on.

    Returns:
        Stats: For each op a dictionary of ``kernels``, executor and kernel to how often it ran, and one of ``mx``, why
            calls went to mx to how many.

    Example:
        >>> counts = mm.stats(reset=True)
        >>> mx.eval(mm.softmax(mx.ones((2, 8)), axis=-1))
        >>> sorted(mm.stats())
        ['softmax']
    """
    runs, left = _ext.stats(reset)
    return counted(runs, [(op, reason, count) for op, reason, _, count in left])


def counted(runs: Iterable[tuple[str, str, str, int]], left: Iterable[tuple[str, str, int]]) -> Stats:
    """Counts of primitives, executors and kernels, and of ops and reasons why mx, as `stats` has them."""
    result = Stats()
    for primitive, executor, kernel, count in runs:
        op = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", primitive.removeprefix("Mittens")).lower()
        ran = result.setdefault(op, {"kernels": {}, "mx": {}})["kernels"]
        ran[f"{executor} {kernel}"] = ran.get(f"{executor} {kernel}", 0) + count
    for op, reason, count in left:
        reasons = result.setdefault(op, {"kernels": {}, "mx": {}})["mx"]
        reasons[reason] = reasons.get(reason, 0) + count
    return result
