"""Random calls of the products with weights: dense, affine, and of GGUF blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from verification.fuzz import exact
from verification.fuzz.case import Case
from verification.fuzz.compare import overflow, to_float64
from verification.fuzz.draw import Draw, describe, promoted

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON, gguf

EPSILON32 = EPSILON[mx.float32]
ROWS = (1, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33)


def leading_axes(draw: Draw, counts: Sequence[int] = (0, 1, 1, 1, 2), most: int = 40) -> list[int]:
    axes = [draw.pick(ROWS) for _ in range(draw.pick(counts))]
    return axes if np.prod(axes) <= most else axes[:1]


def size_of(a: mx.array) -> np.ndarray:
    """How large the finite numbers are."""
    return np.abs(np.nan_to_num(to_float64(a), posinf=0, neginf=0))


def moved(draw: Draw, x: mx.array) -> np.ndarray:
    """How far rounding moves a product with packed weights, by the element of x: rounding of its sums, and of x itself.

    Native code rounds a row of x in a half type to integers of 16 bits. Each scale serves some columns, so the largest
    element of the row bounds the error.
    """
    sizes = size_of(x)
    of_sums = 4 * EPSILON32 * sizes
    if draw.gpu or x.dtype not in (mx.float16, mx.bfloat16):
        return of_sums
    return of_sums + sizes.max(-1, keepdims=True, initial=0) / (2 * 32767)


def with_bias(y: mx.array, bias: Sequence[mx.array]) -> mx.array:
    return y + bias[0] if bias else y


def draw_bias(draw: Draw, outputs: int, dtype: mx.Dtype, probability: float) -> list[mx.array]:
    if not draw.chance(probability):
        return []
    return [draw.array(draw.numbers([outputs], draw.kind()), draw.dtype_like(dtype))]


def _sum_of_nothing(shape: list[int], bias: Sequence[mx.array]) -> list[np.ndarray]:
    return [np.zeros(shape) + (to_float64(bias[0]) if bias else 0)]


def matmul(draw: Draw) -> Case:
    return gemv(draw, lambda w, x, bias, transpose: mm.matmul(x, w, bias, transpose=transpose))


def gemv(draw: Draw, call: Callable[..., mx.array] | None = None) -> Case:
    call = call or (lambda w, x, bias, transpose: mm.gemv(w, x, bias, transpose=transpose))
    dtype, transpose = draw.dtype(), draw.chance(0.6)
    columns = draw.size(draw.limit(2049, 97))
    leading = leading_axes(draw, (0, 1, 1, 2, 3), most=64)
    outputs = draw.size(max(1, min(draw.limit(2049, 97), draw.limit(30000, 3000) // max(columns, 1))))
    kinds = draw.kind(), draw.kind()
    shape = [outputs, columns] if transpose else [columns, outputs]
    arrays = [
        draw.array(draw.numbers(shape, kinds[0]), draw.dtype_like(dtype)),
        draw.array(draw.numbers([*leading, columns], kinds[1]), dtype),
        *draw_bias(draw, outputs, dtype, 0.5),
    ]

    def product(w: mx.array, x: mx.array, *bias: mx.array) -> mx.array:
        return with_bias(x @ (w.T if transpose else w), bias)

    def noise() -> list[np.ndarray | float]:
        w, x, *bias = map(size_of, arrays)
        return [4 * EPSILON32 * (x @ (w.T if transpose else w) + sum(bias))]

    return Case(
        describe(arrays, draw, numbers=kinds, transpose=transpose),
        arrays,
        ours=lambda w, x, bias=None: call(w, x, bias, transpose),
        twin=product,
        exact=product,
        of_nothing=lambda: _sum_of_nothing([*leading, outputs], arrays[2:]),
        differentiable=range(len(arrays)),
        noise=noise,
        ordinary=kinds == ("normal", "normal"),
    )


def packed(draw: Draw, shape: Sequence[int], dtype: mx.Dtype, group_size: int, bits: int) -> list[mx.array]:
    """Words, scales and biases of affine weights of a shape."""
    *leading, columns = shape
    words = draw.rng.integers(0, 2**32, [*leading, columns * bits // 32], dtype=np.uint32)
    scales, biases = (draw.numbers([*leading, columns // group_size]) for _ in range(2))
    scales *= 2.0 / 2**bits
    if draw.chance(0.05) and scales.size:
        scales.reshape(-1)[0] = draw.pick((0.0, 60.0, -1e-6))
    return [draw.array(words, mx.uint32), draw.array(scales, dtype), draw.array(biases, dtype)]


def size_of_packed(scales: mx.array, biases: mx.array, group_size: int, bits: int) -> np.ndarray:
    """A bound of the weights' sizes."""
    return np.repeat(size_of(scales) * (2**bits - 1) + size_of(biases), group_size, -1)


