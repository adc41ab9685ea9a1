"""Predicted time of a prompt through the chosen experts of mixtures on Apple GPUs, beside what mx and mlx-lm launch.

python bench/apple/expert_prompts.py            prints the tables
python bench/apple/expert_prompts.py --write    writes bench/results/expert-prompts.md
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tiles import SIMULATED, TYPES, Noted, at_columns, beside, blend, launches, percent_of_peak, work_on

import mlx_mittens as mm
from mlx_mittens import frontend
from mlx_mittens.apple import machine_code
from mlx_mittens.apple.chips import Chip
from mlx_mittens.apple.estimates import elementwise
from mlx_mittens.apple.model import Instructions, Work, chain
from mlx_mittens.ops.custom import Output, int32, launch
from mlx_mittens.peer import mlx_sources
from mlx_mittens.simulator import PredictedLaunch

HEADS = "model", "us (%)", "mx's"
CHIPS = ("m1", "m1-max", "m2-pro", "m2-max", "m3-max", "m4-max")
TOKENS = 512
FILE = Path(__file__).parents[1] / "results" / "expert-prompts.md"
# Blocks of 8 rows of a tile that are simulated; those between them lie on lines.
BLOCKS = (1, 4, 8)
NAMES = {"affine": "4bit", "mxfp4": "mxfp4"}

HEAD = f"""# Prompts of mixtures, predicted beside mx's launches

Predictions, not measurements: no Mac was at hand. `python bench/apple/expert_prompts.py --write`. A prompt of {TOKENS}
tokens through the chosen experts of one layer: tokens choose experts at random, each as often as any other. Ours is
gather_swiglu and gather_sum. mx's is mlx-lm's layer: two sorts, the gather of the tokens, three products (MLX 0.32.4's
`gather_qmm_rhs`), the activation, the gather back, and the weighted sum, with the biases of gpt-oss. For dense experts
one product is compared, the one down: our `gather_mm` sorts and multiplies, MLX's `gather_mm_rhs` gets rows that are
sorted. Products are simulated at {SIMULATED[0]} and at {SIMULATED[1]} columns and extended; small operations are
estimated from their bytes. Percent are of the ALU's peak in half types, of the products alone.
[docs/apple.md](../../docs/apple.md) says how far such predictions are off.
"""


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer: quantized as `mode` and `group` say, with 4 bits."""

    name: str
    experts: int
    chosen: int
    columns: int
    hidden: int
    mode: str = "affine"
    group: int = 64
    has_bias: bool = False

    def options(self) -> dict[str, Any]:
        """The options of the ops."""
        return {"group_size": self.group, "bits": 4, "mode": self.mode}

    def rows(self) -> np.ndarray:
        """Of each expert, for the tokens of a prompt."""
        scores = np.random.default_rng(0).random((TOKENS, self.experts))
        return np.bincount(np.argsort(scores)[:, : self.chosen].ravel(), minlength=self.experts)


MIXTURES = (
    Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Mixture("gpt-oss-20b", 32, 4, 2880, 2880, "mxfp4", 32, True),
    Mixture("Mixtral 8x7B", 8, 2, 4096, 14336),
)


def draw(shape: Sequence[int], dtype: mx.Dtype, mode: str, group: int) -> list[mx.array]:
    """A stack of quantized matrices."""
    w = mx.random.normal(tuple(shape)).astype(dtype)
    return list(mx.quantize(w, group, 4, mode=mode))


def parameters(columns: int, outputs: int, group: int | None) -> bytes:
    """GatherQmmParams of one expert, whose x and weights lie row by row; no group: dense weights."""
    weights = struct.pack("=5I4x12q", 0, 1, 1, 1, 1, *[0] * 12)
    groups = columns // group if group else 0
    shift = group.bit_length() - 1 if group else 0
    row = columns // 8 if group else columns
    sizes = [1, 1, columns, outputs, shift, row, groups, groups, 0, 0x4B000000, 0, 0, 0, 0]
    return weights + struct.pack("=14I2f4I2I2f", *sizes, 1.0, 0.0, 1, 8 * BLOCKS[-1], 1, 0, 1, 0, math.inf, 0.0)


