"""Simulate: one case of an op through its Metal kernels on the CPU, and what each launch did."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from .. import _ext, frontend, simulator, specs
from ..backends import strict
from ..bench import mlx_metal
from .options import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help=f"one of {', '.join(op.name for op in specs.OPS)}")
    parser.add_argument("case", metavar="CASE", help='a case, by words of its name: "8B decode", 512x4096')
    parser.add_argument("--dtype", choices=specs.DTYPES, default="float16")
    parser.add_argument("--seed", type=int, default=0, help="order in which threads run; 0 is the natural one")
    parser.add_argument("--peer", choices=("metal",), help="then MLX's own Metal kernel, for its counts")
    parser.add_argument("--no-watch", action="store_true", help="do not check accesses: faster, and fewer counts")


def run(arguments: argparse.Namespace) -> int:
    """Simulates the case and prints its counts; 0 if it is right and without a fault, else 1."""
    if frontend.compiler_problem():
        raise UsageError(frontend.compiler_problem())
    try:
        op = specs.get(arguments.op)
    except KeyError as error:
        raise UsageError(error.args[0]) from None
    case = find_case(op, arguments.case)
    dtype = specs.DTYPES[arguments.dtype]
    try:
        check, launches = simulate(op, case, dtype, arguments.seed, not arguments.no_watch)
    except simulator.Fault as fault:
        print(f"{op.name}, {case.name}, {arguments.dtype}: FAULT\n{fault}")
        return 1
    number = f"{len(launches)} launch" + "es" * (len(launches) != 1)
    print(f"{op.name}, {case.name}, {arguments.dtype}: {number}, error {check.error:.1e} (mx {check.twin_error:.1e})")
    _print(launches, watched=not arguments.no_watch)
    moved = sum(launch["counts"][f"device_bytes_{way}"] for launch in launches for way in ("loaded", "stored"))
    fewest = op.bytes_moved(case, dtype)
    if moved:
        print(f"\n{moved:,} bytes of device memory moved; {moved / fewest:.2f} times the fewest, {fewest:,}")
    peer = mlx_metal.of(op, case) if arguments.peer else None
    if peer:
        try:
            launches = peer_launches(op, peer, case, dtype, arguments.seed, not arguments.no_watch)
            _print(launches, watched=not arguments.no_watch)
        except simulator.Fault as fault:  # of MLX's kernels some are known for one that has no effect
            print(f"\nFAULT of MLX's kernel (--no-watch runs it all the same)\n{fault}")
    elif arguments.peer:
        print(f"\nMLX has no Metal kernel of its own to show for {op.name}, {case.name}")
    if not check.passed:
        print(f"WRONG: {check.detail}")
    return 0 if check.passed else 1


def simulate(
    op: specs.Op, case: specs.Case, dtype: mx.Dtype, seed: int = 0, watch: bool = True
) -> tuple[specs.Check, list[dict[str, Any]]]:
    """Runs a case in the simulator.

    Returns:
        How right it was, and for each launch its file, kernel, threadgroups, threads and counts.

    Raises:
        Fault: If the simulator found one.
    """
    rng = np.random.default_rng(seed)
    arrays = op.draw(rng, case, dtype)
    cotangents = op.cotangents(rng, case, dtype)
    with mx.stream(mx.cpu), strict():
        ours, launches = _recorded(lambda: specs.run(op, op.ours, case, arrays, cotangents), seed, watch, case)
        twin = specs.run(op, op.twin, case, arrays, cotangents)
        mx.eval(twin)
    exact = op.exact(case, arrays, cotangents)
    return specs.compare(op, case, ours, twin, exact, arrays), launches


def peer_launches(
    op: specs.Op,
    peer: Callable[..., mx.array],
    case: specs.Case,
    dtype: mx.Dtype,
    seed: int = 0,
    watch: bool = True,
) -> list[dict[str, Any]]:
    """What MLX's own Metal kernels do for a case, on the inputs that ours get."""
    arrays = op.draw(np.random.default_rng(seed), case, dtype)
    with mx.stream(mx.cpu):
        return _recorded(lambda: specs.run(op, peer, case, arrays), seed, watch, case)[1]


def _recorded(
    build: Callable[[], list[mx.array]], seed: int, watch: bool, case: specs.Case
) -> tuple[list[mx.array], list[dict[str, Any]]]:
    """What a call gives in the simulator, evaluated, and the launches that this takes."""
    with simulator.enabled(seed=seed, watch=watch, gpu=case.gpu):
        _ext.simulator_record(True)
        try:
            result = build()
            mx.eval(result)
        finally:
            launches = _ext.simulator_record(False)
    return result, launches


def find_case(op: specs.Op, words: str) -> specs.Case:
    """The case whose name has all these words; whole words go before parts of them, then short names before long."""
    known = [*op.cases, *op.tests]
    asked = words.lower().split()

    def like(case: specs.Case) -> bool:
        name = case.name.lower()
        return all(word in name for word in asked)

    found = [case for case in known if like(case)]
    if not found:
        names = "\n  ".join(dict.fromkeys(case.name for case in known))
        raise UsageError(f"{op.name} has no case {words!r}; it has\n  {names}")
    return min(found, key=lambda case: (not set(asked) <= set(case.name.lower().split()), len(case.name)))


def _print(launches: list[dict[str, Any]], watched: bool) -> None:
    for launch in launches:
        print(f"\n{launch['file']}: {launch['kernel']}")
        for name, value in _lines(launch, watched):
            print(f"  {name:<42} {value:>16}")


_OF_ACCESSES = ("loaded", "stored", "accesses", "lines", "conflicts")


def _lines(launch: dict[str, Any], watched: bool) -> list[tuple[str, str]]:
    """Counts by their names, in words; those of accesses only where they were watched."""
    counts = launch["counts"]
    size = [" x ".join(str(n) for n in launch[key] if n > 1) or "1" for key in ("threadgroups", "threads")]
    lines = [("threadgroups", size[0]), ("threads of a threadgroup", size[1])]
    for name, value in counts.items():
        if not watched and any(word in name for word in _OF_ACCESSES):
            continue
        if name == "threadgroup_bytes":
            lines.append(("bytes of threadgroup memory", f"{value:,}"))
        else:
            lines.append((name.replace("_", " "), f"{value:,}"))
    if counts.get("device_lines_fewest"):
        times = counts["device_lines"] / counts["device_lines_fewest"]
        lines.append(("device lines, of the fewest", f"{times:.2f} times"))
    return lines
