"""Predicted time of quantized products of many rows on Apple GPUs, beside MLX's own kernels.

python bench/apple/prompts.py            prints the table
python bench/apple/prompts.py --write    writes bench/results/prompts.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import mlx.core as mx

import mlx_mittens as mm
from mlx_mittens.apple.chips import Chip, find_chip
from mlx_mittens.apple.model import Instructions, Work, predict
from mlx_mittens.bench import mlx_metal
from mlx_mittens.ops.custom import Output, int32, launch
from mlx_mittens.simulator import PredictedLaunch

CHIPS = ("m1", "m2-max", "m3-max", "m4-max")
ROWS = (32, 512, 2048)
WEIGHTS = ((4096, 4096), (4096, 14336), (14336, 4096))  # columns and outputs
TYPES = {"float16": (mx.float16, "half"), "bfloat16": (mx.bfloat16, "bfloat16_t")}
BITS = (4, 8)
GROUP = 64
# Columns of the products that are simulated: work grows by a constant with each more.
SIMULATED = (256, 512)
FILE = Path(__file__).parents[1] / "results" / "prompts.md"

HEAD = """# Products of prompts, predicted beside MLX's kernels

Predictions, not measurements: no Mac was at hand. `python bench/apple/prompts.py --write`. Groups of 64, MLX 0.32.4's
`affine_qmm_t`. A threadgroup is simulated at 256 and at 512 columns and extended to the whole product.
MLX splits the columns where tiles are few (`affine_qmm_t_splitk`), which fills a GPU better and is left out: of 32 rows
and 4096 outputs on a Max, speed is that much less. [docs/apple.md](../../docs/apple.md) says how far such predictions
are off. Percent are of the ALU's peak in half types, cores x clock x 256. Speed is MLX's time by ours.
"""

Simulated = Sequence[tuple[int, PredictedLaunch]]


def draw(rows: int, outputs: int, columns: int, dtype: mx.Dtype, bits: int) -> list[mx.array]:
    """x and a triple."""
    w = mx.random.normal((outputs, columns)).astype(dtype)
    return [mx.random.normal((rows, columns)).astype(dtype), *mx.quantize(w, GROUP, bits)]


def simulated(call: Callable[[int], mx.array]) -> Simulated:
    """The launch of a product at each of the numbers of columns."""
    found = []
    for columns in SIMULATED:
        with mm.simulator.enabled(gpu=CHIPS[0]), mm.simulator.predicted(CHIPS[0]) as launches:
            mx.eval(call(columns))
        found.append((columns, launches[-1]))
    return found


def ours(rows: int, dtype: mx.Dtype, bits: int) -> Simulated:
    """A tile with this number of rows."""

    def call(columns: int) -> mx.array:
        x, *triple = draw(rows, 64, columns, dtype, bits)
        with mm.strict():
            return mm.quantized_matmul(x, *triple, group_size=GROUP, bits=bits)

    return simulated(call)


def theirs(dtype: mx.Dtype, text: str, bits: int) -> Simulated:
    """Four threadgroups of MLX's kernel."""
    kernel = mlx_metal.instance("quantized", "affine_qmm_t", text, GROUP, bits, True, False)

    def call(columns: int) -> mx.array:
        x, w, scales, biases = draw(64, 64, columns, dtype, bits)
        arguments = {0: w, 1: scales, 2: biases, 3: x, 4: Output([64, 64], dtype)}
        arguments |= {5: int32(columns), 6: int32(64), 7: int32(64)}
        return launch(*kernel, arguments, [2, 2, 1], [32, 2, 2], stream=mx.cpu)[0]

    return simulated(call)


def extended(found: Simulated, chip: Chip, columns: int, threadgroups: int, lines: float) -> Work:
    """The work of a whole product, from that of a few threadgroups at two numbers of columns."""
    (fewer, first), (more, second) = [(k, one.on(chip).work) for k, one in found]
    if first is None or second is None:
        raise RuntimeError("a kernel does not compile")
    share = (columns - fewer) / (more - fewer)
    grown = lambda a, b: a + (b - a) * share
    each = threadgroups / first.threadgroups
    instructions = Instructions(
        **{
            f.name: grown(getattr(first.instructions, f.name), getattr(second.instructions, f.name)) * each
            for f in fields(Instructions)
        }
    )
    return replace(
        first,
        threadgroups=threadgroups,
        instructions=instructions,
        summed_lines=grown(first.summed_lines, second.summed_lines) * each,
        lines=lines,
        rounds=grown(first.rounds, second.rounds),
    )


def table(name: str, bits: int) -> list[str]:
    """The lines of a type and a number of bits."""
    dtype, text = TYPES[name]
    tiles = {rows: ours(rows, dtype, bits) for rows in (32, 64)}
    mlx = theirs(dtype, text, bits)
    lines = [f"## {bits} bits, {name}", ""]
    lines.append("| rows x K x N |" + "".join(f" {chip}: us (%) | MLX's | speed |" for chip in CHIPS))
    lines.append("|---|" + "--:|--:|--:|" * len(CHIPS))
    for rows in ROWS:
        for columns, outputs in WEIGHTS:
            size = 32 if rows <= 32 else 64
            moved = 2 * rows * (columns + outputs) + columns * outputs * (bits / 8 + 4 / GROUP)
            cells = [f"{rows} x {columns} x {outputs}"]
            for chip in map(find_chip, CHIPS):
                whole = lambda found, threadgroups: (
                    predict(extended(found, chip, columns, threadgroups, moved / 128), chip).microseconds
                )
                a = whole(tiles[size], -(-rows // size) * outputs // 64)
                b = whole(mlx, rows // 32 * outputs // 32)
                peak = chip.cores * chip.clock_GHz * 1e3 * 256
                percent = [100 * 2 * rows * columns * outputs / peak / us for us in (a, b)]
                cells += [f"{a:,.0f} ({percent[0]:.0f})", f"{b:,.0f} ({percent[1]:.0f})", f"{b / a:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    print(*lines, sep="\n", flush=True)
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    lines = [line for bits in BITS for name in TYPES for line in table(name, bits)]
    if arguments.write:
        FILE.write_text("\n".join([HEAD, *lines]))


if __name__ == "__main__":
    main()
