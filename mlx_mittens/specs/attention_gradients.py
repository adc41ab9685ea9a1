"""Gradients of attention in float64, by their definition."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .op import Exact, widen


def exact_attention_vjp(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    dy: mx.array,
    scale: float,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    causal: bool = False,
    window: int | None = None,
) -> list[Exact]:
    """Gradients of queries, keys and values, then of a mask that is added and of sinks where they are there.

    All scores are held at once. A row that sees no key has zeros. A gradient's size is measured on its terms, before
    the mean of a row is subtracted: a row that sees one key cancels to nothing.
    """
    wide_q, wide_k, wide_v, wide_dy = widen(q), widen(k), widen(v), widen(dy)
    (batch, heads, queries, _), (key_heads, keys) = q.shape, k.shape[1:3]
    ratio = heads // key_heads
    seen = np.ones((batch, heads, queries, keys), bool)
    position, key = np.arange(queries)[:, None] + keys - queries, np.arange(keys)
    if causal or window:
        seen &= key <= position
    if window:
        seen &= key > position - window
    added: np.ndarray | float = 0.0
    if mask is not None and mask.dtype == mx.bool_:
        seen &= np.array(mask)
    elif mask is not None:
        numbers = widen(mask)
        seen &= numbers != -np.inf
        added = np.where(numbers == -np.inf, 0, numbers)

    # [batch, heads, queries, keys]
    k_of_rows, v_of_rows = wide_k.repeat(ratio, 1), wide_v.repeat(ratio, 1)
    scores = np.where(seen, scale * wide_q @ k_of_rows.swapaxes(-1, -2) + added, -np.inf)
    sink_scores = np.full(heads, -np.inf) if sinks is None else widen(sinks)
    most = np.maximum(scores.max(-1, keepdims=True), sink_scores[:, None, None])
    most = np.where(np.isinf(most), 0, most)
    weights, sink_weights = np.exp(scores - most), np.exp(sink_scores[:, None, None] - most)
    total = weights.sum(-1, keepdims=True) + sink_weights
    total = np.where(total == 0, 1, total)
    p, sink_p = weights / total, sink_weights / total
    dp = wide_dy @ v_of_rows.swapaxes(-1, -2)
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta)
    # delta comes from the rounded result.
    size = p * (np.abs(dp) + (np.abs(wide_dy) * np.abs(p @ v_of_rows)).sum(-1, keepdims=True))

    def of_group(a: np.ndarray) -> np.ndarray:
        return a.reshape(batch, key_heads, ratio, *a.shape[2:]).sum(2)

    def turned(a: np.ndarray) -> np.ndarray:
        return a.swapaxes(-1, -2)

    gradients = [
        Exact(scale * ds @ k_of_rows, abs(scale) * size @ np.abs(k_of_rows)),
        Exact(of_group(scale * turned(ds) @ wide_q), of_group(abs(scale) * turned(size) @ np.abs(wide_q))),
        Exact(of_group(turned(p) @ wide_dy), of_group(turned(p) @ np.abs(wide_dy))),
    ]
    if mask is not None and mask.dtype != mx.bool_:
        gradients.append(Exact(_summed(ds, mask.shape), _summed(size, mask.shape)))
    if sinks is not None:
        terms = sink_p * delta
        gradients.append(Exact(-terms.sum((0, 2, 3)), (sink_p * size.sum(-1, keepdims=True)).sum((0, 2, 3))))
    return gradients


def _summed(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over the axes that an array of this shape was broadcast along."""
    a = a.sum(tuple(range(a.ndim - len(shape))))
    return a.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
