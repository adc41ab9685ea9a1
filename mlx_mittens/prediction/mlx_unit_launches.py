"""MLX's dense products of rows, of chosen matrices and of segments, as calls that predictions simulate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .drawn import KERNEL_TYPES, drawn
from .mlx_graph import Array, Operation
from .mlx_tiles import MOST_SIMULATED, Call, Tiles

_CPU = mx.Device(mx.cpu)


def sizes_of_product(operation: Operation) -> tuple[int, int, int, int]:
    """Products, rows and columns of one, and terms of a sum."""
    a, b = operation.inputs[:2]
    *outer, m, n = operation.outputs[0].shape if len(operation.outputs[0].shape) > 1 else (1, 1)
    batch = math.prod(outer)
    if len(b.shape) == 2:
        batch, m = 1, batch * m
    return batch, m, n, a.shape[-1]


def turned(operation: Operation, graph: Sequence[Operation]) -> tuple[bool, bool]:
    """Whether a product's operands are transposed views of matrices that lie row by row."""
    a, b = operation.inputs[:2]
    if len(b.shape) == 2 and b.maker is None:
        return _is_transposed(a, graph), not b.row_contiguous
    return _is_transposed(a, graph), _is_transposed(b, graph)


def _is_transposed(array: Array, graph: Sequence[Operation]) -> bool:
    if array.maker is None or len(array.shape) < 2:
        return False
    maker, axes = graph[array.maker], len(array.shape)
    return maker.name == "Transpose" and maker.details == (*range(axes - 2), axes - 1, axes - 2)


def unit_product(operation: Operation, graph: Sequence[Operation]) -> Call | None:
    """A dense product on matrix units, of whole tiles where the simulator would fault the last."""
    from ..peer import mlx_unit_products

    a, b, *added = operation.inputs
    batch, m, n, k = sizes_of_product(operation)
    if a.dtype not in KERNEL_TYPES or a.dtype != b.dtype or batch * m * n * k > MOST_SIMULATED:
        return None
    dtype, lie_turned = getattr(mx, a.dtype), turned(operation, graph)
    options: dict[str, Any] = {"turned": lie_turned, "stream": _CPU}
    if not mlx_unit_products.takes(m, n, k, dtype, **options) or any(_unbroadcast(c, graph).size != n for c in added):
        return None
    rows, columns = mlx_unit_products.plan(m, n, k, dtype, batch=batch, **options).that_runs(m, n)

    def matrix(height: int, width: int, is_turned: bool, times: int) -> mx.array:
        shape = (*[times] * (times > 1), *((width, height) if is_turned else (height, width)))
        values = drawn(Array(shape, a.dtype, a.itemsize))
        return values.swapaxes(-1, -2) if is_turned else values

    def call() -> mx.array:
        bias = drawn(Array((columns,), a.dtype, a.itemsize)) if added else None
        left, right = matrix(rows, k, lie_turned[0], batch), matrix(k, columns, lie_turned[1], batch)
        return mlx_unit_products.matmul(left, right, bias, stream=_CPU)

    return Call(call)


def _unbroadcast(array: Array, graph: Sequence[Operation]) -> Array:
    while array.maker is not None and graph[array.maker].name in ("Broadcast", "BroadcastAxes"):
        array = graph[array.maker].inputs[0]
    return array


