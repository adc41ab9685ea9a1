"""Simulate: one case of an op through its Metal kernels on the CPU, and what each launch did."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np

from .. import _ext, frontend, simulator, specs
from ..apple.chips import Chip
from ..backends import strict
from ..peer import mlx_metal
from ..table import aligned, terminal_width
from . import predictions
from .completion import offer
from .options import UsageError, listed, natural_64
from .runs import JsonFile, launch_progress

# Cases that are suggested for one that is not there.
_NEAREST_CASES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    op = parser.add_argument("op", nargs="?", metavar="OP", help="an op (without one, the ops are listed)")
    offer(op, lambda _: [op.name for op in specs.OPS])
    case = parser.add_argument(
        "case",
        nargs="?",
        metavar="CASE",
        help='a case, by words of its name: "8B decode", 512x4096 (without one, the cases of OP are listed)',
    )
    offer(case, lambda given: [case.name for op in specs.OPS if op.name == given.op for case in _known_cases(op)])
    parser.add_argument("--dtype", choices=specs.DTYPES, help="of the inputs (float16)")
    parser.add_argument(
        "--seed", type=natural_64, metavar="N", help="order in which threads run; 0 is the natural one (0)"
    )
    parser.add_argument("--peer", choices=("metal",), help="then MLX's own Metal kernel, for its counts")
    predictions.add_chip_argument(parser)
    parser.add_argument("--json", metavar="FILE", help="write the counts to FILE, those of every line of the source")
    parser.add_argument("--no-watch", action="store_true", help="do not check accesses: faster, and fewer counts")


def _check_listing(arguments: argparse.Namespace) -> None:
    """Refuses options that would have no effect without a case."""
    options = {name: getattr(arguments, name) for name in ("dtype", "seed", "peer", "chip", "json", "no_watch")}
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} goes with OP and CASE, which mlx-mittens simulate lists")


def run(arguments: argparse.Namespace) -> int:
    """Simulates the case and prints its counts; 0 if it is right and without a fault, else 1."""
    with launch_progress(_ext.simulator_progress):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.case is None:
        _check_listing(arguments)
    if arguments.op is None:
        print(_ops_listed())
        return 0
    op = _find_op(arguments.op)
    if arguments.case is None:
        print(_cases_listed(op))
        return 0
    case = find_case(op, arguments.case)
    arguments.dtype, arguments.seed = arguments.dtype or "float16", arguments.seed or 0
    if frontend.compiler_problem():
        raise UsageError(frontend.compiler_problem())
    chips = predictions.chosen_chips(arguments.chip, ours_alone=not arguments.peer) if arguments.chip else []
    if chips and arguments.no_watch:
        raise UsageError("--chip needs the counts of accesses: leave out --no-watch")
    dtype = specs.DTYPES[arguments.dtype]
    file = JsonFile(arguments.json)
    rows: list[str] = []
    try:
        gpu = gpu_of(case, chips[0]) if chips else case.gpu
        check, launches = simulate(op, case, dtype, arguments.seed, not arguments.no_watch, gpu)
    except simulator.Fault as fault:
        print(f"{op.name}, {case.name}, {arguments.dtype}: FAULT\n{fault}")
        file.write(
            {"op": op.name, "case": case.name, "dtype": arguments.dtype, "fault": str(fault)}, "launches", [], True
        )
        return 1
    number = f"{len(launches)} launch" + "es" * (len(launches) != 1)
    print(f"{op.name}, {case.name}, {arguments.dtype}: {number}, error {check.error:.1e} (mx {check.twin_error:.1e})")
    _print(launches)
    rows += [json.dumps({"by": "mlx_mittens", **_with_names(launch)}) for launch in launches]
    moved = sum(launch["counts"][f"device_bytes_{way}"] for launch in launches for way in ("loaded", "stored"))
    fewest = op.bytes_moved(case, dtype)
    if moved:
        print(f"\n{moved:,} bytes of device memory moved; {moved / fewest:.2f} times the fewest, {fewest:,}")
    sides = {}
    if chips:
        sides["mlx_mittens"] = predictions.Side.of(own_launches(op, case, dtype, chips, arguments.seed, launches))
    peer = has_peer(op, case, gpu) if arguments.peer else False
    if peer:
        try:
            simulator.notes()  # notes on our kernels are not the peer's
            launches = peer_launches(op, case, dtype, arguments.seed, not arguments.no_watch, gpu)
            _print(launches)
            for note in simulator.notes():
                print(f"\nNOTE on MLX's kernel\n{note}")
            rows += [json.dumps({"by": "mlx", **_with_names(launch)}) for launch in launches]
            if chips:
                sides["mlx"] = predictions.Side.of(peer_of_chips(op, case, dtype, chips, arguments.seed, launches))
        except simulator.Fault as fault:  # of MLX's kernels some are known for one that has no effect
            print(f"\nFAULT of MLX's kernel (--no-watch runs it all the same)\n{fault}")
    elif arguments.peer:
        print(f"\nMLX has no Metal kernel of its own to show for {op.name}, {case.name}")
    if chips:
        predictions.show(op.name, chips, sides["mlx_mittens"], sides.get("mlx"))
    if not check.passed:
        print(f"WRONG: {check.detail}")
    head = {"op": op.name, "case": case.name, "dtype": arguments.dtype, "seed": arguments.seed}
    file.write(
        {
            **head,
            "passed": check.passed,
            "error": check.error if math.isfinite(check.error) else None,
            "bytes_needed": fewest,
            **({"predictions": {by: side.json() for by, side in sides.items()}} if chips else {}),
        },
        "launches",
        rows,
        True,
    )
    if file.problem:
        print(f"mlx-mittens simulate: {file.problem}", file=sys.stderr)
    return 0 if check.passed and not file.problem else 1


def simulate(
    op: specs.Op, case: specs.Case, dtype: mx.Dtype, seed: int = 0, watch: bool = True, gpu: str | None = None
) -> tuple[specs.Check, list[dict[str, Any]]]:
    """Runs a case in the simulator, planned for a GPU; without one for the case's.

    Returns:
        How right it was, and for each launch its file, kernel, threadgroups, threads, counts, and where accesses are
        watched the counts by line of the source.

    Raises:
        Fault: If the simulator found one.
    """
    rng = np.random.default_rng(seed)
    arrays = op.draw(rng, case, dtype)
    cotangents = op.cotangents(rng, case, dtype)
    gpu = gpu or case.gpu
    with mx.stream(mx.cpu), strict(not case.left_to_mx):
        ours, launches = _recorded(_call_of_ours(op, case, arrays, cotangents), seed, watch, gpu)
        twin = specs.run(op, op.twin, case, arrays, cotangents)
        mx.eval(twin)
    exact = op.exact(case, arrays, cotangents)
    return specs.compare(op, case, ours, twin, exact, arrays), launches


def _with_names(launch: dict[str, Any]) -> dict[str, Any]:
    """A launch whose lines have names for their values, as its JSON has them."""
    if "lines" not in launch:
        return launch
    return {**launch, "lines": [asdict(simulator.LineCounts(*line)) for line in launch["lines"]]}


def gpu_of(case: specs.Case, chip: Chip) -> str:
    """The GPU that a case is planned for where its time on a chip is asked for."""
    return chip.name if case.gpu == "apple" else case.gpu


def own_launches(
    op: specs.Op,
    case: specs.Case,
    dtype: mx.Dtype,
    chips: Sequence[Chip],
    seed: int = 0,
    first: list[dict[str, Any]] | None = None,
) -> list[tuple[list[Chip], list[dict[str, Any]]]]:
    """The launches of our kernels for a case, profiled, without a look at the result.

    Args:
        first: The launches by the plan for the first chip, where they are known.

    Returns:
        For each set of chips whose plans come to the same launches these, simulated once.
    """
    rng = np.random.default_rng(seed)
    arrays = op.draw(rng, case, dtype)
    cotangents = op.cotangents(rng, case, dtype)

    def launches(gpu: str, dry: bool) -> list[dict[str, Any]]:
        with mx.stream(mx.cpu), strict():
            return _recorded(_call_of_ours(op, case, arrays, cotangents), seed, True, gpu, dry)[1]

    return _by_decision(case, chips, launches, first)


def _by_decision(
    case: specs.Case,
    chips: Sequence[Chip],
    launches: Callable[[str, bool], list[dict[str, Any]]],
    first: list[dict[str, Any]] | None,
) -> list[tuple[list[Chip], list[dict[str, Any]]]]:
    """For each set of chips for which a case comes to the same launches these, simulated once.

    Args:
        case: The case.
        chips: The chips.
        launches: The launches for a GPU, which run or, dry, are only decided on.
        first: The launches for the first chip, where they are known.
    """
    decided: dict[str, list[Chip]] = {}
    for chip in chips:
        decision = launches(gpu_of(case, chip), True) if len(chips) > 1 else []
        keys = ("file", "kernel", "threadgroups", "threads", "arguments")
        decided.setdefault(str([[launch[key] for key in keys] for launch in decision]), []).append(chip)
    found = []
    for alike in decided.values():
        known = first if first is not None and alike[0] is chips[0] else None
        found.append((alike, known if known is not None else launches(gpu_of(case, alike[0]), False)))
    return found


def has_peer(op: specs.Op, case: specs.Case, gpu: str) -> bool:
    """Whether MLX has a Metal kernel of its own for a case on a GPU."""
    with simulator.enabled(gpu=gpu):
        return mlx_metal.of(op, case) is not None


def peer_launches(
    op: specs.Op,
    case: specs.Case,
    dtype: mx.Dtype,
    seed: int = 0,
    watch: bool = True,
    gpu: str | None = None,
    dry: bool = False,
) -> list[dict[str, Any]]:
    """The launches of MLX's own Metal kernels for a case, on the inputs that ours get; none where it has none.

    Args:
        op: The op.
        case: The case.
        dtype: Of the inputs.
        seed: Of the inputs, and of the order of threads.
        watch: Whether accesses are checked.
        gpu: The GPU that MLX launches them on; the case's if left out.
        dry: Whether no launch runs.
    """
    arrays = op.draw(np.random.default_rng(seed), case, dtype)

    def build() -> list[mx.array]:
        peer = mlx_metal.of(op, case)
        return specs.run(op, peer, case, arrays) if peer else []

    with mx.stream(mx.cpu):
        return _recorded(build, seed, watch, gpu or case.gpu, dry)[1]


def peer_of_chips(
    op: specs.Op,
    case: specs.Case,
    dtype: mx.Dtype,
    chips: Sequence[Chip],
    seed: int,
    first: list[dict[str, Any]] | None = None,
) -> list[tuple[list[Chip], list[dict[str, Any]]]]:
    """MLX's launches for each set of chips for which they are the same."""
    return _by_decision(case, chips, lambda gpu, dry: peer_launches(op, case, dtype, seed, gpu=gpu, dry=dry), first)


