"""MLX's dense products on the matrix units of an M5: which kernel, which tiles and which grid, and their launch.

The rules follow the host library in MLX 0.32.4's wheel for macOS 26, whose launches are recorded in
tests/bench/mlx_host_launches.txt. The letter that ends the name of a GPU's architecture decides there: `s` on a Pro and
a Max, `d` on an Ultra (ml-explore/mlx#3852). The kernels are the installed wheel's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import mlx.core as mx

from .. import _ext
from ..ops.custom import Output, launch
from . import mlx_matrix_units, split_sums
from .mlx_sources import TYPES, instance

_SIMD = 32
# Most columns, or rows of a transposed matrix, of a thin product.
_THIN = 64
_LARGE = ("pro", "max")
_MOST_OFFSET = 2**31 - 1
# Rows that MLX multiplies as vectors, three times five of them.
_MOST_VECTORS = 15

Stream = mx.Stream | mx.Device | None


@dataclass(frozen=True)
class Plan:
    """The launch of a product.

    Attributes:
        kernel: `thin`, `split` or `fused`.
        tile: Rows and columns of a threadgroup.
        step: Columns of K between two barriers.
        simdgroups: Along rows, along columns, and along K.
        tiles: Along rows and along columns.
        swizzle: Logarithm of the rows of tiles that run beside each other.
        part: Columns of K of one part, of a product that is split; all others have one part.
        parts: Parts of K.
        batch: Products.
    """

    kernel: str
    tile: tuple[int, int]
    step: int
    simdgroups: tuple[int, int, int]
    tiles: tuple[int, int]
    swizzle: int = 0
    part: int = 0
    parts: int = 1
    batch: int = 1

    @property
    def threadgroups(self) -> tuple[int, int, int]:
        """The grid."""
        rows, columns = self.tiles
        if self.kernel == "thin":
            return rows * columns, 1, 1
        beside, groups = 1 << self.swizzle, -(-rows >> self.swizzle)
        if self.kernel == "split":
            return columns * beside * groups * self.parts, 1, 1
        return columns * beside, groups, self.batch

    @property
    def threads(self) -> tuple[int, int, int]:
        """Of a threadgroup."""
        rows, columns, along_k = self.simdgroups
        return (_SIMD * rows * columns * along_k, 1, 1) if self.kernel == "thin" else (_SIMD, columns, rows)

    def that_runs(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns with the same tiles, which the simulator runs.

        Where the last tile fills one SIMD-group's part and not the next one's, the two wait at two copies of one
        barrier. Metal's specification forbids that, and the simulator faults it.
        """
        if self.kernel == "thin":
            return m, n
        sizes = zip((m, n), self.tile, self.simdgroups)
        rows, columns = (_whole(size, tile) if size % tile >= tile // parts else size for size, tile, parts in sizes)
        return rows, columns


def _whole(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def plan(
    m: int,
    n: int,
    k: int,
    dtype: mx.Dtype,
    *,
    batch: int = 1,
    turned: tuple[bool, bool] = (False, True),
    stream: Stream = None,
) -> Plan:
    """How MLX launches a product of more than one row and column on matrix units.

    Args:
        m: Rows.
        n: Columns.
        k: Terms of a sum.
        dtype: Of the operands.
        batch: Number of products. No two share a matrix.
        turned: Whether the operands lie in memory column by column.
        stream: Where it is to run.
    """
    tier = mlx_matrix_units.gpu(stream)["tier"]
    if batch == 1:
        if _is_thin(m, n, k, dtype, turned):
            # Two SIMD-groups beside each other for many rows, and more along K for few.
            columns, along_k = (2, 2) if m >= 2048 else (1, 4)
            tile = 32, 32 * columns
            return Plan("thin", tile, 64, (1, columns, along_k), _tiles(m, n, tile))
        longest = max(m, n)
        if k >= 3 * longest or (longest <= 1024 and k > 2 * longest):
            return _split(m, n, k, tier)
    tile, step, simdgroups = fused_tile(m, n, k, tier)
    tiles = _tiles(m, n, tile)
    swizzle = 2 if tier in _LARGE else 2 * (m <= n) if tier == "ultra" else int(tiles[0] > 3)
    return Plan("fused", tile, step, simdgroups, tiles, swizzle, batch=batch)


def fused_tile(m: int, n: int, k: int, tier: str) -> tuple[tuple[int, int], int, tuple[int, int, int]]:
    """The tile, step and simdgroups of a product [m, k] by [k, n] that is not split, as `Plan` has them."""
    if tier in _LARGE:
        return (64, 128), 64 if k >= 8192 and k > m + n else 256, (2, 4, 1)
    if tier == "ultra":
        return _of_an_ultra(m, n)
    return (128, 128), 512, (4, 4, 1)


def _is_thin(m: int, n: int, k: int, dtype: mx.Dtype, turned: tuple[bool, bool]) -> bool:
    of_a, of_b = turned
    if of_a or dtype == mx.float32 or not (n <= _THIN or (of_b and m <= _THIN)):
        return False
    return of_b or n * k <= _MOST_OFFSET


def _split(m: int, n: int, k: int, tier: str) -> Plan:
    ultra = tier == "ultra"
    few = k <= 4096 or (max(m, n) <= 2048 if ultra else (m + n) // 2 < 512)
    if few:
        tile, step, simdgroups = (64, 64), 256, (2, 2, 1)
    else:
        tile, step, simdgroups = _of_an_ultra(m, n) if ultra else ((128, 128), 512, (4, 4, 1))
    part = k // 2 if k <= 1024 else 1024 if k <= 2048 else 2048 if k <= 4096 or (ultra and few) else 4096
    tiles = _tiles(m, n, tile)
    swizzle = int(m <= n) if ultra else int(tiles[0] > 3)
    return Plan("split", tile, step, simdgroups, tiles, swizzle, part, -(-k // part))


def _of_an_ultra(m: int, n: int) -> tuple[tuple[int, int], int, tuple[int, int, int]]:
    return ((128, 64), 512, (4, 2, 1)) if n > m else ((64, 128), 512, (2, 4, 1))


def _tiles(m: int, n: int, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-m // tile[0]), -(-n // tile[1])


def takes(
    m: int,
    n: int,
    k: int,
    dtype: mx.Dtype,
    *,
    turned: tuple[bool, bool] = (False, True),
    stream: Stream = None,
) -> bool:
    """Whether MLX computes a product on matrix units there, not by vectors."""
    if min(m, n) <= 1 or not mlx_matrix_units.are_used(dtype, stream):
        return False
    by_vectors = m <= _MOST_VECTORS and turned == (False, True) and k % 4 == 0 and dtype != mx.float32
    return not by_vectors


def matmul(a: mx.array, b: mx.array, bias: mx.array | None = None, *, stream: Stream = None) -> mx.array:
    """``a @ b + bias`` on matrix units: [..., M, K] with one matrix [K, N], or [B, M, K] with [B, K, N].

    Raises:
        ValueError: The shapes are others, or there are so few rows that MLX computes by vectors.
    """
    shapes = f"shapes are {tuple(a.shape)} and {tuple(b.shape)}"
    batched = a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] and bias is None
    if a.ndim < 2 or not (b.ndim == 2 or batched) or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"[peer.matmul] {shapes}: expected [..., M, K] and [K, N], or [B, M, K] and [B, K, N]")
    outer = a.shape[:-1]
    a, b = a if batched else a.reshape(-1, a.shape[-1]), b
    mx.eval(a, b)  # MLX hands over views with their strides, which are known then
    (a, of_a), (b, of_b) = (_that_lies(array, stream) for array in (a, b))
    (m, k), n = a.shape[-2:], b.shape[-1]
    if not takes(m, n, k, a.dtype, turned=(of_a, of_b), stream=stream):
        raise ValueError(f"[peer.matmul] {shapes}: expected a product that MLX computes on matrix units")
    batch = a.shape[0] if batched else 1
    planned = plan(m, n, k, a.dtype, batch=batch, turned=(of_a, of_b), stream=stream)
    shape = [*outer, n]
    if planned.kernel == "split":
        return _split_product(planned, a, b, bias, shape, (of_a, of_b), stream)
    return _whole_product(planned, a, b, bias, shape, (of_a, of_b), stream)


def _that_lies(array: mx.array, stream: Stream) -> tuple[mx.array, bool]:
    """A matrix as MLX hands it over, and whether it lies in memory column by column."""
    strides = _ext.strides(array)[-2:]
    if strides[1] == 1 or strides[0] == 1:
        return array, strides[1] != 1
    array = mx.contiguous(array, stream=stream)
    mx.eval(array)
    return array, False


def _row(array: mx.array, is_turned: bool) -> int:
    """The stride of the axis that does not lie one value beside the other."""
    return int(_ext.strides(array)[-1 if is_turned else -2])


def _of_batch(array: mx.array) -> int:
    return int(_ext.strides(array)[0]) if array.ndim == 3 else 0


def _whole_product(planned, a, b, bias, shape, turned, stream):
    (m, k), n = a.shape[-2:], b.shape[-1]
    tile, step = planned.tile, planned.step
    rows, columns, along_k = planned.simdgroups
    text = TYPES[a.dtype]
    iterations = k // step
    if planned.kernel == "thin":
        template = (text, 2, 2, rows, columns, along_k, turned[1])
        kernel = instance("thin_nax", "gemm_thin_nax", *template)
        iterations = -(-k // (step * along_k))
    else:
        template = (text, *tile, step, rows, columns, *turned)
        kernel = instance("fused_nax", "gemm", *template, name="steel_gemm_fused_nax")
    params = struct.pack(
        "=8i3q3i4x",
        *(m, n, k, _row(a, turned[0]), _row(b, turned[1]), n, *planned.tiles[::-1]),
        *(_of_batch(a), _of_batch(b), 0 if planned.kernel == "thin" else m * n),
        *(planned.swizzle, iterations, int(planned.kernel != "thin")),
    )
    arguments = {0: a, 1: b, 3: Output(shape, a.dtype), 4: params}
    if bias is not None:
        arguments |= {2: bias, 5: struct.pack("=2iq2f", 0, 1, 0, 1, 1)}
    aligned = [size % part == 0 for size, part in zip((m, n, k), (*tile, step))]
    constants = {100: bias is not None, 110: False, **dict(zip((200, 201, 202), aligned))}
    if planned.kernel == "fused":
        constants[10] = False
    return launch(
        *kernel,
        *(arguments, list(planned.threadgroups), list(planned.threads)),
        constants=constants,
        ensure_row_contiguous=False,
        stream=stream,
    )[0]


def _split_product(planned, a, b, bias, shape, turned, stream):
    (m, k), n = a.shape[-2:], b.shape[-1]
    template = (TYPES[a.dtype], *planned.tile, planned.step, *planned.simdgroups[:2], *turned)
    kernel = instance("splitk_nax", "gemm_splitk_nax", *template)
    params = struct.pack(
        "=13i",
        *(m, n, k, _row(a, turned[0]), _row(b, turned[1]), n, *planned.tiles[::-1]),
        *(planned.parts, m * n, planned.part, planned.swizzle, planned.part // planned.step),
    )
    (partials,) = launch(
        *kernel,
        {0: a, 1: b, 2: Output([planned.parts, m, n], mx.float32), 3: params},
        *(list(planned.threadgroups), list(planned.threads)),
        constants={200: m % planned.tile[0] == 0, 201: n % planned.tile[1] == 0},
        ensure_row_contiguous=False,
        stream=stream,
    )
    return split_sums.added(partials, shape, a.dtype, bias, stream=stream)
