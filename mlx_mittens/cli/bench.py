"""Benchmark: each op beside its mx twin, over the layer shapes of real models.

Ours and the twin are timed in turns (``sampling`` says how) in one run, over inputs that rotate through more
memory than the caches hold. The medians of all turns are reported, and their spread. Results are checked against
float64 in the same run. On a CPU a copy takes turns with large cases.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import mlx.core as mx

from .. import frontend, specs
from ..backends import executors, strict
from ..bench import llama_cpp, machine
from ..bench.measure import FULL, QUICK, Outcome, Row, kept_memory, measure, plan
from ..table import Column, show, terminal_width
from . import bench_compare, bench_files, bench_models, bench_predictions, predicted_models, predictions
from .options import UsageError, add_minutes, add_ops, add_seed, chosen, drawn, inputs, writable
from .runs import Ending, JsonFile, each, finish, progress, steps

_COLUMNS = (
    Column("op", left=True),
    Column("case", left=True),
    Column("dtype", left=True),
    Column("ms", 1),
    Column("mx ms", 2),
    Column("peer ms", 3),
    Column("speedup"),
    Column("+-", 7),
    Column("cal", 7),
    Column("GB/s", 4),
    Column("of copy", 5),
    Column("host us", 9),
    Column("mx host us", 10),
    Column("error", 6),
    Column("mx error", 8),
)

Item = tuple[specs.Op, specs.Case, str]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _cells(outcome: Outcome, case: str) -> list[str]:
    """A row as text, under `_COLUMNS`; empty where a column does not apply."""
    row = outcome.row
    return [
        row.op,
        case,
        row.dtype,
        _number(row.mittens_ms),
        _number(row.mx_ms),
        _number(row.peer_ms) if row.peer_ms else "",
        "WRONG" if not outcome.passed else f"{row.speedup:.2f}x" if row.is_clear else "unclear",
        f"{row.spread:.0%}",
        "*" * row.calibrated,
        _number(row.gb_s),
        f"{row.gb_s / row.copy_gb_s:.0%}" if row.copy_gb_s else "",
        _number(row.mittens_host_ms * 1e3) if row.mittens_host_ms else "",
        _number(row.mx_host_ms * 1e3) if row.mx_host_ms else "",
        f"{row.error:.1e}",
        f"{row.mx_error:.1e}",
    ]


def _short_names(op: specs.Op) -> dict[str, str]:
    """An op's cases by their names, each with no more of its options than tell it from the others."""
    short = {}
    for case in op.cases:
        for count in range(len(case.options) + 1):
            text, others = _cut(case, count), [other for other in op.cases if other is not case]
            if all(_cut(other, count) != text for other in others):
                break
        short[case.name] = text
    return short


def _cut(case: specs.Case, count: int) -> str:
    """A case's name with the first of its options only."""
    return replace(case, options=dict(list(case.options.items())[:count])).name


def _is_slower(row: Row) -> bool:
    return row.is_clear and row.speedup < 1


def _show(outcomes: Sequence[Outcome]) -> None:
    """Prints the table: with the cases' whole names into a file or a pipe, with short ones on a terminal."""
    short = {op.name: _short_names(op) for op in specs.OPS} if terminal_width() else {}
    name = lambda row: short[row.op].get(row.case, row.case) if short else row.case
    rows = [_cells(outcome, name(outcome.row)) for outcome in outcomes]
    styles = ["1;31" if not outcome.passed else "33" * _is_slower(outcome.row) for outcome in outcomes]
    show(_COLUMNS, rows, styles)


