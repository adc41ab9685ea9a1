"""Predicted times of products with masked blocks on Apple GPUs, beside MLX's own Metal kernels.

python bench/apple/block_masked.py            prints the tables
python bench/apple/block_masked.py --write    writes bench/results/block-masked.md
"""

from __future__ import annotations

import argparse
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kept
import mlx.core as mx
import numpy as np
from tiles import SIMULATED, Noted, beside, extended, launches, percent_of_peak, work_on

import mlx_mittens as mm
from mlx_mittens import frontend
from mlx_mittens.apple.chips import Chip
from mlx_mittens.apple.model import chain, predict
from mlx_mittens.ops.custom import Output, int32, int64, launch
from mlx_mittens.simulator import PredictedLaunch

CHIPS = ("m1", "m2-max", "m3-max", "m4-max")
TYPES = {"float16": (mx.float16, "half"), "bfloat16": (mx.bfloat16, "bfloat16_t"), "float32": (mx.float32, "float")}
SIZE = (512, 4096, 4096)  # rows, columns and outputs
ROW = (4096, 4096)  # columns and outputs of one row
FILE = Path(__file__).parents[1] / "results" / "block-masked.md"
KERNELS = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"

HEAD = f"""# Products with masked blocks, predicted beside MLX's kernels

Predictions, not measurements: no Mac was at hand. `python bench/apple/block_masked.py --write`. MLX 0.32.4's
`block_masked_gemm`, and `gemv_masked` and `gemv_t_masked` for one row. The second operand is masked, by bools, or by
numbers where it says so: all of its blocks are there, or every other one. w is [outputs, columns] or, where it says so,
[columns, outputs]. A tile is simulated at {SIMULATED[0]} and at {SIMULATED[1]} columns and extended to
{" x ".join(map(str, SIZE))}; one row, of {" x ".join(map(str, ROW))}, is simulated as a whole. Percent are of the ALU's
peak in half types, of the products that are left. Speed is MLX's time by ours.
[docs/apple.md](../../docs/apple.md) says how far such predictions are off.
"""

NOTES = """## What falls short

- float32, blocks of 64, w [columns, outputs], with all blocks there: 0.94 on M1 and M2. Steps of 32 rows of w are at
  0.99 and spill.
"""

Simulated = Sequence[PredictedLaunch]


def instance(header: str, function: str, *template: object) -> tuple[str, str]:
    """Registers an instantiation of a kernel of MLX's.

    `block_masked_gemm` is two templates. The second, which MLX does not launch, is left out.
    """
    text = (KERNELS / header).read_text()
    if (second := text.find("bool has_operand_mask = false>")) >= 0:
        text = text[: text.rindex("template <", 0, second)]
    arguments = [str(a).lower() if isinstance(a, bool) else str(a) for a in template]
    kernel = "_".join([function, *arguments])
    headers = "".join(f'#include "mlx/backend/metal/kernels/{name}"\n' for name in ("utils.h", "steel/gemm/gemm.h"))
    instantiation = f'instantiate_kernel("{kernel}", {function}, {", ".join(arguments)})\n'
    frontend.register_source(f"mlx/{kernel}.metal", f"{headers}{text}\n{instantiation}")
    return f"mlx/{kernel}.metal", kernel


def of_blocks(shape: tuple[int, int], live: float, numbers: bool, dtype: mx.Dtype) -> mx.array:
    """A mask that keeps every block, or every other one in either direction."""
    m, n = np.indices(shape)
    mask = mx.array((m + n) % 2 == 0 if live < 1 else np.ones(shape, bool))
    return mask.astype(dtype) if numbers else mask


def draw(shape: Sequence[int], dtype: mx.Dtype, transpose: bool = False) -> mx.array:
    a = mx.random.normal(tuple(reversed(shape)) if transpose else tuple(shape)).astype(dtype)
    mx.eval(a)
    return a.T if transpose else a


