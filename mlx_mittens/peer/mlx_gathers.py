"""MLX's products of rows with chosen matrices: which kernel, and those that need no matrix units.

The rules are those of MLX 0.32.4's host library. Where rows are sorted by their matrix, MLX first finds where each
matrix's rows begin, in a kernel whose source is not in its wheel: here mx finds them.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import mlx.core as mx

from .. import _ext
from ..ops.custom import Output, int32, int64, launch
from . import mlx_matrix_units, mlx_quantized, mlx_unit_gathers
from .mlx_formats import Format, Weights, layouts
from .mlx_sources import TYPES, instance

_SIMD = 32
# Rows, sorted by their matrix, from which MLX multiplies them as matrices, and how many of these a matrix.
_FEWEST_SORTED, _FEWEST_OF_MATRIX = 16, 4
# The first of MLX's architectures that reads a matrix once for several rows, and the most rows for which it does.
_FIRST_WIDE, _MOST_WIDE = 15, 15

Stream = mx.Stream | mx.Device | None


def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    lhs_indices: mx.array,
    rhs_indices: mx.array,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
    sorted_indices: bool = False,
    *,
    stream: Stream = None,
) -> mx.array:
    """``mx.gather_qmm`` of x [..., M, K] with weights [E, N, K], by the kernel that MLX launches.

    Args:
        x: Rows.
        w: Packed weights.
        scales: Of each group of weights.
        biases: Of each group of affine weights.
        lhs_indices: The rows of each product.
        rhs_indices: The weights of each product, in the same shape.
        group_size: Weights that share a scale.
        bits: Of a weight.
        mode: Of the weights.
        sorted_indices: Whether `rhs_indices` do not decrease, and `lhs_indices` are all rows in order.
        stream: Where to run.
    """
    if lhs_indices.shape != rhs_indices.shape:
        shapes = f"shapes {lhs_indices.shape} and {rhs_indices.shape}"
        raise ValueError(f"[peer.gather_qmm] lhs_indices and rhs_indices have {shapes}: expected one shape")
    m, n, k = x.shape[-2], w.shape[-2], x.shape[-1]
    form, weights = Format(group_size, bits, mode), (w, scales, biases)
    if m == 1 and sorted_indices and are_sorted_by_matrices(rhs_indices.size, w.shape[0]):
        return sorted_qmm(x, weights, rhs_indices, form, stream=stream)
    if mlx_quantized.is_by_matrices((m, k, n), stream):
        return _qmm_of_matrices(x, weights, lhs_indices, rhs_indices, form, stream)
    return _qmv_of_matrices(x, weights, lhs_indices, rhs_indices, form, stream)


def are_sorted_by_matrices(rows: int, matrices: int) -> bool:
    """Whether MLX multiplies sorted single rows as matrices, not each as a vector."""
    return rows >= _FEWEST_SORTED and rows // matrices >= _FEWEST_OF_MATRIX


def sorted_qmm(
    x: mx.array,
    weights: Weights,
    rhs_indices: mx.array,
    form: Format,
    tile: int | None = None,
    *,
    stream: Stream = None,
) -> mx.array:
    """The product of single rows [R, 1, K] that are sorted by their weights [E, N, K].

    Args:
        x: Rows.
        weights: Words, scales, and biases of affine ones.
        rhs_indices: The weights of each row.
        form: The weights' format.
        tile: Rows of a threadgroup on matrix units; as many as MLX takes if left out.
        stream: Where to run.
    """
    if mlx_matrix_units.are_used(x.dtype, stream):
        return mlx_unit_gathers.gather_qmm(x, weights, rhs_indices, True, form, tile, stream=stream)
    rows, k, n, matrices = rhs_indices.size, x.shape[-1], weights[0].shape[1], weights[0].shape[0]
    kernel = form.kernel("gather_qmm_rhs", x.dtype, 16, 32, 32, 1, 2, True)
    values: list[Any] = [x, *form.operands(weights), mlx_unit_gathers.begins(rhs_indices, matrices, stream)]
    values += [Output([*x.shape[:-1], n], x.dtype), *(int32(size) for size in (rows, n, k, matrices))]
    grid = [-(-n // 32), -(-rows // 16) + matrices - 1, 1]
    constants = {201: n % 32 == 0, 202: k % 32 == 0}
    return launch(*kernel, dict(enumerate(values)), grid, [_SIMD, 2, 1], constants=constants, stream=stream)[0]


def _qmv_of_matrices(x, weights, lhs_indices, rhs_indices, form, stream):
    m, k, n = x.shape[-2], x.shape[-1], weights[0].shape[-2]
    is_whole = n % 8 == 0 and k % form.step == 0
    kernel = form.kernel("gather_qmv_fast" if is_whole else "gather_qmv", x.dtype)
    values = [*form.operands(weights), x, lhs_indices, rhs_indices]
    values += [Output([*lhs_indices.shape, m, n], x.dtype), int32(k), int32(n)]
    values += _of_products(x, weights, lhs_indices.size)
    groups = [m, -(-n // 8), lhs_indices.size]
    return launch(*kernel, dict(enumerate(values)), groups, [_SIMD, 2, 1], stream=stream)[0]


def _qmm_of_matrices(x, weights, lhs_indices, rhs_indices, form, stream):
    m, k, n = x.shape[-2], x.shape[-1], weights[0].shape[-2]
    if k % 64 == 0 and mlx_matrix_units.are_used(x.dtype, stream):
        tile, kernel = 64, form.kernel("gather_qmm_t_nax", x.dtype, n % 64 == 0, 64, 64, 64, 2, 2)
    else:
        tile, kernel = 32, form.kernel("gather_qmm_t", x.dtype, n % 32 == 0)
    values = [*form.operands(weights), x, lhs_indices, rhs_indices]
    values += [Output([*lhs_indices.shape, m, n], x.dtype), int32(k), int32(n), int32(m)]
    values += _of_products(x, weights, lhs_indices.size)
    groups = [-(-n // tile), -(-m // tile), lhs_indices.size]
    return launch(*kernel, dict(enumerate(values)), groups, [_SIMD, 2, 2], stream=stream)[0]


def _of_products(x: mx.array, weights: Weights, products: int) -> list[bytes]:
    """Layouts of x, of weights and of indices, which lie in memory row by row."""
    return [*layouts(x, weights), int32(1), int32(products), int64(1), int64(1)]


def gather_mm(
    x: mx.array,
    w: mx.array,
    lhs_indices: mx.array,
    rhs_indices: mx.array,
    sorted_indices: bool = False,
    *,
    stream: Stream = None,
) -> mx.array:
    """``mx.gather_mm`` of x [..., M, K] with w [E, K, N], which may be a transposed view, by MLX's kernel.

    Args:
        x: Rows.
        w: Matrices.
        lhs_indices: The rows of each product.
        rhs_indices: The matrix of each product, in the same shape.
        sorted_indices: Whether `rhs_indices` do not decrease, and `lhs_indices` are all rows in order.
        stream: Where to run.

    Raises:
        ValueError: More rows than MLX multiplies as vectors, or several where w is no transposed view.
    """
    m = x.shape[-2]
    mx.eval(w)
    if m == 1 and sorted_indices:
        of_sorted = mlx_unit_gathers.gather_mm if mlx_matrix_units.are_used(x.dtype, stream) else _sorted_mm
        return of_sorted(x, w, rhs_indices, stream=stream)
    strides = _ext.strides(w)
    is_turned = strides[2] != 1 and strides[1] == 1
    if not is_turned and strides[2] != 1:
        w = mx.contiguous(w, stream=stream)
        mx.eval(w)
        strides = _ext.strides(w)
    if m == 1:
        return _gather_mv(x, w, is_turned, lhs_indices, rhs_indices, stream)
    if not is_turned or not is_wide(m, w.shape[2], x.shape[-1], x.dtype, stream):
        raise ValueError(f"[peer.gather_mm] x has shape {tuple(x.shape)}: expected [..., M, K] of few rows M")
    return _gather_wide(x, w, lhs_indices, rhs_indices, stream)


def _sorted_mm(x: mx.array, w: mx.array, rhs_indices: mx.array, *, stream: Stream) -> mx.array:
    strides = _ext.strides(w)
    is_turned = strides[2] != 1
    rows, matrices, k, n = rhs_indices.size, *w.shape
    kernel = instance("steel_gather", "gather_mm_rhs", TYPES[x.dtype], 16, 64, 16, 1, 2, False, is_turned)
    grid = [-(-n // 64), -(-rows // 16) + matrices - 1, 1]
    row = strides[2 if is_turned else 1]
    params = struct.pack("=8i3q3i4x", rows, n, k, k, row, n, *grid[:2], 0, strides[0], 0, 0, k // 16, 0)
    values: list[Any] = [mx.contiguous(x, stream=stream), w, mlx_unit_gathers.begins(rhs_indices, matrices, stream)]
    values += [Output([*x.shape[:-1], n], x.dtype), params, int32(matrices)]
    constants = {201: n % 64 == 0, 202: k % 16 == 0}
    arguments = dict(enumerate(values))
    threads = [_SIMD, 2, 1]
    return launch(*kernel, arguments, grid, threads, constants=constants, ensure_row_contiguous=False, stream=stream)[0]


def _gather_mv(x, w, is_turned, lhs_indices, rhs_indices, stream):
    _, k, n = w.shape
    tm = tn = 4
    if is_turned:
        bm, bn, sm, sn = 8 if n >= 4096 else 4, 1, 1, 32
        tm = 1 if n < tm else tm
        each = bm * sm * tm
    else:
        sm, sn = (4, 8) if k >= 8192 and n >= 2048 else (8, 4)
        bm, bn = 1, 16 if n >= 2048 else 4 if n >= 512 else 2
        tn = 1 if n < tn else tn
        each = bn * sn * tn
    kernel = instance("gemv", "gemv_gather" if is_turned else "gemv_t_gather", TYPES[x.dtype], bm, bn, sm, sn, tm, tn)
    strides = _ext.strides(w)
    arguments: dict[int, Any] = {
        **{0: w, 1: x, 3: Output([*lhs_indices.shape, 1, n], x.dtype)},
        **{4: int32(k), 5: int32(n), 6: int32(strides[2 if is_turned else 1])},
        **{9: int32(1), 10: int32(lhs_indices.size), 11: int64(1, 1)},
        **dict(enumerate(_of_rows(x), 12)),
        **dict(enumerate((int32(1), int32(*w.shape), int64(*strides)), 15)),
        **{18: lhs_indices, 19: rhs_indices},
    }
    return launch(
        *kernel,
        *(arguments, [-(-n // each), 1, lhs_indices.size], [_SIMD, bn, bm]),
        ensure_row_contiguous=False,
        stream=stream,
    )[0]


def is_wide(m: int, n: int, k: int, dtype: mx.Dtype, stream: Stream = None) -> bool:
    """Whether MLX reads a transposed matrix [N, K] once for several rows of x, five at a time."""
    gpu = mlx_matrix_units.gpu(stream)
    can = gpu["vendor"] == "apple" and gpu["generation"] >= _FIRST_WIDE and dtype != mx.float32
    return can and 1 < m <= _MOST_WIDE and n > 1 and k % 4 == 0


def wide_tile(m: int, n: int) -> tuple[int, int, int]:
    """Rows of x that a threadgroup takes at a time, lanes that share a row of the matrix, and threadgroups beside."""
    passes = -(-m // 5)
    lanes = 32 if passes == 1 or n <= 64 else 16
    return -(-m // passes), lanes, 1 if n >= 65536 else passes


def gemv_wide(
    x: mx.array, w: mx.array, bias: mx.array | None = None, *, of_outputs: int = 0, stream: Stream = None
) -> mx.array:
    """``x @ w.T + bias`` of x [M, K] of few rows and w [N, K], which lie row by row, as `is_wide` says.

    Args:
        x: Rows.
        w: The matrix.
        bias: Of each output.
        of_outputs: Outputs of the matrix that w has the first rows of; its own if left out.
        stream: Where to run.
    """
    (m, k), n = x.shape, w.shape[0]
    vectors, lanes, beside = wide_tile(m, of_outputs or n)
    kernel = instance("gemv", "gemv_wide", TYPES[x.dtype], vectors, lanes)
    values = [int32(size) for size in (k, n, m, k, k)]
    arguments: dict[int, Any] = {0: w, 1: x, 3: Output([m, n], x.dtype), **dict(enumerate(values, 4))}
    arguments |= {11: int32(1), 12: int32(1), 13: int64(0), 14: int64(0)}
    if bias is not None:
        one = struct.pack("=f", 1)
        arguments |= {2: bias, 9: one, 10: one, 15: int64(0), 16: int32(0), 17: int32(1)}
    constants = {0: False, 1: bias is not None}
    grid = [beside, -(-n // 4), 1]
    return launch(*kernel, arguments, grid, [_SIMD, lanes // 8, 1], constants=constants, stream=stream)[0]


def _gather_wide(x, w, lhs_indices, rhs_indices, stream):
    m, (_, k, n) = x.shape[-2], w.shape
    vectors, lanes, beside = wide_tile(m, n)
    kernel = instance("gemv", "gemv_wide_gather", TYPES[x.dtype], vectors, lanes)
    strides = _ext.strides(w)
    values = [int32(size) for size in (k, n, m, strides[2], k)]
    output = Output([*lhs_indices.shape, m, n], x.dtype)
    arguments: dict[int, Any] = {0: w, 1: x, 3: output, **dict(enumerate(values, 4))}
    arguments |= {11: int32(1), 12: int32(lhs_indices.size), 13: int64(1, 1)}
    arguments |= dict(enumerate(_of_rows(x), 14))
    arguments |= {17: int32(1), 18: int32(*w.shape), 19: int64(*strides), 20: lhs_indices, 21: rhs_indices}
    grid = [beside, -(-n // 4), lhs_indices.size]
    return launch(
        *kernel,
        *(arguments, grid, [_SIMD, lanes // 8, 1]),
        constants={1: False},
        ensure_row_contiguous=False,
        stream=stream,
    )[0]


def _of_rows(x: mx.array) -> tuple[bytes, bytes, bytes]:
    """Axes before the last two of rows that lie one after another, as one, its shape and strides."""
    rows = math.prod(x.shape[:-2])
    return int32(1), int32(rows), int64(x.shape[-2] * x.shape[-1])