def peer_side(
    op: specs.Op, case: specs.Case, dtype: mx.Dtype, chips: Sequence[Chip], seed: int = 0
) -> predictions.Side | None:
    """MLX's own Metal kernels for a case, predicted; None where it has none, or one that is known to have no effect."""
    if not any(has_peer(op, case, gpu_of(case, chip)) for chip in chips):
        return None
    try:
        return predictions.Side.of(peer_of_chips(op, case, dtype, chips, seed))
    except simulator.Fault:
        return None


def _call_of_ours(
    op: specs.Op, case: specs.Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array]
) -> Callable[[], list[mx.array]]:
    """A call of our op, once, which alone holds the arrays that it updates: of others' it would have to make copies."""
    own: list[mx.array | None] = list(arrays)
    for i in op.updated(case):
        array = own[i]
        if array is not None:
            own[i] = array + mx.zeros((), array.dtype)
            mx.eval(own[i])

    def call() -> list[mx.array]:
        taken = [*own]
        own.clear()
        return specs.run(op, op.ours, case, taken, cotangents)

    return call


def _recorded(
    build: Callable[[], list[mx.array]], seed: int, watch: bool, gpu: str, dry: bool = False
) -> tuple[list[mx.array], list[dict[str, Any]]]:
    """Evaluates a call in the simulator; its results and launches. Dry, no launch runs."""
    with simulator.enabled(seed=seed, watch=watch, gpu=gpu):
        _ext.simulator_record(True, profile=watch, dry=dry)
        try:
            result = build()
            mx.eval(result)
        finally:
            launches = _ext.simulator_record(False)
    return result, launches


