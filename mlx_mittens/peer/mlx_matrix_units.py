"""MLX's quantized products and attention on the matrix units of an M5, launched where MLX launches them.

The names of such kernels have nax. The rules and the geometry are MLX 0.32.4's, whose host library does as MLX 0.32.2's
public source; the kernels are the installed wheel's. Dense products: `mlx_unit_products`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import _ext
from ..ops.custom import launch
from .mlx_formats import Format
from .mlx_sources import TYPES, instance

_SIMD = 32
# Of MLX's architectures: the first with matrix units in a Mac.
_FIRST_GENERATION = 17
# Widths of heads: 256 splits between two SIMD-groups, and MLX prefers it to separate products for long causal prompts.
_ATTENTION_WIDTHS = (64, 96, 128, 256)
_SPLIT_WIDTH, _FEWEST_SPLIT_QUERIES = 256, 1024

Stream = mx.Stream | mx.Device | None


def gpu(stream: Stream = None) -> dict[str, Any]:
    """The GPU that launches on a stream are for; of a CPU's stream the one that the simulator stands for."""
    with mx.stream(mx.default_stream(mx.default_device()) if stream is None else stream):
        return _ext.gpu()


def are_used(dtype: mx.Dtype, stream: Stream = None) -> bool:
    """Whether MLX computes on matrix units there: in float32 only as TF32, if `MLX_ENABLE_TF32` allows it."""
    found = gpu(stream)
    return bool(found["float32_matrix_units" if dtype == mx.float32 else "matrix_units"])


def fewest_rows_of_qmm(k: int, n: int, stream: Stream = None) -> int | None:
    """The fewest rows of x for which MLX calls qmm for weights [N, K]; None on GPUs before the M5."""
    found = gpu(stream)
    if found["vendor"] != "apple" or found["generation"] < _FIRST_GENERATION or found["tier"] == "ultra":
        return None
    return 33 if max(k, n) <= 2048 else 25 if max(k, n) <= 4096 else 13


def parts_of_qmm(shape: tuple[int, int, int], group_size: int, matrices: int = 1) -> int:
    """Into how many parts MLX splits the columns of a quantized product of many rows, for some 512 threadgroups.

    Args:
        shape: Rows of x for each matrix, its columns, and outputs.
        group_size: Weights that share a scale.
        matrices: How many weights there are; products with several are not split.
    """
    if matrices > 1:
        return 1
    m, k, n = shape
    align = max(group_size, 32)
    parts = max(1, min(512 // (-(-n // 32) * -(-m // 32)), k // align))
    while parts > 1 and k % (parts * align):
        parts -= 1
    return parts


def takes_product(
    dtype: mx.Dtype, shape: tuple[int, int, int], group_size: int, matrices: int = 1, stream: Stream = None
) -> bool:
    """Whether MLX's quantized product of many rows is the one on matrix units: one that it splits along K is not.

    Args:
        dtype: Of x.
        shape: Rows of x for each matrix, its columns, and outputs.
        group_size: Weights that share a scale.
        matrices: How many weights there are.
        stream: Where it is to run.
    """
    return shape[1] % 64 == 0 and parts_of_qmm(shape, group_size, matrices) == 1 and are_used(dtype, stream)


def qmm(
    values: Sequence[Any],
    dtype: mx.Dtype,
    shape: tuple[int, int, int],
    weights: Format,
    stream: Stream,
    matrices: int = 1,
) -> mx.array:
    """The quantized product of many rows: 64 outputs of 64 rows a threadgroup, or of 32 where these are all.

    Args:
        values: Arguments of the kernel, in order.
        dtype: Of x.
        shape: Rows of x, its columns, and outputs.
        weights: Their format.
        stream: Where to run.
        matrices: How many weights there are, each with rows of its own.
    """
    m, _, n = shape
    rows = _rows_of_tile(m)
    kernel = weights.kernel("qmm_t_nax", dtype, n % 64 == 0, matrices > 1, rows, 64, 64, 2, 2)
    groups = [-(-n // 64), -(-m // rows), matrices]
    return launch(*kernel, dict(enumerate(values)), groups, [_SIMD, 2, 2], stream=stream)[0]


def _rows_of_tile(m: int) -> int:
    return 32 if m <= 32 else 64


def rows_that_run(m: int) -> int:
    """Rows of a quantized product that makes the same tiles as m rows, and that the simulator runs."""
    return whole_tiles(m, _rows_of_tile(m))


def whole_tiles(size: int, tile: int = 64) -> int:
    """Rows or columns of the same tiles that the simulator runs: a whole last tile where it would fault a part of one.

    If a part fills the first of the tile's two SIMD-groups, but not the second, these wait at two copies of one
    barrier. Metal's specification forbids that, and the simulator faults it; a GPU counts arrivals.
    """
    return -(-size // tile) * tile if size % tile >= tile // 2 else size


def takes_attention(dtype: mx.Dtype, width: int, stream: Stream = None) -> bool:
    """Whether MLX's attention of more than eight queries is the one on matrix units."""
    return width in _ATTENTION_WIDTHS and are_used(dtype, stream)


def prefers_attention(width: int, queries: int, is_causal: bool) -> bool:
    """Whether MLX takes its kernel of one piece on matrix units for heads of this width, not separate products."""
    if width != _SPLIT_WIDTH:
        return width in _ATTENTION_WIDTHS
    return is_causal and queries >= _FEWEST_SPLIT_QUERIES


def attention_kernel(dtype: mx.Dtype, width: int) -> tuple[tuple[str, str], int, int, tuple[int, int]]:
    """The kernel, its queries and keys of a tile, and the SIMD-groups of a threadgroup: along queries, along a head."""
    name, queries, keys = TYPES[dtype], 64, 32
    if width == _SPLIT_WIDTH:
        template: tuple[object, ...] = (name, queries, keys, width, 4, 2, name, "float")
        return instance("attention_nax", "attention_nax_dsplit", *template), queries, keys, (4, 2)
    template = (name, queries, keys, width, width, 4, 1, name, "float")
    return instance("attention_nax", "attention_nax", *template), queries, keys, (4, 1)
