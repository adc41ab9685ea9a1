"""mlx-lm's plain and quantized key-value caches, appended to in one call: indexing their arrays from Python costs the
host more than a layer's attention.

The functions give None where the cache has no room, or is of another class: then its own methods run.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from .. import _ext

__all__ = ["attend", "make_room", "turn_and_append", "turn_and_quantize"]


def _empty(cache: Any, shape: tuple[int, int, int], width: int, dtype: mx.Dtype) -> Any:
    if not hasattr(cache, "bits"):
        return mx.zeros((*shape, width), dtype)
    words, groups = width * cache.bits // 32, width // cache.group_size
    return mx.zeros((*shape, words), mx.uint32), *(mx.zeros((*shape, groups), dtype) for _ in range(2))


def make_room(cache: Any, tokens: int, heads: int, like: mx.array) -> None:
    """Grows the buffers of a plain or quantized cache where they have no room for `tokens` more, by as much as its
    `update_and_fetch` grows them. Heads of keys and of values have the batch, width and dtype of `like`."""
    first = cache.keys[0] if hasattr(cache, "bits") and cache.keys is not None else cache.keys
    if first is not None and cache.offset + tokens <= first.shape[2]:
        return
    shape = (like.shape[0], heads, -(-tokens // cache.step) * cache.step)
    more = _empty(cache, shape, like.shape[-1], like.dtype)
    if first is None:
        cache.keys, cache.values = more, tree_map(mx.zeros_like, more)
        return
    end = cache.offset if cache.offset % cache.step else first.shape[2]

    def grown(buffer: mx.array, more: mx.array) -> mx.array:
        return mx.concatenate([buffer[:, :, :end], more], axis=2)

    cache.keys, cache.values = tree_map(grown, cache.keys, more), tree_map(grown, cache.values, more)


def turn_and_append(cache: Any, heads: mx.array, rotary: _ext.Rotary) -> tuple[mx.array, mx.array, mx.array] | None:
    """Turned queries of a layer's heads, and its turned keys and its values behind the cached ones."""
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
    """A token's attention over the cache and its own keys and values, from its heads on."""
    result = _ext.attend_with_cache(heads, cache.keys, cache.values, rotary, cache.offset, scale)
    if result is not None:
        cache.offset += 1
    return result