def _find_op(name: str) -> specs.Op:
    try:
        return specs.get(name)
    except KeyError:
        known = [op.name for op in specs.OPS]
        raise UsageError(f"no op is called {name!r}; {listed(name, known)}") from None


def _ops_listed() -> str:
    """The ops, each with the number of its cases."""
    rows = [["op", "cases"], *([op.name, str(len(_known_cases(op)))] for op in specs.OPS)]
    return f"{aligned(rows, left=1)}\n\nmlx-mittens simulate OP lists the cases of an op."


def _cases_listed(op: specs.Op) -> str:
    """The cases of an op: purpose, shape and options, each in a column of its own."""
    known = _known_cases(op)
    table = aligned([["case", "shape", "options"], *(list(case.columns) for case in known)], 3, terminal_width())
    return f"{table}\n\nWords of a line name its case:\n  mlx-mittens simulate {op.name} {known[0].columns[1]}"


def _known_cases(op: specs.Op) -> list[specs.Case]:
    """The cases of an op, timed ones before tests, each once."""
    return list({case.name: case for case in (*op.cases, *op.tests)}.values())


def _likeness(asked: Sequence[str], words: Sequence[str]) -> float:
    """How like the words of a name are to the words that were asked for."""
    ratio = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()
    return sum(max(ratio(word, other) for other in words) for word in asked)


