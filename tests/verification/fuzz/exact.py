"""The ops in float64, of plain mx operations, so that mx differentiates them.

mlx_mittens.specs.reference uses numpy, which mx cannot differentiate.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_mittens.specs import gguf

FLOAT64 = mx.float64


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    y = x * mx.rsqrt((x * x).mean(-1, keepdims=True) + mx.array(eps, FLOAT64))
    return y if weight is None else y * weight


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    y = rms_norm(x - x.mean(-1, keepdims=True), weight, eps)
    return y if bias is None else y + bias


def softmax(a: mx.array, axis: int | Sequence[int] | None) -> mx.array:
    e = mx.exp(a - mx.stop_gradient(a.max(axis=axis, keepdims=True)))
    return e / e.sum(axis=axis, keepdims=True)


def dequantize(words: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """Affine weights, of any number of bits: integers follow each other in the words' bits, the lowest first."""
    single = (mx.expand_dims(words, -1) >> mx.arange(32, dtype=mx.uint32)) & 1
    single = single.reshape(*words.shape[:-1], words.shape[-1] * 32 // bits, bits)
    integers = (single << mx.arange(bits, dtype=mx.uint32)).sum(-1).astype(FLOAT64)
    groups = integers.reshape(*scales.shape, group_size)
    return (groups * mx.expand_dims(scales, -1) + mx.expand_dims(biases, -1)).reshape(*words.shape[:-1], -1)


def dequantize_blocks(blocks: mx.array, kind: str) -> mx.array:
    """Weights of GGUF blocks."""
    return mx.array(gguf.weights(np.array(blocks), kind), FLOAT64)


def visible(mask: None | str | mx.array, window: int | None, queries: int, keys: int) -> mx.array | None:
    """Which keys each query sees, by a mask, causality and a window; None where it sees all."""
    seen = None
    if isinstance(mask, str) or window:
        position, key = mx.arange(queries)[:, None] + (keys - queries), mx.arange(keys)
        seen = key <= position
        if window:
            seen = seen & (key + window > position)
    if isinstance(mask, mx.array):
        shown = mask if mask.dtype == mx.bool_ else mask != -mx.inf
        seen = shown if seen is None else seen & shown
    return seen


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: None | str | mx.array,
    sinks: mx.array | None,
    window: int | None,
) -> mx.array:
    """Attention in which keys and values that a query does not see do not matter, even NaN.

    A query that sees a NaN or an infinity gets NaN; one that sees no key gets 0.
    """
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (mx.repeat(a, heads // a.shape[1], axis=1) for a in (k, v))
    scores = (q * mx.array(scale, FLOAT64)) @ k.swapaxes(-1, -2)
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        scores = scores + mask
    seen = visible(mask, window, queries, keys)
    if seen is not None:
        scores = mx.where(seen, scores, mx.array(-1e300, FLOAT64))
    most = mx.stop_gradient(scores.max(-1, keepdims=True))
    if sinks is not None:
        sinks = sinks.reshape(1, heads, 1, 1)
        most = mx.maximum(most, mx.stop_gradient(sinks))
    weights = mx.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    weights = weights / (total if sinks is None else total + mx.exp(sinks - most))
    finite = mx.isfinite(v)
    if seen is not None:
        # A hidden key's weight is 0 also where another score of the row is NaN, or where the row sees nothing.
        weights = mx.where(seen, weights, mx.array(0.0, FLOAT64))
    if seen is None or mx.all(finite).item():
        return weights @ v
    reached = mx.broadcast_to(seen, scores.shape).astype(FLOAT64) @ (~finite).astype(FLOAT64)
    return mx.where(reached > 0, mx.array(mx.nan, FLOAT64), weights @ mx.where(finite, v, mx.array(0.0, FLOAT64)))
