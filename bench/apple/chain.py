"""Predicts published measurements of MLX's kernels as a user would: simulator, Mesa's machine code and model.

python bench/apple/chain.py           writes bench/results/apple-chain.md, and the table of docs/apple.md

`errors.py` holds the model to works that were derived from the sources of kernels. Here the kernels of the installed
MLX run in the simulator, on drawn inputs of the published shapes, and the works are its counts in their machine
code. It takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))

from works import Point, predict_point, read_points

from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import Prediction, Work, chain
from mlx_mittens.peer import mlx_metal, mlx_quantized
from mlx_mittens.prediction.launches import predict_launches
from mlx_mittens.simulator import PredictedLaunch, profiled

REPORT = Path(__file__).parents[1] / "results" / "apple-chain.md"
PAGE = Path(__file__).parents[2] / "docs" / "apple.md"
BEGIN, END = "<!-- chain: begin -->", "<!-- chain: end -->"
# How many values of softmax are simulated: its threadgroups all do the same on rows of their own.
_VALUES = 1 << 18


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of MLX's on one shape, as points have it.

    Attributes:
        family: Of its points.
        kernel: Their kernel, or its beginning.
        shape: Their shape, as a regular expression.
        dtype: Their type.
    """

    family: str
    kernel: str
    shape: str
    dtype: str

    def points(self) -> list[Point]:
        """The published measurements of it."""
        return [point for point in read_points() if self.has(point)]

    def has(self, point: Point) -> bool:
        """Whether a point is one of it."""
        return (
            (point.family, point.dtype) == (self.family, self.dtype)
            and re.fullmatch(self.kernel, point.kernel) is not None
            and re.fullmatch(self.shape, point.shape) is not None
        )


KERNELS = (
    Kernel("softmax", "softmax_single_row", "Softmax dim=1000000x64 axi=-1", "float32"),
    Kernel("softmax", "softmax_single_row", "Softmax dim=64x16x32x1024 axi=-1", "float32"),
    Kernel("softmax", "softmax_looped", "Softmax dim=64x1000000 axi=-1", "float32"),
    Kernel("gemv", "gemv", "8192x8192", "float32"),
    Kernel("gemv", "gemv", "1x5120 @ 17408x5120", "bfloat16"),
    Kernel("qmv", "affine_qmv_fast 4-bit gs64", "1x5120 @ 17408x5120", "bfloat16/4-bit"),
    Kernel("qmv", "affine_qmv_fast 4-bit gs64", "1x5120 @ 17408x5120", "4-bit"),
    Kernel("qmv", "affine_qmv_fast 2-bit gs64", "1x5120 @ 17408x5120", "2-bit"),
    Kernel("qmv", "affine_qmv_fast 4-bit gs64", "8192x8192", "4-bit"),
    Kernel("sdpa_decode", r"sdpa_vector_2pass_1\+2", "32q/8kv hd128 ctx 2048", "float16"),
    Kernel("sdpa_decode", r"sdpa_vector_2pass_1\+2", "32q/4kv hd128 ctx 2048", "float16"),
    Kernel("sdpa_decode", r"sdpa_vector_2pass_1_gqa\+2", "32q/4kv hd128 ctx 8192", "bfloat16"),
    Kernel("sdpa_decode", r"sdpa_vector_2pass_1_gqa\+2", "64q/8kv hd64 ctx 8192", "bfloat16"),
)
KINDS = {
    "softmax_single_row": "softmax of rows of 64 and 1024",
    "softmax_looped": "softmax of rows of a million",
    "gemv": "product with a vector, dense weights",
    "affine_qmv_fast": "product with a vector, 2-bit and 4-bit weights",
    "sdpa_vector_2pass_1": "attention of one query",
}
# Few launches, and done in seconds.
QUICK = KERNELS[:2]


