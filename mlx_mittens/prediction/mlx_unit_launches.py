"""MLX's dense products and products of sorted experts on matrix units, as calls that predictions simulate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .drawn import KERNEL_TYPES, drawn
from .mlx_graph import Array, Operation

_CPU = mx.Device(mx.cpu)
# Multiplications of a product that is simulated; a larger one's work is estimated.
_MOST_SIMULATED = 2**27


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


def unit_product(operation: Operation, graph: Sequence[Operation]) -> Callable[[], mx.array] | None:
    """A dense product on matrix units, of whole tiles where the simulator would fault the last."""
    from ..peer import mlx_unit_products

    a, b, *added = operation.inputs
    batch, m, n, k = sizes_of_product(operation)
    if a.dtype not in KERNEL_TYPES or a.dtype != b.dtype or batch * m * n * k > _MOST_SIMULATED:
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

    return call


def _unbroadcast(array: Array, graph: Sequence[Operation]) -> Array:
    while array.maker is not None and graph[array.maker].name in ("Broadcast", "BroadcastAxes"):
        array = graph[array.maker].inputs[0]
    return array


def sorted_qmm(operation: Operation) -> Callable[[], mx.array] | None:
    """Single rows that are sorted by their experts, on matrix units; the experts get alike numbers of rows."""
    from ..peer import mlx_unit_gathers

    group_size, bits, mode, transposed, is_sorted = operation.details
    x, weights, of_groups = operation.inputs[:3]
    rows, columns = x.size // x.shape[-1], x.shape[-1]
    if not is_sorted or mode != "affine" or x.shape[-2] != 1 or len(weights.shape) != 3 or of_groups.dtype != x.dtype:
        return None
    products = operation.outputs[0].size * columns
    if x.dtype not in KERNEL_TYPES or operation.inputs[-1].size != rows or products > _MOST_SIMULATED:
        return None
    if not mlx_unit_gathers.takes_sorted_qmm(getattr(mx, x.dtype), rows, weights.shape[0], _CPU):
        return None
    rhs = mlx_unit_gathers.indices_that_run(
        rows, weights.shape[0], mlx_unit_gathers.tile_of_qmm(rows, weights.shape[0])
    )

    def call() -> mx.array:
        taken = drawn(Array((rhs.size, 1, columns), x.dtype, x.itemsize))
        w, scales, biases = (drawn(a) for a in operation.inputs[1:4])
        options: dict[str, Any] = {"transpose": transposed, "group_size": group_size, "bits": bits}
        return mlx_unit_gathers.gather_qmm(taken, w, scales, biases, rhs, **options, stream=_CPU)

    return call


def sorted_mm(operation: Operation, graph: Sequence[Operation]) -> Callable[[], mx.array] | None:
    """The same of dense experts."""
    from ..peer import mlx_unit_gathers

    x, w = operation.inputs[:2]
    (is_sorted,) = operation.details
    rows, columns = x.size // x.shape[-1], x.shape[-1]
    if not is_sorted or x.shape[-2] != 1 or len(w.shape) != 3 or x.dtype not in KERNEL_TYPES or x.dtype != w.dtype:
        return None
    if operation.inputs[-1].size != rows or operation.outputs[0].size * columns > _MOST_SIMULATED:
        return None
    if not mlx_unit_gathers.takes_sorted_mm(getattr(mx, x.dtype), _CPU):
        return None
    count, outputs, is_turned = w.shape[0], w.shape[2], _is_transposed(w, graph)
    outputs = -(-outputs // 128) * 128 if outputs % 128 >= 32 else outputs
    rhs = mlx_unit_gathers.indices_that_run(rows, count, mlx_unit_gathers.tile_of_mm(rows, count))

    def call() -> mx.array:
        shape = (count, *((outputs, columns) if is_turned else (columns, outputs)))
        weights = drawn(Array(shape, w.dtype, w.itemsize))
        taken = drawn(Array((rhs.size, 1, columns), x.dtype, x.itemsize))
        return mlx_unit_gathers.gather_mm(taken, weights.swapaxes(1, 2) if is_turned else weights, rhs, stream=_CPU)

    return call
