"""MLX's products with quantized weights, as calls that predictions simulate: whole, or some tiles of large ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..peer.mlx_formats import Format, Weights
from .drawn import KERNEL_TYPES, drawn
from .mlx_graph import Array, Operation
from .mlx_tiles import MOST_SIMULATED, Call, Tiles

_CPU = mx.Device(mx.cpu)


def product(operation: Operation) -> Call | None:
    """A product of rows and weights, or of a stack of each."""
    from ..peer import mlx_quantized

    group_size, bits, mode, transposed = operation.details
    x, *weights = operation.inputs
    form = Format(group_size, bits, mode)
    of_stack = weights[0].shape[:-2]
    if not _is_known(x, weights, form) or (of_stack and of_stack != x.shape[:-2]):
        return None
    rows = x.shape[-2] if of_stack else math.prod(x.shape[:-1])
    if not transposed:
        return _by_columns(x, weights, rows, form) if rows >= mlx_quantized.FEWEST_BY_COLUMNS else None
    shape = rows, x.shape[-1], weights[0].shape[-2]
    if mlx_quantized.is_by_matrices(shape, _CPU):
        return _by_matrices(x, weights, shape, form)
    options: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode, "stream": _CPU}
    return Call(lambda: mlx_quantized.quantized_matmul(drawn(x), *_drawn(weights), **options))


def _is_known(x: Array, weights: Sequence[Array], form: Format) -> bool:
    """Whether the weights fit the format, and affine ones have scales of x's type."""
    if form.mode == "another" or len(weights) != (3 if form.is_affine else 2):
        return False
    return x.dtype in KERNEL_TYPES and (not form.is_affine or weights[1].dtype == x.dtype)


