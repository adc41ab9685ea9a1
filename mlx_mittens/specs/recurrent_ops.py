"""Rows of the table of ops that keep a state: their arrays, and their results in float64.

The shape of a case is ``(batch, steps, key_heads, heads, rows, columns)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .op import Case, Exact, ModelOp, Op, add_outliers, widen


@dataclass(frozen=True, kw_only=True)
class GatedDeltaOp(ModelOp):
    """Queries, keys, values, gates, rates and a state. Gradients and masks are tested beside the table.

    Options of a case are ``per_column``, whether gates are, and ``state``, whether there is one.
    """

    # The least shape that any case's options allow.
    smallest = (1, 2, 1, 2, 3, 8)

    def link(self, case: Case) -> int:
        return 5 if self._has_state(case) else 2

    def updated(self, case: Case) -> Mapping[int, int]:
        return {5: 1} if self._has_state(case) else {}

    def _has_state(self, case: Case) -> bool:
        return self.arguments(case).get("state", True)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, steps, key_heads, heads, rows, columns = case.shape
        per_head = (batch, steps, heads)
        gates = (*per_head, columns) if self.arguments(case).get("per_column") else per_head
        keys = (batch, steps, key_heads, columns)
        return [keys, keys, (*per_head, rows), gates, per_head, (batch, heads, rows, columns)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        shapes = self.shapes(case)
        numbers = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        for i in (0, 1):  # as they are normalized
            numbers[i] /= np.sqrt((numbers[i] ** 2).sum(-1, keepdims=True) + np.float32(1e-6))
        add_outliers(rng, numbers[2])
        gates = rng.uniform(0.5, 1, shapes[3]).astype(np.float32)
        rates = rng.uniform(0, 1, shapes[4]).astype(np.float32)
        arrays = [mx.array(a).astype(dtype) for a in (*numbers[:3], rates)]
        return [*arrays[:3], mx.array(gates), arrays[3], mx.array(numbers[5]) if self._has_state(case) else None]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        q, k, v, gates, rates, state = (math.prod(shape) for shape in self.shapes(case))
        return dtype.size * (q + k + 2 * v + rates) + 4 * (gates + (2 if self._has_state(case) else 1) * state)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        q, k, v, gates, rates = (widen(a) for a in arrays[:5] if a is not None)
        return exact_recurrence(q, k, v, gates, rates, widen(arrays[5]))


@dataclass(frozen=True, kw_only=True)
class GatedDeltaTokenOp(Op):
    """Queries, keys, values, gates of results, time steps, rates, the convolution's state and weights, logarithms of
    decays, biases of time steps, weights of the norm, and a state.

    The shape of a case is ``(batch, taps, key_heads, heads, rows, columns)``. With ``per_column`` it has a gate for
    each column of the state, and convolutions of queries, of keys and of values.
    """

    smallest = (1, 2, 1, 2, 3, 8)

    def link(self, case: Case) -> int:
        return 11

    def arguments(self, case: Case) -> dict[str, Any]:
        return {name: value for name, value in super().arguments(case).items() if name != "per_column"}

    def updated(self, case: Case) -> Mapping[int, int]:
        return {11: 2}

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, taps, key_heads, heads, rows, columns = case.shape
        keys, per_head = (batch, key_heads, columns), (batch, key_heads, heads // key_heads)
        channels = 2 * key_heads * columns + heads * rows
        each = (columns,) if case.options.get("per_column") else ()
        return [
            *(keys, keys, (*per_head, rows), (*per_head, rows), (*per_head, *each), per_head),
            *((batch, taps - 1, channels), (channels, taps), (heads,), (heads, *each), (rows,)),
            (batch, heads, rows, columns),
        ]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        numbers = [rng.standard_normal(shape, dtype=np.float32) for shape in self.shapes(case)]
        numbers[7] *= np.float32(case.shape[1] ** -0.5)
        add_outliers(rng, numbers[2])
        return [*(mx.array(a).astype(dtype) for a in numbers[:11]), mx.array(numbers[11])]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        *shapes, state = (math.prod(shape) for shape in self.shapes(case))
        # All inputs once, the result, and the convolution's state again.
        return dtype.size * (sum(shapes) + shapes[2] + shapes[6]) + 8 * state

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        return exact_gated_delta_token(*(widen(a) for a in arrays if a is not None), **self.arguments(case))


@dataclass(frozen=True, kw_only=True)
class StateSpaceOp(ModelOp):
    """Inputs, rates of decay, B, C, D, time steps, their bias and a state."""

    smallest = (1, 2, 1, 2, 3, 8)

    def link(self, case: Case) -> int:
        return 7

    def updated(self, case: Case) -> Mapping[int, int]:
        return {7: 1}

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, steps, groups, heads, rows, columns = case.shape
        per_head, keys = (batch, steps, heads), (batch, steps, groups, columns)
        return [(*per_head, rows), (heads,), keys, keys, (heads,), per_head, (heads,), (batch, heads, rows, columns)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        numbers = [rng.standard_normal(shape, dtype=np.float32) for shape in self.shapes(case)]
        add_outliers(rng, numbers[0])
        return [*(mx.array(a).astype(dtype) for a in numbers[:7]), mx.array(numbers[7])]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        x, a, b, c, d, dt, bias, state = (math.prod(shape) for shape in self.shapes(case))
        return dtype.size * (2 * x + a + b + c + d + dt + bias) + 8 * state

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        x, a_log, b, c, d, dt, bias, state = (widen(a) for a in arrays if a is not None)
        return exact_state_space(x, a_log, b, c, d, dt, bias, state)


def exact_state_space(
    x: np.ndarray,
    a_log: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    d: np.ndarray,
    dt: np.ndarray,
    dt_bias: np.ndarray,
    state: np.ndarray | None = None,
    limits: tuple[float, float] = (0.001, 100.0),
    mask: np.ndarray | None = None,
) -> list[Exact]:
    """A state space by its definition, in float64: y and the last state."""
    (batch, steps, heads, rows), (groups, columns) = x.shape, b.shape[2:]
    b, c = (a.repeat(heads // groups, 2) for a in (b, c))
    dt = np.clip(np.logaddexp(dt + dt_bias, 0), *limits)
    s = np.zeros((batch, heads, rows, columns)) if state is None else state
    size, inner = np.abs(s), np.zeros_like(s)
    y, y_size, y_inner = x * d[:, None], np.abs(x * d[:, None]), np.zeros(x.shape)
    for t in range(steps):
        exponent = (np.exp(a_log) * dt[:, t])[..., None, None]
        decay = np.exp(-exponent)
        added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        seen = np.ones((batch, 1, 1, 1), bool) if mask is None else mask[:, t].reshape(batch, 1, 1, 1)
        inner = np.where(seen, (inner + exponent * size) * decay, inner)
        s, size = np.where(seen, s * decay + added, s), np.where(seen, size * decay + np.abs(added), size)
        columns, size_of_columns = c[:, t, :, None, :], np.abs(c[:, t, :, None, :])
        y[:, t] += np.where(seen[..., 0], (s * columns).sum(-1), 0)
        y_size[:, t] += np.where(seen[..., 0], (size * size_of_columns).sum(-1), 0)
        y_inner[:, t] += np.where(seen[..., 0], (inner * size_of_columns).sum(-1), 0)
    return [Exact(y, y_size, y_inner), Exact(s, size, inner)]


def exact_gated_delta_token(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    z: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    conv_state: np.ndarray,
    conv_weight: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    norm_weight: np.ndarray,
    state: np.ndarray,
    *,
    eps: float = 1e-6,
    key_eps: float = 1e-6,
    gate: str = "silu",
) -> list[Exact]:
    """A token of a layer of the gated delta rule by its definition, in float64: y, and both states.

    Sizes belong to sums whose terms cancel. A norm of numbers that nearly cancel magnifies the errors before it.
    """
    (batch, key_heads, columns), (group, rows) = q.shape, v.shape[2:]
    heads = key_heads * group
    mixed = np.concatenate([part.reshape(batch, 1, -1) for part in (q, k, v)], -1)
    window = np.concatenate([conv_state, mixed], 1)
    products = window * conv_weight.reshape(len(conv_weight), -1).T
    c, c_size = products.sum(1), np.abs(products).sum(1)
    gated = c / (1 + np.exp(-c))
    size = np.maximum(np.abs(gated), c_size)  # the slope of SiLU is at most 1.1
    of_keys = key_heads * columns

    def normalized(begin: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [array[:, begin : begin + of_keys].reshape(batch, key_heads, 1, columns) for array in (gated, size)]
        root = np.sqrt((parts[0] ** 2).sum(-1, keepdims=True) + key_eps)
        value, value_size = (np.repeat(part / root, group, 2).reshape(batch, heads, columns) for part in parts)
        along = (np.abs(value) * value_size).sum(-1, keepdims=True)
        return value, value_size + np.abs(value) * along

    (query, query_size), (key, key_size) = normalized(0), normalized(of_keys)
    query, query_size = query * columns**-0.5, query_size * columns**-0.5
    value, value_size = (array[:, 2 * of_keys :].reshape(batch, heads, rows) for array in (gated, size))
    gates = a.shape[3] if a.ndim == 4 else 1  # of a head
    time = np.logaddexp(a.reshape(batch, heads, 1, gates) + dt_bias.reshape(heads, 1, gates), 0)
    exponent = np.exp(a_log)[:, None, None] * time
    decay, rate = np.exp(-exponent), 1 / (1 + np.exp(-b.reshape(batch, heads, 1)))
    decayed, decayed_size = state * decay, np.abs(state) * decay * (1 + exponent)
    predicted = (decayed * key[..., None, :]).sum(-1)
    predicted_size = (decayed_size * np.abs(key[..., None, :]) + np.abs(decayed) * key_size[..., None, :]).sum(-1)
    update, update_size = rate * (value - predicted), rate * (value_size + predicted_size)
    last = decayed + update[..., None] * key[..., None, :]
    last_size = (
        decayed_size
        + update_size[..., None] * np.abs(key[..., None, :])
        + np.abs(update)[..., None] * key_size[..., None, :]
    )
    result = (last * query[..., None, :]).sum(-1)
    result_size = (last_size * np.abs(query[..., None, :]) + np.abs(last) * query_size[..., None, :]).sum(-1)
    root = np.sqrt((result**2).mean(-1, keepdims=True) + eps)
    along = (np.abs(result) * result_size).mean(-1, keepdims=True) / root**2
    factor = (1 if gate == "sigmoid" else z) / (1 + np.exp(-z))
    scale = np.abs(norm_weight * factor.reshape(batch, heads, rows)) / root
    y = norm_weight * result / root * factor.reshape(batch, heads, rows)
    return [
        Exact(y, scale * (result_size + np.abs(result) * along)),
        Exact(window[:, 1:]),
        Exact(last, last_size),
    ]


def exact_recurrence(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    gates: np.ndarray,
    rates: np.ndarray,
    state: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> list[Exact]:
    """A recurrence by its definition, in float64: y and the last state."""
    (batch, steps, key_heads, columns), (heads, rows) = q.shape, v.shape[2:]
    q, k = (a.repeat(heads // key_heads, 2) for a in (q, k))
    s = np.zeros((batch, heads, rows, columns)) if state is None else state
    size = np.abs(s)
    gates = gates[..., None] if gates.ndim == 3 else gates
    y, y_size = np.zeros(v.shape), np.zeros(v.shape)
    for t in range(steps):
        key = k[:, t, :, None, :]
        decayed = s * gates[:, t, :, None]
        error = v[:, t] - (decayed * key).sum(-1)
        update = rates[:, t, :, None] * error
        after = decayed + update[..., None] * key
        size_after = size * gates[:, t, :, None] + np.abs(update)[..., None] * np.abs(key)
        seen = np.ones((batch, 1, 1, 1), bool) if mask is None else mask[:, t].reshape(batch, 1, 1, 1)
        s, size = np.where(seen, after, s), np.where(seen, size_after, size)
        y[:, t] = np.where(seen[..., 0], (s * q[:, t, :, None, :]).sum(-1), 0)
        y_size[:, t] = np.where(seen[..., 0], (size * np.abs(q[:, t, :, None, :])).sum(-1), 0)
    return [Exact(y, y_size), Exact(s, size)]
