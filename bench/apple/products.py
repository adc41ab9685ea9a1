"""Predicted times of products with quantized weights on Apple GPUs, beside MLX's own Metal kernels.

python bench/apple/products.py            prints the table
python bench/apple/products.py --write    writes bench/results/products.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import kept
import mlx.core as mx

from mlx_mittens import specs
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.calibration.measure import Plan, forced
from mlx_mittens.cli.predictions import Side
from mlx_mittens.cli.simulate import own_launches, peer_side
from mlx_mittens.prediction.launches import MARK
from mlx_mittens.specs import Case

CHIPS = ("m1-max", "m2-max", "m4-max")
# The model, columns and outputs of a layer, bits.
LAYERS = (("Llama-3.1-8B", 4096, 4096, 4), ("Llama-3.1-8B", 4096, 1024, 4), ("Llama-3.1-8B", 4096, 1024, 8))
ROWS = (1, 8, 16)
# Columns and outputs of a product, and by op its options, the rows of x and the schedules that are compared.
SIZES, SCHEDULE_CHIPS = (1024, 2048), ("m1", "m1-max", "m4-max", "m5")
SCHEDULES: tuple[tuple[str, dict[str, int], tuple[int, ...], tuple[str, ...]], ...] = (
    ("gemv", {}, (4, 8, 16), ("rows", "tiles")),
    ("quantized_matmul", {"bits": 4}, (4,), ("rows", "tiles")),
    ("quantized_matmul", {"bits": 4}, (8,), ("tiles",)),
    ("quantized_matmul", {"bits": 4}, (16,), ("tiles", "qmm_tiles")),
    ("quantized_swiglu", {"bits": 4}, (4,), ("rows", "tiles")),
    ("quantized_swiglu", {"bits": 8}, (4,), ("rows", "tiles")),
)
FILE = Path(__file__).parents[1] / "results" / "products.md"

HEAD = """# Products with quantized weights, predicted beside MLX's kernels

Predictions, not measurements: no Mac was at hand. float16, groups of 64, `python bench/apple/products.py --write`.
MLX's kernels are those that it launches itself: `qmv_fast` for one row, `qmv_wide` for 8 rows, `qmm_t` in parts of the
columns and a sum for 16. Of a time with a star the machine code's instructions miss the simulator's counts by more than
10 %: Mesa splits loads of vectors.
[docs/apple.md](../../docs/apple.md) says how far such predictions are off. Speed is MLX's time by ours.
"""

DECISIONS = """
## What plans were chosen by

Predicted on 2026-11-30: 1,024 columns and 2,048 outputs, float16, microseconds on an M1, M1 Max, M4 Max and M5. A
calibration tries the other schedules on the user's own machine.

| product | rows | schedule | m1 | m1-max | m4-max | m5 |
|---|--:|---|--:|--:|--:|--:|
@ROWS@

- Dense weights: tiles from 5 rows on stay. Up to 16 rows they take as long as their memory.
- Packed weights, gated or not: the kernel by rows for up to 4 rows. In float32 4 rows of 4 bits by 8x8 matrices take
  0.86 to 0.89 of its time on an M3 Max and M4 Max, and 1.00 to 1.23 of it on M1, M2 and M5.
- Packed weights: 8x8 matrices (`tiles`) for 5 to 16 rows stay. A tile of 32 rows (`qmm_tiles`) takes as long for 9 rows
  as for 32, so it begins at 17 rows.
- M5: the limits are those from which MLX's dispatch goes over to matrix units, whose kernels were not predicted then
  (int8-prompts.md has one now). Ours take their memory's time for 9 to 16 dense rows, so nothing shows that either side
  is ahead there.
- Dense weights [columns, outputs], 9 to 16 rows (2026-11-28): two blocks of 8 rows instead of sums of 16, which spill,
  take 0.90 to 0.91 of the time on an M1 and M1 Max, and 0.62 to 0.85 on an M3 Max and M4 Max.
- Simdgroups that share the columns of few outputs (2026-11-28): as many as half of those that a GPU's cores hold. Of
  36 cases with less than 6 MB of weights none is slower than with all of them; the mean is 0.976 on an M1 Max. A
  quarter is up to 6 % faster there. It was not taken: how many simdgroups hide the latency of memory is what the model
  knows least.
"""


def schedules() -> Iterator[str]:
    """Lines of the table of schedules: ours by each of them, and MLX's kernel where it is known."""
    chips = [find_chip(name) for name in SCHEDULE_CHIPS]
    for name, options, every, choices in SCHEDULES:
        op = specs.get(name)
        for rows in every:
            case = Case("", (rows, *SIZES), options)
            for choice in choices:
                with forced(Plan(schedule=choice)):
                    side = Side.of(own_launches(op, case, mx.float16, chips))
                yield schedule(name, options, rows, choice, side)
            if theirs := peer_side(op, case, mx.float16, chips):
                yield schedule(name, options, rows, "MLX", theirs)


def schedule(name: str, options: dict[str, int], rows: int, choice: str, side: Side) -> str:
    times = " | ".join(f"{side.predictions[chip].microseconds:.1f}" for chip in SCHEDULE_CHIPS)
    bits = f", {options['bits']} bits" if options else ""
    line = f"| `{name}`{bits} | {rows} | {choice} | {times} |"
    print(line, flush=True)
    return line


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
    return "\n".join([HEAD, *lines, DECISIONS.replace("@ROWS@", "\n".join(schedules()))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    kept.show(table(), FILE if arguments.write else None)