def _by_matrices(x: Array, weights: Sequence[Array], shape: tuple[int, int, int], form: Format) -> Call | None:
    """All tiles, or one of a large product; whole tiles where the simulator would fault the last."""
    from ..peer import mlx_matrix_units, mlx_quantized

    m, k, n = shape
    of_stack = weights[0].shape[:-2]
    matrices = math.prod(of_stack)
    parts = mlx_matrix_units.parts_of_qmm(shape, form.group_size, matrices)
    on_units = mlx_matrix_units.takes_product(getattr(mx, x.dtype), shape, form.group_size, matrices, _CPU)
    rows, outputs, tiles = m, n, None
    if matrices * m * n * k > MOST_SIMULATED:
        rows, outputs = (min(64, 32 * -(-m // 32)), 64) if on_units else (32, 32)
        nbytes = x.nbytes + sum(a.nbytes for a in weights)
        result, sums = matrices * m * n * x.itemsize, 4 * parts * m * n
        moved = (nbytes + result,) if parts == 1 else (nbytes + sums, sums + result)
        tiles = Tiles(matrices * -(-m // rows) * -(-n // outputs), moved)
        weights = [Array(a.shape[-2:], a.dtype, a.itemsize) for a in weights]
        of_stack = ()
    elif on_units:
        rows = mlx_matrix_units.rows_that_run(m)

    def call() -> mx.array:
        taken = drawn(Array((*of_stack, rows, k), x.dtype, x.itemsize))
        of_outputs = _drawn(_of_outputs(weights, outputs))
        return mlx_quantized.by_matrices(taken, of_outputs, (rows, k, outputs), form, parts, on_units, _CPU)

    return Call(call, tiles)


def _by_columns(x: Array, weights: Sequence[Array], m: int, form: Format) -> Call:
    """The same of weights that are not transposed."""
    from ..peer import mlx_matrix_units, mlx_quantized

    of_stack, k = weights[0].shape[:-2], x.shape[-1]
    matrices, n = math.prod(of_stack), weights[1].shape[-1] * form.group_size
    on_units = mlx_quantized.are_columns_on_units(getattr(mx, x.dtype), (m, k, n), form, _CPU)
    tile = 64 if on_units else 32
    rows, outputs, tiles = mlx_matrix_units.whole_tiles(m) if on_units else m, n, None
    if matrices * m * n * k > MOST_SIMULATED:
        rows, outputs = min(rows, tile), max(64, form.group_size)
        nbytes = x.nbytes + sum(a.nbytes for a in weights) + matrices * m * n * x.itemsize
        all_tiles = matrices * -(-m // tile) * -(-n // tile)
        tiles, of_stack = Tiles(all_tiles * tile / outputs, (nbytes,)), ()

    def call() -> mx.array:
        taken = drawn(Array((*of_stack, rows, k), x.dtype, x.itemsize))
        parts = [Array((*of_stack, k, a.shape[-1] * outputs // n), a.dtype, a.itemsize) for a in weights]
        options: dict[str, Any] = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode, "stream": _CPU}
        return mlx_quantized.quantized_matmul(taken, *_drawn(parts), transpose=False, **options)

    return Call(call, tiles)


def _drawn(weights: Sequence[Array]) -> Weights:
    """Words, scales, and biases where there are any."""
    w, scales, *biases = map(drawn, weights)
    return w, scales, biases[0] if biases else None


def _of_outputs(weights: Sequence[Array], outputs: int) -> list[Array]:
    """Transposed weights with another number of outputs."""
    return [Array((*a.shape[:-2], outputs, a.shape[-1]), a.dtype, a.itemsize) for a in weights]


def gathered(operation: Operation) -> Call | None:
    """Rows with chosen weights, which are drawn as different ones; of sorted rows all weights get alike numbers."""
    from ..peer import mlx_gathers, mlx_matrix_units, mlx_quantized

    group_size, bits, mode, transposed, is_sorted = operation.details
    x, *weights, lhs, rhs = operation.inputs
    form = Format(group_size, bits, mode)
    if len(weights[0].shape) != 3 or lhs.size != rhs.size or not _is_known(x, weights, form):
        return None
    if is_sorted and x.shape[-2] == 1 and mlx_gathers.are_sorted_by_matrices(rhs.size, weights[0].shape[0]):
        if x.size != rhs.size * x.shape[-1]:
            return None
        return (_sorted if transposed else _sorted_of_columns)(operation, form)
    if not transposed:
        return None
    m, k, n = *x.shape[-2:], weights[0].shape[1]
    if m * n * k * rhs.size > MOST_SIMULATED and m > 1:
        return None

    some = mlx_matrix_units.whole_tiles(m) if mlx_quantized.is_by_matrices((m, k, n), _CPU) else m

    def call() -> mx.array:
        chosen = mx.arange(rhs.size, dtype=mx.uint32)
        rows = x.size // (m * k)
        taken = drawn(Array((rows, some, k), x.dtype, x.itemsize))
        indices = chosen * rows // rhs.size, chosen % weights[0].shape[0]
        return mlx_gathers.gather_qmm(taken, *_drawn(weights), *indices, group_size, bits, mode, stream=_CPU)

    return Call(call)


def _sorted(operation: Operation, form: Format) -> Call:
    """All rows, or one tile of a large product."""
    from ..peer import mlx_gathers, mlx_matrix_units, mlx_unit_gathers

    x, *weights, _, _ = operation.inputs
    matrices, outputs, k = *weights[0].shape[:2], x.shape[-1]
    rows = x.size // k
    on_units = mlx_matrix_units.are_used(getattr(mx, x.dtype), _CPU)
    tile, width = (mlx_unit_gathers.tile_of_qmm(rows, matrices), 64) if on_units else (16, 32)
    counts = mlx_unit_gathers.rows_that_run(rows, matrices, tile, 2 if on_units else 1)
    tiles = None
    if rows * k * outputs > MOST_SIMULATED:
        moved = sum(a.nbytes for a in operation.inputs) + operation.outputs[0].nbytes
        tiles = Tiles(sum(-(-count // tile) for count in counts) * -(-outputs // width), (moved,))
        counts = mlx_unit_gathers.rows_that_run(min(counts[0], tile), 1, tile, 2 if on_units else 1)
        outputs = width
    rhs = mlx_unit_gathers.indices_of(counts)

    def call() -> mx.array:
        taken = drawn(Array((rhs.size, 1, k), x.dtype, x.itemsize))
        of_matrices = [Array((len(counts), *a.shape[1:]), a.dtype, a.itemsize) for a in weights]
        of_outputs = _drawn(_of_outputs(of_matrices, outputs))
        return mlx_gathers.sorted_qmm(taken, of_outputs, rhs, form, tile, stream=_CPU)

    return Call(call, tiles)


def _sorted_of_columns(operation: Operation, form: Format) -> Call | None:
    """The same of weights [E, K, N] on matrix units, where the product is not large."""
    from ..peer import mlx_matrix_units, mlx_unit_gathers

    x, *weights, _, _ = operation.inputs
    k = x.shape[-1]
    rows, matrices = x.size // k, weights[0].shape[0]
    is_large = operation.outputs[0].size * k > MOST_SIMULATED
    if is_large or not mlx_matrix_units.are_used(getattr(mx, x.dtype), _CPU):
        return None
    tile = mlx_unit_gathers.tile_of_qmm(rows, matrices)
    rhs = mlx_unit_gathers.indices_of(mlx_unit_gathers.rows_that_run(rows, matrices, tile, 2))

    def call() -> mx.array:
        taken = drawn(Array((rhs.size, 1, k), x.dtype, x.itemsize))
        return mlx_unit_gathers.gather_qmm(taken, _drawn(weights), rhs, False, form, tile, stream=_CPU)

    return Call(call)
