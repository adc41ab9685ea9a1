"""Predicted times of attention and of ops on rows on Apple GPUs, beside MLX's own Metal kernels.

python bench/apple/predicted.py FILE                predicts what FILE does not have yet, and prints the document
python bench/apple/predicted.py FILE --minutes 0    prints the document of what FILE has
python bench/apple/predicted.py FILE --write        writes bench/results/predicted.md
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kept
import mlx.core as mx

from mlx_mittens import specs
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.cli.predictions import Side
from mlx_mittens.cli.simulate import own_launches, peer_side
from mlx_mittens.prediction.launches import MARK
from mlx_mittens.specs import Case

CHIPS = ("m1", "m1-max", "m2-pro", "m3-max", "m4-max", "m5")
OPS = (
    "scaled_dot_product_attention", "quantized_scaled_dot_product_attention",
    "rms_norm", "add_rms_norm", "layer_norm", "softmax",
)  # fmt: skip
# Larger cases would take the simulator many minutes.
MOST_BYTES = 40_000_000
MOST_PRODUCTS = 1 << 29  # of the scores and the outputs of an attention
FILE = Path(__file__).parents[1] / "results" / "predicted.md"

HEAD = """# Attention and ops on rows, predicted beside MLX's kernels

Predictions, not measurements: no Mac was at hand. float16, plans of each chip, MLX 0.32.4's Metal kernels,
`python bench/apple/predicted.py FILE --write`. [docs/apple.md](../../docs/apple.md) says how far such predictions are
off. A cell has our time in microseconds, MLX's, and MLX's by ours; ours alone where MLX has no kernel for it. MLX's
norms, which its wheel lacks, are those of its repository at 846d176 (`MLX_MITTENS_MLX_SOURCE`). The cases are those of
the benchmark that were simulated in the time at hand. An attention is batch x heads x key heads x queries x keys x
width. Of a time with a star the machine code's instructions miss the simulator's counts by more than 10 %: Mesa splits
loads of vectors. Products of matrices and barriers are counted alike.
The figures of the M5 were made before MLX's kernels for matrix units ran in the simulator, and have none of them: where
MLX uses the units the plan leaves the call to mx. [int8-prompts.md](int8-prompts.md) has one of them.
"""


def products(case: Case) -> int:
    """Multiplications of an attention."""
    batch, heads, _, queries, keys, width = case.shape
    return 2 * batch * heads * queries * keys * width


def cases() -> Iterator[tuple[specs.Op, Case]]:
    for op in map(specs.get, OPS):
        for case in op.cases:
            fits = op.bytes_moved(case, mx.float16) <= MOST_BYTES
            if op.name.endswith("attention"):
                fits = fits and products(case) <= MOST_PRODUCTS
            if fits and case.gpu == "apple" and not case.vjp:
                yield op, case


def predicted(op: specs.Op, case: Case) -> dict[str, list[Any]]:
    """By chip our time, MLX's or None, the limit of ours, and whether the counts of ours and of MLX's are missed."""
    chips = [find_chip(name) for name in CHIPS]
    own, peer = Side.of(own_launches(op, case, mx.float16, chips)), peer_side(op, case, mx.float16, chips)
    ours, theirs = own.predictions, peer.predictions if peer else {}
    other = {name: theirs[name].microseconds if name in theirs else None for name in CHIPS}
    missed = {name: [own.is_missed(name), peer is not None and peer.is_missed(name)] for name in CHIPS}
    return {
        name: [ours[name].microseconds, other[name], ours[name].limit, *missed[name]] for name in CHIPS if name in ours
    }


def cell(ours: float, theirs: float | None, _: str, ours_missed: bool, theirs_missed: bool) -> str:
    us = f"{ours:.1f}{MARK * ours_missed}"
    return us if theirs is None else f"{us}, {theirs:.1f}{MARK * theirs_missed}, {theirs / ours:.2f}"


def document(found: dict[str, dict[str, list[Any]]]) -> str:
    lines = [HEAD]
    for name in OPS:
        if not any(key.startswith(f"{name}: ") for key in found):
            continue
        speeds: dict[str, list[float]] = {chip: [] for chip in CHIPS}
        lines += [f"## {name}", "", "| case | " + " | ".join(CHIPS) + " | limit on m1 |"]
        lines.append("|---|" + "--:|" * len(CHIPS) + "---|")
        for key, by_chip in found.items():
            op, case = key.split(": ", 1)
            if op != name:
                continue
            cells = [cell(*by_chip[chip]) if chip in by_chip else "" for chip in CHIPS]
            lines.append(f"| {case} | " + " | ".join(cells) + f" | {by_chip['m1'][2]} |")
            for chip, (ours, theirs, *_) in by_chip.items():
                speeds[chip] += [] if theirs is None else [theirs / ours]
        if speeds["m1"]:
            means = [f"{statistics.geometric_mean(s):.2f} (least {min(s):.2f})" for s in speeds.values()]
            lines.append("| geometric mean of the speeds | " + " | ".join(means) + " | |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON of what was predicted, kept and continued")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so long")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    found = kept.read(arguments.file)
    for op, case in cases():
        key = f"{op.name}: {case.name}"
        if key not in found and time.monotonic() < end:
            kept.add(arguments.file, found, key, predicted(op, case))
    kept.show(document(found), FILE if arguments.write else None)


if __name__ == "__main__":
    main()