def few_rows(operation: Operation, graph: Sequence[Operation]) -> Call | None:
    """A product of some rows that MLX multiplies as vectors, by a transposed matrix that it reads once for five."""
    from ..peer import mlx_gathers

    a, b, *added = operation.inputs
    batch, m, n, k = sizes_of_product(operation)
    if batch > 1 or a.dtype != b.dtype or a.dtype not in KERNEL_TYPES or turned(operation, graph) != (False, True):
        return None
    if not mlx_gathers.is_wide(m, n, k, getattr(mx, a.dtype), _CPU) or len(b.shape) != 2:
        return None
    if any(_unbroadcast(c, graph).size != n for c in added):
        return None
    # Each threadgroup has four rows of the matrix.
    some = n if m * n * k <= MOST_SIMULATED else max(4, MOST_SIMULATED // (m * k) // 4 * 4)
    nbytes = (m * k + n * k + m * n) * a.itemsize
    tiles = Tiles(n / some, (nbytes,)) if some < n else None

    def call() -> mx.array:
        x, w = (drawn(Array((rows, k), a.dtype, a.itemsize)) for rows in (m, some))
        bias = drawn(Array((some,), a.dtype, a.itemsize)) if added else None
        return mlx_gathers.gemv_wide(x, w, bias, of_outputs=n, stream=_CPU)

    return Call(call, tiles)


def gathered(operation: Operation, graph: Sequence[Operation]) -> Call | None:
    """Rows with chosen matrices: sorted single ones, which are large products, or few rows each."""
    from ..peer import mlx_gathers

    x, w, lhs, rhs = operation.inputs
    (is_sorted,) = operation.details
    k, n = x.shape[-1], w.shape[-1]
    if len(w.shape) != 3 or x.dtype not in KERNEL_TYPES or x.dtype != w.dtype or lhs.size != rhs.size:
        return None
    if is_sorted and x.shape[-2] == 1:
        return _sorted(operation, graph) if rhs.size * k == x.size else None
    m, is_turned, dtype = x.shape[-2], _is_transposed(w, graph), getattr(mx, x.dtype)
    if m > 1 and not (is_turned and mlx_gathers.is_wide(m, n, k, dtype, _CPU)):
        return None
    if m * n * k * rhs.size > MOST_SIMULATED:
        return None

    def call() -> mx.array:
        chosen = mx.arange(rhs.size, dtype=mx.uint32)
        indices = chosen * (x.size // (m * k)) // rhs.size, chosen % w.shape[0]
        return mlx_gathers.gather_mm(drawn(x), _matrices(w, w.shape[0], n, is_turned), *indices, stream=_CPU)

    return Call(call)


def _matrices(w: Array, count: int, outputs: int, is_turned: bool) -> mx.array:
    k = w.shape[1]
    values = drawn(Array((count, *((outputs, k) if is_turned else (k, outputs))), w.dtype, w.itemsize))
    return values.swapaxes(1, 2) if is_turned else values


def _sorted(operation: Operation, graph: Sequence[Operation]) -> Call:
    """All rows, or one tile of a large product; matrices get alike numbers of rows."""
    from ..peer import mlx_gathers, mlx_matrix_units, mlx_unit_gathers

    x, w = operation.inputs[:2]
    (matrices, k, outputs), rows = w.shape, x.size // x.shape[-1]
    is_turned = _is_transposed(w, graph)
    on_units = mlx_matrix_units.are_used(getattr(mx, x.dtype), _CPU)
    (tile, along_rows), width = ((16, 1), 64)
    if on_units:
        (tile, along_rows), width = mlx_unit_gathers.tile_of_mm(rows, matrices), 128
        outputs = -(-outputs // width) * width if outputs % width >= 32 else outputs
    counts = mlx_unit_gathers.rows_that_run(rows, matrices, tile, along_rows)
    tiles = None
    if rows * k * outputs > MOST_SIMULATED:
        moved = sum(a.nbytes for a in operation.inputs) + operation.outputs[0].nbytes
        tiles = Tiles(sum(-(-count // tile) for count in counts) * -(-outputs // width), (moved,))
        counts = mlx_unit_gathers.rows_that_run(min(counts[0], tile), 1, tile, along_rows)
        outputs = width
    rhs = mlx_unit_gathers.indices_of(counts)

    def call() -> mx.array:
        taken = drawn(Array((rhs.size, 1, k), x.dtype, x.itemsize))
        chosen = _matrices(w, len(counts), outputs, is_turned)
        lhs = mx.arange(rhs.size, dtype=mx.uint32)
        return mlx_gathers.gather_mm(taken, chosen, lhs, rhs, sorted_indices=True, stream=_CPU)

    return Call(call, tiles)


def segmented(operation: Operation, graph: Sequence[Operation]) -> Call | None:
    """A product over segments of its terms on matrix units; segments are taken to be alike."""
    from ..peer import mlx_matrix_units, mlx_unit_gathers

    a, b, segments = operation.inputs
    (m, k), n, count = a.shape[-2:], b.shape[-1], segments.size // 2
    if len(a.shape) != 2 or len(b.shape) != 2 or a.dtype not in KERNEL_TYPES or a.dtype != b.dtype:
        return None
    if not mlx_matrix_units.are_used(getattr(mx, a.dtype), _CPU) or k < count:
        return None
    tiles, rows, columns = None, mlx_matrix_units.whole_tiles(m), mlx_matrix_units.whole_tiles(n)
    if m * n * k > MOST_SIMULATED:
        moved = a.nbytes + b.nbytes + count * m * n * a.itemsize
        tiles = Tiles(-(-m // 64) * -(-n // 64), (moved,))
        rows = columns = 64
    lie_turned = turned(operation, graph)

    def call() -> mx.array:
        left, right = (
            drawn(Array(shape[::-1] if lies else shape, a.dtype, a.itemsize)).transpose(*((1, 0) if lies else (0, 1)))
            for shape, lies in zip(((rows, k), (k, columns)), lie_turned)
        )
        ends = mx.arange(count + 1, dtype=mx.uint32) * (k // count)
        return mlx_unit_gathers.segmented_mm(left, right, mx.stack([ends[:-1], ends[1:]], axis=1), stream=_CPU)

    return Call(call, tiles)
