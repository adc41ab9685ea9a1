"""Where the plans of an M1 and of an M3 Ultra differ, of all cases of the benchmark, and what that is worth on each.

python bench/apple/plans.py FILE                does what FILE does not have yet, and prints the document
python bench/apple/plans.py FILE --minutes 0    prints the document of what FILE has
python bench/apple/plans.py FILE --write        writes bench/results/apple-chip-plans.md
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import kept
import mlx.core as mx
import numpy as np

from mlx_mittens import _ext, simulator, specs
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.backends import strict
from mlx_mittens.calibration import grid, measure
from mlx_mittens.cli.predictions import Side
from mlx_mittens.cli.simulate import own_launches, peer_side
from mlx_mittens.specs import Case

CHIPS = ("m1", "m3-ultra")
# What the simulator runs in minutes: bytes that a case moves, and products of numbers.
MOST_BYTES = 100 << 20
MOST_PRODUCTS = 1 << 30
# Predictions that differ by less are alike.
ALIKE = 0.005
FILE = Path(__file__).parents[1] / "results" / "apple-chip-plans.md"

HEAD = """# Plans of an M1 and of an M3 Ultra, each on both chips

Predictions, not measurements: no Mac was at hand. float16, MLX 0.32.4's Metal kernels,
`python bench/apple/plans.py FILE --write`. [docs/apple.md](../../docs/apple.md) says how far such predictions are off.
An M1 has 8 cores, an M3 Ultra 80. The plans of the other chip stand for plans that do not know the chip. Plans are
compared by kernel, threadgroups, threads and structs of all launches of a case."""

# Whether both plans are the same; else by chip the times by its own plan ("own"), by the other's and of MLX's kernel,
# or nothing where the simulator would take too long.
Entry = dict[str, Any]


def work(op: specs.Op, case: Case) -> int:
    """What the simulator has to do for a case, in bytes moved or products of numbers."""
    moved = op.bytes_moved(case, mx.float16)
    if op.name.endswith("attention") and len(case.shape) == 6:
        batch, heads, _, queries, keys, width = case.shape
        return max(moved, 2 * batch * heads * queries * keys * width)
    if "matmul" in op.name or op.name in ("gemv", "quantized_swiglu"):
        return max(moved, math.prod(case.shape))
    return moved


def cases() -> Iterator[tuple[specs.Op, Case]]:
    """The cases of the benchmark on an Apple GPU, the cheapest first."""
    found = [(op, case) for op in specs.OPS for case in op.cases if case.gpu == "apple" and case.runs_on("gpu")]
    yield from sorted(found, key=lambda item: work(*item))


def is_simulated(op: specs.Op, case: Case) -> bool:
    return op.bytes_moved(case, mx.float16) <= MOST_BYTES and work(op, case) <= MOST_PRODUCTS


def planned(op: specs.Op, case: Case, chip: str) -> list[Any]:
    """The launches of a case by the plan of a chip, none of which runs."""
    item = grid.Item(op, case, "float16")
    arrays = measure.draw(item, np.random.default_rng(0))
    cotangents = op.cotangents(np.random.default_rng(0), case, mx.float16)
    with simulator.enabled(gpu=chip), mx.stream(mx.cpu), strict():
        _ext.simulator_record(True, dry=True)
        _ext.calibration_launches(True)
        try:
            mx.eval(specs.run(op, op.ours, case, arrays, cotangents))
        finally:
            _ext.simulator_record(False)
            launches = _ext.calibration_launches(False)
    return launches


def predicted(op: specs.Op, case: Case) -> dict[str, dict[str, float | None]]:
    chips = [find_chip(name) for name in CHIPS]
    plans = {}
    for alike, launches in own_launches(op, case, mx.float16, chips):
        times = Side.of([(chips, launches)]).predictions
        plans.update({chip.name: times for chip in alike})
    peer = None if case.vjp else peer_side(op, case, mx.float16, chips)
    theirs = peer.predictions if peer else {}
    microseconds = lambda times, chip: times[chip].microseconds if chip in times else None
    return {
        chip: {
            "own": microseconds(plans[chip], chip),
            "other": microseconds(plans[other], chip),
            "mlx": microseconds(theirs, chip),
        }
        for chip, other in zip(CHIPS, reversed(CHIPS))
    }


def is_done(entry: Entry | None, op: specs.Op, case: Case) -> bool:
    """Whether nothing is left to do for a case."""
    return entry is not None and (entry["same"] or entry["times"] is not None or not is_simulated(op, case))


def examined(op: specs.Op, case: Case) -> Entry:
    first, second = (planned(op, case, chip) for chip in CHIPS)
    assert first or case.vjp, "no kernel is launched"  # some gradients are of mx's operations
    if first == second:
        return {"same": True}
    times = predicted(op, case) if is_simulated(op, case) else None
    return {"same": False, "times": times}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _ratios(entries: Iterable[Entry], chip: str, by: str) -> list[float]:
    times = [(entry["times"][chip]["own"], entry["times"][chip][by]) for entry in entries]
    return [theirs / own for own, theirs in times if own is not None and theirs is not None]


def _mean(ratios: list[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.3f} ({min(ratios):.3f})" if ratios else ""


def document(found: dict[str, Entry]) -> str:
    every = [f"{op.name}: {case.name}" for op, case in cases()]
    differing = [key for key in every if key in found and not found[key]["same"]]
    predictions = {key: found[key] for key in differing if found[key]["times"]}
    speeds = {chip: _ratios(predictions.values(), chip, "other") for chip in CHIPS}
    lines = [
        f"{HEAD}\n",
        f"Of the benchmark's {len(every)} cases {len(found)} were compared. In {len(found) - len(differing)} both "
        f"plans are the same, in {len(differing)} they differ.",
        f"{len(predictions)} of these are predicted.",
        "",
        "| chip | its own plan is faster | as fast, within 0.5 % | slower | mean speed to the other plan | least |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for chip, ratios in speeds.items():
        faster, slower = sum(r > 1 + ALIKE for r in ratios), sum(r < 1 - ALIKE for r in ratios)
        mean = f"{statistics.geometric_mean(ratios):.3f} | {min(ratios):.3f}" if ratios else "|"
        lines.append(f"| {chip} | {faster} | {len(ratios) - faster - slower} | {slower} | {mean} |")
    lines += [
        "",
        "## By op",
        "",
        "The speed of a chip's own plan relative to the other's, and to MLX's kernel where there is one: mean, least.",
        "",
        "| op | cases | differ | " + " | ".join(f"{chip}: other plan | {chip}: MLX" for chip in CHIPS) + " |",
        "|---|--:|--:|" + "--:|--:|" * len(CHIPS),
    ]
    for op in specs.OPS:
        of_op = lambda keys, op=op: [key for key in keys if key.startswith(f"{op.name}: ")]
        if keys := of_op(key for key in every if key in found):
            entries = [predictions[key] for key in of_op(predictions)]
            means = [_mean(_ratios(entries, chip, by)) for chip in CHIPS for by in ("other", "mlx")]
            lines.append(f"| {op.name} | {len(keys)} | {len(of_op(differing))} | {' | '.join(means)} |")
    lines += [
        "",
        "## Cases whose plans differ, in microseconds",
        "",
        "| op | case | " + " | ".join(f"{chip} | by the other plan | MLX" for chip in CHIPS) + " |",
        "|---|---|" + "--:|--:|--:|" * len(CHIPS),
    ]
    for op in specs.OPS:
        for key, entry in predictions.items():
            name, case = key.split(": ", 1)
            if name == op.name:
                cells = [_number(entry["times"][chip][by]) for chip in CHIPS for by in ("own", "other", "mlx")]
                lines.append(f"| {name} | {case} | {' | '.join(cells)} |")
    for title, keys in (
        (
            "Differ, not predicted: they take long in the simulator",
            [key for key in differing if key not in predictions],
        ),
        ("Not compared", [key for key in every if key not in found]),
    ):
        if keys:
            lines += ["", f"## {title}", "", *(f"- {key}" for key in keys)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON of what was done, kept and continued")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so long")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    found: dict[str, Entry] = kept.read(arguments.file)
    for op, case in cases():
        key = f"{op.name}: {case.name}"
        if not is_done(found.get(key), op, case) and time.monotonic() < end:
            kept.add(arguments.file, found, key, examined(op, case))
            mx.clear_cache()
    kept.show(document(found), FILE if arguments.write else None)


if __name__ == "__main__":
    main()
