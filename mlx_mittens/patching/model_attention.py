"""mlx-lm's function between a model's attention and mx's, on ours, for converted models."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from .. import _ext
from ..ops.attention import quantized_scaled_dot_product_attention


def attend(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> mx.array:
    """Attention over a model's cache, packed or not; mlx-lm's own where a call is being exported."""
    try:
        if not hasattr(cache, "bits"):
            return _ext.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if sinks is not None:
            raise ValueError("Quantized SDPA does not support attention sinks.")
        return quantized_scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, group_size=cache.group_size, bits=cache.bits
        )
    except _ext.ExportError:
        attend = sys.modules["mlx_lm.models.base"].scaled_dot_product_attention
        return attend(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
