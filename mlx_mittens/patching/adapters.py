"""Sharded layers, layers of Gemma and masks of mlx-lm, as ops."""

from __future__ import annotations

import sys
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.distributed import sum_gradients

from .. import _ext
from .digests import digest, digest_in, plain

OFFSET_NORM = "2d57c26ef3b93b3f"  # the digest of the norm of mlx-lm's gemma, whose scale is 1 + weight
GEAR_NORM = "e42338b4914f315c"  # of gear's, whose scale is that in the type of its input
CLIP_RESIDUAL = "2faf093f497711a9"  # the digest of mlx-lm's gemma3_text.clip_residual


def all_to_sharded(module: Any, x: mx.array) -> mx.array | None:
    return _ext.try_linear(module, sum_gradients(module.group)(x))


def sharded_to_all(module: Any, x: mx.array) -> mx.array | None:
    part = _ext.try_gemv(module["weight"], x)
    if part is None:
        return None
    y = mx.distributed.all_sum(part, group=module.group)
    return y + module["bias"] if "bias" in module else y


def gear_norm(norm: Any, x: mx.array) -> mx.array | None:
    return _ext.try_offset_rms_norm_layer(norm, x) if norm.weight.dtype == x.dtype else None


def gemma3_block(block: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """A decoder layer of Gemma 3, whose sums a compiled function computes: that hides them from the norms after them.

    In float16 it keeps them finite too.
    """
    if digest_in(sys.modules[type(block).__module__], "clip_residual") != CLIP_RESIDUAL:
        return None
    norms = [block["post_attention_layernorm"], block["post_feedforward_layernorm"]]
    is_known = all(digest(plain(type(norm).__call__)) == OFFSET_NORM for norm in norms)
    if x.dtype == mx.float16 and (_ext.exporting() or not is_known):
        return None
    h = _plus_norm(x, block.self_attn(block.input_layernorm(x), mask, cache), norms[0])
    return _plus_norm(h, block.mlp(block.pre_feedforward_layernorm(h)), norms[1])


def _plus_norm(residual: mx.array, x: mx.array, norm: Any) -> mx.array:
    """A sum of Gemma 3's, which the norm after it may compute."""
    if residual.dtype != mx.float16:
        return cast(mx.array, residual + norm(x))
    return _ext.norm_add_norm(x, residual, norm.weight, None, norm.eps, weight_offset=1.0, clip_sum=True)[1]


def gemma2_logits(model: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    """The logits of Gemma 2, bounded in one kernel."""
    return _ext.softcap(model.model.embed_tokens.as_linear(model.model(inputs, cache)), model.final_logit_softcapping)


def causal_mask(
    N: int, offset: int = 0, window_size: int | None = None, right_padding: Any = None, left_padding: Any = None
) -> mx.array | None:
    """The mask of a window, or of rows that are padded on their left, which attention knows by the array."""
    if not isinstance(offset, int) or not N > 0 or right_padding is not None:
        return None
    if window_size is not None and not (isinstance(window_size, int) and window_size > 0):
        return None
    if left_padding is None:
        return None if window_size is None else _ext.window_mask(N, offset, window_size)
    if not isinstance(left_padding, mx.array) or left_padding.ndim != 1 or left_padding.dtype != mx.int32:
        return None
    return _ext.row_mask(N, offset, window_size, left_padding)


def rotating_mask(cache: Any, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
    """The mask of a batch of windows whose tokens are in their order."""
    held, is_one = cache._idx, N == 1
    if is_one and (cache.rotated or held >= cache.max_size):
        if not _ext.keeps_order(cache):
            return None
        held, is_one = cache.keys.shape[2] if cache.rotated else held, False
    dropped = max(held - cache.max_size + int(not is_one), 0)
    padding = cache.left_padding - dropped if dropped else cache.left_padding
    return causal_mask(N, min(cache.max_size - 1, cache._offset), window_size or cache.max_size, None, padding)


def window_mask(cache: Any, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
    """The mask of a token over a full window that is wider than the token's own, and keeps its tokens in order."""
    is_narrow = isinstance(window_size, int) and window_size < cache.max_size <= cache.offset
    if N != 1 or not is_narrow or not _ext.keeps_order(cache):
        return None
    return mx.arange(cache.max_size) >= cache.max_size - window_size