def _overflow_of_packed(draw: Draw, x: mx.array, bits: int) -> np.ndarray | float:
    """The kernels multiply with the integers, and scale the sums of a group afterwards."""
    return overflow((2**bits - 1) * size_of(x).sum(-1, keepdims=True)) if draw.gpu else 0.0


def quantized_matmul(draw: Draw) -> Case:
    dtype, transpose = draw.dtype(), draw.chance(0.65)
    group_size, bits = draw.pick((32, 64, 128)), draw.pick((4, 4, 4, 8, 8, 1, 2, 3, 5, 6))
    total, most = draw.limit(9000, 3000), draw.limit(1025, 97)
    stack = [] if draw.chance(0.75) else [draw.pick((1, 2, 3)) for _ in range(draw.integer(1, 2))]
    if transpose:
        columns = group_size * draw.pick((0, 1, 1, 2, 3, 4, 5, 8, 16, 17, 32), [0.01] + [0.099] * 10)
        columns = min(columns, max(group_size, total // group_size * group_size))
        outputs = draw.size(max(1, min(most, total // max(columns, 1))), zero=0.01)
        shape = [*stack, outputs, columns]
    else:
        outputs = group_size * draw.pick((1, 2, 3, 4, 8))
        columns = draw.size(max(1, min(most, total // outputs)), zero=0.01)
        shape = [*stack, columns, outputs]
    leading = leading_axes(draw)
    if stack:
        leading = [n if draw.chance(0.7) else 1 for n in stack] + [draw.pick((1, 2, 3, 16, 17))]
        leading = [draw.pick((1, 2)), *leading] if draw.chance(0.2) else leading
    kind = draw.kind()
    arrays = [
        draw.array(draw.numbers([*leading, columns], kind), dtype),
        *packed(draw, shape, draw.dtype_like(dtype), group_size, bits),
        *draw_bias(draw, outputs, dtype, 0.3),
    ]
    by_default = bits == 4 and group_size == 64 and draw.chance(0.5)
    options = {} if by_default else {"group_size": group_size, "bits": bits}

    def ours(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, bias: mx.array | None = None) -> mx.array:
        return mm.quantized_matmul(x, w, scales, biases, transpose=transpose, bias=bias, **options)

    def twin(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *bias: mx.array) -> mx.array:
        y = mx.quantized_matmul(x, w, scales, biases, transpose=transpose, group_size=group_size, bits=bits)
        return with_bias(y, bias)

    def in_float64(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *bias: mx.array) -> mx.array:
        weights = exact.dequantize(w, scales, biases, group_size, bits)
        return with_bias(x @ (weights.swapaxes(-1, -2) if transpose else weights), bias)

    def noise() -> list[np.ndarray | float]:
        weights = size_of_packed(arrays[2], arrays[3], group_size, bits)
        if transpose:
            total = moved(draw, arrays[0]) @ np.swapaxes(weights, -1, -2)
        else:
            total = 4 * EPSILON32 * (size_of(arrays[0]) @ weights)
        return [total + _overflow_of_packed(draw, arrays[0], bits)]

    batch = list(np.broadcast_shapes(tuple(leading[:-1]), tuple(stack))) + leading[-1:] if stack else leading
    return Case(
        describe(arrays, draw, numbers=kind, group_size=group_size, bits=bits, transpose=transpose, default=by_default),
        arrays,
        ours,
        twin,
        in_float64,
        of_nothing=lambda: _sum_of_nothing([*batch, outputs], arrays[4:]),
        differentiable=[0] if draw.chance(0.5) else [0, 2, 3, 4][: len(arrays) - 1],
        noise=noise,
        ordinary=kind == "normal",
    )


def block_masked_mm(draw: Draw) -> Case:
    dtype, size = draw.dtype(), draw.pick((32, 64))
    rows, outputs = draw.size(draw.limit(200, 70)), draw.size(draw.limit(200, 70))
    columns = draw.pick((1, 1, 1, 2)) * draw.size(draw.limit(40, 20)) * 4
    batch = draw.pick(([], [], [2], [2, 3]))
    transpose, kind = draw.chance(0.5), draw.pick(("bools", "numbers"))
    shapes = {"mask_out": (rows, outputs), "mask_lhs": (rows, columns), "mask_rhs": (columns, outputs)}
    names = [name for name in shapes if draw.chance(0.7)] or ["mask_out"]

    def of_blocks(name: str) -> mx.array:
        shape = [*(batch if draw.chance(0.5) else []), *(-(-length // size) for length in shapes[name])]
        live = mx.array(draw.numbers(shape) > -0.4)
        return live if kind == "bools" else draw.array(np.array(live) * draw.numbers(shape), dtype)

    arrays = [
        draw.array(draw.numbers([*batch, rows, columns]), dtype),
        draw.array(draw.numbers([outputs, columns] if transpose else [columns, outputs]), draw.dtype_like(dtype)),
        *map(of_blocks, names),
    ]

    def whole(mask: mx.array, name: str) -> mx.array:
        wide = mx.repeat(mx.repeat(mask, size, axis=-2), size, axis=-1)
        return wide[..., : shapes[name][0], : shapes[name][1]]

    def ours(a: mx.array, b: mx.array, *masks: mx.array) -> mx.array:
        return mm.block_masked_mm(a, b.T if transpose else b, size, **dict(zip(names, masks)))

    def product(a: mx.array, b: mx.array, *masks: mx.array) -> mx.array:
        of = {name: whole(mask, name).astype(a.dtype) for name, mask in zip(names, masks)}
        b = b.T if transpose else b
        return ((a * of.get("mask_lhs", 1)) @ (b * of.get("mask_rhs", 1))) * of.get("mask_out", 1)

    def noise() -> list[np.ndarray | float]:
        a, b, *masks = (np.array(size_of(array)) for array in arrays)
        largest = np.prod([mask.max(initial=0) for mask in masks])
        return [8 * EPSILON32 * largest * (a @ (b.T if transpose else b))]

    return Case(
        describe(arrays, draw, block_size=size, transpose=transpose, masks=kind),
        arrays,
        ours=ours,
        twin=product,
        exact=product,
        of_nothing=lambda: [np.zeros([*batch, rows, outputs])],
        differentiable=[0, 1] if kind == "bools" else range(len(arrays)),
        noise=noise,
        ordinary=True,
    )


def quantized_matmuls(draw: Draw) -> Case:
    dtype, rows = draw.dtype(), draw.pick((1, 1, 1, 2))
    group_size, bits = draw.pick((32, 64, 128)), draw.pick((4, 4, 4, 8, 8, 2, 3, 5, 6))
    columns, count = group_size * draw.pick((1, 1, 2, 3, 8)), draw.integer(1, 5)
    sizes = [max(1, draw.size(draw.limit(130, 40))) for _ in range(count)]
    kind, weight_dtype, has_bias = draw.kind(), draw.dtype_like(dtype), draw.chance(0.4)
    arrays = [draw.array(draw.numbers([rows, columns], kind), dtype)]
    for outputs in sizes:
        arrays += packed(draw, [outputs, columns], weight_dtype, group_size, bits)
    if has_bias:
        arrays += [draw.array(draw.numbers([outputs]), weight_dtype) for outputs in sizes]

    def parts(weights: Sequence[mx.array]) -> list[tuple[Sequence[mx.array], Sequence[mx.array]]]:
        return [(weights[3 * i : 3 * i + 3], weights[3 * count + i :][:1]) for i in range(count)]

    def ours(x: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
        triples, bias = zip(*parts(weights))
        added = [b[0] for b in bias] if has_bias else None
        found = mm.quantized_matmuls(x, [tuple(triple) for triple in triples], group_size, bits, bias=added)
        return tuple(found)

    def twin(x: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
        options = {"transpose": True, "group_size": group_size, "bits": bits}
        return tuple(with_bias(mx.quantized_matmul(x, *triple, **options), bias) for triple, bias in parts(weights))

    def in_float64(x: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
        products = [(x @ exact.dequantize(*triple, group_size, bits).T, bias) for triple, bias in parts(weights)]
        return tuple(with_bias(y, bias) for y, bias in products)

    def noise() -> list[np.ndarray | float]:
        x, beyond = arrays[0], _overflow_of_packed(draw, arrays[0], bits)
        sizes = [size_of_packed(triple[1], triple[2], group_size, bits) for triple, _ in parts(arrays[1:])]
        return [moved(draw, x) @ size.T + beyond for size in sizes]

    return Case(
        describe(arrays, draw, numbers=kind, group_size=group_size, bits=bits, count=count, bias=has_bias),
        arrays,
        ours=ours,
        twin=twin,
        exact=in_float64,
        of_nothing=list,
        differentiable=[0],
        noise=noise,
        ordinary=kind == "normal",
    )


def quantized_embedding(draw: Draw) -> Case:
    """Indices may be out of range: their rows are NaN."""
    dtype, group_size, bits = draw.dtype(), draw.pick((32, 64, 128)), draw.pick((4, 4, 8, 1, 2, 3, 5, 6))
    columns, rows = group_size * draw.pick((1, 1, 2, 3, 8)), draw.size(draw.limit(300, 40))
    shape = [draw.integer(0, 5) for _ in range(draw.integer(0, 2))]
    low, high = draw.pick(((0, rows), (-rows, rows), (-2 * rows - 2, 2 * rows + 2)))
    indices = draw.rng.integers(low, max(high, low + 1), shape)
    kind = draw.pick((mx.int32, mx.int32, mx.int64, mx.uint32 if low == 0 else mx.int32))
    arrays = [draw.array(indices, kind), *packed(draw, [rows, columns], dtype, group_size, bits)]

    def in_float64(indices: mx.array, *triple: mx.array) -> mx.array:
        n = np.array(indices).astype(np.int64)
        n = np.where(n < 0, n + rows, n)
        is_there = (n >= 0) & (n < rows)
        y = np.full([*n.shape, columns], np.nan)
        y[is_there] = np.array(exact.dequantize(*triple, group_size, bits))[n[is_there]]
        return mx.array(y, mx.float64)

    def noise() -> list[np.ndarray | float]:
        return [EPSILON[dtype] * (2**bits - 1) * float(size_of(arrays[2]).max(initial=0))]

    return Case(
        describe(arrays, draw, group_size=group_size, bits=bits, low=low, high=high),
        arrays,
        ours=lambda indices, *triple: mm.quantized_embedding(indices, *triple, group_size, bits),
        twin=None,
        exact=in_float64,
        of_nothing=lambda: [np.full([*arrays[0].shape, columns], np.nan)],
        noise=noise,
    )


def gated(gate: mx.array, up: mx.array, activation: str) -> mx.array:
    """Gated products in mx's operations."""
    if activation == "clipped":
        gate, up = mx.minimum(gate, 7.0), mx.clip(up, -7.0, 7.0)
        return gate * mx.sigmoid(1.702 * gate) * (up + 1)
    slope = 1.0 if activation == "swiglu" else 2 * math.sqrt(2 / math.pi) * (1 + 0.044715 * gate * gate)
    return gate * mx.sigmoid(gate * slope) * up


def quantized_swiglu(draw: Draw) -> Case:
    dtype = draw.dtype()
    group_size, bits = draw.pick((32, 64, 128)), draw.pick((4, 4, 4, 8, 8, 1, 2, 3, 5, 6))
    columns = group_size * draw.pick((0, 1, 1, 2, 3, 4, 8, 16), [0.01] + [0.99 / 7] * 7)
    outputs = draw.size(max(1, min(draw.limit(513, 97), draw.limit(6000, 3000) // max(columns, 1))), zero=0.01)
    leading = leading_axes(draw)
    kind = draw.kind(("normal", "normal", "small", "constant", "special"))
    weight_dtype, activation = draw.dtype_like(dtype), draw.pick(("swiglu", "geglu"))
    arrays = [draw.array(draw.numbers([*leading, columns], kind), dtype)]
    for _ in range(2):
        arrays += packed(draw, [outputs, columns], weight_dtype, group_size, bits)

    def twin(x: mx.array, *weights: mx.array) -> mx.array:
        options = {"transpose": True, "group_size": group_size, "bits": bits}
        gate, up = (mx.quantized_matmul(x, *weights[i : i + 3], **options) for i in (0, 3))
        return gated(gate, up, activation)

    def in_float64(x: mx.array, *weights: mx.array) -> mx.array:
        gate, up = (x @ exact.dequantize(*weights[i : i + 3], group_size, bits).T for i in (0, 3))
        return gated(gate, up, activation)

    def noise() -> list[np.ndarray | float]:
        x, products, errors = arrays[0].astype(mx.float64), [], []
        for i in (1, 4):
            scales, biases = (a.astype(mx.float64) for a in arrays[i + 1 : i + 3])
            weights = exact.dequantize(arrays[i], scales, biases, group_size, bits)
            products.append(np.abs(np.nan_to_num(np.array(x @ weights.T), posinf=0, neginf=0)))
            errors.append(moved(draw, arrays[0]) @ size_of_packed(scales, biases, group_size, bits).T)
        # The slopes of silu and of GELU are less than 1.2.
        total = 2 * (errors[0] * 1.2 * (products[1] + errors[1]) + errors[1] * products[0])
        return [total + _overflow_of_packed(draw, arrays[0], bits)]

    return Case(
        describe(arrays, draw, numbers=kind, group_size=group_size, bits=bits, activation=activation),
        arrays,
        ours=lambda x, *w: mm.quantized_swiglu(x, tuple(w[:3]), tuple(w[3:]), group_size, bits, activation=activation),
        twin=twin,
        exact=in_float64,
        of_nothing=lambda: [np.zeros([*leading, outputs])],
        differentiable=[0],
        noise=noise,
        ordinary=kind == "normal",
    )


def draw_blocks(draw: Draw, outputs: int, columns: int, kind: str, wild: bool) -> np.ndarray:
    """Random bytes of blocks; scales of normal weights unless they are to be wild: any number, infinity and NaN too."""
    each = gguf.KINDS[kind]
    count = columns // each.weights
    blocks = draw.rng.integers(0, 256, [outputs, count, each.bytes], dtype=np.uint8)
    if not wild:
        for at, size in zip(each.halves, (each.step, each.minimum)):
            scales = np.asarray(draw.rng.standard_normal([outputs, count]) * abs(size), dtype=np.float16)
            blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
        blocks[..., : each.scales] = each.scale
    return blocks.reshape(outputs, count * each.bytes)


def size_of_blocks(blocks: mx.array, kind: str) -> np.ndarray:
    """A bound of the terms that weights are computed from: a scale times an integer, and the number subtracted from it.

    Both are less than three times the largest weight of a block, whose integers are random.
    """
    weights, each = size_of(exact.dequantize_blocks(blocks, kind)), gguf.KINDS[kind]
    of_blocks = weights.reshape(*weights.shape[:-1], -1, each.weights).max(-1, initial=0)
    return 3 * np.repeat(of_blocks, each.weights, -1)


def block_matmul(draw: Draw) -> Case:
    dtype, blocks_kind = draw.dtype(), draw.pick(list(gguf.KINDS))
    each = gguf.KINDS[blocks_kind].weights
    counts = (0, 1, 1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64) if each == 32 else (0, 1, 1, 2, 3, 4, 5, 8)
    columns = each * draw.pick(counts, [0.02] + [0.98 / (len(counts) - 1)] * (len(counts) - 1))
    columns = min(columns, draw.limit(2048, 1056 if each == 32 else 1024))
    outputs = draw.size(max(1, min(draw.limit(1025, 97), draw.limit(16000, 3000) // max(columns, 1))), zero=0.01)
    leading, wild, kind = leading_axes(draw), draw.chance(0.2), draw.kind()
    arrays = [
        draw.array(draw.numbers([*leading, columns], kind), dtype),
        draw.array(draw_blocks(draw, outputs, columns, blocks_kind, wild), mx.uint8),
        *draw_bias(draw, outputs, dtype, 0.4),
    ]

    def twin(x: mx.array, blocks: mx.array, *bias: mx.array) -> mx.array:
        weights = exact.dequantize_blocks(blocks, blocks_kind).astype(mx.float32)
        weights = weights.astype(promoted(x.dtype, *(b.dtype for b in bias)))
        return with_bias(x @ weights.T, bias)

    def in_float64(x: mx.array, blocks: mx.array, *bias: mx.array) -> mx.array:
        return with_bias(x @ exact.dequantize_blocks(blocks, blocks_kind).T, bias)

    def noise() -> list[np.ndarray | float]:
        weights = size_of_blocks(arrays[1], blocks_kind)
        beyond = overflow(size_of(arrays[0]) @ weights.T)  # terms are scaled behind their sum
        return [moved(draw, arrays[0]) @ weights.T + 4 * EPSILON32 * sum(map(size_of, arrays[2:])) + beyond]

    return Case(
        describe(arrays, draw, numbers=kind, kind=blocks_kind, wild=wild),
        arrays,
        ours=lambda x, blocks, bias=None: mm.block_matmul(x, blocks, blocks_kind, bias),
        twin=twin,
        exact=in_float64,
        of_nothing=lambda: _sum_of_nothing([*leading, outputs], arrays[2:]),
        differentiable=[0, 2][: len(arrays) - 1],
        noise=noise,
        ordinary=kind == "normal" and not wild,
    )
