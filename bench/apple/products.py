"""Predicted times of products with quantized weights on Apple GPUs, beside MLX's own Metal kernels.

python bench/apple/products.py            prints the table
python bench/apple/products.py --write    writes bench/results/products.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import kept
import mlx.core as mx

from mlx_mittens import specs
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.cli.predictions import Side
from mlx_mittens.cli.simulate import own_launches, peer_side
from mlx_mittens.simulator.prediction import MARK
from mlx_mittens.specs import Case

CHIPS = ("m1-max", "m2-max", "m4-max")
# The model, columns and outputs of a layer, bits.
LAYERS = (("Llama-3.1-8B", 4096, 4096, 4), ("Llama-3.1-8B", 4096, 1024, 4), ("Llama-3.1-8B", 4096, 1024, 8))
ROWS = (1, 8, 16)
FILE = Path(__file__).parents[1] / "results" / "products.md"

HEAD = """# Products with quantized weights, predicted beside MLX's kernels

Predictions, not measurements: no Mac was at hand. float16, groups of 64, `python bench/apple/products.py --write`.
MLX's kernels are those that it launches itself: `qmv_fast` for one row, `qmv_wide` for 8 rows, `qmm_t` in parts of the
columns and a sum for 16. Of a time with a star the machine code's instructions miss the simulator's counts by more than
10 %: Mesa splits loads of vectors.
[docs/apple.md](../../docs/apple.md) says how far such predictions are off. Speed is MLX's time by ours.
"""


def table() -> str:
    """The document."""
    op = specs.get("quantized_matmul")
    chips = [find_chip(name) for name in CHIPS]
    head = "| layer | rows | bits | our kernel |"
    lines = [head + "".join(f" {chip}: us | MLX's | speed | limit |" for chip in CHIPS)]
    lines.append("|---|--:|--:|---|" + "--:|--:|--:|---|" * len(CHIPS))
    for model, columns, outputs, bits in LAYERS:
        for rows in ROWS:
            case = Case(model, (rows, columns, outputs), {"bits": bits})
            ours = Side.of(own_launches(op, case, mx.float16, chips))
            theirs = peer_side(op, case, mx.float16, chips)
            assert theirs is not None
            kernel = ours.launches[CHIPS[0]][0].launch.kernel.removesuffix("_float16")
            cells = []
            for chip in CHIPS:
                a, b = ours.predictions[chip], theirs.predictions[chip]
                speed, marks = b.microseconds / a.microseconds, [MARK * s.is_missed(chip) for s in (ours, theirs)]
                times = f" {a.microseconds:.1f}{marks[0]} | {b.microseconds:.1f}{marks[1]}"
                cells.append(f"{times} | {speed:.2f} | {a.limit} |")
            lines.append(f"| {model} {columns} x {outputs} | {rows} | {bits} | `{kernel}` |" + "".join(cells))
            print(lines[-1], flush=True)
    return "\n".join([HEAD, *lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    kept.show(table(), FILE if arguments.write else None)
