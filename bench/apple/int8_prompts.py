"""Writes bench/results/int8-prompts.md: prompts' products by integers of 8 bits on an M5, predicted beside MLX's.

Small products are simulated. The work of larger ones has as many of their tiles; lines of memory are counted from the
arrays. The first of our launches, which rounds x, has machine code of Mesa's compiler; no other has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

import mlx_mittens as mm
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import LINE_BYTES, Work, chain
from mlx_mittens.peer import mlx_metal

REPORT = Path(__file__).resolve().parents[1] / "results" / "int8-prompts.md"
CHIPS = ("m5", "m5-pro", "m5-max")
GROUP = 64
_SMALL = (64, 1024, 64)  # rows, columns, outputs: a tile, and the part of a row that a threadgroup rounds
# Layers of Llama 3.1 8B: columns, outputs.
LAYERS = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
ROWS = (64, 512, 2048)

Sizes = tuple[int, int, int]


def _bytes_of_ours(sizes: Sizes) -> tuple[int, int]:
    """Of the launch that rounds x, and of the product."""
    rows, columns, outputs = sizes
    rounded = rows * columns + 8 * rows * columns // GROUP
    return 2 * rows * columns + rounded, rounded + _weights(columns, outputs) + 2 * rows * outputs


def _bytes_of_mlx(sizes: Sizes) -> tuple[int]:
    rows, columns, outputs = sizes
    return (2 * rows * columns + _weights(columns, outputs) + 2 * rows * outputs,)


def _weights(columns: int, outputs: int) -> int:
    return columns * outputs // 2 + 4 * columns * outputs // GROUP


def _scaled(work: Work, moved: int, sizes: Sizes, by_outputs: bool) -> Work:
    """The work of a product of whole tiles from one tile's work; by_outputs: whether it grows with the outputs."""
    rows, columns, outputs = (size // small for size, small in zip(sizes, _SMALL, strict=True))
    tiles = rows * (outputs if by_outputs else 1)
    return replace(
        work,
        threadgroups=work.threadgroups * tiles * (1 if by_outputs else columns),
        lines=moved / LINE_BYTES,
        summed_lines=work.summed_lines * tiles * columns,
        instructions=work.instructions * (tiles * columns),
        rounds=work.rounds * (columns if by_outputs else 1),
    )


def works(call: Callable[[], mx.array], peer: bool) -> list[Work]:
    """The work of the launches of a small product."""
    with mm.simulator.enabled(gpu="m5"), mm.simulator.predicted("m5") as launches:
        mx.eval(call())
    found = [launch.work for launch in launches]
    if any(work is None for work in found) or len(found) != (1 if peer else 2):
        raise RuntimeError(f"the launches are not those that were expected: {launches}")
    return [work for work in found if work is not None]


def report() -> str:
    """bench/results/int8-prompts.md."""
    rows, columns, outputs = _SMALL
    x = mx.random.normal((rows, columns)).astype(mx.float16)
    w = mx.quantize(mx.random.normal((outputs, columns)).astype(mx.float16), group_size=GROUP, bits=4)
    mx.eval(x, w)
    options = {"group_size": GROUP, "bits": 4}
    ours = works(lambda: mm.quantized_matmul(x, *w, activations="int8", **options), peer=False)
    mlx = works(lambda: mlx_metal.quantized_matmul(x, *w, **options), peer=True)
    table = [_row(count, layer, ours, mlx) for layer in LAYERS for count in ROWS]
    headings = " | ".join(f"{chip}: ours | MLX | MLX by ours" for chip in CHIPS)
    return "\n".join([_HEAD, f"| rows | columns | outputs | {headings} |", "|--:" * 12 + "|", *table, _TAIL])


def _row(rows: int, layer: tuple[int, int], ours: Sequence[Work], mlx: Sequence[Work]) -> str:
    sizes = (rows, *layer)
    cells = [f"{size:,}" for size in sizes]
    moved, moved_by_mlx = _bytes_of_ours(sizes), _bytes_of_mlx(sizes)
    for chip in map(find_chip, CHIPS):
        own = [_scaled(work, moved[i], sizes, by_outputs=i == 1) for i, work in enumerate(ours)]
        their = [_scaled(mlx[0], moved_by_mlx[0], sizes, by_outputs=True)]
        times = [chain(each, chip).microseconds for each in (own, their)]
        cells += [f"{times[0]:,.0f}", f"{times[1]:,.0f}", f"{times[1] / times[0]:.2f}"]
    return f"| {' | '.join(cells)} |"


_HEAD = """# Prompts by integers of 8 bits on an M5: predicted

Made by `python bench/apple/int8_prompts.py`. Predictions, not measurements: no Mac was at hand. Microseconds of a
product of float16 with affine weights of 4 bits in groups of 64: ours under `activations="int8"`, two launches, and MLX
0.32.4's `affine_qmm_t_nax`. The layers are those of Llama 3.1 8B.
"""
_TAIL = """
There is no machine code for an M5's matrix units: the work is that of products, loads and stores as the simulator
counts them on a small product, with the tiles of the larger one. Arithmetic is in neither figure: MLX's kernel unpacks
weights to halves, ours adds the sums of each group to floats. Where it does not hide behind the products both take
longer. Of 64 rows the model has MLX's kernel wait for its loads, which nothing published confirms: those ratios say
little. Others report 30 to 47 % more tokens of a prompt a second for such kernels; a whole prompt has other launches
too. The rate of integers is taken as twice that of halves (matrix-units.md).
"""


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    REPORT.write_text(report())
    print(f"{REPORT.name}: written")
