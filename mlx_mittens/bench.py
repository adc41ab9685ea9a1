"""Benchmark: each op beside its mx twin, over the layer shapes of real models.

What is timed (``sampling`` says how): ours and the twin take turns in one run, over inputs that rotate through more
memory than the caches hold. The medians of all turns are reported, and their spread. Results are checked against
float64 in the same run. On a CPU a copy takes turns with large cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import cases, machine, model_bench, peer, sampling, strict
from .table import aligned
from .usage import UsageError, chosen

# mx keeps 32 MB of freed memory on a CPU by default; a larger output would time the system's page faults, in both.
_CPU_KEPT_BYTES = 1 << 30

# Seconds of one contender's turn: a short call alone would time the waking of threads, and cold caches.
_SHORTEST_SAMPLE = {"cpu": 4e-3, "gpu": 10e-3}

# A call that takes so many seconds, as mx's may on a CPU, is timed twice: it hardly scatters.
_SLOW = 0.1

# On a CPU a copy takes turns with cases that move so many bytes, since on a shared machine its bandwidth changes by the
# second.
_COPIED_BYTES = 4 << 20

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
    mittens_host_ms: float | None = None  # what a call takes the host: on a GPU, where it is no part of the
    mx_host_ms: float | None = None  # other times


@dataclass(frozen=True)
class Outcome:
    """A row, the scatter of its times (half the interquartile range, relative), and whether its results are right."""

    row: Row
    spread: float
    passed: bool
    detail: str


@dataclass(frozen=True)
class Budget:
    """How long one row may be measured, and how often at least and at most."""

    seconds: float
    fewest: int
    most: int


FULL = Budget(seconds=0.3, fewest=5, most=101)
QUICK = Budget(seconds=0.35, fewest=3, most=51)


def plan(names: Sequence[str], device: str, quick: bool) -> list[tuple[cases.Op, cases.Case, str]]:
    """What a run measures, in order."""
    return [
        (op, case, dtype)
        for op in cases.OPS
        if op.name in names
        for case in op.cases
        if (case.quick or not quick) and case.runs_on(device)
        for dtype in op.dtypes(case)
    ]


def _turns(samplers: dict[str, Callable[[int], float]], device: str, budget: Budget) -> dict[str, list[float]]:
    """Lets the contenders take turns until the budget is spent; seconds of each turn."""
    counts = {}
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for name, sample in samplers.items():
        seconds, count = sample(1), 1
        if device == "cpu" and seconds > _SLOW:
            times[name].append(seconds)
        else:
            seconds = sample(1)  # the first call of a kernel may have compiled it
        while seconds * count < _SHORTEST_SAMPLE[device] and count < 1 << 16:
            count = max(2 * count, math.ceil(_SHORTEST_SAMPLE[device] / max(seconds, 1e-9)))
            seconds = sample(count)
        counts[name] = count
    slow = [name for name in samplers if times[name]]
    order = [name for name in samplers if name not in slow]
    for name in slow:  # their second time, before the others are at work
        times[name].append(samplers[name](counts[name]))
    end = time.perf_counter() + budget.seconds
    for turn in range(budget.most if order else 0):
        for name in order if turn % 2 == 0 else reversed(order):
            times[name].append(samplers[name](counts[name]))
        if turn + 1 >= budget.fewest and time.perf_counter() > end:
            break
    return times


def _copy_gb_s(times: dict[str, list[float]], seconds: float) -> float:
    """What a copy would reach in the time of our median: the median of the turns' ratios is held to, not its own."""
    ratio = statistics.median(copy / ours for copy, ours in zip(times["copy"], times["mittens"]))
    return machine.cpu_copy().bytes_moved / (ratio * seconds) / 1e9


def _scatter(times: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def measure(
    op: cases.Op,
    case: cases.Case,
    dtype: str,
    device: str,
    budget: Budget,
    rng: np.random.Generator,
    with_peer: bool = False,
) -> Outcome:
    """Checks and times one case; ``with_peer`` also runs MLX's own Metal kernel beside them."""
    arrays = op.draw(rng, case, cases.DTYPES[dtype])
    cotangents = op.cotangents(rng, case, cases.DTYPES[dtype])
    check = cases.check(op, case, arrays, cotangents)

    sets = sampling.rotation([*arrays, *cotangents], device, op.updated(case))
    contenders = {"mittens": op.ours, "mx": op.twin}
    if with_peer and (twin := peer.of(op, case)):
        contenders["peer"] = twin
    bytes_moved = op.bytes_moved(case, cases.DTYPES[dtype])
    copied = device == "cpu" and bytes_moved >= _COPIED_BYTES
    samplers = {}
    for i, (name, function) in enumerate(contenders.items()):
        # Each starts in a part of the rotation of its own: none finds in the cache what another has just read.
        build = lambda group, function=function: cases.run(
            op, function, case, group[: len(arrays)], group[len(arrays) :]
        )
        first = i * len(sets) // len(contenders)
        samplers[name] = sampling.sampler(build, op.link(case), op.updated(case), sets, first, device)
    if copied:  # next to ours in every turn
        copy = lambda count: statistics.mean(machine.cpu_copy()() for _ in range(count))
        samplers = {"mittens": samplers["mittens"], "copy": copy, **samplers}
    times = _turns(samplers, device, budget)

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
    )
    return Outcome(row, max(_scatter(times[name]) for name in contenders), check.passed, check.detail)


