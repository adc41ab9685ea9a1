"""Predicted time of products of many rows on Apple GPUs, beside MLX's own kernels.

python bench/apple/prompts.py                        prints the tables
python bench/apple/prompts.py --write                writes bench/results/prompts.md
python bench/apple/prompts.py --write --only Dense   makes the tables whose titles have this text, and keeps the others
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
from tiles import SIMULATED, TYPES, Noted, beside, extended, launches, percent_of_peak

import mlx_mittens as mm
from mlx_mittens.apple.chips import Chip
from mlx_mittens.apple.estimates import elementwise
from mlx_mittens.apple.model import Instructions, chain, predict
from mlx_mittens.ops.custom import Output, int32, launch
from mlx_mittens.peer import mlx_sources
from mlx_mittens.simulator import PredictedLaunch
from mlx_mittens.specs.gguf import KINDS as KINDS_OF_BLOCKS
from mlx_mittens.specs.matmul_cases import COMMON_KINDS

CHIPS = ("m1", "m2-max", "m3-max", "m4-max")
ALL_CHIPS = ("m1", "m1-max", "m2-pro", "m2-max", "m3-max", "m4-max")
ROWS = (32, 512, 2048)
# Products of few outputs: rows, columns and outputs.
FEW_OUTPUTS = ((32, 4096, 1024), (64, 4096, 1024), (32, 2048, 512), (48, 2048, 1024))
SPLIT_CHIPS = ("m1", "m1-max", "m2-max", "m3-max", "m4-max")
WEIGHTS = ((4096, 4096), (4096, 14336), (14336, 4096))  # columns and outputs
BITS = (4, 8)
KINDS = ("q4_0", "q4_k", "mxfp4")
GROUP = 64
FILE = Path(__file__).parents[1] / "results" / "prompts.md"

HEAD = """# Products of prompts, predicted beside MLX's kernels

Predictions, not measurements: no Mac was at hand. `python bench/apple/prompts.py --write`. Groups of 64, MLX 0.32.4's
`affine_qmm_t` and `affine_qmm_n`, and its `gemm` with the tiles that it takes on each chip. A threadgroup is simulated
at 256 and at 512 columns and extended to the whole product. MLX splits the columns where tiles are few
(`affine_qmm_t_splitk`, and `gemm_splitk` of dense weights), which fills a GPU better. It is in the tables of few
outputs and of few rows alone: of 32 rows and 4096 outputs on a Max, speed is that much less in the others.
[docs/apple.md](../../docs/apple.md) says how far such predictions are off. Percent are of the ALU's peak in half types,
cores x clock x 256. Speed is MLX's time by ours. Weights of GGUF files are dequantized by our kernel for MLX's `gemm`:
its time is that of reading the blocks and of writing the weights, at the memory's nominal speed, besides.
"""

NOTES = """## What falls short

- 32 rows in float16: 1.25 in 8 bits on an M1, 1.18 to 1.19 on M3 Max and M4 Max. Tiles of 32 rows by 64 outputs are
  launched; a prototype of 32 by 128 was predicted at 1.17 on an M3 Max in 4 bits. On an M2 Pro 4096 outputs are 1.10
  to 1.16.
- Percent of the peak: half types and affine weights of 64 rows have a loop of their own for whole steps, which asks
  nothing of each run, and one place for all rows of a lane instead of a product for each. 512 x 4096 x 4096 on an M1
  in 4 bits: 80.8 % instead of 79.2 in float16, 74.7 instead of 72.6 in bfloat16. For all types and formats it spilled
  up to 58 registers in float32. Gated products gained less than 0.1 % in float16 on M1 and M2, with a threadgroup less
  on each core, and keep one loop.
- 512 rows on an M2 Max: 4096 outputs are 512 tiles, 13.5 rounds of 38 cores, so that 4 % of these idle in the last.
  8 bits float16 are at 1.38, 4 bits at 78 % of the peak, bfloat16 at 72 %. With 2048 rows all reach 80 % and 74 %.
