"""The work of each published point's launches: one function for each family of points.

Bytes come with the points. Instructions are of the kernels' inner loops. Of MLX's qmv_fast, gemv and two-pass
attention they and the half registers were counted in the machine code that Mesa's compiler makes of them; of the rest
they follow from the sources. Nothing here is fitted, and nothing asks which point it is.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_mittens.apple.chips import Chip, find_chip
from mlx_mittens.apple.estimates import elementwise, matrix_product, norm, vector_product
from mlx_mittens.apple.model import CONSTANTS, LINE_BYTES, MATRIX_FLOP, Constants, Instructions, Prediction, Work, chain

POINTS = Path(__file__).parent / "points.csv"
# Every chip's system cache is at least as large.
_SMALLEST_SYSTEM_CACHE = 8e6
# mlx-benchmark computed Linear as a product and a sum until 2024-03-06, then as mx.addmm. Its tables of these versions
# are older. Of the two tables of 0.5.0, the M1 Pro's was measured again in the commit that made the change.
_PRODUCT_AND_SUM = {"?", "0.2.0"}
_PRODUCT_AND_SUM_TABLES = {("m2-max", "0.5.0")}
# MLX's gemv reads the vector without a detour from 0.15.1 on; no point is of 0.15.
_GEMV_READS_ALL = (0, 16)
# Kernels of a layer: 7 products, and norms, rotations, cache, scores, activation and sums. MLX fuses more of them.
_LLAMA_CPP_KERNELS = 23
_MLX_KERNELS = 17
# Of the two-pass attention by the width of a head; for bfloat16 it takes 147 where float16 takes 143.
_SDPA_REGISTERS = {64: 71, 128: 95, 256: 147}
_LLAMA_7B = {"layers": 32, "weights": 6.74e9, "width": 4096}
_LAYERS = {
    "Llama-3.1-8B": 32,
    "R1-Distill-Qwen-14B": 48,
    "Phi-4 14B": 40,
    "Gemma 3 12B": 48,
    "Qwen2.5-Coder-14B": 48,
    "Qwen2.5-7B": 28,
    "Mistral 7B": 32,
    "Qwen3.5-9B": 32,
}


@dataclass(frozen=True)
class Point:
    """A published measurement.

    Attributes:
        time_us: The time as published, or derived from a published rate.
        overhead_us: The host's part of it: the round trip of an `mx.eval` in the same table.
        bytes: Bytes that the kernel has to read and write; 0 where unknown.
        flops: Operations of products.
        first_model_us: Prediction of an earlier model, for comparison.
    """

    family: str
    kernel: str
    shape: str
    dtype: str
    chip: str
    framework: str
    version: str
    time_us: float
    overhead_us: float
    bytes: float
    flops: float
    timing: str
    source: str
    note: str
    first_model_us: float | None

    @property
    def kernel_us(self) -> float:
        """The time without the host's share; not positive where that was measured as larger."""
        return self.time_us - self.overhead_us


@functools.cache
def read_points() -> tuple[Point, ...]:
    """The points of points.csv."""
    numbers = ("time_us", "overhead_us", "bytes", "flops")
    points = []
    for row in csv.DictReader(POINTS.read_text().splitlines()):
        first = row.pop("first_model_us")
        values: dict = {name: float(cell or 0) if name in numbers else cell for name, cell in row.items()}
        points.append(Point(**values, first_model_us=float(first) if first else None))
    return tuple(points)


Launches = list[tuple[Work, int]]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _gemm(point: Point, chip: Chip) -> Launches:
    size = 4 if point.dtype == "float32" else 2
    nax = point.kernel.endswith("nax")
    if point.shape.startswith("Linear"):
        batch, m, k, n = _numbers(point.shape.replace("dim", ""))[0:3] + _numbers(point.shape)[-1:]
        product = (matrix_product(1, batch * m, n, k, point.dtype, size), 1)
        if point.version in _PRODUCT_AND_SUM or (point.chip, point.version) in _PRODUCT_AND_SUM_TABLES:
            values = batch * m * n
            return [product, (elementwise(values, 2 * values * size, Instructions(floats=1)), 1)]
        return [product]
    if point.shape.startswith("MatMul"):
        first, second = (_numbers(part) for part in point.shape.split("dim=")[1:])
        if len(second) == 2:  # one right side: its products are one
            return [(matrix_product(1, math.prod(first[:-1]), second[1], first[-1], point.dtype, size), 1)]
        return [(matrix_product(first[0], first[1], second[2], first[2], point.dtype, size), 1)]
    if "^3" in point.shape:
        m = k = n = _numbers(point.shape)[0]
    else:
        m, k, _, n = _numbers(point.shape)
    return [(matrix_product(1, m, n, k, point.dtype, size, nax), 1)]


