"""Rows of the table of ops that multiply with a matrix of weights; `specs` puts them together.

The shape of a case is ``(rows, columns, outputs)``: so many rows of x, each of so many columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..ops.matmul import (
    block_dequantize,
    block_matmul,
    block_quantize,
    gemv,
    matmul,
    quantized_matmul,
    quantized_matmuls,
    quantized_swiglu,
)
from . import gguf, normed, reference
from .op import (
    FLOAT_MODES,
    Case,
    Exact,
    ModelOp,
    Op,
    add_outliers,
    draw_packed,
    gated,
    mode_of,
    on_all_cores,
    weight_bytes,
    widen,
)

# Numbers that are drawn; larger arrays repeat them, which no row length divides.
_DRAWN = 2**24 + 43

# Weights that are widened to float64 at once.
_PIECE = 2**22


@dataclass(frozen=True, kw_only=True)
class MatrixOp(ModelOp):
    """An op on x and weights. `draw` is told by `layout` which weights.

    The table's gradients are by dense weights and x, and by x alone where weights are affine.
    """

    layout: str = "dense"

    def link(self, case: Case) -> int:
        names = [name for name, _ in self.parameters]
        return names.index("x") if "x" in names else 0  # weights alone, of the ops on blocks

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        rows, columns, outputs = case.shape
        options = self.arguments(case)
        w = (outputs, columns) if options.get("transpose", True) else (columns, outputs)
        if self.layout == "dense":
            dense: dict[str, tuple[int, ...]] = {"w": w, "x": (rows, columns), "bias": (outputs,)}
            return [dense[name] for name, _ in self.parameters]
        if self.layout == "blocks":
            return [(rows, columns), (outputs, gguf.KINDS[options["kind"]].row_bytes(columns))]
        if self.layout == "block":
            row_bytes = gguf.KINDS[options["kind"]].row_bytes(columns)
            return [(rows, row_bytes if self.name == "block_dequantize" else columns)]
        groups = (w[0], w[1] // options["group_size"])
        triple = [(w[0], w[1] * options["bits"] // 32), groups, groups]
        return [(rows, columns), *triple * (2 if self.layout == "gated" else 1)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        # Weights of a size that makes results about one; a view of every other row where the case says so.
        scale = case.shape[1] ** -0.5
        step = 2 if case.label == "strided" else 1
        arrays: list[mx.array | None] = []
        for (name, _), shape in zip(self.parameters, self.shapes(case), strict=True):
            without_biases = name.endswith("biases") and mode_of(self.arguments(case)) != "affine"
            if without_biases or (name == "bias" and not has_bias(case)):
                arrays.append(None)
                continue
            shape = (shape[0] * step, *shape[1:]) if name not in ("x", "bias") else shape
            array = _draw(rng, name, shape, scale, dtype, self.arguments(case))
            arrays.append(array[::step] if name not in ("x", "bias") else array)
        return arrays

    def cotangents(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array]:
        if not case.vjp:
            return []
        rows, _, outputs = case.shape
        return [_draw(rng, "x", (rows, outputs), 1.0, dtype, {})]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        rows, columns, outputs = case.shape
        options = self.arguments(case)
        if case.vjp:  # the weights and the cotangent are read, x is where there is a gradient of the weights
            dense = self.layout == "dense"
            weights = columns * outputs * (2.0 * dtype.size if dense else options["bits"] / 8)
            return int(weights) + dtype.size * rows * (outputs + (2 if dense else 1) * columns)
        sizes = {"w": 4 if self.layout != "dense" else dtype.size, "blocks": 1, "gate": 4, "up": 4}
        if mode_of(options) != "affine":
            sizes |= {name: 1 for name, _ in self.parameters if name.endswith("scales")}
            sizes |= {name: 0 for name, _ in self.parameters if name.endswith("biases")}
        inputs = sum(
            sizes.get(name, dtype.size) * int(np.prod(shape))
            for (name, _), shape in zip(self.parameters, self.shapes(case), strict=True)
        )
        if self.layout != "block":
            return inputs + rows * outputs * dtype.size
        row_bytes = gguf.KINDS[options["kind"]].row_bytes(columns)
        return inputs + rows * (columns * dtype.size if self.name == "block_dequantize" else row_bytes)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        given = [a for a in arrays if a is not None]  # without a bias that is not there, the last of its op
        if self.layout == "block":
            return [self._exact_blocks(given[0], options)]
        bias = arrays[2] if self.layout == "dense" else None
        link = self.link(case)
        x, weights = given[link], [given[1 - link]] if self.layout == "dense" else given[1:]
        if case.vjp:
            dy = widen(cotangents[0])
            by_x = _product(dy, weights, options, self.layout, transpose=False)
            return [_product_of(dy.T, widen(x)), by_x] if self.layout == "dense" else [by_x]
        product = lambda part: _product(widen(x), part, options, self.layout, options.get("transpose", True))
        if self.layout == "gated":
            half = len(weights) // 2
            if options.get("is_normed"):
                row, _ = normed.exact_row(widen(x), product(weights[:half]).value)
                product = lambda part: _product(row, part, options, self.layout, True)
            activation = options.get("activation", "swiglu")
            return [gated(product(weights[:half]), product(weights[half:]), activation)]
        sums = product(weights)
        return [sums if bias is None else Exact(sums.value + widen(bias), sums.magnitude)]

    def _exact_blocks(self, array: mx.array, options: dict[str, Any]) -> Exact:
        if self.name == "block_dequantize":
            return Exact(gguf.weights(np.array(array), options["kind"]))
        return Exact(_quantized_blocks(np.array(array.astype(mx.float32)), options["kind"]).astype(np.float64))


@dataclass(frozen=True, kw_only=True)
class MatricesOp(ModelOp):
    """An x, three quantized matrices and their biases.

    The shape of a case is ``(rows, columns, outputs of each..)``.
    """

    smallest = (1, 64, 8, 4, 1)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        rows, columns, *outputs = case.shape
        options = self.arguments(case)
        groups = columns // options["group_size"]
        triples = [shape for n in outputs for shape in ((n, columns * options["bits"] // 32), (n, groups), (n, groups))]
        return [(rows, columns), *triples, *((n,) for n in outputs)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        options = self.arguments(case)
        arrays: list[mx.array | None] = []
        for (name, _), shape in zip(self.parameters, self.shapes(case), strict=True):
            is_bias = name.startswith("bias")
            without = name.endswith("biases") and mode_of(options) != "affine"
            if without or (is_bias and not has_bias(case)):
                arrays.append(None)
            else:
                kind = "x" if is_bias else name
                arrays.append(_draw(rng, kind, shape, case.shape[1] ** -0.5, dtype, options))
        return arrays

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        rows, columns, *outputs = case.shape
        options = self.arguments(case)
        weights = int(columns * sum(outputs) * weight_bytes(options, dtype))
        return weights + dtype.size * rows * (columns + sum(outputs))

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        x, biases = widen(arrays[0]), arrays[10:]
        assert x is not None
        found = []
        for i, bias in enumerate(biases):
            triple = [a for a in arrays[1 + 3 * i : 4 + 3 * i] if a is not None]
            sums = _product(x, triple, options, "affine", True)
            if options.get("is_normed") and i == 0:
                product = sums.value if bias is None else sums.value + widen(bias)
                x, total = normed.exact_row(x, product)
                found.append(Exact(total, sums.magnitude))
                continue
            found.append(sums if bias is None else Exact(sums.value + widen(bias), sums.magnitude))
        return found


def has_bias(case: Case) -> bool:
    """Models are timed without a bias, which mx would need another kernel for."""
    return case.label in ("test", "strided")


def _draw(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], scale: float, dtype: mx.Dtype, options: dict[str, Any]
) -> mx.array:
    if "bits" in options and name != "x":
        return draw_packed(rng, name, shape, options["bits"], dtype, scale, mode_of(options))
    if name == "blocks":
        kind = gguf.KINDS[options["kind"]]
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // kind.bytes, kind.bytes), dtype=np.uint8)
        for at, step in zip(kind.halves, (kind.step, kind.minimum), strict=False):
            halves = (rng.uniform(0.5, 1.5, blocks.shape[:-1]) * (scale * step)).astype(np.float16)
            blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
        if kind.scales:
            smaller = round(-np.log2(scale)) * (8 if kind.scales > 1 else 1)  # the exponent begins at bit 3, or 0
            scales = rng.integers(-2, 3, (*blocks.shape[:-1], kind.scales)) + max(kind.scale - smaller, 2)
            blocks[..., : kind.scales] = scales
        return mx.array(blocks.reshape(shape))
    size = int(np.prod(shape))
    a = rng.standard_normal(min(size, _DRAWN), dtype=np.float32)
    a = a.reshape(shape) if size <= _DRAWN else np.resize(a, shape)
    if name == "w" and options.get("kind") is None:
        a *= np.float32(scale)
    add_outliers(rng, a)
    return mx.array(a).astype(dtype)


def _quantized_blocks(w: np.ndarray, kind: str) -> np.ndarray:
    """GGUF blocks of float32 weights, every step rounded to float32."""
    w = w.reshape(*w.shape[:-1], -1, 32)
    largest = np.take_along_axis(w, np.abs(w).argmax(-1)[..., None], -1)
    d = largest / np.float32(-8) if kind == "q4_0" else np.abs(largest) / np.float32(127)
    with np.errstate(divide="ignore"):
        scaled = w * np.where(d == 0, np.float32(0), np.float32(1) / d)
    if kind == "q4_0":
        integers = np.clip(np.trunc(scaled + np.float32(8.5)), 0, 15).astype(np.uint8)
        integers = integers[..., :16] | integers[..., 16:] << 4
    else:
        whole = np.floor(np.abs(scaled))
        rounded = whole + np.floor(2 * (np.abs(scaled) - whole))
        integers = (np.sign(scaled) * rounded).astype(np.int8).view(np.uint8)
    blocks = np.concatenate([d.astype(np.float16).view(np.uint8), integers], axis=-1)
    return blocks.reshape(*blocks.shape[:-2], -1)


def _rows_of(weights: Sequence[np.ndarray], options: dict[str, Any], layout: str) -> np.ndarray:
    """Some rows of weights in float64."""
    if layout == "dense":
        return weights[0].astype(np.float64)
    if layout == "blocks":
        return gguf.weights(weights[0], options["kind"])
    words, scales = weights[:2]
    biases = weights[2] if len(weights) > 2 else None
    mode = mode_of(options)
    return reference.dequantize(words, scales, biases, options["group_size"], options["bits"], mode)


def _product(
    x: np.ndarray, weights: Sequence[mx.array], options: dict[str, Any], layout: str, transpose: bool
) -> Exact:
    """x times weights, and the size that such a sum of terms has; weights are widened piece by piece."""
    narrow = [np.array(a if a.dtype in (mx.uint32, mx.uint8) else a.astype(mx.float32)) for a in weights]
    columns = x.shape[-1]
    step = max(1, _PIECE // max(columns, 1))

    def piece(start: int) -> tuple[np.ndarray, np.ndarray]:
        w = _rows_of([a[start : start + step] for a in narrow], options, layout)
        part = x if transpose else x[:, start : start + step]
        w = w.T if transpose else w
        return part @ w, (part * part) @ (w * w)

    values, squares = zip(*on_all_cores(piece, range(0, len(narrow[0]), step)))
    if transpose:
        return Exact(np.concatenate(values, -1), np.sqrt(np.concatenate(squares, -1)))
    return Exact(sum(values), np.sqrt(sum(squares)))


def _product_of(a: np.ndarray, b: np.ndarray) -> Exact:
    return Exact(a @ b, np.sqrt((a * a) @ (b * b)))


def _quantized_swiglu(x, gate, gate_scales, gate_biases, up, up_scales, up_biases, is_normed=False, **options):
    both = (gate, gate_scales, gate_biases), (up, up_scales, up_biases)
    triples = [[a for a in triple if a is not None] for triple in both]
    return normed.swiglu(x, *triples, options) if is_normed else quantized_swiglu(x, *triples, **options)


def _matrices_of(arrays):
    """The triples of three matrices, and their biases if there are any."""
    triples = [[a for a in arrays[i : i + 3] if a is not None] for i in (0, 3, 6)]
    return triples, None if arrays[9] is None else arrays[9:]


def _quantized_matmuls(x, *arrays, is_normed=False, **options):
    triples, bias = _matrices_of(arrays)
    if is_normed:
        return normed.matmuls(x, triples, bias, options)
    return quantized_matmuls(x, triples, bias=bias, **options)


def _mx_matmuls(x, *arrays, is_normed=False, **options):
    triples, bias = _matrices_of(arrays)
    total = []
    if is_normed:
        x, *total = normed.row_of_mx(x, triples[0], bias, options)
        triples, bias = triples[1:], None if bias is None else bias[1:]
    products = [mx.quantized_matmul(x, *triple, transpose=True, **options) for triple in triples]
    return [*total, *(products if bias is None else [y + b for y, b in zip(products, bias)])]


def _mx_quantized_matmul(*arrays, exact=False, **options):
    return mx.quantized_matmul(*arrays, **options)


def _mx_swiglu(
    x,
    gate,
    gate_scales,
    gate_biases,
    up,
    up_scales,
    up_biases,
    activation="swiglu",
    is_normed=False,
    exact=False,
    **options,
):
    if is_normed:
        triple = [a for a in (gate, gate_scales, gate_biases) if a is not None]
        x, _ = normed.row_of_mx(x, triple, None, options)
    linear = mx.quantized_matmul(x, gate, gate_scales, gate_biases, **options)
    return gated_by_mx(linear, mx.quantized_matmul(x, up, up_scales, up_biases, **options), activation)


def gated_by_mx(gate: mx.array, up: mx.array, activation: str) -> mx.array:
    """What models compute of two products in the place of our gated ones."""
    return (nn.gelu_approx(gate) if activation == "geglu" else gate * mx.sigmoid(gate)) * up


def _mx_matmul(x, w, bias=None, transpose=True):
    return _mx_gemv(w, x, bias, transpose)


def _mx_gemv(w, x, bias=None, transpose=True):
    y = x @ (w.T if transpose else w)
    return y if bias is None else y + bias


def _mx_blocks(x, blocks, kind):
    return x @ _mx_dequantize(blocks, kind, x.dtype).T


def _mx_dequantize(blocks, kind, dtype=mx.float32):
    if kind not in ("q4_0", "q8_0"):
        return mx.array(gguf.weights(np.array(blocks), kind).astype(np.float32)).astype(dtype)
    parts = blocks.reshape(*blocks.shape[:-1], -1, gguf.KINDS[kind].bytes)
    d = mx.view(mx.contiguous(parts[..., :2]), mx.float16).astype(mx.float32)
    if kind == "q8_0":
        integers = mx.view(mx.contiguous(parts[..., 2:]), mx.int8).astype(mx.float32)
    else:
        integers = mx.concatenate([parts[..., 2:] & 15, parts[..., 2:] >> 4], axis=-1).astype(mx.float32) - 8
    return (d * integers).reshape(*blocks.shape[:-1], -1).astype(dtype)


def _mx_quantize(w, kind):
    return mx.array(_quantized_blocks(np.array(w.astype(mx.float32)), kind))


def _tests(
    *shapes: tuple[int, int, int],
    label: str = "test",
    gpu: Literal["apple", "nvidia"] = "apple",
    cpu_only: bool = False,
    apple_only: bool = False,
    **options: Any,
) -> tuple[Case, ...]:
    return tuple(Case(label, shape, options, gpu=gpu, cpu_only=cpu_only, apple_only=apple_only) for shape in shapes)


# The layers that one token passes, as (columns, outputs), and the last one.
_MODELS = {
    "Llama-3.2-1B": ((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048), (2048, 128256)),
    "Llama-3.1-8B": ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 128256)),
    "Qwen3-0.6B": ((1024, 2048), (1024, 1024), (2048, 1024), (1024, 3072), (3072, 1024), (1024, 151936)),
    "Qwen3-8B": ((4096, 12288), (12288, 4096), (4096, 151936)),
    "Qwen2.5-0.5B": ((896, 896), (896, 128), (896, 4864), (4864, 896), (896, 151936)),
    "Gemma 3 1B": ((1152, 1024), (1152, 256), (1024, 1152), (1152, 6912), (6912, 1152), (1152, 262144)),
    "gpt-oss 20B": ((2880, 4096), (2880, 512), (4096, 2880), (2880, 201088)),
}

# Cases that are timed on a CPU too, and in the benchmark's short form.
_ON_CPU = {("Llama-3.1-8B", 4096, 4096), ("Llama-3.1-8B", 4096, 14336), ("Qwen2.5-0.5B", 896, 4864)}
_QUICK = {("Llama-3.1-8B", 4096, 4096)}


# Training of a layer, and of an adapter's two products, on one batch.
def _training(*shapes: tuple[int, int, int], label: str, **options: Any) -> tuple[Case, ...]:
    return tuple(Case(label, shape, options, vjp=True, cpu_only=True) for shape in shapes)


# A prompt through a layer, small enough that mx needs seconds: its products in half types are slow on a CPU.
def _prompts(*shapes: tuple[int, int, int], **options: Any) -> tuple[Case, ...]:
    return tuple(Case("Qwen2.5-0.5B prompt", shape, options, cpu_only=True) for shape in shapes)


def _timed_on_cpu(model: str, rows: int, columns: int, outputs: int) -> bool:
    """Of several rows one large layer, since mx needs minutes for all of them."""
    small = columns < 1024
    return (model, columns, outputs) in _ON_CPU and (small or rows == 1 or (rows == 8 and outputs == columns))


def _models(rows: tuple[int, ...] = (1,), **options: Any) -> tuple[Case, ...]:
    """The layers of the models for one row, and some of them for more rows."""
    return tuple(
        Case(
            model,
            (m, columns, outputs),
            options,
            quick=m == 1 and (model, columns, outputs) in _QUICK,
            gpu_only=not _timed_on_cpu(model, m, columns, outputs),
        )
        for m in rows
        for model, layers in _MODELS.items()
        for columns, outputs in layers
        if m == 1 or (model, columns, outputs) in _ON_CPU
    )


# Tiles of 32 and of 64 rows, with tails of rows, columns and outputs.
_TILES = ((19, 160, 133), (37, 160, 69))
_TRANSPOSED_TILES = ((19, 41, 160), (37, 72, 96))


def _tile_tests(shapes: Sequence[tuple[int, int, int]], **options: Any) -> tuple[Case, ...]:
    """Cases in each format. The first shape is for tiles of 32 rows: 2, 3, 5 and 6 bits have no other tiles."""
    formats: list[tuple[dict[str, Any], bool]] = [
        *(({"group_size": 32, "bits": bits}, bits in (4, 8)) for bits in (2, 3, 4, 5, 6, 8)),
        *(({"group_size": size, "bits": bits, "mode": mode}, True) for mode, bits, size in FLOAT_MODES),
    ]
    return tuple(
        case
        for more, both in formats
        for case in _tests(*(shapes if both else shapes[:1]), apple_only=True, **options, **more)
    )


_QUANTIZED_TESTS = tuple(
    case
    for bits in (4, 8)
    for case in (
        *_tests((1, 2880, 9), (1, 96, 37), (2, 576, 10), (3, 1024, 7), (7, 192, 38), (16, 320, 9), (1, 8448, 3),
                transpose=True, group_size=32, bits=bits),
        *_tests((1, 4096, 64), (4, 70, 320), (13, 20, 32), transpose=False, group_size=32, bits=bits),
        *_tests((1, 4096, 64), (2, 33, 320), (4, 70, 64), (8, 41, 96), (13, 20, 32), transpose=False, group_size=32,
                bits=bits, gpu="nvidia"),
        *_tests((1, 256, 6), transpose=True, group_size=128, bits=bits),
        *_tests((11, 448, 37), transpose=True, group_size=64, bits=bits),
        *_tests((1, 256, 6), transpose=True, group_size=64, bits=bits, label="strided"),
    )
) + tuple(
    case
    for bits in (2, 3, 5, 6)
    for case in (
        *_tests((1, 1088, 9), (3, 576, 6), (9, 608, 37), transpose=True, group_size=32, bits=bits),
        *_tests((9, 41, 96), transpose=False, group_size=32, bits=bits),
    )
) + tuple(
    case
    for mode, bits, group_size in FLOAT_MODES
    for case in (
        *_tests((1, 1088, 9), (3, 576, 6), (9, 608, 37), transpose=True, group_size=group_size, bits=bits, mode=mode),
        *_tests((9, 41, 96), transpose=False, group_size=group_size, bits=bits, mode=mode),
    )
) + tuple(
    case
    for bits in (4, 8)
    for case in (
        *_tests((1, 2880, 9), (2, 576, 10), (3, 1024, 7), (5, 640, 5), (11, 320, 9), transpose=True, group_size=32,
                bits=bits, gpu="nvidia"),
        *_tests((6, 640, 35), (11, 448, 37), transpose=True, group_size=64, bits=bits, gpu="nvidia"),
    )
) + _tests((1, 2880, 9), (1, 4672, 9), (1, 576, 21), (1, 128, 4099), transpose=True, gpu="nvidia")  # fmt: skip

# GGUF kinds with kernels for several rows of x.
COMMON_KINDS = ("q4_0", "q8_0", "q4_k", "q5_k", "q6_k")

# Rows that share the weights, each with the sums that it has alone.
_EXACT_TESTS = tuple(
    Case("test", (rows, 576, 6), {"exact": True, **options}, gpu_only=True, apple_only=True)
    for options in ({"bits": 4}, {"bits": 8}, {"mode": "mxfp4", "bits": 4, "group_size": 32})
    for rows in (2, 4, 8)
)

MATRIX_OPS: tuple[Op, ...] = (
    MatrixOp(
        name="gemv",
        parameters=(("w", "rows"), ("x", "rows"), ("bias", "bias")),
        ours=gemv,
        twin=_mx_gemv,
        twin_text="`x @ w.T + bias`",
        summary="`mm.matmul` with the weights first",
        options={"transpose": True},
        tests=_tests(
            (1, 4104, 9),
            (1, 777, 5),
            (2, 1024, 10),
            (2, 333, 3),
            (3, 640, 6),
            (4, 99, 7),
            (8, 520, 19),
            (7, 65, 9),
            (6, 712, 21),
            (6, 72, 8193),
            (7, 136, 5),
            (16, 264, 18),
            (11, 31, 3),
            (13, 72, 8199),
            (1, 32768, 2),
        )
        + _tests(
            (1, 600, 72),
            (1, 300, 21),
            (2, 90, 64),
            (2, 77, 13),
            (4, 50, 24),
            (3, 64, 9),
            (8, 33, 40),
            (5, 20, 7),
            (16, 24, 16),
            (9, 17, 5),
            (1, 8192, 8),
            transpose=False,
        )
        + _tests((1, 512, 6), label="strided")
        + _tests(
            (1, 512, 17),
            (1, 1024, 9),
            (1, 8, 3),
            (1, 600, 9),
            (1, 712, 7),
            (1, 1096, 4),
            (1, 1416, 10),
            (1, 2048, 6),
            gpu="nvidia",
        )
        # GPUs leave them to mx: they show the simulator what a kernel does with rows beyond its first block of them.
        + _tests((19, 264, 17), (18, 31, 3), cpu_only=True),
        cases=_models((1, 2, 4, 8, 16))
        + _prompts((128, 896, 896), (512, 896, 896))
        + _training((512, 896, 896), label="Qwen2.5-0.5B training")
        + _training((512, 896, 8), (512, 8, 896), label="Qwen2.5-0.5B LoRA"),
    ),
    MatrixOp(
        name="matmul",
        parameters=(("x", "rows"), ("w", "rows"), ("bias", "bias")),
        ours=matmul,
        twin=_mx_matmul,
        twin_text="`x @ w.T + bias`",
        summary="rows times a dense matrix",
        options={"transpose": True},
        tests=_tests((1, 520, 9), (7, 136, 21))
        + _tests((2, 90, 40), transpose=False)
        # Few GPUs have tiles, and for few rows: these show the simulator what a kernel does with many.
        + _tests(*_TILES, cpu_only=True)
        + _tests(*_TRANSPOSED_TILES, cpu_only=True, transpose=False),
        cases=(Case("Qwen2.5-0.5B prompt", (512, 896, 896), cpu_only=True, quick=True),),
    ),
    MatrixOp(
        name="quantized_matmul",
        parameters=(("x", "rows"), ("w", "rows"), ("scales", "rows"), ("biases", "rows")),
        ours=quantized_matmul,
        twin=_mx_quantized_matmul,
        twin_text="`mx.quantized_matmul`",
        summary="rows times quantized weights",
        options={"group_size": 64, "bits": 4},
        tests=_QUANTIZED_TESTS
        + _tile_tests(_TILES, transpose=True)
        + _tile_tests(_TRANSPOSED_TILES, transpose=False)
        + _EXACT_TESTS,
        cases=_models((1, 2, 4, 8, 16), bits=4)
        + _models((1, 4), bits=8)
        + _prompts((128, 896, 896), (512, 896, 128), bits=4)
        + tuple(
            Case("Llama-3.1-8B prompt", (rows, columns, outputs), {"bits": 4}, gpu_only=True, apple_only=True)
            for rows in (32, 512, 2048)
            for columns, outputs in _MODELS["Llama-3.1-8B"][:4]
        )
        + _training((32, 896, 896), label="Qwen2.5-0.5B QLoRA", bits=4),  # mx takes seconds in half types
        layout="affine",
        frozen=("w", "scales", "biases"),
    ),
    MatricesOp(
        name="quantized_matmuls",
        parameters=(
            ("x", "rows"),
            *((f"w{i}{end}", "rows") for i in range(3) for end in ("", "_scales", "_biases")),
            *((f"bias{i}", "rows") for i in range(3)),
        ),
        outputs=3,
        ours=_quantized_matmuls,
        twin=_mx_matmuls,
        twin_text="several `mx.quantized_matmul`",
        summary="one row times several quantized matrices in one launch",
        options={"group_size": 64, "bits": 4},
        tests=(
            *(
                Case("test", shape, {"bits": bits, "group_size": 32})
                for bits in (4, 8)
                for shape in ((1, 320, 9, 4, 1), (1, 64, 38, 3, 16))
            ),
            Case("test", (1, 1088, 9, 5, 2), {"mode": "mxfp4", "group_size": 32, "bits": 4}),
            *(
                Case("test", (1, 96, 96, 38, 3), {"is_normed": True, "group_size": 32, **options})
                for options in ({"bits": 4}, {"bits": 8}, {"mode": "mxfp4", "bits": 4})
            ),
        ),
        cases=(
            Case("Qwen3-30B-A3B", (1, 2048, 4096, 512, 512), quick=True),
            Case("Llama 3.1 8B", (1, 4096, 4096, 1024, 1024), gpu_only=True),
        ),
    ),
    MatrixOp(
        name="quantized_swiglu",
        parameters=(
            ("x", "rows"),
            ("gate", "rows"),
            ("gate_scales", "rows"),
            ("gate_biases", "rows"),
            ("up", "rows"),
            ("up_scales", "rows"),
            ("up_biases", "rows"),
        ),
        ours=_quantized_swiglu,
        twin=_mx_swiglu,
        twin_text="`nn.silu(gate) * up` of two `mx.quantized_matmul`",
        summary="gate, activation and product in one kernel",
        options={"group_size": 64, "bits": 4},
        tests=tuple(
            case
            for bits in (4, 8)
            for case in _tests((1, 2880, 9), (1, 64, 38), (2, 576, 5), (4, 320, 6), (7, 128, 3), bits=bits)
        )
        + tuple(case for bits in (2, 3, 5, 6) for case in _tests((1, 1088, 9), (9, 576, 21), bits=bits))
        + tuple(
            case
            for mode, bits, group_size in FLOAT_MODES
            for case in _tests((1, 1088, 9), (9, 608, 21), group_size=group_size, bits=bits, mode=mode)
        )
        + _EXACT_TESTS
        + tuple(
            case
            for bits in (4, 8)
            for case in _tests((1, 320, 9), (2, 576, 5), (4, 320, 6), group_size=32, bits=bits, gpu="nvidia")
        )
        + _tests((1, 2880, 9), (1, 4672, 9), (1, 64, 38), gpu="nvidia")
        + _tile_tests(_TILES)
        + _tests((1, 2880, 9), (4, 320, 6), activation="geglu")
        + _tests((2, 576, 5), bits=8, activation="geglu")
        + tuple(
            case
            for options in ({"bits": 4}, {"bits": 8}, {"mode": "mxfp4", "bits": 4})
            for case in _tests((1, 96, 96), is_normed=True, group_size=32, **options)
        ),
        cases=tuple(
            Case(
                model,
                (1, columns, outputs),
                {"bits": 4, **({"activation": "geglu"} if model.startswith("Gemma") else {})},
                quick=model == "Llama-3.2-1B",
                gpu_only=model != "Llama-3.2-1B",
            )
            for model, columns, outputs in (
                ("Llama-3.2-1B", 2048, 8192),
                ("Llama-3.1-8B", 4096, 14336),
                ("Qwen3-0.6B", 1024, 3072),
                ("Qwen3-8B", 4096, 12288),
                ("Qwen2.5-0.5B", 896, 4864),
                ("Gemma 3 1B", 1152, 6912),
            )
        ),
        layout="gated",
    ),
    MatrixOp(
        name="block_matmul",
        parameters=(("x", "rows"), ("blocks", "rows")),
        ours=block_matmul,
        twin=_mx_blocks,
        twin_text="`x @ w.T`, `w` dequantized at each call",
        summary="rows times the weights of a GGUF file",
        # Of 4000 draws of 1x96x38 in q8_0 the worst was 5.9 units off; mx's own worst was 8.0.
        units=8,
        tests=tuple(
            case
            for kind in ("q4_0", "q8_0")
            for case in (
                *_tests((1, 2880, 9), (1, 96, 38), (2, 1056, 5), (5, 64, 7), kind=kind),
                *_tests((1, 96, 5), kind=kind, label="strided"),
            )
        )
        + tuple(case for kind in ("q4_k", "q5_k", "q6_k") for case in _tests((1, 1280, 9), (5, 256, 7), kind=kind))
        + tuple(
            case
            for kind in ("q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4")
            for case in _tests((1, 768, 6), kind=kind)
        )
        + tuple(
            case
            for kind in sorted(gguf.KINDS)
            for case in _tests(
                *((rows, 256, 21) for rows in ((20, 40) if kind in COMMON_KINDS else (20,))), apple_only=True, kind=kind
            )
        ),
        cases=tuple(
            Case("Llama-3.1-8B", (1, columns, outputs), {"kind": kind}, quick=outputs == 4096, gpu_only=outputs != 4096)
            for kind in ("q4_0", "q8_0")
            for columns, outputs in ((4096, 4096), (4096, 14336))
        ),
        layout="blocks",
    ),
    MatrixOp(
        name="block_quantize",
        parameters=(("w", "rows"),),
        ours=block_quantize,
        twin=_mx_quantize,
        twin_text="the `gguf` package",
        summary="weights to GGUF blocks, and back",
        tests=_tests((9, 96, 0), kind="q4_0") + _tests((9, 96, 0), kind="q8_0"),
        # The twin computes on the host, where each call would wait for the GPU.
        cases=(Case("Llama-3.1-8B", (4096, 4096, 0), {"kind": "q4_0"}, quick=True, cpu_only=True),),
        layout="block",
    ),
    MatrixOp(
        name="block_dequantize",
        parameters=(("blocks", "rows"),),
        ours=block_dequantize,
        twin=_mx_dequantize,
        twin_text="the `gguf` package",
        summary="weights to GGUF blocks, and back",
        tests=tuple(
            Case("test", (9, 96, 0), {"kind": kind, "dtype": dtype})
            for kind in ("q4_0", "q8_0")
            for dtype in (mx.float32, mx.float16, mx.bfloat16)
        )
        + tuple(Case("test", (3, 256, 0), {"kind": kind, "dtype": mx.float32}) for kind in sorted(gguf.KINDS)),
        # The twin computes on the host, where each call would wait for the GPU.
        cases=(Case("Llama-3.1-8B", (4096, 4096, 0), {"kind": "q4_0"}, quick=True, cpu_only=True),),
        layout="block",
    ),
)
