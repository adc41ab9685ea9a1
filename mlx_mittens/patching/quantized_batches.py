"""mlx-lm's batches of requests whose caches are quantized: its server serves such requests one by one.

A function here stands before one of mlx-lm's, and gives None where that is to be called.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import mlx.core as mx

from .batch_caches import BatchQuantizedKVCache
from .batch_windows import BatchRotatingQuantizedKVCache

__all__ = ["is_batchable", "merge_caches", "new_caches", "quantize_new"]

# State of the server's thread: `format`, the group size and bits of the caches that it wants, and `known`, the last
# findings on a model.
_server = threading.local()


def _caches() -> Any:
    return sys.modules["mlx_lm.models.cache"]


def _quantized(cache: Any, group_size: int, bits: int) -> Any:
    """A plain or rotating cache in a packed form; another one as it is, and one that keeps its first tokens."""
    caches = _caches()
    if type(cache) is caches.KVCache:
        return cache.to_quantized(group_size, bits)
    if type(cache) is caches.RotatingKVCache and not cache.keep:
        return BatchRotatingQuantizedKVCache.quantized(cache, group_size, bits)
    return cache


def _is_packed(cache: Any) -> bool:
    return type(cache) in (_caches().QuantizedKVCache, BatchRotatingQuantizedKVCache)


def new_caches(model: Any, group_size: int, bits: int) -> list[Any]:
    """The caches of a request, quantized where they are plain or have a window."""
    return [_quantized(cache, group_size, bits) for cache in _caches().make_prompt_cache(model)]


def _finds_out(model: Any, group_size: int, bits: int) -> bool:
    caches = new_caches(model, group_size, bits)
    others = [cache for cache in caches if not _is_packed(cache)]
    if len(others) == len(caches) or not all(hasattr(cache, "merge") for cache in others):
        return False
    if any(hasattr(cache, "to_quantized") for cache in others):  # rotating ones that keep their first tokens
        return False
    try:
        model(mx.zeros((1, 1), mx.int32), cache=merge_caches([caches]))
    except Exception:  # whatever the model says of a quantized cache, such as of one with attention sinks
        return False
    return True


def _takes_quantized(model: Any, group_size: int, bits: int) -> bool:
    """Whether a batch of a model may have quantized caches: a graph of one token is made of them, and not evaluated."""
    known = getattr(_server, "known", None)
    if known is None or known[0] is not model or known[1] != (group_size, bits):
        _server.known = known = model, (group_size, bits), _finds_out(model, group_size, bits)
    return bool(known[2])


def is_batchable(server: Any, args: Any) -> bool | None:
    """mlx_lm.server.ResponseGenerator._is_batchable: also requests with caches that are quantized from the start."""
    options, provider = server.cli_args, server.model_provider
    _server.format = None
    if options.kv_bits is None or options.quantized_kv_start > 0 or args.seed is not None:
        return None
    if not provider.is_batchable or not _takes_quantized(provider.model, options.kv_group_size, options.kv_bits):
        return None
    _server.format = options.kv_group_size, options.kv_bits
    return True


def quantize_new(
    generator: Any, segments: Any, max_tokens: Any = None, caches: list[Any] | None = None, *rest: Any, **options: Any
) -> None:
    """mlx_lm.generate.BatchGenerator.insert_segments: puts quantized caches where the server has none for a request."""
    wanted = getattr(_server, "format", None)
    if wanted is None or not isinstance(caches, list) or not _takes_quantized(generator.model, *wanted):
        return
    for i, cache in enumerate(caches):
        if cache is None:
            caches[i] = new_caches(generator.model, *wanted)


def merge_caches(caches: list[list[Any]]) -> list[Any] | None:
    """mlx_lm.generate._merge_caches: the caches of several requests as one a layer, where some are quantized."""
    if not caches:
        return None
    layers = list(zip(*caches))
    if not any(_is_packed(cache) for layer in layers for cache in layer):
        return None
    merged = []
    for layer in layers:
        first = next((cache for cache in layer if _is_packed(cache)), None)
        if first is not None:
            kind = BatchQuantizedKVCache if type(first) is _caches().QuantizedKVCache else type(first)
            merged.append(kind.merge([_quantized(cache, first.group_size, first.bits) for cache in layer]))
        elif all(hasattr(cache, "merge") for cache in layer):
            merged.append(layer[0].merge(list(layer)))
        else:
            return None  # mlx-lm says which
    return merged
