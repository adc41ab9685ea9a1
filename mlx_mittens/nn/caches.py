"""mlx-lm's plain and quantized key-value caches, appended to in one call: indexing their arrays from Python costs the
host more than a layer's attention.

The functions give None where the cache has no room, or is another: then it does what it does by itself.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .. import _ext

__all__ = ["append", "attend", "turn_and_append", "turn_and_quantize"]


def append(cache: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array] | None:
    """Keys and values with those of the cache before them."""
    result = _ext.append_to_cache(cache.keys, cache.values, keys, values, cache.offset)
    if result is not None:
        cache.offset += keys.shape[2]
    return result


def turn_and_append(cache: Any, heads: mx.array, rotary: _ext.Rotary) -> tuple[mx.array, mx.array, mx.array] | None:
    """Turned queries of a layer's heads, and its turned keys and its values with those of the cache before them."""
    result = _ext.turn_into_cache(heads, cache.keys, cache.values, rotary, cache.offset)
    if result is not None:
        cache.offset += heads.shape[2]
    return result


def turn_and_quantize(cache: Any, heads: mx.array, rotary: _ext.Rotary) -> tuple[Any, ...] | None:
    """The same of a quantized cache, whose keys and values are words, scales and biases."""
    end = cache.offset + heads.shape[2]
    format = cache.group_size, cache.bits
    try:
        result = _ext.quantized_rope_append(
            heads, tuple(cache.keys), tuple(cache.values), rotary, cache.offset, None, *format
        )
    except ValueError:  # no room, which the cache makes
        return None
    queries, cache.keys, cache.values = result
    cache.offset = end
    return queries, *(tuple(a[:, :, :end] for a in part) for part in (cache.keys, cache.values))


def attend(cache: Any, heads: mx.array, rotary: _ext.Rotary, scale: float) -> mx.array | None:
    """A token's attention over what the cache holds and its own keys and values, from its heads on."""
    result = _ext.attend_with_cache(heads, cache.keys, cache.values, rotary, cache.offset, scale)
    if result is not None:
        cache.offset += 1
    return result