def find_case(op: specs.Op, words: str) -> specs.Case:
    """The case whose name has all these words; whole words go before parts of them, then short names before long."""
    known = _known_cases(op)
    asked = words.lower().split()

    def like(case: specs.Case) -> bool:
        name = case.name.lower()
        return all(word in name for word in asked)

    found = [case for case in known if like(case)]
    if not found:
        names = [case.name for case in known]
        near = sorted(names, key=lambda name: -_likeness(asked, re.split("[ -]", name.lower())))[:_NEAREST_CASES]
        lines = "\n  ".join(near)
        raise UsageError(
            f"{op.name} has no case {words!r}; the nearest are\n  {lines}\n"
            f"mlx-mittens simulate {op.name} lists all {len(names)}"
        )
    return min(found, key=lambda case: (not set(asked) <= set(case.name.lower().split()), len(case.name)))


_MOST_LINES = 7  # of the source, on the screen


def _print(launches: list[dict[str, Any]]) -> None:
    for launch in launches:
        print(f"\n{launch['file']}: {launch['kernel']}")
        for line in _lines(launch):
            print(f"  {line}".rstrip())


def _lines(launch: dict[str, Any]) -> list[str]:
    """A launch in words: its size, its operations, its accesses by memory, and the busiest lines of the source."""
    counts = launch["counts"]
    groups, threads = (" x ".join(str(n) for n in launch[key] if n > 1) or "1" for key in ("threadgroups", "threads"))
    barriers = f"{counts['threadgroup_barriers']:,} of threadgroups, {counts['simdgroup_barriers']:,} of simdgroups"
    lines = [
        f"threadgroups {groups}, threads of each {threads}, bytes of its memory {counts['threadgroup_bytes']:,}",
        _row("barriers", barriers),
        _row("operations", f"{counts['simd_operations']:,} simd, {counts['matrix_operations']:,} matrix"),
    ]
    if "lines" not in launch:  # unwatched: no access was seen
        return lines
    moved = [counts[f"{memory}_bytes_{way}"] for memory in ("device", "threadgroup") for way in ("loaded", "stored")]
    merged = [counts[f"{memory}_{way}"] for memory in ("device", "threadgroup") for way in ("loads", "stores")]
    distinct = [counts[f"distinct_lines_{way}"] for way in ("loaded", "stored")]
    lines += [
        _row("memory", "device loads", "stores", "group loads", "stores"),
        _row("bytes", *moved),
        _row("accesses, merged", *merged),
        _row("distinct lines, 128 B", *distinct),
        _row("lines, both", f"{counts['distinct_lines']:,}, {counts['threadgroup_lines']:,} summed over threadgroups"),
    ]
    if counts["device_lines_fewest"]:
        times = counts["device_lines"] / counts["device_lines_fewest"]
        lines.append(_row("", f"{counts['device_lines']:,} summed over accesses, {times:.2f} times the fewest"))
    accesses = f"{counts['device_accesses']:,} device, {counts['threadgroup_accesses']:,} threadgroup"
    lines += [
        _row("accesses, not merged", f"{accesses}; {counts['bank_conflicts']:,} bank conflicts"),
        _row("params", f"{counts['params_bytes_loaded']:,} bytes loaded"),
    ]
    return lines + _source_lines(launch["lines"])


def _row(name: str, *values: int | str) -> str:
    """A name and its value in words, or its values in columns."""
    if len(values) == 1:
        return f"{name:<23}{values[0]}"
    return f"{name:<23}" + "".join(f"{value:>13}" if isinstance(value, str) else f"{value:>13,}" for value in values)


def _source_lines(all_lines: list[tuple[str, int, str, str, int, int]]) -> list[str]:
    """The lines that simdgroups execute most often."""
    busiest = sorted(all_lines, key=lambda line: (-line[4], -line[5]))[:_MOST_LINES]
    left = len(all_lines) - len(busiest)
    title = "busiest lines of the source" + (f", {left} more in --json" if left else "")
    table = [f"{title:<50}{'executions':>14}{'operations':>13}"]
    for file, line, operation, memory, executions, operations in busiest:
        place = f"{file}:{line}"
        place = place if len(place) <= 31 else f"..{place[-29:]}"
        table.append(f"{place:<32}{f'{operation} {memory}'.rstrip():<18}{executions:>14,}{operations:>13,}")
    return table if busiest else []