def _release(version: str) -> tuple[int, int]:
    """Major and minor of MLX's version. A table without a version is older than all tables with one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _gemm_skinny(point: Point, chip: Chip) -> Launches:
    """Few rows of a product in tiles of 64: the multiplies are of whole tiles, the bytes of the rows there are."""
    m, k, n, _ = _numbers(point.shape)
    return [(matrix_product(1, m, n, k, point.dtype, 2), 1)]


def _gemv(point: Point, chip: Chip) -> Launches:
    """MLX's gemv: 8 simdgroups of 4 rows, a lane takes 4 neighbouring values of each row at a time.

    Before 0.15.1 the vector came through threadgroup memory: a step waited for it, and then for the matrix.
    """
    if point.shape.startswith("Linear"):
        batch, _, k = _numbers(point.shape)[0:3]
        rows, size = batch, 4  # the vector is the weight, and the rows of the matrix are the batch
    else:
        numbers = _numbers(point.shape)
        rows, k = numbers[-2], numbers[-1]
        size = 4 if point.dtype == "float32" else 2
    staged = _release(point.version) < _GEMV_READS_ALL
    return [(vector_product(rows, k, size, 2 if staged else 1), 1)]


def _softmax(point: Point, chip: Chip) -> Launches:
    """A threadgroup a row; a lane takes 4 neighbouring values."""
    shape = _numbers(point.shape.split("axi")[0])
    columns, rows = shape[-1], math.prod(shape[:-1])
    looped = "looped" in point.kernel
    threads = 1024 if looped else min(1024, math.ceil(columns / 128) * 32)
    simdgroups = rows * threads / 32
    work = Work(
        threadgroups=rows,
        threads=threads,
        half_registers=59 if looped else 43,
        lines=point.bytes / LINE_BYTES,
        instructions=rows * columns / 32 * Instructions(floats=5, exponentials=1, loads=0.25, stores=0.25)
        + simdgroups * Instructions(reductions=4, loads=2, stores=2, integers=12, control=10, reciprocals=1),
        rounds=(2 * columns / 4096 if looped else 1) + 2,
    )
    return [(work, 1)]


def _layer_norm(point: Point, chip: Chip) -> Launches:
    *outer, columns = _numbers(point.shape)
    return [(norm(math.prod(outer), columns, point.bytes), 1)]


def _mapped(point: Point, chip: Chip) -> Launches:
    """ReLU, Sigmoid and a copy: the bytes of the input and of the output."""
    each = Instructions(floats=1, exponentials=1, reciprocals=1) if "Sigmoid" in point.shape else Instructions(floats=1)
    return [(elementwise(point.bytes / 8, point.bytes, each), 1)]


def _reduce_all(point: Point, chip: Chip) -> Launches:
    """A first launch of at most a few hundred threadgroups that loop over their share, and one that sums theirs."""
    values = point.bytes / 4
    each = Instructions(floats=1, loads=0.25, integers=0.25, control=0.25)
    first = Work(
        threadgroups=512,
        threads=1024,
        lines=point.bytes / LINE_BYTES,
        instructions=values / 32 * each,
        rounds=values / (512 * 1024) / 16,
    )
    return [(first, 1), (Work(threads=512, lines=16, instructions=Instructions(reductions=32), rounds=2), 1)]


def _qmv(point: Point, chip: Chip) -> Launches:
    """MLX's qmv_fast: two simdgroups of 4 rows, a lane has 16 values of x for 64 weights.

    A weight takes a mask, a conversion and a multiply-add. Scales, biases and x come once for the 64 and are 24 values.
    """
    numbers = _numbers(point.shape)
    if "@" in point.shape:
        m, k, n, _ = numbers
    else:
        m, (n, k) = 1, numbers
    each = Instructions(integers=96, conversions=64, floats=99, loads=16, control=15)
    each = each + 24 * _widened(point.dtype, chip)
    steps = k / 512
    work = Work(
        threadgroups=m * math.ceil(n / 8),
        threads=64,
        half_registers=87,
        lines=point.bytes / LINE_BYTES,
        summed_lines=m * point.bytes / LINE_BYTES,
        instructions=m * n / 4 * steps * each + m * n / 4 * Instructions(reductions=4, stores=1, integers=30),
        rounds=steps,
        cached="hot" in point.timing,
    )
    return [(work, 1)]


def _qmm(point: Point, chip: Chip) -> Launches:
    """MLX's qmm_t: tiles of 32x32 outputs, four simdgroups of 16x16, 32 of K at a time, and fragments of float.

    Both operands go through threadgroup memory, for which the weights are unpacked once in 32 rows. Instructions are
    as the loop in the machine code has them, for each multiply. M1 and M2 widen bfloat16.
    """
    m, k, n, _ = _numbers(point.shape)
    tiles = math.ceil(m / 32) * math.ceil(n / 32)
    multiplies = tiles * 16 * math.ceil(k / 8)
    each = Instructions(matrix=1, loads=2, stores=1, floats=0.56, conversions=0.5, integers=4.9)
    if "bfloat16" in point.dtype and not chip.native_bfloat:
        each = replace(each, integers=7.9, conversions=0, multiplies=2.6)
    work = Work(
        threadgroups=tiles,
        threads=128,
        half_registers=144,
        lines=point.bytes / LINE_BYTES,
        summed_lines=(tiles * 32 * k * 2 + math.ceil(m / 32) * n * k * 0.5625) / LINE_BYTES,
        instructions=multiplies * each,
        rounds=k / 32,
    )
    return [(work, 1)]


def _widened(dtype: str, chip: Chip) -> Instructions:
    """Instructions for a bfloat16 operand: M1 and M2 shift it into a float."""
    if "float16" in dtype and "bfloat16" not in dtype or chip.native_bfloat:
        return Instructions()
    return Instructions(multiplies=1)


def _sdpa_blocks(chip: Chip, heads_a_group: int, keys: int) -> int:
    """In how many blocks MLX's two-pass attention splits the keys."""
    if chip.tier == "ultra":
        if heads_a_group <= 2 and keys > 8192:
            return 256
        if heads_a_group >= 6 and keys >= 16384:
            return 512 if keys < 65536 else 1024
        return 128
    if chip.tier in ("pro", "max"):
        if keys <= 1024 or heads_a_group <= 4:
            return 64
        return next((blocks for most, blocks in ((8192, 128), (32768, 256), (65536, 512)) if keys <= most), 1024)
    return 64 if heads_a_group >= 4 else 32


