"""MLX's sum of products that were split along K: one kernel, which adds the parts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..ops.custom import Output, float32, int32, launch
from .mlx_sources import TYPES, instance

Stream = mx.Stream | mx.Device | None


def added(
    partials: mx.array, shape: list[int], dtype: mx.Dtype, bias: mx.array | None = None, *, stream: Stream = None
) -> mx.array:
    """The sum of float32 parts [P, M, N], in another type and shape; with a bias of each column.

    Args:
        partials: The parts.
        shape: Of the result.
        dtype: Of the result.
        bias: Of each column.
        stream: Where to run.
    """
    parts, m, n = partials.shape
    arguments: dict[int, Any] = {0: partials, 1: Output(shape, dtype), 2: int32(parts), 3: int32(m * n), 4: int32(n)}
    function = "gemm_splitk_accum"
    if bias is not None:
        function += "_axpby"
        arguments |= {5: bias, 6: int32(0), 7: int32(1), 8: float32(1), 9: float32(1)}
    kernel = instance("splitk", function, "float", TYPES[dtype])
    width, height = _block(n, m)
    return launch(*kernel, arguments, [n // width, m // height, 1], [width, height, 1], stream=stream)[0]


def _block(width: int, height: int) -> tuple[int, int]:
    """MLX's threadgroup size, reduced to powers of two that divide the grid."""
    width_bits = height_bits = 0
    while width_bits + height_bits < 10:
        before = width_bits + height_bits
        width_bits += width % (2 << width_bits) == 0
        if width_bits + height_bits < 10:
            height_bits += height % (2 << height_bits) == 0
        if width_bits + height_bits == before:
            break
    return 1 << width_bits, 1 << height_bits
