"""Products whose row is a norm that lies between two of them, as calls for tests of the table of ops.

The product before is one of x with a square matrix, and x is added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .. import _ext
from ..ops.matmul import quantized_matmul, quantized_matmuls
from ..ops.norm import add_rms_norm
from ..ops.recurrent_layers import short_conv_token

__all__ = ["exact_row", "matmuls", "row_before", "row_of_mx", "short_conv", "sum_before", "swiglu", "widths"]

Triple = Any  # words, scales and, where there are any, biases of groups

_EPS = 1e-5


def _weight(x: mx.array) -> mx.array:
    return mx.ones(x.shape[-1:], x.dtype)


def _row(x: mx.array, triple: Triple, bias: mx.array | None, options: dict[str, Any]) -> tuple[mx.array, mx.array]:
    return add_rms_norm(quantized_matmul(x, *triple, bias=bias, **options), x, _weight(x), _EPS)


def widths(options: dict[str, Any]) -> dict[str, Any]:
    """The options that say how weights are quantized."""
    return {name: options[name] for name in ("group_size", "bits", "mode") if name in options}


def row_before(x: mx.array, triple: Triple, options: dict[str, Any]) -> mx.array:
    """The norm after a product with the square matrix has used it: others may read it too."""
    row, _ = _row(x, triple, None, widths(options))
    _ext.try_products_of_norm(row, [triple], **widths(options))
    return row


def matmuls(x: mx.array, triples: Sequence[Triple], bias: Any, options: dict[str, Any]) -> list[mx.array]:
    """The sum, and products of its norm with all matrices but the first, which is the square one."""
    row, total = _row(x, triples[0], None if bias is None else bias[0], options)
    others = None if bias is None else bias[1:]
    parts = _ext.try_products_of_norm(row, triples[1:], bias=others, **options)
    return [total, *(quantized_matmuls(row, triples[1:], bias=others, **options) if parts is None else parts)]


def sum_before(y: mx.array, x: mx.array, triple: Triple, options: dict[str, Any]) -> mx.array:
    """x + y, where a product with a matrix reads the norm of that."""
    row, total = add_rms_norm(y, x, _weight(x), _EPS)
    _ext.try_products_of_norm(row, [triple], **widths(options))
    return total


def swiglu(x: mx.array, gate: Triple, up: Triple, options: dict[str, Any]) -> mx.array:
    """quantized_swiglu of the norm, where gate is the square matrix too."""
    row, _ = _row(x, gate, None, widths(options))
    y: mx.array = _ext.swiglu_of_norm(row, gate, up, **options)
    return y


def short_conv(
    x: mx.array,
    square: Triple,
    projection: Triple,
    conv_state: mx.array,
    conv_weight: mx.array,
    options: dict[str, Any],
) -> tuple[mx.array, mx.array]:
    """short_conv_token of the norm's product with the projection."""
    options = widths(options)
    row, _ = _row(x, square, None, options)
    each = options["group_size"], options["bits"], options.get("mode", "affine")
    found: Any = _ext.short_conv_token_of_norm(row, projection, *each, conv_state, conv_weight)
    return found or short_conv_token(quantized_matmul(row, *projection, **options), conv_state, conv_weight)


def row_of_mx(x: mx.array, triple: Triple, bias: Any, options: dict[str, Any]) -> tuple[mx.array, mx.array]:
    """Norm and sum by mx."""
    biases = triple[2] if len(triple) > 2 else None
    product = mx.quantized_matmul(x, triple[0], triple[1], biases, transpose=True, **options)
    total = x + (product if bias is None else product + bias[0])
    return mx.fast.rms_norm(total, _weight(x), _EPS), total


def exact_row(x: np.ndarray, product: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Norm and sum in float64, from the product."""
    total = x + product
    return total / np.sqrt((total**2).mean(-1, keepdims=True) + _EPS), total