def drawn(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Random values, repeated where there are many."""
    size = math.prod(shape)
    few = min(size, 1 << 16)
    if dtype == mx.uint32:
        values = mx.random.randint(0, 2**31 - 1, (few,), dtype, key=mx.random.key(0))
    else:
        values = (0.1 * mx.random.normal((few,), key=mx.random.key(1))).astype(dtype)
    return mx.concatenate([values] * math.ceil(size / few))[:size].reshape(shape)


Call = tuple[Callable[[], mx.array], float]  # and what part of the launch it is


def _softmax(point: Point) -> Call:
    *outer, columns = map(int, re.findall(r"\d+", point.shape.split("axi")[0]))
    rows = math.prod(outer)
    few = min(rows, max(1, _VALUES // columns))
    x = drawn((few, columns), mx.float32)
    return lambda: mlx_metal.softmax(x, stream=mx.cpu), rows / few


def _matrix(point: Point) -> tuple[int, int]:
    """Outputs and inputs of a product with one row."""
    outputs, inputs = map(int, re.findall(r"\d+", point.shape)[-2:])
    return outputs, inputs


def _gemv(point: Point) -> Call:
    outputs, inputs = _matrix(point)
    dtype = getattr(mx, point.dtype)
    w, x = drawn((outputs, inputs), dtype), drawn((1, inputs), dtype)
    return lambda: mlx_metal.gemv(w, x, stream=mx.cpu), 1


def _qmv(point: Point) -> Call:
    outputs, inputs = _matrix(point)
    dtype, bits = (
        mx.bfloat16,
        int(point.dtype.removesuffix("-bit")[-1]),
    )  # what mlx-lm's models have, where none is said
    w = drawn((outputs, inputs * bits // 32), mx.uint32)
    scales, x = drawn((outputs, inputs // 64), dtype), drawn((1, inputs), dtype)
    return lambda: mlx_quantized.quantized_matmul(x, w, scales, scales, bits=bits, stream=mx.cpu), 1


def _sdpa(point: Point) -> Call:
    found = re.match(r"(\d+)q/(\d+)kv hd(\d+) ctx (\d+)", point.shape)
    assert found is not None, point.shape
    heads, key_heads, width, keys = map(int, found.groups())
    dtype = getattr(mx, point.dtype)
    q, k = drawn((1, heads, 1, width), dtype), drawn((1, key_heads, keys, width), dtype)
    v = drawn(k.shape, dtype)
    return lambda: mlx_metal.scaled_dot_product_attention(q, k, v, scale=width**-0.5, stream=mx.cpu), 1


_CALLS: dict[str, Callable[[Point], Call]] = {
    "softmax": _softmax,
    "gemv": _gemv,
    "qmv": _qmv,
    "sdpa_decode": _sdpa,
}


@functools.cache
def simulated(kernel: Kernel) -> tuple[list[PredictedLaunch], float]:
    """The launches of a kernel, and how many of them make the published launch.

    Raises:
        RuntimeError: One does not compile.
    """
    point = kernel.points()[0]
    with mx.stream(mx.cpu):
        call, times = _CALLS[kernel.family](point)
        with profiled() as recorded:
            mx.eval(call())
    launches = predict_launches(recorded, find_chip(point.chip))
    for launch in launches:
        if launch.code is None:
            raise RuntimeError(f"{launch.launch.kernel} does not compile: {launch.problem}")
    return launches, times


def _scaled(work: Work, times: float) -> Work:
    return dataclasses.replace(
        work,
        threadgroups=times * work.threadgroups,
        lines=times * work.lines,
        summed_lines=times * work.summed_lines,
        instructions=times * work.instructions,
    )


def predicted(kernel: Kernel, point: Point) -> Prediction:
    """A point by the whole chain; the host's share of its time is added."""
    launches, times = simulated(kernel)
    chip = find_chip(point.chip)
    works = [work for launch in launches if (work := launch.on(chip).work) is not None]
    works = [dataclasses.replace(_scaled(work, times), cached="hot" in point.timing) for work in works]
    found = chain(works, chip)
    return Prediction(found.microseconds + point.overhead_us, found.limit, found.terms)


@dataclasses.dataclass(frozen=True)
class Row:
    """A point, and its predictions by the chain and from the source of its kernel."""

    kernel: Kernel
    point: Point
    chain: Prediction
    source: Prediction

    @property
    def error(self) -> float:
        """Of the chain, as a share of the measured time."""
        return self.chain.microseconds / self.point.time_us - 1

    @property
    def source_error(self) -> float:
        """Of the prediction from the kernel's source."""
        return self.source.microseconds / self.point.time_us - 1


def rows(kernels: tuple[Kernel, ...] = KERNELS) -> Iterator[Row]:
    """The points of kernels."""
    for kernel in kernels:
        for point in kernel.points():
            yield Row(kernel, point, predicted(kernel, point), predict_point(point))


def _summary(name: str, some: list[Row]) -> str:
    errors = [100 * abs(row.error) for row in some]
    bias = 100 * statistics.mean(row.error for row in some)
    source = statistics.median(100 * abs(row.source_error) for row in some)
    cells = [name, str(len(some)), *(f"{x:.0f}" for x in (statistics.median(errors), max(errors)))]
    return f"| {' | '.join([*cells, f'{bias:+.0f}', f'{source:.0f}'])} |"


def table(found: list[Row]) -> str:
    """The errors by kind."""
    lines = [
        "| kind | measurements | median error, % | largest, % | bias, % | median from sources, % |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for start, kind in KINDS.items():
        lines.append(_summary(kind, [row for row in found if row.point.kernel.startswith(start)]))
    return "\n".join([*lines, _summary("all", found)])


def report(found: list[Row]) -> str:
    """The tables as Markdown."""
    lines = [
        "# Predicted time on Apple GPUs: errors of the whole chain",
        "",
        "Made by `python bench/apple/chain.py`: MLX's own kernels in the simulator, in the machine code that Mesa's",
        "compiler makes of them, with the model's constants, against published measurements. Errors are in percent of",
        "the measured time, the host's share of it included. Those from sources are of `apple-model.md`, which takes",
        "what a kernel does from its source. Nothing was fitted to the chain.",
        "",
        table(found),
        "",
        "A launch counts each line once, however often it comes from memory. `softmax_looped` reads its rows of 4 MB",
        "twice, and no cache holds those of all threadgroups: its predictions are a third too low.",
        "",
        "| kernel | shape | type | chip | cached | us | chain, us | error | from sources | limited by | misses |",
        "|---|---|---|---|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in found:
        point = row.point
        misses = max(launch.mismatch for launch in simulated(row.kernel)[0])
        cells = [point.kernel, point.shape, point.dtype, point.chip, "yes" if "hot" in point.timing else ""]
        cells += [f"{point.time_us:.0f}", f"{row.chain.microseconds:.0f}", f"{100 * row.error:+.0f}"]
        cells += [f"{100 * row.source_error:+.0f}", row.chain.limit, f"{100 * misses:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "\"Misses\" is by how much the machine code's instructions miss the simulator's counts."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    done = list(rows())
    REPORT.write_text(report(done))
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(done)}\n{END}{rest.partition(END)[2]}")
    print(f"{REPORT} and the table of {PAGE}: written")
