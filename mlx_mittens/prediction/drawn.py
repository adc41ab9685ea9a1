"""Inputs with values of no meaning, for the calls of MLX's kernels that predictions simulate."""

from __future__ import annotations

import functools

import mlx.core as mx

from .mlx_graph import Array

# Types of MLX's kernels of products, norms and attention.
KERNEL_TYPES = {"float32", "float16", "bfloat16"}


@functools.lru_cache(maxsize=16)
def _values(size: int, dtype: str) -> mx.array:
    kind = getattr(mx, dtype)
    if kind in (mx.uint32, mx.uint8):  # bytes are exponents
        low, high = (0, 2**31 - 1) if kind == mx.uint32 else (118, 122)
        return mx.random.randint(low, high, (size,), key=mx.random.key(0)).astype(kind)
    return (0.1 * mx.random.normal((size,), key=mx.random.key(1))).astype(kind)


def drawn(array: Array) -> mx.array:
    """An array of the same shape and type with values of no meaning."""
    with mx.stream(mx.cpu):
        few = min(array.size, 1 << 16)
        values = _values(few, array.dtype)
        if few < array.size:
            values = mx.concatenate([values] * -(-array.size // few))[: array.size]
        values = values.reshape(array.shape)
        mx.eval(values)
    return values