- `transpose=False`: 1.25 to 1.34 in float16 on M1 and M2. A lane unpacks runs of 8 outputs for 32 rows, twice as
  many weights for each product as with `transpose=True`; runs of 4 for 64 rows were not written.
- One tile alone on a core hides no latency: 32 x 4096 x 4096 with `transpose=False` is 32 tiles, at 1.03 on an M2
  Max and at 0.78 to 0.97 on M3 Max and M4 Max. The plan leaves such products to mx: tiles that share the columns are
  those of `transpose=True`.
- GGUF in float16 with products of halves is faster, and its rounded scales (a half times an integer) miss the
  tests' tolerance in q2_k to q6_k, q5_1 and iq4_xs; all kinds have products of floats.
- GGUF kinds that have tiles of 32 rows alone fall behind MLX's `gemm` of dequantized weights on M1 and M2 in float16:
  the plan leaves more than 192 rows to mx there.
"""

Simulated = Sequence[PredictedLaunch]


@dataclass(frozen=True)
class Tile:
    """Threadgroups of a kernel: the simulated ones, and the rows and outputs of one."""

    found: Simulated
    rows: int
    outputs: int


def simulated(call: Callable[[int], mx.array]) -> Simulated:
    """The launch of a product at each number of columns that is simulated."""
    return [launches(call(columns))[-1] for columns in SIMULATED]


def quantized(outputs: int, columns: int, dtype: mx.Dtype, bits: int, transpose: bool) -> Sequence[mx.array]:
    """A triple."""
    shape = (outputs, columns) if transpose else (columns, outputs)
    return mx.quantize(mx.random.normal(shape).astype(dtype), GROUP, bits)


def our_quantized(rows: int, dtype: mx.Dtype, bits: int, transpose: bool) -> Tile:
    outputs = 128 if rows == 32 and not transpose else 64

    def call(columns: int) -> mx.array:
        x = mx.random.normal((rows, columns)).astype(dtype)
        triple = quantized(outputs, columns, dtype, bits, transpose)
        return mm.quantized_matmul(x, *triple, transpose=transpose, group_size=GROUP, bits=bits)

    return Tile(simulated(call), rows, outputs)


def our_blocks(rows: int, dtype: mx.Dtype, kind: str) -> Tile:
    each = KINDS_OF_BLOCKS[kind]

    def call(columns: int) -> mx.array:
        blocks = mx.random.randint(0, 60, (64, each.row_bytes(columns))).astype(mx.uint8)
        return mm.block_matmul(mx.random.normal((rows, columns)).astype(dtype), blocks, kind)

    return Tile(simulated(call), rows, 64)


def our_dense(rows: int, dtype: mx.Dtype, transpose: bool) -> Tile:
    outputs = 128 if rows == 32 and not transpose else 64

    def call(columns: int) -> mx.array:
        w = mx.random.normal((outputs, columns) if transpose else (columns, outputs)).astype(dtype)
        return mm.matmul(mx.random.normal((rows, columns)).astype(dtype), w, transpose=transpose)

    return Tile(simulated(call), rows, outputs)


def their_quantized(dtype: mx.Dtype, text: str, bits: int, transpose: bool) -> Tile:
    """Four threadgroups of MLX's kernel."""
    more = (True, False) if transpose else (False,)  # whole tiles, no batch
    function = "affine_qmm_t" if transpose else "affine_qmm_n"
    kernel = mlx_sources.instance("quantized", function, text, GROUP, bits, *more)

    def call(columns: int) -> mx.array:
        x = mx.random.normal((64, columns)).astype(dtype)
        w, scales, biases = quantized(64, columns, dtype, bits, transpose)
        arguments = {0: w, 1: scales, 2: biases, 3: x, 4: Output([64, 64], dtype)}
        arguments |= {5: int32(columns), 6: int32(64), 7: int32(64)}
        return launch(*kernel, arguments, [2, 2, 1], [32, 2, 2], stream=mx.cpu)[0]

    return Tile(simulated(call), 32, 32)


