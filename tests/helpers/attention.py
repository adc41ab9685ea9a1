"""Helpers that the tests of attention share: inputs and float64 results."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from helpers.matrices import draw
from mlx_mittens import specs
from mlx_mittens.specs import widen
from mlx_mittens.specs.attention import exact_attention, twin_mask, zero_unseeing

MASKS = ("none", "causal", "bool", "additive", "row")


def run(call):
    """The result of a call, evaluated."""
    y = call()
    mx.eval(y)
    return y


def inputs(rng, shape, dtype, value_width=None, outliers=True):
    """Queries, keys and values of (batch, heads, key_heads, queries, keys, width)."""
    batch, heads, key_heads, queries, keys, width = shape
    return (
        draw(rng, (batch, heads, queries, width), dtype, outliers),
        draw(rng, (batch, key_heads, keys, width), dtype, outliers),
        draw(rng, (batch, key_heads, keys, value_width or width), dtype, outliers),
    )


def mask_of(rng, kind, shape, dtype):
    """A mask by its name; `row` is the same for all queries and heads."""
    batch, heads, _, queries, keys, _ = shape
    if kind == "bool":
        return mx.array(rng.random((batch, 1, queries, keys)) < 0.6)
    if kind == "additive":
        hidden = rng.random((heads, queries, keys)) < 0.3
        return mx.array(np.where(hidden, -np.inf, rng.standard_normal(hidden.shape))).astype(dtype)
    if kind == "row":
        return mx.array(rng.random(keys) < 0.8)
    return "causal" if kind == "causal" else None


# How keys are hidden: a mask, or causality and a window.
HIDES = ("causal", "bool", "additive", "row", "window")


def hides(queries: int) -> tuple[str, ...]:
    """The masks that hide a key from one of these queries: a single causal query sees all."""
    return tuple(how for how in HIDES if queries > 1 or how != "causal")


@dataclass
class Hidden:
    """Keys that some rows do not see, whose numbers must not matter to these rows."""

    mask: str | mx.array | None
    window: int | None
    keys: np.ndarray  # [keys]: all that one row does not see
    hits: np.ndarray  # [queries]: whether a row sees one of them


def hidden_keys(rng, how, queries, keys, dtype) -> Hidden:
    key, position = np.arange(keys), np.arange(queries)[:, None] + keys - queries
    seen = {
        "causal": key <= position,
        "row": np.broadcast_to(key < keys - 9, (queries, keys)),
        "window": (key <= position) & (key > position - 7),
    }.get(how, rng.random((queries, keys)) < 0.6)
    if how in ("bool", "additive"):
        seen[:, rng.integers(keys)] = True
    mask, window = {
        "causal": ("causal", None),
        "additive": (mx.array(np.where(seen, rng.standard_normal(seen.shape), -np.inf)).astype(dtype), None),
        "window": (None, 7),
    }.get(how, (mx.array(seen), None))
    unseen = ~seen[rng.integers(queries)] if how != "causal" else ~seen[0]
    assert unseen.any()
    return Hidden(mask, window, unseen, (seen & unseen).any(1))


def poisoned(array: mx.array, keys: np.ndarray, value: float, columns=slice(None)) -> mx.array:
    """A copy that has another value in some columns of some keys."""
    at = np.zeros(array.shape, bool)
    at[:, :, keys, columns] = True
    return mx.where(mx.array(at), mx.array(value, array.dtype), array)


def without(y: mx.array, rows: np.ndarray, exact: specs.Exact) -> mx.array:
    """y, with some rows of queries replaced by exact results."""
    return mx.where(mx.array(rows)[:, None], mx.array(exact.value.astype(np.float32)).astype(y.dtype), y)


def mx_attention(q, k, v, scale, mask=None, sinks=None, window=None):
    """mx's result on the CPU, with 0 for rows that see no key."""
    queries, keys = q.shape[2], k.shape[2]
    with mx.stream(mx.cpu):
        seen = twin_mask(mask, window, queries, keys)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=seen, sinks=sinks)
        return zero_unseeing(y, mask, window, queries, keys)


def exact_of(q, k, v, scale, mask=None, sinks=None, window=None):
    array = mask if isinstance(mask, mx.array) else None
    q, k, v = (a if isinstance(a, np.ndarray) else widen(a) for a in (q, k, v))
    return exact_attention(q, k, v, scale, array, sinks, array is None and mask == "causal", window)