def _sdpa_decode(point: Point, chip: Chip) -> Launches:
    """MLX's sdpa_vector_2pass_1 and _2: a simdgroup takes one key of each round of blocks, of one head.

    A key takes two loads that are waited for, a dot product, a sum over the simdgroup, two exponentials, and scaling
    and adding to the output. The variant for eight heads a group reads key and value together, once for four heads
    (D = 128) or eight (D = 64) in a simdgroup, which has as much fewer keys.
    """
    shape = re.match(r"(\d+)q/(\d+)kv hd(\d+) (?:ctx |L=(\d+) S=)(\d+)", point.shape)
    if shape is None:
        raise ValueError(f"{point.shape!r} is no shape of attention")
    heads, groups, width, queries, keys = (int(number or 1) for number in shape.groups())
    heads_a_group = heads // groups * queries
    blocks = _sdpa_blocks(chip, heads_a_group, keys)
    lanes_values = width / 32
    shared = {64: 8, 128: 4}[width] if "gqa" in point.kernel else 1
    loads = 2 * max(1, lanes_values / 4)
    each_head = Instructions(floats=7 + 3 * lanes_values, integers=1.5, reductions=1, exponentials=2)
    each_key = Instructions(loads=loads, integers=7.5, control=3 + loads)
    each_key = each_key + 2 * lanes_values * _widened(point.dtype, chip)
    keys_of_simdgroups = heads * queries * keys
    # Masked keys of later queries are few: L queries at the end of S keys.
    first = Work(
        threadgroups=groups * blocks,
        threads=min(1024, 32 * heads_a_group),
        half_registers=_SDPA_REGISTERS[width],
        lines=point.bytes / LINE_BYTES,
        instructions=keys_of_simdgroups * each_head + keys_of_simdgroups / shared * each_key,
        rounds=keys / blocks / shared if shared > 1 else 2 * keys / blocks,
    )
    partial = heads * queries * blocks * (width * 2 + 8)
    steps = blocks / 32
    second = Work(
        threadgroups=heads * queries,
        threads=1024,
        half_registers=47,
        lines=partial / LINE_BYTES,
        instructions=heads
        * queries
        * 32
        * (
            steps
            * Instructions(loads=5, exponentials=2, floats=7 + lanes_values, integers=22, multiplies=2, control=14)
            + lanes_values * Instructions(reductions=1, loads=1, stores=1, reciprocals=1, control=4)
        ),
        rounds=3 * steps,
    )
    return [(first, 1), (second, 1)]


