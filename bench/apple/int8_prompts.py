"""Writes bench/results/int8-prompts.md: prompts' products by integers of 8 bits on an M5, predicted beside MLX's.

Small products are simulated. The work of larger ones has as many of their tiles; lines of memory are counted from the
arrays. The first of our launches, which rounds x, and MLX's products that it splits along K have machine code of Mesa's
compiler; products on matrix units have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from prompts import Tile, of_parts, their_quantized

import mlx_mittens as mm
from mlx_mittens.apple.chips import Chip, find_chip
from mlx_mittens.apple.model import LINE_BYTES, Work, chain
from mlx_mittens.ops.custom import Output, int32
from mlx_mittens.peer import mlx_matrix_units
from mlx_mittens.peer.mlx_formats import Format

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


def _bytes_of_mlx(sizes: Sizes) -> int:
    rows, columns, outputs = sizes
    return 2 * rows * columns + _weights(columns, outputs) + 2 * rows * outputs


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


def on_units(x: mx.array, w: Sequence[mx.array]) -> mx.array:
    """MLX's kernel for matrix units, which its rule launches for larger products than the one that is simulated."""
    rows, columns, outputs = _SMALL
    values = [*w, x, Output([rows, outputs], x.dtype), int32(columns), int32(outputs), int32(rows)]
    return mlx_matrix_units.qmm(values, x.dtype, _SMALL, Format(GROUP, 4), mx.cpu)


def report() -> str:
    """bench/results/int8-prompts.md."""
    rows, columns, outputs = _SMALL
    x = mx.random.normal((rows, columns)).astype(mx.float16)
    w = mx.quantize(mx.random.normal((outputs, columns)).astype(mx.float16), group_size=GROUP, bits=4)
    mx.eval(x, w)
    options = {"group_size": GROUP, "bits": 4}
    ours = works(lambda: mm.quantized_matmul(x, *w, activations="int8", **options), peer=False)
    (mlx,) = works(lambda: on_units(x, w), peer=True)
    tile = their_quantized(mx.float16, "half", 4, transpose=True)
    table = [_row(count, layer, ours, (mlx, tile)) for layer in LAYERS for count in ROWS]
    headings = " | ".join(f"{chip}: ours | MLX | MLX by ours" for chip in CHIPS)
    return "\n".join([_HEAD, f"| rows | columns | outputs | {headings} |", "|--:" * 12 + "|", *table, _TAIL])


def _row(rows: int, layer: tuple[int, int], ours: Sequence[Work], theirs: tuple[Work, Tile]) -> str:
    sizes = (rows, *layer)
    cells = [f"{size:,}" for size in sizes]
    moved = _bytes_of_ours(sizes)
    parts = mlx_matrix_units.parts_of_qmm(sizes, GROUP)
    for chip in map(find_chip, CHIPS):
        own = [_scaled(work, moved[i], sizes, by_outputs=i == 1) for i, work in enumerate(ours)]
        times = chain(own, chip).microseconds, _time_of_mlx(sizes, parts, theirs, chip)
        cells += [f"{times[0]:,.0f}", f"{times[1]:,.0f}" + f" ({parts})" * (parts > 1), f"{times[1] / times[0]:.2f}"]
    return f"| {' | '.join(cells)} |"


def _time_of_mlx(sizes: Sizes, parts: int, theirs: tuple[Work, Tile], chip: Chip) -> float:
    """Microseconds of MLX's product, by its kernel for matrix units or by the one that it splits along K."""
    on_units, tile = theirs
    if parts > 1:
        return of_parts(tile, chip, sizes, parts, _weights(1024, 1024) / 2**20)
    work = _scaled(on_units, _bytes_of_mlx(sizes), sizes, by_outputs=True)
    return chain([work], chip).microseconds


_HEAD = """# Prompts by integers of 8 bits on an M5: predicted

Made by `python bench/apple/int8_prompts.py`. Predictions, not measurements: no Mac was at hand. Microseconds of a
product of float16 with affine weights of 4 bits in groups of 64: ours under `activations="int8"`, two launches, and MLX
0.32.4's. The layers are those of Llama 3.1 8B. MLX has `affine_qmm_t_nax` on the matrix units, but where 32x32 tiles
of the result are 256 or fewer it splits the columns first and computes the parts without these units
(`affine_qmm_t_splitk`, and a sum): the number of parts stands in brackets.
"""
_TAIL = """
There is no machine code for an M5's matrix units: the work is that of products, loads and stores as the simulator
counts them on a small product, with the tiles of the larger one. Arithmetic is in neither figure: MLX's kernel unpacks
weights to halves, ours adds the sums of each group to floats. Where it does not hide behind the products both take
longer. Where few threadgroups come to a core, as of 512 rows and 1,024 outputs on an M5 Max, the model has MLX's kernel
wait for its loads, which nothing published confirms: those ratios say little. MLX's split products have machine code of
Mesa's compiler. Others report 30 to 47 % more tokens of a prompt a second for such kernels; a whole prompt has other
launches too. The rate of integers is taken as twice that of halves (matrix-units.md).
"""


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    REPORT.write_text(report())
    print(f"{REPORT.name}: written")
