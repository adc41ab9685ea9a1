"""Rows of the table of ops on a matrix of weights: their arrays, and their products in float64.

The shape of a case is ``(rows, columns, outputs)``: rows of x, the columns of each, and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import gguf, normed, reference
from .op import (
    Case,
    Exact,
    ModelOp,
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
        return Exact(quantized_blocks(np.array(array.astype(mx.float32)), options["kind"]).astype(np.float64))


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


def quantized_blocks(w: np.ndarray, kind: str) -> np.ndarray:
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
