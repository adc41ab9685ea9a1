"""MLX's products of rows and quantized weights: by vectors, by matrices, or on the matrix units of an M5.

The rules are those of MLX 0.32.4's host library, for an M5 and later as for that GPU, for all others as for an M4 Max.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from ..ops.custom import Output, int32, launch
from . import mlx_matrix_units, split_sums
from .mlx_formats import Format, Weights, layouts

_SIMD = 32
_SMALL_FLOATS = ("mxfp4", "mxfp8", "nvfp4")
# Outputs from which on a Pro's and a Max's M5 takes half as many of them a SIMD-group, in nvfp4.
_FEWEST_NARROW = 4096
# Rows from which on MLX multiplies matrices that are not transposed.
FEWEST_BY_COLUMNS = 4

Shape = tuple[int, int, int]  # rows of x, its columns, and outputs
Stream = mx.Stream | mx.Device | None


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
    *,
    stream: Stream = None,
) -> mx.array:
    """``mx.quantized_matmul`` with weights [N, K] and x [M, K]: by vectors, or by matrices from some rows on.

    Weights may be a stack [B, N, K], for x [B, M, K], and [K, N] if they are not transposed.

    Raises:
        ValueError: The weights are of another mode, a stack of other axes than those of x, or not transposed and for
            fewer rows than MLX multiplies as matrices.
    """
    if mode not in ("affine", *_SMALL_FLOATS):
        raise ValueError(f"[peer.quantized_matmul] mode is {mode!r}: expected affine, mxfp4, mxfp8 or nvfp4")
    if w.ndim > 2 and w.shape[:-2] != x.shape[:-2]:
        shapes = f"x has shape {tuple(x.shape)}, w {tuple(w.shape)}"
        raise ValueError(f"[peer.quantized_matmul] {shapes}: expected the same axes before the last two")
    form, weights = Format(group_size, bits, mode), (w, scales, biases)
    rows = x.shape[-2] if w.ndim > 2 else math.prod(x.shape[:-1])
    if not transpose:
        return _by_columns(x, weights, (rows, x.shape[-1], scales.shape[-1] * group_size), form, stream)
    shape = rows, x.shape[-1], w.shape[-2]
    if not is_by_matrices(shape, stream):
        return _by_vectors(x, weights, shape, form, stream)
    matrices = _matrices(weights)
    parts = mlx_matrix_units.parts_of_qmm(shape, group_size, matrices)
    on_units = mlx_matrix_units.takes_product(x.dtype, shape, group_size, matrices, stream)
    return by_matrices(x, weights, shape, form, parts, on_units, stream)


def _matrices(weights: Weights) -> int:
    return math.prod(weights[0].shape[:-2])


def is_by_matrices(shape: Shape, stream: Stream = None) -> bool:
    """Whether MLX multiplies matrices, not each row as a vector."""
    m, k, n = shape
    return m >= (mlx_matrix_units.fewest_rows_of_qmm(k, n, stream) or fewest_rows_of_qmm(k, n))


def fewest_rows_of_qmm(k: int, n: int) -> int:
    """The fewest rows of x for which MLX calls qmm for weights [N, K], on an M3 or M4 that is no Ultra."""
    return 15 if 2048 < max(k, n) <= 4096 else 13


def _by_vectors(x: mx.array, weights: Weights, shape: Shape, form: Format, stream: Stream) -> mx.array:
    m, k, n = shape
    matrices = _matrices(weights)
    is_stack = matrices > 1
    output = Output([*x.shape[:-1], n], x.dtype)
    sizes: list[Any] = [x, output, int32(k), int32(n)]
    strides = layouts(x, weights) if is_stack else []
    if k in (64, 128) and form.bits in ((1, 2, 4, 8) if k == 128 else (2, 4, 8)):
        kernel = form.kernel("qmv_quad", x.dtype, k, is_stack)
        values = [*form.operands(weights, False), *sizes, *strides]
        groups = [m, -(-n // 64), matrices]
        return launch(*kernel, dict(enumerate(values)), groups, [_SIMD, 1, 1], stream=stream)[0]
    if m > 1:
        tiles = -(-m // 5)
        vectors, lanes = -(-m // tiles), 8 if form.is_affine else 16
        kernel = form.kernel("qmv_wide", x.dtype, vectors, lanes, is_stack)
        values = [*form.operands(weights, False), *sizes, int32(m), *strides]
        groups = [-(-m // vectors), -(-n * lanes // (2 * _SIMD)), matrices]
        return launch(*kernel, dict(enumerate(values)), groups, [_SIMD, 2, 1], stream=stream)[0]
    is_whole = k % form.step == 0
    each = 2 if is_whole and _is_narrow(n, form, stream) else 4
    template: list[object] = [is_stack, n % 8 != 0] if is_whole else [is_stack]
    kernel = form.kernel("qmv_fast" if is_whole else "qmv", x.dtype, *template, *[False, each] * (each == 2))
    values = [*form.operands(weights), *sizes, *strides]
    groups = [m, -(-n // (2 * each)), matrices]
    return launch(*kernel, dict(enumerate(values)), groups, [_SIMD, 2, 1], stream=stream)[0]


def are_columns_on_units(dtype: mx.Dtype, shape: Shape, form: Format, stream: Stream = None) -> bool:
    """Whether MLX's product by weights [K, N] is on matrix units."""
    _, k, n = shape
    return form.is_affine and k % 64 == 0 and n % 64 == 0 and mlx_matrix_units.are_used(dtype, stream)


