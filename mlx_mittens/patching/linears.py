"""Linear layers of one input, which are one launch for a token where they are quantized alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import _ext

__all__ = ["format_of", "is_quantized_linear", "is_rms_norm", "kept_wide", "products", "weights_of"]


def is_quantized_linear(layer: Any) -> bool:
    """Whether a layer is `mlx.nn.QuantizedLinear`, or ours in its place."""
    kind = type(layer)
    is_ours = kind.__module__ == "mlx_mittens.nn.modules" and kind.__name__ == "QuantizedLinear"
    return is_ours or kind is nn.QuantizedLinear


def is_rms_norm(layer: Any) -> bool:
    """Whether a layer is `mlx.nn.RMSNorm`, or ours in its place."""
    is_ours = type(layer).__module__.startswith("mlx_mittens.") and isinstance(layer, nn.RMSNorm)
    return is_ours or type(layer) is nn.RMSNorm


def weights_of(layer: Any) -> tuple[mx.array, ...]:
    """Words, scales and, where there are any, biases of groups."""
    return tuple(layer[name] for name in ("weight", "scales", "biases") if layer.get(name) is not None)


def kept_wide(layer: Any, weights: Sequence[mx.array]) -> list[mx.array]:
    """Weights of a layer in float32: cast once, and again where one is another array.

    They are not waited for, since `mx.compile` and gradients may be tracing.
    """
    kept = layer.__dict__.get("_wide")
    if kept is None or any(a is not b for a, b in zip(kept[0], weights, strict=True)):
        kept = list(weights), [a.astype(mx.float32) for a in weights]
        object.__setattr__(layer, "_wide", kept)
    return cast("list[mx.array]", kept[1])


def format_of(layer: Any) -> tuple[Any, ...]:
    """Group size, bits and mode."""
    return layer.group_size, layer.bits, layer.mode


def products(x: mx.array, layers: Sequence[Any], alone: bool = False) -> list[mx.array]:
    """The results of each layer for x.

    alone: whether nothing else reads x. If it is a norm that nothing has computed yet, the products compute it.
    """
    few = x.size == x.shape[-1] and not _ext.exporting() and all(map(is_quantized_linear, layers))
    first = layers[0]
    if few and all(format_of(layer) == format_of(first) and ("bias" in layer) == ("bias" in first) for layer in layers):
        bias = [layer["bias"] for layer in layers] if "bias" in first else None
        attempt = _ext.try_products_of_norm if alone else _ext.try_quantized_matmuls
        found = attempt(x, [weights_of(layer) for layer in layers], *format_of(first), bias=bias)
        if found is not None:
            return cast("list[mx.array]", found)
    return [layer(x) for layer in layers]