@functools.cache
def our_tile(type_name: str, block: int, transpose: bool, live: float, numbers: bool) -> tuple[Simulated, int]:
    """A threadgroup at each number of columns, and its rows. Many of them are launched, as for all of the product."""
    dtype, _ = TYPES[type_name]
    rows, outputs = block, 152 * block  # enough for tiles of 64 rows to keep any GPU busy
    found = []
    for columns in SIMULATED:
        a, b = draw((rows, columns), dtype), draw((columns, outputs), dtype, transpose)
        mask = of_blocks((columns // block, 1), live, numbers, dtype)
        found.append(launches(mm.block_masked_mm(a, b, block, None, None, mask))[-1])
    kernel = found[0].launch.kernel
    tile = kernel.removeprefix("block_masked_mm_").removeprefix("columns_").removeprefix("tiles_").partition("_")[0]
    return found, int(tile.partition("x")[0])


@functools.cache
def their_tile(type_name: str, block: int, transpose: bool, live: float, numbers: bool) -> Simulated:
    """A threadgroup of MLX's kernel at each number of columns."""
    dtype, text = TYPES[type_name]
    mask_type = text if numbers else "bool"
    template = (text, "nomask_t", mask_type, block, block, 16, 2, 2, False, transpose, True, True)
    kernel = instance("steel/gemm/kernels/steel_gemm_masked.h", "block_masked_gemm", *template)
    found = []
    for columns in SIMULATED:
        a, b = draw((block, columns), dtype), draw((block, columns) if transpose else (columns, block), dtype)
        mask = of_blocks((columns // block, 1), live, numbers, dtype)
        sizes = (block, block, columns, columns, columns if transpose else block, block, 1, 1)
        arguments: dict[int, Any] = {0: a, 1: b, 3: Output([block, block], dtype)}
        params = struct.pack("=8i3q3i4x", *sizes, 0, 0, 0, 0, columns // 16, 1)
        arguments |= {4: params, 6: int32(1), 7: int64(*[0] * 5)}
        arguments |= {10: mx.ones((1,), mx.bool_), 11: mx.ones_like(mask), 12: mask, 13: int32(1, 0, 0, 1)}
        found.append(launches(launch(*kernel, arguments, [1, 1, 1], [32, 2, 2], stream=mx.cpu)[0])[-1])
    return found


def of_tiles(
    type_name: str, block: int, transpose: bool, live: float, numbers: bool, chip: Chip
) -> tuple[Noted, Noted]:
    rows, columns, outputs = SIZE
    size = 4 if type_name == "float32" else 2
    lines = size * (rows * (columns + outputs) + live * columns * outputs) / 128
    key = (type_name, block, transpose, live, numbers)
    ours, tile_rows = our_tile(*key)
    sides = ((ours, tile_rows, 152), (their_tile(*key), block, 1))
    times = []
    for found, rows_of_one, simulated in sides:
        threadgroups = -(-rows // rows_of_one) * -(-outputs // block)
        works = extended(found, chip, columns, threadgroups, lines)
        assert work_on(found[0], chip).threadgroups == simulated * (block // rows_of_one), "other tiles than expected"
        times.append(predict(works, chip).microseconds)
    percent = [percent_of_peak(2 * live * rows * columns * outputs, us, chip) for us in times]
    return (times[0], f" ({percent[0]:.0f})"), (times[1], f" ({percent[1]:.0f})")


def our_row(type_name: str, block: int, transpose: bool, live: float, chip: Chip) -> float:
    dtype, _ = TYPES[type_name]
    columns, outputs = ROW
    a, b = draw((1, columns), dtype), draw((columns, outputs), dtype, transpose)
    mask = of_blocks((columns // block, outputs // block), live, False, dtype)
    with mm.simulator.enabled(gpu=chip.name), mm.simulator.predicted(chip.name) as found, mm.strict():
        mx.eval(mm.block_masked_mm(a, b, block, None, None, mask))
    return chain([work_on(found[-1], chip)], chip).microseconds


@functools.cache
def their_row(type_name: str, block: int, transpose: bool, live: float) -> PredictedLaunch:
    """MLX's kernel, which calls w the matrix [outputs, columns], or its transpose."""
    dtype, text = TYPES[type_name]
    columns, outputs = ROW
    x, w = draw((columns,), dtype), draw((outputs, columns) if transpose else (columns, outputs), dtype)
    mask = of_blocks((columns // block, outputs // block), live, False, dtype)
    if transpose:
        sizes = (2, 1, 4, 8, 4, 4) if block == 32 else (4, 1, 2, 16, 4, 4)
        threadgroup = sizes[0] * sizes[2] * sizes[4]
    else:
        sizes = (1, 2, 8, 4, 4, 4) if block == 32 else (1, 4, 8, 4, 8, 4)
        threadgroup = sizes[1] * sizes[3] * sizes[5]
    function = "gemv_masked" if transpose else "gemv_t_masked"
    kernel = instance("gemv_masked.h", function, text, "nomask_t", "bool", *sizes, False)
    across = outputs // block  # from row to row of the mask
    of_w = (across, 1) if transpose else (1, across)
    of_x = (1, 1)
    arguments: dict[int, Any] = {0: w, 1: x, 3: Output([outputs], dtype), 4: int32(columns), 5: int32(outputs)}
    arguments |= {6: int32(columns if transpose else outputs), 9: int32(1), 10: int32(1), 11: int64(0), 12: int64(0)}
    arguments |= {20: mx.ones((1,), mx.bool_), 21: mask, 22: mx.ones((columns // block,), mx.bool_)}
    arguments |= {23: int32(*of_w, *of_x), 24: int64(0, 0)}
    threads = [32, sizes[1], sizes[0]]
    y = launch(*kernel, arguments, [-(-outputs // threadgroup), 1, 1], threads, stream=mx.cpu)[0]
    found = launches(y)[-1]
    wide = np.array(mx.repeat(mx.repeat(mask, block, 0), block, 1).astype(mx.float32))
    b = np.array((w.T if transpose else w).astype(mx.float32)) * wide
    right = np.array(x.astype(mx.float32)) @ b
    assert np.abs(np.array(y.astype(mx.float32)) - right).max() < 0.02 * np.abs(right).max(), "MLX's kernel is misused"
    return found


def of_row(type_name: str, block: int, transpose: bool, live: float, chip: Chip) -> tuple[Noted, Noted]:
    theirs = chain([work_on(their_row(type_name, block, transpose, live), chip)], chip).microseconds
    return (our_row(type_name, block, transpose, live, chip), ""), (theirs, "")


Times = Callable[[Chip], tuple[Noted, Noted]]


def rows(type_name: str) -> Iterator[tuple[str, Times]]:
    """Of the tiles."""
    for block in (64, 32):
        for transpose in (True, False):
            for numbers in (False, True):
                for live in (1, 0.5):
                    name = f"{block}, {'all' if live == 1 else 'half'}{', numbers' * numbers}"
                    name += "" if transpose else ", w [columns, outputs]"
                    yield name, partial(of_tiles, type_name, block, transpose, live, numbers)


def single_rows() -> Iterator[tuple[str, Times]]:
    for type_name in TYPES:
        for block in (64, 32):
            for transpose in (True, False):
                for live in (1, 0.5):
                    name = f"{type_name}, {block}, {'all' if live == 1 else 'half'}"
                    name += "" if transpose else ", w [columns, outputs]"
                    yield name, partial(of_row, type_name, block, transpose, live)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    lines = beside("One row", ("type, blocks", "us", "MLX's"), CHIPS, single_rows())
    for name in TYPES:
        lines += beside(f"512 rows, {name}", ("blocks", "us (%)", "MLX's"), CHIPS, rows(name))
    kept.show("\n".join([HEAD, *lines, NOTES]), FILE if arguments.write else None)


if __name__ == "__main__":
    main()