def _by_columns(x: mx.array, weights: Weights, shape: Shape, form: Format, stream: Stream) -> mx.array:
    m, k, n = shape
    if m < FEWEST_BY_COLUMNS:
        raise ValueError(
            f"[peer.quantized_matmul] transpose is False, x has {m} rows: expected {FEWEST_BY_COLUMNS} or more"
        )
    matrices = _matrices(weights)
    if are_columns_on_units(x.dtype, shape, form, stream):
        tile, kernel = 64, form.kernel("qmm_n_nax", x.dtype, matrices > 1, 64, 64, 64, 2, 2)
    else:
        tile, kernel = 32, form.kernel("qmm_n", x.dtype, matrices > 1)
    values: list[Any] = [*form.operands(weights, False), x, Output([*x.shape[:-1], n], x.dtype)]
    values += [int32(k), int32(n), int32(m), *(layouts(x, weights) if matrices > 1 else [])]
    groups = [-(-n // tile), -(-m // tile), matrices]
    return launch(*kernel, dict(enumerate(values)), groups, [_SIMD, 2, 2], stream=stream)[0]


def _is_narrow(n: int, form: Format, stream: Stream) -> bool:
    gpu = mlx_matrix_units.gpu(stream)
    of_gpu = gpu["vendor"] == "apple" and gpu["generation"] == 17 and gpu["tier"] in ("pro", "max")
    return of_gpu and form.mode == "nvfp4" and n >= _FEWEST_NARROW


def by_matrices(
    x: mx.array, weights: Weights, shape: Shape, form: Format, parts: int, on_units: bool, stream: Stream
) -> mx.array:
    """The product of many rows.

    Args:
        x: Rows.
        weights: Words, scales, and biases of affine ones.
        shape: Rows of x for each matrix, its columns, and outputs.
        form: The weights' format.
        parts: Parts of the columns, whose sums a second launch adds.
        on_units: Whether it is on matrix units, which has one part.
        stream: Where to run.
    """
    m, k, n = shape
    output = Output([*x.shape[:-1], n], x.dtype)
    sizes: list[Any] = [int32(k), int32(n), int32(m)]
    matrices = _matrices(weights)
    if matrices > 1:
        sizes += layouts(x, weights)
    if on_units:
        values = [*form.operands(weights), x, output, *sizes]
        return mlx_matrix_units.qmm(values, x.dtype, shape, form, stream, matrices)
    tiles = [-(-n // 32), -(-m // 32)]
    is_aligned = n % 32 == 0
    if parts == 1:
        kernel = form.kernel("qmm_t", x.dtype, is_aligned, matrices > 1)
        arguments = dict(enumerate([*form.operands(weights), x, output, *sizes]))
        return launch(*kernel, arguments, [*tiles, matrices], [_SIMD, 2, 2], stream=stream)[0]
    kernel = form.kernel("qmm_t_splitk", x.dtype, is_aligned)
    values = [*form.operands(weights, False), x, Output([parts, m, n], mx.float32), *sizes]
    arguments = dict(enumerate([*values, int32(k // parts), int32(m * n)]))
    (partials,) = launch(*kernel, arguments, [*tiles, parts], [_SIMD, 2, 2], stream=stream)
    return split_sums.added(partials, list(output.shape), output.dtype, stream=stream)
