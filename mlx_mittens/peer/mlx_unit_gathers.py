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
from ..ops.custom import Output, int32, launch
from .mlx_formats import Format, Weights
from .mlx_sources import TYPES, instance

_SIMD = 32

Stream = mx.Stream | mx.Device | None


def rows_that_run(rows: int, matrices: int, tile: int, along_rows: int = 1) -> list[int]:
    """Rows of each matrix, where all get alike numbers: some more where the simulator would fault a tile.

    Where the rows that are left fill one SIMD-group's part of a tile and not the next one's, the two wait at two copies
    of one barrier. None does if the last rows are a whole tile.

    Args:
        rows: Of all matrices.
        matrices: How many.
        tile: Rows of a threadgroup.
        along_rows: Its SIMD-groups along rows.
    """
    counts = [rows // matrices + (i < rows % matrices) for i in range(matrices)]
    last = min(rows, matrices) - 1
    if along_rows > 1 and (last > 0 or counts[last] % tile >= tile // along_rows):
        counts[last] = -(-counts[last] // tile) * tile
    return counts


def indices_of(counts: Sequence[int]) -> mx.array:
    """The matrix of each row, by the rows of each matrix."""
    return mx.array([i for i, count in enumerate(counts) for _ in range(count)], dtype=mx.uint32)


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
    tile, along_rows = tile_of_mm(rows, matrices)
    strides = _ext.strides(w)
    template = (TYPES[x.dtype], tile, 128, 128, along_rows, 4, False, is_turned)
    kernel = instance("gather_nax", "gather_mm_rhs_nax", *template)
    grid = [-(-n // 128), -(-rows // tile) + matrices - 1, 1]
    params = struct.pack(
        "=8i3q3i4x", *(rows, n, k, k, strides[2 if is_turned else 1], n, *grid[:2]), 0, strides[0], 0, 0, k // 128, 0
    )
    arguments: dict[int, Any] = {
        **dict(enumerate((mx.contiguous(x, stream=stream), w, begins(rhs_indices, matrices, stream)))),
        **{3: Output([*x.shape[:-1], n], x.dtype), 4: params, 5: int32(matrices)},
    }
    constants = {201: n % 128 == 0, 202: k % 128 == 0}
    threads = [_SIMD, 4, along_rows]
    return launch(*kernel, arguments, grid, threads, constants=constants, ensure_row_contiguous=False, stream=stream)[0]


def tile_of_mm(rows: int, matrices: int) -> tuple[int, int]:
    """Rows of a threadgroup of a dense product of sorted rows, and its SIMD-groups along them."""
    each = rows // matrices
    return (64, 2) if each > 48 else (32, 1) if each > 24 else (16, 1)


def gather_qmm(
    x: mx.array,
    weights: Weights,
    rhs_indices: mx.array,
    transpose: bool,
    form: Format,
    tile: int | None = None,
    *,
    stream: Stream = None,
) -> mx.array:
    """``mx.gather_qmm`` of sorted single rows: x [R, 1, K] with weights [E, N, K], or [E, K, N].

    Args:
        x: Rows.
        weights: Words, scales, and biases of affine ones.
        rhs_indices: The weights of each row.
        transpose: Whether weights are [E, N, K].
        form: The weights' format.
        tile: Rows of a threadgroup; as many as MLX takes if left out.
        stream: Where to run.
    """
    rows, k = x.size // x.shape[-1], x.shape[-1]
    w = weights[0]
    matrices = w.shape[0]
    n = w.shape[1] if transpose else w.shape[2] * 32 // form.bits
    _need_rows(x, rhs_indices, "gather_qmm")
    tile = tile or tile_of_qmm(rows, matrices)
    kernel = form.kernel("gather_qmm_rhs_nax", x.dtype, tile, 64, 64, 2, 2, transpose)
    values = [x, *form.operands(weights), begins(rhs_indices, matrices, stream), Output([*x.shape[:-1], n], x.dtype)]
    values += [int32(size) for size in (rows, n, k, matrices)]
    grid = [-(-n // 64), -(-rows // tile) + matrices - 1, 1]
    constants = {201: n % 64 == 0, 202: k % 64 == 0}
    arguments: dict[int, Any] = dict(enumerate(values))
    return launch(*kernel, arguments, grid, [_SIMD, 2, 2], constants=constants, stream=stream)[0]


def segmented_mm(a: mx.array, b: mx.array, segments: mx.array, *, stream: Stream = None) -> mx.array:
    """``mx.segmented_mm``: a [M, K] and b [K, N], which may be transposed views, over segments [S, 2] of K."""
    mx.eval(a, b)
    (m, k), n = a.shape, b.shape[1]
    turned = [_ext.strides(operand)[1] != 1 for operand in (a, b)]
    rows_of_operands = [_ext.strides(operand)[int(lies)] for operand, lies in zip((a, b), turned)]
    count = segments.size // 2
    each = k // count
    step = 256 if each >= 256 else 128 if each >= 128 else 64
    template = (TYPES[a.dtype], 64, 64, step, 2, 2, *turned)
    kernel = instance("segmented_nax", "segmented_mm_nax", *template)
    columns, rows = -(-n // 64), -(-m // 64)
    params = struct.pack("=8i3q3i4x", m, n, k, *rows_of_operands, n, columns, rows, 0, 0, m * n, 0, 0, 0)
    arguments: dict[int, Any] = {**dict(enumerate((a, b, segments))), 3: Output([count, m, n], a.dtype), 4: params}
    constants = {199: True, 200: m % 64 == 0, 201: n % 64 == 0}
    grid = [count, columns, rows] if step == 64 else [columns, rows, count]
    threads = [_SIMD, 2, 2]
    return launch(*kernel, arguments, grid, threads, constants=constants, ensure_row_contiguous=False, stream=stream)[0]


def _need_rows(x: mx.array, indices: mx.array, name: str) -> None:
    if x.shape[-2] != 1 or x.size // x.shape[-1] != indices.size:
        raise ValueError(f"[peer.{name}] x has shape {tuple(x.shape)}: expected [..., 1, K], a row of each index")


def begins(indices: mx.array, matrices: int, stream: Stream) -> mx.array:
    """The first row of each matrix."""
    every = mx.arange(matrices, dtype=mx.uint32)[:, None]
    return mx.sum(indices.reshape(1, -1) < every, axis=1, stream=stream).astype(mx.int32)