@functools.cache
def variant(op: str, type_name: str, mode: str, blocks: int) -> tuple[str, str]:
    """A kernel whose tiles all have an expert and `blocks` of rows: counts do not tell which loop has run."""
    file = f"moe/apple/{op}_tiles.metal"
    text = re.sub(r"(?m)^instantiate_types\(.*\n", "", frontend.flatten(file))
    text = text.replace("if (tile.expert < params.pairs.matrices) {", "if (true) {")
    kernel = f"{op}_tiles_{mode}_{blocks}_{type_name}"
    types = {"float16": "half", "bfloat16": "bfloat", "float32": "float"}
    format_ = {"affine": " affine_4,", "dense": ""}.get(mode, f" {mode},")
    of = f"{types[type_name]},{format_} {blocks}, {blocks}"
    frontend.register_source(f"bench/{kernel}.metal", f'{text}\ninstantiate_kernel("{kernel}", {op}_tiles, {of})\n')
    return f"bench/{kernel}.metal", kernel


@functools.cache
def tile(op: str, type_name: str, mode: str, group: int, blocks: int, columns: int) -> PredictedLaunch:
    """A tile of `blocks` of rows by the outputs of one threadgroup."""
    dtype, _ = TYPES[type_name]
    rows = 8 * blocks
    outputs, stacks = (64, 1) if op == "gather_qmm" else (32, 2)
    x = mx.random.normal((rows, columns)).astype(dtype)
    values: list[Any] = [x]
    for _ in range(stacks):
        w, scales, *biases = draw((outputs, columns), dtype, mode, group)
        values += [w, scales, biases[0] if biases else scales]
    values += [x] * stacks  # there are no biases of outputs
    values += [mx.repeat(mx.arange(rows, dtype=mx.uint32)[:, None], 2, 1), mx.array([[0, 0, rows, 0]], mx.uint32)]
    values += [Output([rows, outputs], dtype), parameters(columns, outputs, group)]
    return of_whole(op, f"{NAMES[mode]}_64_{type_name}", variant(op, type_name, mode, blocks), values)


def of_whole(op: str, name: str, kernel: tuple[str, str], values: Sequence[Any]) -> PredictedLaunch:
    """A launch of a variant, with the registers of the kernel that has all numbers of blocks."""
    found = launches(launch(*kernel, dict(enumerate(values)), [1, 1, 1], [128, 1, 1], stream=mx.cpu)[0])[-1]
    whole = machine_code.compile(f"moe/apple/{op}_tiles.metal", f"{op}_tiles_{name}")
    return replace(
        found, code=replace(found.code, half_registers=whole.half_registers, threads_a_core=whole.threads_a_core)
    )


@functools.cache
def tile_of_mlx(type_name: str, mode: str, group: int, rows: int, columns: int) -> PredictedLaunch:
    """A threadgroup of MLX's kernel, of 16 rows or fewer."""
    dtype, text = TYPES[type_name]
    affine = mode == "affine"
    function = "affine_gather_qmm_rhs" if affine else "fp_gather_qmm_rhs"
    kernel = mlx_sources.instance(
        "quantized" if affine else "fp_quantized", function, text, group, 4, 16, 32, 32, 1, 2, True
    )
    x = mx.random.normal((rows, columns)).astype(dtype)
    w, scales, *biases = draw((1, 32, columns), dtype, mode, group)
    third = biases[0] if affine else mx.ones((1,))
    values: list[Any] = [x, w, scales, third, mx.zeros((1,), mx.int32), Output([rows, 32], dtype)]
    values += [int32(rows), int32(32), int32(columns), int32(1)]
    constants = {200: rows == 16, 201: True, 202: True}
    return launches(
        launch(*kernel, dict(enumerate(values)), [1, 1, 1], [32, 2, 1], constants=constants, stream=mx.cpu)[0]
    )[-1]


@functools.cache
def dense_tile(type_name: str, blocks: int, columns: int) -> PredictedLaunch:
    """A tile of `blocks` of rows by the outputs of one threadgroup, of dense experts."""
    dtype, _ = TYPES[type_name]
    rows, outputs = 8 * blocks, 64
    values: list[Any] = [mx.random.normal((n, columns)).astype(dtype) for n in (rows, outputs)]
    values += [mx.repeat(mx.arange(rows, dtype=mx.uint32)[:, None], 2, 1), mx.array([[0, 0, rows, 0]], mx.uint32)]
    values += [Output([rows, outputs], dtype), parameters(columns, outputs, None)]
    return of_whole("gather_mm", f"64_{type_name}", variant("gather_mm", type_name, "dense", blocks), values)