def _gemv_llama(point: Point, chip: Chip) -> Launches:
    """llama.cpp's mul_mv of q4_K: a mask, a conversion and a multiply-add a weight; a loop over the same weights."""
    _, k, n, _ = _numbers(point.shape)
    work = Work(
        threadgroups=math.ceil(n / 4),
        threads=64,
        lines=point.bytes / LINE_BYTES,
        instructions=n * k / 32 * Instructions(integers=1.25, conversions=1, floats=1.25, loads=0.2, control=0.1),
        rounds=k / 1024,
        cached=point.bytes < _SMALLEST_SYSTEM_CACHE,
    )
    return [(work, 1)]


def _launch(point: Point, chip: Chip) -> Launches:
    return [(Work(), _numbers(point.shape)[0])]


# Instructions of a lane for a weight: 16-bit weights are operands, 8-bit ones are converted, 4-bit ones masked.
_OF_A_WEIGHT = {
    "F16": Instructions(),
    "Q8_0": Instructions(conversions=1),
    "Q4_0": Instructions(conversions=1, integers=1),
    "4-bit": Instructions(conversions=1, integers=1),
    "4-bit gs64": Instructions(conversions=1, integers=1),
}


def _decode_model(point: Point, chip: Chip) -> Launches:
    """One token: all weights are read once, in products of a vector, and each layer's kernels wait for one another."""
    if point.framework == "llama.cpp":
        layers, weights, kernels = _LLAMA_7B["layers"], _LLAMA_7B["weights"], _LLAMA_CPP_KERNELS
        cache = layers * 2 * _LLAMA_7B["width"] * 2 * 64  # 64 tokens of 128 are the mean
    else:
        layers = _LAYERS[point.shape.removesuffix(" decode")]
        weights, kernels, cache = point.bytes / 0.5625, _MLX_KERNELS, 0  # 4 bits, and scale and bias of 64
    of_a_weight = _OF_A_WEIGHT[point.dtype] + Instructions(floats=1, loads=0.25, integers=0.25, control=0.05)
    work = Work(
        threadgroups=1e5,
        threads=64,
        lines=(point.bytes + cache) / LINE_BYTES,
        instructions=weights / 32 * of_a_weight,
    )
    return [(Work(lines=1), int(layers * kernels) - 1), (work, 1)]


def _prefill_model(point: Point, chip: Chip) -> Launches:
    """A prompt of 512 tokens: llama.cpp's mul_mm, 64 outputs by 32 tokens in a threadgroup of four simdgroups.

    A weight is brought to half once for 32 tokens. Six fragments serve eight multiplies of a simdgroup.
    """
    multiplies = point.flops / MATRIX_FLOP
    tiles = point.flops / 2 / (64 * 32 * _LLAMA_7B["width"])
    steps = _LLAMA_7B["width"] / 32
    of_a_weight = Instructions() if point.dtype == "F16" else _OF_A_WEIGHT[point.dtype] + Instructions(floats=1)
    work = Work(
        threadgroups=tiles,
        threads=128,
        half_registers=144,
        lines=_LLAMA_7B["weights"] * {"F16": 2, "Q8_0": 1.0625, "Q4_0": 0.5625}[point.dtype] / LINE_BYTES,
        instructions=Instructions(matrix=multiplies, fragments=0.75 * multiplies)
        + tiles * 4 * steps * Instructions(loads=6, stores=6, integers=6, control=4)
        + _LLAMA_7B["weights"] * 512 / 32 / 32 * of_a_weight,
        matrix_dtype="float16",
        tensor_units=True,
    )
    return [(Work(lines=1), int(_LLAMA_7B["layers"] * _LLAMA_CPP_KERNELS) - 1), (work, 1)]


FAMILIES: dict[str, Callable[[Point, Chip], Launches]] = {
    "gemm": _gemm,
    "gemm_skinny": _gemm_skinny,
    "gemv": _gemv,
    "elementwise": _mapped,
    "copy": _mapped,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "reduce_all": _reduce_all,
    "qmv": _qmv,
    "qmm": _qmm,
    "gemv_llama": _gemv_llama,
    "sdpa_decode": _sdpa_decode,
    "decode_model": _decode_model,
    "prefill_model": _prefill_model,
    "launch": _launch,
}


def launches(point: Point) -> Launches:
    """The launches of a point and how often each runs."""
    return FAMILIES[point.family](point, find_chip(point.chip))


def predict_point(
    point: Point, constants: Constants = CONSTANTS, chip: Chip | None = None, works: Launches | None = None
) -> Prediction:
    """Predicts a point as it was measured: the host's share of its time is added to the launches.

    Args:
        point: The point.
        constants: The model's numbers.
        chip: A chip in the place of the point's, for example without its measured constants.
        works: The launches, if they are there already.
    """
    parts = launches(point) if works is None else works
    found = chain([work for work, _ in parts], chip or find_chip(point.chip), constants, [times for _, times in parts])
    return Prediction(found.microseconds + point.overhead_us, found.limit, found.terms)
