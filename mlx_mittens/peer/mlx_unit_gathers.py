"""MLX's products with chosen matrices, and with segments of K, on the matrix units of an M5.

The rules follow MLX 0.32.4's host library, as in `mlx_unit_products`. Where rows are sorted by their matrix, MLX
first finds where each matrix's rows begin, in a kernel whose source is not in its wheel: here mx finds them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import _ext
from ..ops.custom import Output, int32, int64, launch
from . import mlx_matrix_units
from .mlx_sources import TYPES, instance

_SIMD = 32

Stream = mx.Stream | mx.Device | None


def takes_sorted_mm(dtype: mx.Dtype, stream: Stream = None) -> bool:
    """Whether MLX's dense product of single rows that are sorted by their matrix is on matrix units."""
    return mlx_matrix_units.are_used(dtype, stream)


def takes_sorted_qmm(dtype: mx.Dtype, rows: int, matrices: int, stream: Stream = None) -> bool:
    """Whether MLX's quantized product of single sorted rows is on matrix units: fewer are multiplied as vectors."""
    return rows >= 16 and rows // matrices >= 4 and mlx_matrix_units.are_used(dtype, stream)


def indices_that_run(rows: int, matrices: int, tile: int) -> mx.array:
    """Sorted matrices of rows, in whole tiles, which the simulator runs: some more rows where the last tile is not.

    Where a tile fills one SIMD-group's part and not the next one's, the two wait at two copies of one barrier.
    """
    tiles = -(-rows // tile)
    begins = [i * tiles // matrices * tile for i in range(matrices + 1)]
    counts = [after - before for before, after in zip(begins, begins[1:])]
    return mx.array([i for i, count in enumerate(counts) for _ in range(count)], dtype=mx.uint32)


def tile_of_mm(rows: int, matrices: int) -> int:
    """Rows of a threadgroup of a dense product of sorted rows."""
    return _tile_of_mm(rows, matrices)[0]


def tile_of_qmm(rows: int, matrices: int) -> int:
    """Rows of a threadgroup of a quantized product of sorted rows."""
    return 32 if rows // matrices < 64 else 64


def gather_mm(x: mx.array, w: mx.array, rhs_indices: mx.array, *, stream: Stream = None) -> mx.array:
    """``mx.gather_mm`` of sorted single rows: x [R, 1, K] with matrices w [E, K, N], which may be transposed views."""
    rows, k = x.size // x.shape[-1], x.shape[-1]
    matrices, _, n = w.shape
    _need_rows(x, rhs_indices, "gather_mm")
    mx.eval(w)
    is_turned = _ext.strides(w)[2] != 1
    if is_turned and _ext.strides(w)[1] != 1:
        w, is_turned = mx.contiguous(w, stream=stream), False
        mx.eval(w)
    tile, along_rows = _tile_of_mm(rows, matrices)
    strides = _ext.strides(w)
    template = (TYPES[x.dtype], tile, 128, 128, along_rows, 4, False, is_turned)
    kernel = instance("gather_nax", "gather_mm_rhs_nax", *template)
    grid = [-(-n // 128), -(-rows // tile) + matrices - 1, 1]
    params = struct.pack(
        "=8i3q3i4x", *(rows, n, k, k, strides[2 if is_turned else 1], n, *grid[:2]), 0, strides[0], 0, 0, k // 128, 0
    )
    arguments: dict[int, Any] = {
        **dict(enumerate((mx.contiguous(x, stream=stream), w, _begins(rhs_indices, matrices, stream)))),
        **{3: Output([*x.shape[:-1], n], x.dtype), 4: params, 5: int32(matrices)},
    }
    constants = {201: n % 128 == 0, 202: k % 128 == 0}
    threads = [_SIMD, 4, along_rows]
    return launch(*kernel, arguments, grid, threads, constants=constants, ensure_row_contiguous=False, stream=stream)[0]


def _tile_of_mm(rows: int, matrices: int) -> tuple[int, int]:
    """Rows of a threadgroup, and its SIMD-groups along them."""
    each = rows // matrices
    return (64, 2) if each > 48 else (32, 1) if each > 24 else (16, 1)


def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    rhs_indices: mx.array,
    transpose: bool = True,
    group_size: int = 64,
    bits: int = 4,
    *,
    stream: Stream = None,
) -> mx.array:
    """``mx.gather_qmm`` of sorted single rows, with affine weights: x [R, 1, K] with w [E, N, K], or [E, K, N]."""
    rows, k = x.size // x.shape[-1], x.shape[-1]
    matrices = w.shape[0]
    n = w.shape[1] if transpose else w.shape[2] * 32 // bits
    _need_rows(x, rhs_indices, "gather_qmm")
    tile = tile_of_qmm(rows, matrices)
    template = (TYPES[x.dtype], group_size, bits, tile, 64, 64, 2, 2, transpose)
    kernel = instance("quantized_nax", "affine_gather_qmm_rhs_nax", *template)
    values = [x, w, scales, biases, _begins(rhs_indices, matrices, stream), Output([*x.shape[:-1], n], x.dtype)]
    values += [int32(size) for size in (rows, n, k, matrices)]
    grid = [-(-n // 64), -(-rows // tile) + matrices - 1, 1]
    constants = {201: n % 64 == 0, 202: k % 64 == 0}
    arguments: dict[int, Any] = dict(enumerate(values))
    return launch(*kernel, arguments, grid, [_SIMD, 2, 2], constants=constants, stream=stream)[0]


def gather_qmm_of_matrices(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    lhs_indices: mx.array,
    rhs_indices: mx.array,
    group_size: int = 64,
    bits: int = 4,
    *,
    stream: Stream = None,
) -> mx.array:
    """``mx.gather_qmm`` of many rows a matrix, from `mlx_matrix_units.fewest_rows_of_qmm` on.

    Args:
        x: Rows [B, M, K].
        w: Packed weights [E, N, K].
        scales: Of each group of weights.
        biases: Of each group of weights.
        lhs_indices: The rows of each product.
        rhs_indices: The weights of each product.
        group_size: Weights that share a scale.
        bits: Of a weight.
        stream: Where to run.
    """
    (m, k), n = x.shape[-2:], w.shape[1]
    products = rhs_indices.size
    template = (TYPES[x.dtype], group_size, bits, n % 64 == 0, 64, 64, 64, 2, 2)
    kernel = instance("quantized_nax", "affine_gather_qmm_t_nax", *template)
    values: list[Any] = [w, scales, biases, x, lhs_indices, rhs_indices]
    values += [Output([products, m, n], x.dtype), int32(k), int32(n), int32(m)]
    values += [int32(1), _ints(x.shape), _longs(x.shape), int32(1), _ints(w.shape)]
    values += [_longs(a.shape) for a in (w, scales, biases)]
    values += [int32(1), int32(products), int64(1), int64(1)]
    groups = [-(-n // 64), -(-m // 64), products]
    return launch(*kernel, dict(enumerate(values)), groups, [_SIMD, 2, 2], stream=stream)[0]


def segmented_mm(a: mx.array, b: mx.array, segments: mx.array, *, stream: Stream = None) -> mx.array:
    """``mx.segmented_mm``: a [M, K] and b [K, N], which lie row by row, over segments [S, 2] of K."""
    m, k, n = *a.shape, b.shape[1]
    count = segments.size // 2
    each = k // count
    step = 256 if each >= 256 else 128 if each >= 128 else 64
    template = (TYPES[a.dtype], 64, 64, step, 2, 2, False, False)
    kernel = instance("segmented_nax", "segmented_mm_nax", *template)
    columns, rows = -(-n // 64), -(-m // 64)
    params = struct.pack("=8i3q3i4x", m, n, k, k, n, n, columns, rows, 0, 0, m * n, 0, 0, 0)
    arguments: dict[int, Any] = {**dict(enumerate((a, b, segments))), 3: Output([count, m, n], a.dtype), 4: params}
    constants = {199: True, 200: m % 64 == 0, 201: n % 64 == 0}
    grid = [count, columns, rows] if step == 64 else [columns, rows, count]
    return launch(*kernel, arguments, grid, [_SIMD, 2, 2], constants=constants, stream=stream)[0]


def _need_rows(x: mx.array, indices: mx.array, name: str) -> None:
    if x.shape[-2] != 1 or x.size // x.shape[-1] != indices.size:
        raise ValueError(f"[peer.{name}] x has shape {tuple(x.shape)}: expected [..., 1, K], a row of each index")


def _begins(indices: mx.array, matrices: int, stream: Stream) -> mx.array:
    """The first row of each matrix."""
    every = mx.arange(matrices, dtype=mx.uint32)[:, None]
    return mx.sum(indices.reshape(1, -1) < every, axis=1, stream=stream).astype(mx.int32)


def _ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"={len(values)}i", *values)


def _longs(shape: Sequence[int]) -> bytes:
    """Strides of a shape of three axes that lies in memory row by row."""
    _, rows, columns = shape
    return struct.pack("=3q", rows * columns, columns, 1)