def _finite(value: Any) -> Any:
    """JSON has no word for infinity and NaN: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_rows(outcomes: Sequence[Outcome], with_peer: bool = False) -> list[dict[str, Any]]:
    """The rows as in the JSON file; fields that none of them has are left out. A wrong one says why under ``wrong``."""
    rows = [{key: _finite(value) for key, value in asdict(outcome.row).items()} for outcome in outcomes]
    for row, outcome in zip(rows, outcomes, strict=True):
        row.update({} if outcome.passed else {"wrong": outcome.detail})
    unused = ["peer_ms"] * (not with_peer)
    for key in ("copy_gb_s", "mittens_host_ms", "mx_host_ms"):
        unused += [key] * all(row[key] is None for row in rows)
    unused += ["calibrated"] * (not any(row["calibrated"] for row in rows))
    for row in rows:
        for key in unused:
            del row[key]
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    add_ops(parser)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="where to run (mx's default device)")
    parser.add_argument("--quick", action="store_true", help="fewer cases, under a minute")
    parser.add_argument(
        "--peer",
        choices=("metal", "llama.cpp"),
        help="beside ours MLX's own Metal kernels, compiled the same way, or with --model a llama-bench that "
        f"{llama_cpp.EXECUTABLE} names",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine to FILE")
    add_minutes(parser)
    parser.add_argument("--resume", metavar="FILE", help="go on with a run that was ended, whose --json is FILE")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), help="print what moved between two files, beyond the spread"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw speedup and bandwidth to FILE.png or FILE.svg")
    parser.add_argument(
        "--predict", action="store_true", help="predict times on Apple GPUs, of MLX's Metal kernels too"
    )
    predictions.add_chip_argument(parser)
    add_seed(parser)
    bench_models.add_arguments(parser)


def op_names(text: str | None) -> list[str]:
    """The ops that ``--ops`` names, or all.

    Raises:
        UsageError: One is not known.
    """
    known = [op.name for op in specs.OPS]
    return known if text is None else chosen("--ops", text, known)


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


def check_executor(executor: str) -> None:
    """Refuses to begin where kernels cannot be run, as without a compiler.

    Raises:
        UsageError: The executor is not ready.
    """
    status = executors()[executor]
    if not status.startswith("ready"):
        raise UsageError(f"the executor {executor} is not ready: {status}")


def _check_peer(name: str | None, executor: str) -> None:
    if name is None:
        return
    if name == "llama.cpp":
        raise UsageError("--peer llama.cpp goes with --model: llama-bench times whole models")
    if executor == "metal":
        raise UsageError("--peer metal: on a Mac mx runs its Metal kernels itself: that is the column mx ms")
    if executor != "cuda":
        counts = "mlx-mittens simulate OP CASE --peer metal"
        raise UsageError(f"--peer metal: times need an NVIDIA GPU (mlx[cuda13]); for counts: {counts}")
    if frontend.compiler_problem():  # our own kernels may have been compiled when the package was built
        raise UsageError(f"--peer metal: {frontend.compiler_problem()}")


def _mixed(items: Sequence[Item]) -> list[Item]:
    """The first case of every op before the second of any: where time is short, the table has something of each."""
    turns: Counter[str] = Counter()
    order = []
    for item in items:
        order.append(turns[item[0].name])
        turns[item[0].name] += 1
    return [item for _, item in sorted(zip(order, items, strict=True), key=lambda pair: pair[0])]


def _check_compare(arguments: argparse.Namespace) -> None:
    """Refuses options beside ``--compare``, which measures nothing."""
    others = {name: value for name, value in vars(arguments).items() if name not in ("compare", "command")}
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        raise UsageError(f"--{given[0]} does not go with --compare, which only reads two files")


def _check_combination(arguments: argparse.Namespace) -> None:
    """Refuses options that would have no effect."""
    if arguments.model is None:
        given, rule = bench_models.given(arguments), "goes with --model"
    else:
        refused = {name: getattr(arguments, name) for name in ("ops", "quick", "peer", "plot", "seed", "resume")}
        if arguments.peer == "llama.cpp":
            del refused["peer"]
        given = [name for name, value in refused.items() if value is not None and value is not False]
        rule = "does not go with --model, which takes --device, --json, " + ", ".join(
            f"--{name.replace('_', '-')}" for name in bench_models.DEFAULTS
        )
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} {rule}")


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark.

    Returns:
        int: 0, or 1 if a result was wrong.

    Raises:
        UsageError: The arguments cannot be served.
    """
    if arguments.compare is not None:
        _check_compare(arguments)
        return bench_compare.run(arguments)
    bench_predictions.check(arguments)
    if arguments.predict and arguments.model is not None:
        return predicted_models.run(arguments, JsonFile(arguments.json))
    _check_combination(arguments)
    begun = bench_files.Begun.of(arguments.resume) if arguments.resume else None
    if begun:
        begun.set_options(arguments)
    names = op_names(arguments.ops)
    _check_plot(arguments.plot)
    writable("--plot", arguments.plot)
    file = JsonFile(arguments.json)
    if arguments.predict:
        return bench_predictions.run(arguments, file, names)
    select_device(arguments.device)
    check_executor(machine.executor())
    if arguments.model is not None:
        with kept_memory(machine.device()):
            return bench_models.run(arguments, file)
    device = machine.device()
    _check_peer(arguments.peer, machine.executor())
    todo = plan(names, device, arguments.quick)
    if not todo:
        raise UsageError(f"none of the cases of {', '.join(names)} is for {device}" + " and --quick" * arguments.quick)
    info = machine.describe()
    outcomes: list[Outcome] = []
    if begun:
        begun.check_machine(info)
        info["copy_gb_s"] = max(info["copy_gb_s"], begun.machine["copy_gb_s"])
        outcomes += begun.outcomes
    print(machine.headline(info), flush=True)

    seed = info["seed"] = drawn(arguments.seed)
    asked = {**{name: getattr(arguments, name) for name in bench_files.ASKED}, "device": device, "seed": seed}
    place = {(op.name, case.name, dtype): i for i, (op, case, dtype) in enumerate(todo)}
    where = lambda outcome: place.get((outcome.row.op, outcome.row.case, outcome.row.dtype), len(place))
    measured = {(outcome.row.op, outcome.row.case, outcome.row.dtype) for outcome in outcomes}
    left = [item for item in todo if (item[0].name, item[1].name, item[2]) not in measured]
    if begun:
        print(f"goes on with {begun.path}: {len(outcomes)} of {len(todo)} rows are there", flush=True)
    if arguments.minutes is not None:
        left = _mixed(left)

    def save(ending: Ending | None = None) -> None:
        head = {"machine": info, "asked": asked, **progress(ending, len(outcomes), len(todo))}
        rows = [json.dumps(row) for row in json_rows(outcomes, arguments.peer is not None)]
        file.write(head, "rows", rows, last=ending is not None)

    def name(item: Item) -> str:
        op, case, dtype = item
        return f"{op.name} {case.name} {dtype}"

    save()
    ending = Ending()
    with steps(len(left)) as step, strict(), kept_memory(device):

        def one(item: Item) -> None:
            op, case, dtype = item
            budget, rng = QUICK if arguments.quick else FULL, inputs(seed, op.name, case.name, dtype)
            outcomes.append(measure(*item, device, budget, rng, arguments.peer is not None))
            outcomes.sort(key=where)
            save()
            step(name(item))
            mx.clear_cache()

        if left:
            ending = each(left, one, name, arguments.minutes)
    if ending.complete:
        info["copy_gb_s"] = max(info["copy_gb_s"], machine.copy_gb_s())  # the machine may have been busy at first
    save(ending)

    if outcomes:
        _show(outcomes)
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in wrong:
        print(f"WRONG {outcome.row.op} {outcome.row.case} {outcome.row.dtype}: {outcome.detail} (seed {seed})")
    if outcomes:
        print(_summary(outcomes, info))
    if any(outcome.row.calibrated for outcome in outcomes):
        print("* planned by the calibration of this machine; the time is our kernel's where calls go to mx as well.")
    partial = "" if ending.complete else f"{len(outcomes)} of {len(todo)} measured"
    if partial:
        print(f"Incomplete: {partial}.")
    if arguments.plot and outcomes:
        from ..bench.plot import draw

        draw(info, [outcome.row for outcome in outcomes], arguments.plot, partial and f", {partial}")
    return finish("bench", ending, file, passed=not wrong)


def _summary(outcomes: Sequence[Outcome], info: dict[str, Any]) -> str:
    clear = [outcome.row for outcome in outcomes if outcome.row.is_clear]
    wrong = sum(not outcome.passed for outcome in outcomes)
    parts = [f"{len(outcomes)} rows, {wrong} wrong"]
    if clear:
        slowest = min(clear, key=lambda row: row.speedup)
        parts += [f"geometric mean {statistics.geometric_mean(row.speedup for row in clear):.2f}x mx"]
        parts[-1] += f", least {slowest.speedup:.2f}x ({slowest.op} {slowest.case} {slowest.dtype})"
    if unclear := len(outcomes) - len(clear):
        parts += [f"{unclear} unclear, whose times scatter by more than themselves"]
    return (
        f"{'; '.join(parts)}. GB/s counts each input read once and each result written once; a copy reaches "
        f"{info['copy_gb_s']:.3g}."
    )