def _columns(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    rows = [outcome.row for outcome in outcomes]
    copy = ("of copy",) if any(row.copy_gb_s for row in rows) else ()
    host = ("host us", "mx host us") if any(row.mittens_host_ms for row in rows) else ()
    peer = ("peer ms",) if any(row.peer_ms for row in rows) else ()
    return ("op", "case", "dtype", "mittens ms", "mx ms", "speedup", "+-", "GB/s", *copy, *host, "error", "mx error", *peer)


def _cells(outcome: Outcome, columns: Sequence[str]) -> list[str]:
    row = outcome.row
    cells = {
        "op": row.op,
        "case": row.case,
        "dtype": row.dtype,
        "mittens ms": f"{row.mittens_ms:.4g}",
        "mx ms": f"{row.mx_ms:.4g}",
        "speedup": f"{row.speedup:.2f}x",
        "+-": f"{outcome.spread:.0%}",
        "GB/s": f"{row.gb_s:.3g}",
        "of copy": f"{row.gb_s / row.copy_gb_s:.0%}" if row.copy_gb_s else "",
        "host us": f"{row.mittens_host_ms * 1e3:.3g}" if row.mittens_host_ms else "",
        "mx host us": f"{row.mx_host_ms * 1e3:.3g}" if row.mx_host_ms else "",
        "error": f"{row.error:.1e}" + ("" if outcome.passed else " WRONG"),
        "mx error": f"{row.mx_error:.1e}",
        "peer ms": f"{row.peer_ms:.4g}" if row.peer_ms else "",
    }
    return [cells[column] for column in columns]


class _PlainReport:
    """Progress and table as plain text."""

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str], None]]:
        done = 0

        def step(text: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

        yield step

    def table(self, outcomes: Sequence[Outcome]) -> None:
        columns = _columns(outcomes)
        print(aligned([columns, *(_cells(outcome, columns) for outcome in outcomes)], left=3))

    def say(self, text: str) -> None:
        print(text)


class _RichReport:
    """Progress bar and table by rich."""

    def __init__(self) -> None:
        from rich.console import Console

        narrow = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        self._console = Console(width=140 if narrow else None, highlight=False)

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda text: bar.update(task, advance=1, description=text)

    def table(self, outcomes: Sequence[Outcome]) -> None:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        columns = _columns(outcomes)
        for i, name in enumerate(columns):
            table.add_column(
                name, justify="left" if i < 3 else "right", overflow="fold" if i == 1 else "ellipsis", no_wrap=i != 1
            )
        for before, outcome in zip([None, *outcomes], outcomes):
            if before and before.row.op != outcome.row.op:
                table.add_section()
            style = "bold red" if not outcome.passed else "yellow" if outcome.row.speedup < 1 else None
            table.add_row(*_cells(outcome, columns), style=style)
        self._console.print(table)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _report() -> _PlainReport | _RichReport:
    try:
        return _RichReport()
    except ImportError:
        return _PlainReport()


def _finite(value: Any) -> Any:
    """JSON has no word for infinity and NaN: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(info: dict[str, Any], outcomes: Sequence[Outcome], with_peer: bool = False) -> dict[str, Any]:
    """The result as the JSON file holds it."""
    rows = [{key: _finite(value) for key, value in asdict(outcome.row).items()} for outcome in outcomes]
    unused = ["peer_ms"] * (not with_peer)
    for key in ("copy_gb_s", "mittens_host_ms", "mx_host_ms"):
        unused += [key] * all(row[key] is None for row in rows)
    for row in rows:
        for key in unused:
            del row[key]
    return {"machine": info, "rows": rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument("--ops", metavar="A,B", help="only these ops, comma separated (all)")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="where to run (mx's default device)")
    parser.add_argument("--quick", action="store_true", help="fewer cases, under a minute")
    parser.add_argument("--peer", choices=("metal",), help="beside ours MLX's own Metal kernels, compiled the same way")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw speedup and bandwidth to FILE.png or FILE.svg")
    model_bench.add_arguments(parser)


def op_names(text: str | None) -> list[str]:
    """The ops that ``--ops`` names, or all.

    Raises:
        UsageError: One is not known.
    """
    known = [op.name for op in cases.OPS]
    return known if text is None else chosen("--ops", text, known)


def writable(option: str, path: str | None) -> None:
    """Refuses, before any work is done, a file that cannot be written.

    Raises:
        UsageError: The folder is not there or cannot be written to, or the path is a folder.
    """
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"{option}: the folder {folder} does not exist")
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"{option}: cannot write {path}")


def _check_plot(path: str | None) -> None:
    if path is None:
        return
    if not path.endswith((".png", ".svg")):
        raise UsageError(f"--plot: {path} ends with neither .png nor .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError('--plot needs matplotlib: pip install "mlx-mittens[bench]"') from None


def select_device(name: str | None) -> None:
    """Makes ``cpu`` or ``gpu`` mx's default device.

    Raises:
        UsageError: mx has no such device here.
    """
    if name is None:
        return
    device = mx.gpu if name == "gpu" else mx.cpu
    if not mx.is_available(device):
        raise UsageError(f"--device {name}: this mx has no such device; a GPU takes a Mac or mlx[cuda13]")
    mx.set_default_device(device)


def _check_peer(name: str | None, executor: str) -> None:
    if name is None or executor == "cuda":
        return
    if executor == "metal":
        raise UsageError("--peer metal: on a Mac mx runs its Metal kernels itself: that is the column mx ms")
    counts = "mlx-mittens simulate OP CASE --peer metal"
    raise UsageError(f"--peer metal: times need an NVIDIA GPU (mlx[cuda13]); for counts: {counts}")


@contextlib.contextmanager
def _kept_memory(device: str) -> Iterator[None]:
    if device == "gpu":
        yield
        return
    before = mx.set_cache_limit(_CPU_KEPT_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark.

    Returns:
        int: 0, or 1 if a result was wrong.

    Raises:
        UsageError: The arguments cannot be served.
    """
    names = op_names(arguments.ops)
    _check_plot(arguments.plot)
    writable("--plot", arguments.plot)
    writable("--json", arguments.json)
    select_device(arguments.device)
    if arguments.model:
        with _kept_memory(machine.device()):
            return model_bench.run(arguments)
    device = machine.device()
    _check_peer(arguments.peer, machine.executor())
    todo = plan(names, device, arguments.quick)
    info = machine.describe()
    report = _report()
    report.say(_headline(info))

    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    info["seed"] = seed
    outcomes = []
    with report.progress(len(todo)) as step, strict(), _kept_memory(device):
        try:
            for op, case, dtype in todo:
                budget = QUICK if arguments.quick else FULL
                outcomes.append(measure(op, case, dtype, device, budget, rng, arguments.peer is not None))
                step(f"{op.name} {case.name} {dtype}")
                mx.clear_cache()
        except KeyboardInterrupt:
            if not outcomes:
                raise
    if len(outcomes) < len(todo):
        report.say(f"Interrupted: {len(outcomes)} of {len(todo)} measured.")
    info["copy_gb_s"] = max(info["copy_gb_s"], machine.copy_gb_s())  # the machine may have been busy at first

    report.table(outcomes)
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in wrong:
        report.say(f"WRONG {outcome.row.op} {outcome.row.case} {outcome.row.dtype}: {outcome.detail} (seed {seed})")
    report.say(_summary(outcomes, info))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(as_json(info, outcomes, arguments.peer is not None), file, indent=1)
            file.write("\n")
    if arguments.plot:
        from .plot import draw

        draw(info, [outcome.row for outcome in outcomes], arguments.plot)
    return 1 if wrong else 0


def _headline(info: dict[str, Any]) -> str:
    name = info["gpu"] if info["device"] == "gpu" else f"{info['processor']}, {info['cores']} cores"
    versions = info["versions"]
    return (
        f"{name}; copy {info['copy_gb_s']:.3g} GB/s; executor {info['executor']}; "
        f"mlx-mittens {versions['mlx_mittens']}, mlx {versions['mlx']}"
    )


def _summary(outcomes: Sequence[Outcome], info: dict[str, Any]) -> str:
    speedups = [outcome.row.speedup for outcome in outcomes]
    slowest = min(outcomes, key=lambda outcome: outcome.row.speedup).row
    wrong = sum(not outcome.passed for outcome in outcomes)
    return (
        f"{len(outcomes)} rows, {wrong} wrong; geometric mean {statistics.geometric_mean(speedups):.2f}x mx, "
        f"least {slowest.speedup:.2f}x ({slowest.op} {slowest.case} {slowest.dtype}). "
        f"GB/s counts each input read once and each result written once; a copy reaches {info['copy_gb_s']:.3g}."
    )