def their_dense(dtype: mx.Dtype, text: str, transpose: bool, is_base: bool) -> Tile:
    """A threadgroup of MLX's gemm, with the tile that it takes on a base chip or on a Max."""
    rows, outputs, step, along, across = 64, 64, 16, 2, 2
    if is_base:
        outputs, step, along = (32, 32, 2) if transpose else (64, 16, 1)
    kernel = mlx_sources.instance("steel_gemm", "gemm", text, rows, outputs, step, along, across, False, transpose)

    def call(columns: int) -> mx.array:
        x = mx.random.normal((rows, columns)).astype(dtype)
        w = mx.random.normal((outputs, columns) if transpose else (columns, outputs)).astype(dtype)
        sizes = (rows, outputs, columns, columns, columns if transpose else outputs, outputs, 1, 1)
        params = struct.pack("=8i3q3i4x", *sizes, 0, 0, 0, 0, columns // step, 0)
        constants = {10: False, 100: False, 110: False, 200: True, 201: True, 202: True}
        arguments = {0: x, 1: w, 3: Output([rows, outputs], dtype), 4: params}
        return launch(*kernel, arguments, [1, 1, 1], [32, across, along], constants=constants, stream=mx.cpu)[0]

    return Tile(simulated(call), rows, outputs)


def their_split_dense(dtype: mx.Dtype, text: str, rows: int) -> Tile:
    """A threadgroup of MLX's gemm whose columns are shared, which leaves sums in float32."""
    kernel = mlx_sources.instance("splitk", "gemm_splitk", text, "float", rows, 32, 16, 2, 2, False, True, True, True)

    def call(columns: int) -> mx.array:
        x, w = (mx.random.normal((count, columns)).astype(dtype) for count in (rows, 32))
        params = struct.pack("=13i", rows, 32, *[columns] * 3, 32, 1, 1, 1, rows * 32, columns, 0, columns // 16)
        arguments = {0: x, 1: w, 2: Output([1, rows, 32], mx.float32), 3: params}
        return launch(*kernel, arguments, [1, 1, 1], [32, 2, 2], stream=mx.cpu)[0]

    return Tile(simulated(call), rows, 32)


def time(tile: Tile, chip: Chip, size: tuple[int, int, int], moved: float) -> float:
    """Microseconds of a product of rows, columns and outputs, by the bytes that it moves."""
    rows, columns, outputs = size
    threadgroups = -(-rows // tile.rows) * -(-outputs // tile.outputs)
    return predict(extended(tile.found, chip, columns, threadgroups, moved / 128), chip).microseconds


def table(
    title: str,
    ours: Mapping[int, Tile],
    theirs: Mapping[str, Tile],
    bits: float,
    dequantized: bool = False,
    of_rows: Sequence[int] = ROWS,
    chips: Sequence[str] = CHIPS,
) -> list[str]:
    """The lines of a kind of product.

    Args:
        title: Of the section.
        ours: By rows of a tile.
        theirs: By chip.
        bits: Of a weight in memory.
        dequantized: Whether theirs are of dense weights, which are dequantized for each product.
        of_rows: Rows of x.
        chips: Columns of the table.
    """

    def times(size: tuple[int, int, int], chip: Chip) -> tuple[Noted, Noted]:
        rows, columns, outputs = size
        tile = ours.get(32 if rows <= 32 else 64, ours[32])
        activations, weights = 2 * rows * (columns + outputs), columns * outputs
        a = time(tile, chip, size, activations + weights * bits / 8)
        b = time(theirs[chip.name], chip, size, activations + weights * (2 if dequantized else bits / 8))
        if dequantized:
            b += weights * (2 + bits / 8) / chip.nominal_GBps / 1e3
        percent = [percent_of_peak(2 * rows * columns * outputs, us, chip) for us in (a, b)]
        return (a, f" ({percent[0]:.0f})"), (b, f" ({percent[1]:.0f})")

    sizes = [(rows, *weights) for rows in of_rows for weights in WEIGHTS]
    return beside(title, ("rows x K x N", "us (%)", "MLX's"), chips, by_size(sizes, times))


def by_size(
    sizes: Iterable[tuple[int, int, int]], times: Callable[[tuple[int, int, int], Chip], tuple[Noted, Noted]]
) -> Iterator[tuple[str, Callable[[Chip], tuple[Noted, Noted]]]]:
    """The rows of a table of products."""
    return (("{} x {} x {}".format(*size), partial(times, size)) for size in sizes)


def our_splits(size: tuple[int, int, int], chip: Chip) -> int:
    """Of how many parts of the columns the plan makes tiles of 32 rows by 64 outputs."""
    rows, columns, outputs = size
    tiles = -(-rows // 32) * -(-outputs // 64)
    return next(n for n in (1, 2, 4, 8) if are_busy(n * tiles, chip) or n == 8 or columns < 512 * n)


def their_splits(size: tuple[int, int, int]) -> int:
    """Of how many parts MLX makes it."""
    rows, columns, outputs = size
    parts = min(max(1, 512 // (-(-rows // 32) * -(-outputs // 32))), columns // GROUP)
    return next(n for n in range(parts, 0, -1) if columns % (n * GROUP) == 0)


def of_parts(tile: Tile, chip: Chip, size: tuple[int, int, int], parts: int, weight_bytes: float) -> float:
    """Microseconds of a product whose columns are split in parts, with their sum in float32."""
    rows, columns, outputs = size
    results = rows * outputs
    moved = 2 * rows * (columns + outputs) + columns * outputs * weight_bytes + 4 * parts * results
    threadgroups = parts * -(-rows // tile.rows) * -(-outputs // tile.outputs)
    works = [extended(tile.found, chip, columns // parts, threadgroups, moved / 128)]
    if parts > 1:
        each = Instructions(floats=parts, integers=2 * parts, loads=parts)
        works.append(elementwise(results, (4 * parts + 2) * results, each))
    return chain(works, chip).microseconds


def few_outputs(title: str, name: str) -> list[str]:
    """The lines of products whose tiles are so few that they share the columns."""
    dtype, text = TYPES[name]
    ours, theirs = {n: our_quantized(n, dtype, 4, True) for n in (32, 64)}, their_quantized(dtype, text, 4, True)
    weight_bytes = (4 + 32 / GROUP) / 8

    def times(size: tuple[int, int, int], chip: Chip) -> tuple[Noted, Noted]:
        alone = size[0] > 32 and is_ours(ours[64], chip, size[0], size[2])
        tile, parts, their_parts = ours[64 if alone else 32], 1 if alone else our_splits(size, chip), their_splits(size)
        a = of_parts(tile, chip, size, parts, weight_bytes)
        b = of_parts(theirs, chip, size, their_parts, weight_bytes)
        return (a, f" ({parts})"), (b, f" ({their_parts})")

    return beside(title, ("rows x K x N", "us", "MLX's"), SPLIT_CHIPS, by_size(FEW_OUTPUTS, times))


def their_dense_splits(size: tuple[int, int, int], chip: Chip) -> int:
    """Of how many parts MLX makes the columns of a dense product."""
    rows, columns, outputs = size
    most = 2048 if chip.name.endswith(("-max", "-ultra")) else 1024
    if -(-rows // 16) * -(-outputs // 16) > most or columns < max(rows, outputs):
        return 1
    quotient = columns // 16 // (-(-rows // 32) * -(-outputs // 32))
    return min(max(2, 1 << (quotient - 1).bit_length()), 32) if quotient > 1 else 2


def few_rows(title: str, name: str) -> list[str]:
    """The lines of products of few rows with dense weights."""
    dtype, text = TYPES[name]
    ours = our_dense(32, dtype, True)
    shared = {rows: their_split_dense(dtype, text, rows) for rows in (16, 32)}
    alone = {is_base: their_dense(dtype, text, True, is_base) for is_base in (True, False)}

    def times(size: tuple[int, int, int], chip: Chip) -> tuple[Noted, Noted]:
        parts = their_dense_splits(size, chip)
        theirs = alone["-" not in chip.name] if parts == 1 else shared[16 if size[0] < 40 else 32]
        return (of_parts(ours, chip, size, 1, 2), ""), (of_parts(theirs, chip, size, parts, 2), f" ({parts})")

    sizes = [(rows, *weights) for rows in (24, 32, 64) for weights in WEIGHTS]
    return beside(title, ("rows x K x N", "us", "MLX's"), SPLIT_CHIPS, by_size(sizes, times))


def is_ours(tile: Tile, chip: Chip, rows: int, outputs: int) -> bool:
    """Whether the plan gives a product to our kernel, unless its tiles share the columns."""
    return are_busy(-(-rows // tile.rows) * -(-outputs // tile.outputs), chip)


def are_busy(tiles: int, chip: Chip) -> bool:
    """The plan's rule (csrc/ops/matmul/plan.cpp: keep_busy)."""
    return tiles * 2 >= chip.cores * 3 and tiles * 5 >= -(-tiles // chip.cores) * chip.cores * 4


def of_dense(dtype: mx.Dtype, text: str, transpose: bool) -> dict[str, Tile]:
    base, larger = (their_dense(dtype, text, transpose, is_base) for is_base in (True, False))
    return {chip: base if "-" not in chip else larger for chip in CHIPS}


def quantized_table(title: str, name: str, bits: int, transpose: bool) -> list[str]:
    dtype, text = TYPES[name]
    ours = {rows: our_quantized(rows, dtype, bits, transpose) for rows in (32, 64)}
    chips = ALL_CHIPS if transpose else CHIPS
    theirs = dict.fromkeys(chips, their_quantized(dtype, text, bits, transpose))
    return table(title, ours, theirs, bits + 32 / GROUP, chips=chips)


def dense_table(title: str, name: str, transpose: bool) -> list[str]:
    dtype, text = TYPES[name]
    ours = {rows: our_dense(rows, dtype, transpose) for rows in (32, 64)}
    # Of 32 rows MLX splits the columns, as `few_rows` has it for transposed weights.
    return table(title, ours, of_dense(dtype, text, transpose), 16, of_rows=ROWS[1:] if transpose else ROWS)


def gguf_table(title: str, name: str, kind: str) -> list[str]:
    dtype, text = TYPES[name]
    sizes = (32, 64) if kind in COMMON_KINDS else (32,)
    ours = {rows: our_blocks(rows, dtype, kind) for rows in sizes}
    each = KINDS_OF_BLOCKS[kind]
    return table(title, ours, of_dense(dtype, text, True), 8 * each.bytes / each.weights, dequantized=True)


def sections() -> Iterator[tuple[str, Callable[[str], list[str]]]]:
    """The title of each table, and the function that makes its lines."""
    for transpose in (True, False):
        for bits in BITS:
            for name in TYPES:
                make = partial(quantized_table, name=name, bits=bits, transpose=transpose)
                yield f"{bits} bits, {name}" + ("" if transpose else ", transpose=False"), make
    of_parts = "microseconds, and in how many parts"
    for name in TYPES:
        yield f"4 bits, {name}, few outputs: {of_parts} the columns are", partial(few_outputs, name=name)
    for name in TYPES:
        yield f"Dense, {name}, few rows: {of_parts} MLX's columns are", partial(few_rows, name=name)
    for transpose in (True, False):
        title = "Dense, bfloat16" + ("" if transpose else ", transpose=False")
        yield title, partial(dense_table, name="bfloat16", transpose=transpose)
    for name in TYPES:
        for kind in KINDS:
            yield f"GGUF, {kind}, {name}", partial(gguf_table, name=name, kind=kind)


def kept_lines() -> dict[str, list[str]]:
    """The lines of each table of the file, by title."""
    _, *parts = FILE.read_text().split("\n## ")
    return {part.partition("\n")[0]: f"## {part}".split("\n") for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--only", default="", metavar="TEXT", help="the tables whose titles have this text")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    lines = {title: make(title) for title, make in sections() if arguments.only in title}
    if arguments.write:
        # Read last: another run may have written other tables.
        lines = (kept_lines() if arguments.only else {}) | lines
        FILE.write_text("\n".join([HEAD, *(line for title, _ in sections() for line in lines[title]), NOTES]))


if __name__ == "__main__":
    main()