@functools.cache
def dense_tile_of_mlx(type_name: str, rows: int, columns: int) -> PredictedLaunch:
    """A threadgroup of MLX's kernel, of 16 rows or fewer."""
    dtype, text = TYPES[type_name]
    kernel = mlx_sources.instance("steel_gather", "gather_mm_rhs", text, 16, 64, 16, 1, 2, False, True)
    sizes = struct.pack("=8i3q3i4x", rows, 64, columns, columns, columns, 64, 1, 1, 0, 0, 0, 0, columns // 16, 0)
    values: list[Any] = [mx.random.normal((n, columns)).astype(dtype) for n in (rows, 64)]
    values += [mx.zeros((1,), mx.int32), Output([rows, 64], dtype), sizes, int32(1)]
    constants = {200: rows == 16, 201: True, 202: True}
    return launches(
        launch(*kernel, dict(enumerate(values)), [1, 1, 1], [32, 2, 1], constants=constants, stream=mx.cpu)[0]
    )[-1]


def product(mixture: Mixture, op: str, type_name: str, chip: Chip) -> Work:
    """Our launch over tiles of all experts: gate, up and activation, or the product with down."""
    swiglu = op == "gather_swiglu"
    columns, outputs = (mixture.columns, mixture.hidden) if swiglu else (mixture.hidden, mixture.columns)
    of_tiles: dict[int, int] = {}
    for rows in mixture.rows():
        for first in range(0, rows, 64):
            blocks = -(-min(rows - first, 64) // 8)
            of_tiles[blocks] = of_tiles.get(blocks, 0) + 1
    groups = -(-outputs // (32 if swiglu else 64))
    dense = mixture.mode == "dense"
    of = lambda b, k: dense_tile(type_name, b, k) if dense else tile(op, type_name, mixture.mode, mixture.group, b, k)
    parts = []
    for blocks, count in of_tiles.items():
        blocks = 8 if blocks == 7 else blocks
        upper = next(b for b in BLOCKS if b >= blocks)
        lower = max(b for b in BLOCKS if b <= blocks)
        share = (blocks - lower) / (upper - lower) if upper > lower else 0.0
        for weight, b in ((1 - share, lower), (share, upper)):
            pair = [work_on(of(b, k), chip) for k in SIMULATED]
            parts += [(weight * w * count * groups, work) for w, work in at_columns(pair, columns)]
    return blend(parts, sum(of_tiles.values()) * groups, lines_of(mixture, columns, outputs, 2 if swiglu else 1))


def product_of_mlx(mixture: Mixture, columns: int, outputs: int, type_name: str, chip: Chip) -> Work:
    """One of MLX's three launches over tiles of 16 rows."""
    full = sum(int(rows) // 16 for rows in mixture.rows())
    partial = sum(int(rows) % 16 > 0 for rows in mixture.rows())
    dense = mixture.mode == "dense"
    groups = -(-outputs // (64 if dense else 32))
    of = lambda rows, k: (
        dense_tile_of_mlx(type_name, rows, k) if dense else tile_of_mlx(type_name, mixture.mode, mixture.group, rows, k)
    )
    parts = []
    for rows, count in ((16, full), (11, partial)):
        pair = [work_on(of(rows, k), chip) for k in SIMULATED]
        parts += [(w * count * groups, work) for w, work in at_columns(pair, columns)]
    return blend(parts, (full + partial) * groups, lines_of(mixture, columns, outputs, 1))


def lines_of(mixture: Mixture, columns: int, outputs: int, matrices: int) -> float:
    """Distinct lines of a product: x, the weights of experts with rows, and y."""
    rows = mixture.rows()
    each_weight = 2 if mixture.mode == "dense" else 0.5 + (4 if mixture.mode == "affine" else 1) / mixture.group
    weight = matrices * outputs * columns * each_weight
    return (2 * TOKENS * (columns if matrices == 2 else 0) + 2 * rows.sum() * outputs + (rows > 0).sum() * weight) / 128


@functools.cache
def sorting(experts: int, chosen: int) -> PredictedLaunch:
    """Our launch that sorts the rows of a prompt by their experts."""
    indices = mx.array(np.argsort(np.random.default_rng(0).random((TOKENS, experts)))[:, :chosen].astype(np.uint32))
    w = draw((experts, 16, 32), mx.float16, "affine", 32)
    x = mx.random.normal((TOKENS, 1, 1, 32)).astype(mx.float16)
    return launches(mm.gather_qmm(x, *w, rhs_indices=indices, group_size=32, bits=4))[0]


def ours(mixture: Mixture, type_name: str, chip: Chip) -> list[Work]:
    """Our launches."""
    rows, d = TOKENS * mixture.chosen, mixture.columns
    tiles = work_on(sorting(mixture.experts, mixture.chosen), chip)
    sums = Instructions(floats=8 * mixture.chosen, integers=8 * mixture.chosen, loads=2 * mixture.chosen)
    return [
        tiles,
        product(mixture, "gather_swiglu", type_name, chip),
        tiles,
        product(mixture, "gather_qmm", type_name, chip),
        elementwise(TOKENS * d, 2 * (rows * d + TOKENS * d), sums * (1 / 8)),
    ]


def theirs(mixture: Mixture, type_name: str, chip: Chip) -> list[Work]:
    """mx's launches for mlx-lm's layer."""
    rows, d, h = TOKENS * mixture.chosen, mixture.columns, mixture.hidden
    small = elementwise(rows, 12 * rows)
    by_bytes = lambda count, arrays: elementwise(count, 2 * arrays * count)
    added = lambda outputs: [by_bytes(rows * outputs, 2), by_bytes(rows * outputs, 3)] if mixture.has_bias else []
    of = lambda columns, outputs: product_of_mlx(mixture, columns, outputs, type_name, chip)
    return [
        *(small, small, small, small),  # two sorts, the tokens' numbers, the sorted experts
        by_bytes(rows * d, 2),
        *(small, of(d, h), *added(h)),  # where each expert starts, and the product
        *(small, of(d, h), *added(h)),
        by_bytes(rows * h, 3),
        *(small, of(h, d), *added(d)),
        by_bytes(rows * d, 2),
        by_bytes(rows * d, 2),
        elementwise(TOKENS * d, 2 * (rows * d + TOKENS * d)),
    ]


def table(type_name: str) -> list[str]:
    """The lines of a type."""

    def times(mixture: Mixture, chip: Chip) -> tuple[Noted, Noted]:
        flop = 2 * 3 * TOKENS * mixture.chosen * mixture.columns * mixture.hidden
        works = ours(mixture, type_name, chip), theirs(mixture, type_name, chip)
        a, b = (chain(part, chip).microseconds for part in works)
        of_products = [sum(chain([w], chip).microseconds for w in part if w.instructions.matrix) for part in works]
        percent = [percent_of_peak(flop, us, chip) for us in of_products]
        return (a, f" ({percent[0]:.0f})"), (b, f" ({percent[1]:.0f})")

    rows = ((mixture.name, partial(times, mixture)) for mixture in MIXTURES)
    return beside(f"Mixtures, {type_name}", HEADS, CHIPS, rows)


def dense_table(type_name: str) -> list[str]:
    """The lines of a type, of the product down of dense experts."""

    def times(mixture: Mixture, chip: Chip) -> tuple[Noted, Noted]:
        d, h, rows = mixture.columns, mixture.hidden, TOKENS * mixture.chosen
        ours = [
            work_on(sorting(mixture.experts, mixture.chosen), chip),
            product(mixture, "gather_qmm", type_name, chip),
        ]
        theirs = [elementwise(rows, 12 * rows), product_of_mlx(mixture, h, d, type_name, chip)]
        a, b = (chain(works, chip).microseconds for works in (ours, theirs))
        percent = [percent_of_peak(2 * rows * d * h, us, chip) for us in (a, b)]
        return (a, f" ({percent[0]:.0f})"), (b, f" ({percent[1]:.0f})")

    rows = ((mixture.name, partial(times, replace(mixture, mode="dense"))) for mixture in MIXTURES)
    return beside(f"Dense experts, {type_name}", HEADS, CHIPS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--type", choices=TYPES, help="print the tables of one type")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    if arguments.type:
        print(*table(arguments.type), *dense_table(arguments.type), sep="\n")
        return
    text = "\n".join([HEAD, *(line for of in (table, dense_table) for name in TYPES for line in of(name))])
    print(text)
    if arguments.write:
        FILE.write_text(text)


if __name__ == "__main__":
    main()
