"""What the tests of attention share: inputs, float64 results, and the measure of error."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from matrices import draw

from mlx_mittens import cases
from mlx_mittens.attention_cases import UNITS, exact_attention
from mlx_mittens.cases import widen

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


def exact_of(q, k, v, scale, mask=None, sinks=None, window=None):
    array = mask if isinstance(mask, mx.array) else None
    q, k, v = (a if isinstance(a, np.ndarray) else widen(a) for a in (q, k, v))
    return exact_attention(q, k, v, scale, array, sinks, array is None and mask == "causal", window)


def assert_right(y: mx.array, twin: mx.array | None, exact: cases.Exact, dtype: mx.Dtype):
    """Right against float64, and no worse than twice mx or what rounding explains."""
    assert y.dtype == dtype, f"{y.dtype}, expected {dtype}"
    found = cases.error(y, exact)
    allowed = cases.tolerance(dtype, cases.error(twin, exact) if twin is not None else 0.0, float32_units=UNITS)
    assert found <= allowed, f"error {found:.2e}, allowed {allowed:.2e}; {cases._worst(y, exact.value)}"
