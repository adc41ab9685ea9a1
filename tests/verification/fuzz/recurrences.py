"""Random calls of the linear recurrences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from verification.fuzz.case import Case
from verification.fuzz.compare import overflow, to_float64
from verification.fuzz.draw import Draw, describe

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON
from mlx_mittens.specs.op import Exact
from mlx_mittens.specs.recurrent_ops import (
    exact_gated_delta_token,
    exact_recurrence,
    exact_state_space,
)

KINDS = ("normal",) * 4 + ("small", "integers", "constant")
LIMITS = ((0.001, 100.0), (0.0, float("inf")), (0.1, 1.0))


def _sizes(draw: Draw) -> tuple[int, int, int, int, int, int]:
    """batch, steps, key heads, heads, rows and columns."""
    batch, steps = draw.pick((1, 1, 2, 3)), draw.pick((0, 1, 1, 1, 2, 3, 5, 9), (1, 8, 8, 8, 8, 8, 4, 2))
    key_heads, group = draw.pick((1, 2, 3)), draw.pick((1, 1, 2, 3))
    rows, columns = draw.size(draw.limit(80, 33)), draw.size(draw.limit(520, 129))
    if rows * columns * steps * key_heads * group * batch > draw.limit(400_000, 10_000):
        batch, key_heads, steps, rows = 1, 1, min(steps, 2), min(rows, 9)
    return batch, steps, key_heads, key_heads * group, rows, columns


def _mask(draw: Draw, batch: int, steps: int) -> mx.array | None:
    return mx.array(draw.rng.random((batch, steps)) < 0.7) if draw.chance(0.3) else None


def _seen(mask: mx.array | None, t: int) -> mx.array | None:
    return None if mask is None else mask[:, t, None, None, None]


def _noise(exact: Sequence[Exact], steps: int, columns: int, rounded: float) -> list[np.ndarray | float]:
    """Of sums in float32, by the sizes of their terms; and of y, which is in parts rounded to its type."""
    sums = 4 * EPSILON[mx.float32] * (steps + 8 + columns / 16)
    y, state = (e.magnitude for e in exact)
    return [y * (sums + rounded) + overflow(y), state * sums + overflow(state)]


def _correcting(exact: Sequence[Exact], arrays: Sequence[np.ndarray], mask: np.ndarray | None) -> list[Exact]:
    """With the sizes of all terms: a correction is a difference, which may be smaller than its rounding error."""
    q, k, v, gates, rates = (np.abs(a) for a in arrays[:5])
    group = v.shape[2] // k.shape[2]
    q, k = q.repeat(group, 2), k.repeat(group, 2)
    gates = gates if gates.ndim == 4 else gates[..., None]
    s = np.abs(arrays[5]) if len(arrays) > 5 else np.zeros(exact[1].value.shape)
    y = np.zeros(v.shape)
    for t in range(v.shape[1]):
        key, decayed = k[:, t, :, None, :], s * gates[:, t, :, None, :]
        update = rates[:, t, :, None] * (v[:, t] + (decayed * key).sum(-1))
        after = decayed + update[..., None] * key
        s = after if mask is None else np.where(mask[:, t, None, None, None], after, s)
        y[:, t] = (s * q[:, t, :, None, :]).sum(-1)
    return [Exact(e.value, size) for e, size in zip(exact, (y, s))]


def _case(
    draw: Draw,
    arrays: Sequence[mx.array],
    by_definition: Callable[[], list[Exact]],
    noise: tuple[int, int, float],
    *,
    ours: Callable[..., tuple[mx.array, mx.array]],
    twin: Callable[..., tuple[mx.array, mx.array]] | None,
    exact: Callable[..., tuple[mx.array, mx.array]],
    kind: str,
    **described: object,
) -> Case:
    """A call; `noise` has the steps, the columns and the rounding of y, as `_noise` takes them."""
    return Case(
        describe(arrays, draw, kind=kind, **described),
        arrays,
        ours=ours,
        twin=twin,
        exact=exact,
        of_nothing=lambda: [e.value for e in by_definition()],
        differentiable=range(len(arrays)),
        noise=lambda: _noise(by_definition(), *noise),
        ordinary=kind == "normal",
    )


def gated_delta_update(draw: Draw) -> Case:
    """Keys are about as long as 1, gates and rates between 0 and 1, as models have them."""
    batch, steps, key_heads, heads, rows, columns = _sizes(draw)
    dtype, kind, per_column, has_state = draw.dtype(), draw.kind(KINDS), draw.chance(0.4), draw.chance(0.7)
    keys, per_head = (batch, steps, key_heads, columns), (batch, steps, heads)
    arrays = [draw.array(draw.numbers(keys) / max(columns, 1) ** 0.5, dtype) for _ in range(2)]
    arrays.append(draw.array(draw.numbers((*per_head, rows), kind), dtype))
    arrays.append(draw.array(draw.rng.uniform(0.1, 1, (*per_head, columns) if per_column else per_head), mx.float32))
    arrays.append(draw.array(draw.rng.uniform(0, 1, per_head), draw.pick((dtype, mx.float32))))
    if has_state:
        arrays.append(draw.array(draw.numbers((batch, heads, rows, columns), kind), mx.float32))
    mask = _mask(draw, batch, steps)

    def ours(q, k, v, gamma, beta, state=None):
        return mm.gated_delta_update(q, k, v, gamma, beta, state, mask)

    def of_mx(q, k, v, gamma, beta, state=None):
        y, last = mx.fast.gated_delta_update(q, k, v, gamma, beta, state, mask)
        return y.astype(dtype), last

    def in_float64(q, k, v, gamma, beta, state=None):
        q, k = (mx.repeat(a, heads // key_heads, 2) for a in (q, k))
        s = mx.zeros((batch, heads, rows, columns), mx.float64) if state is None else state
        gamma = gamma if per_column else gamma[..., None]
        results = []
        for t in range(steps):
            key, query, seen = k[:, t, :, None, :], q[:, t, :, None, :], _seen(mask, t)
            decayed = s * gamma[:, t, :, None, :]
            error = v[:, t] - (decayed * key).sum(-1)
            after = decayed + (beta[:, t, :, None] * error)[..., None] * key
            s = after if seen is None else mx.where(seen, after, s)
            y = (s * query).sum(-1)
            results.append(y if seen is None else mx.where(seen[..., 0], y, mx.zeros_like(y)))
        return mx.stack(results, axis=1), s

    def by_definition() -> list[Exact]:
        wide, seen = [to_float64(a) for a in arrays], None if mask is None else np.array(mask)
        return _correcting(exact_recurrence(*wide[:5], wide[5] if has_state else None, seen), wide, seen)

    return _case(
        draw,
        arrays,
        by_definition,
        (steps, columns, 0.0),
        ours=ours,
        twin=None if per_column else of_mx,
        exact=in_float64,
        kind=kind,
        per_column=per_column,
        mask=None if mask is None else mask.tolist(),
    )


def gated_delta_token(draw: Draw) -> Case:
    """A token of a layer, with few numbers: a head's go through norms, which magnify small ones."""
    batch, _, key_heads, heads, rows, columns = _sizes(draw)
    rows, columns, taps, dtype = max(rows, 1), max(columns, 1), draw.pick((2, 3, 4, 4, 4, 5)), draw.dtype()
    keys, per_head = (batch, key_heads, columns), (batch, key_heads, heads // key_heads)
    channels = 2 * key_heads * columns + heads * rows
    gate, apart = draw.pick(("silu", "sigmoid")), draw.chance(0.5)
    each = (columns,) if draw.chance(0.5) else ()
    shapes = [
        *(keys, keys, (*per_head, rows), (*per_head, rows), (*per_head, *each), per_head),
        *((batch, taps - 1, channels), (channels, taps), (heads,), (heads, *each), (rows,)),
    ]
    arrays = [draw.array(draw.numbers(shape), dtype) for shape in shapes]
    arrays.append(draw.array(draw.numbers((batch, heads, rows, columns)), mx.float32))

    def in_type_of(q, k, v, z, a, b, past, weight, a_log, bias, norm, state):
        mixed = mx.concatenate([part.reshape(batch, 1, -1) for part in (q, k, v)], axis=-1)
        window = mx.concatenate([past, mixed], axis=1)
        c = (window * weight.T).sum(1)
        c = c * mx.sigmoid(c)
        parts = [c[:, i * keys[1] * columns : (i + 1) * keys[1] * columns] for i in (0, 1)]
        parts = [part.reshape(batch, key_heads, 1, 1, columns) for part in parts]
        query, key = (part * mx.rsqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in parts)
        value = c[:, 2 * key_heads * columns :].reshape(*per_head, rows, 1)
        by_head = lambda x: x.reshape(1, key_heads, heads // key_heads, 1, -1)
        biased = a.reshape(*per_head, 1, -1) + by_head(bias)
        time = mx.logaddexp(biased, mx.zeros_like(biased))
        s = state.reshape(*per_head, rows, columns) * mx.exp(-mx.exp(by_head(a_log)) * time)
        s = s + mx.sigmoid(b)[..., None, None] * (value - (s * key).sum(-1, keepdims=True)) * key
        y = (s * query).sum(-1) * columns**-0.5
        y = norm * y * mx.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * mx.sigmoid(z) * (z if gate == "silu" else 1)
        return y.reshape(batch, heads, rows), window[:, 1:], s.reshape(state.shape)

    def ours(*given):
        if not apart:
            return mm.gated_delta_token(*given, gate=gate)
        ends = [key_heads * columns, 2 * key_heads * columns]
        parts = (tuple(mx.split(given[i], ends, axis)) for i, axis in ((6, 2), (7, 0)))
        y, past, last = mm.gated_delta_token(*given[:6], *parts, *given[8:], gate=gate)
        return y, mx.concatenate(past, axis=2), last

    def of_mx(*given):
        y, past, last = in_type_of(*(each.astype(mx.float32) for each in given))
        return y.astype(dtype), past.astype(dtype), last

    def by_definition() -> list[Exact]:
        return exact_gated_delta_token(*map(to_float64, arrays), gate=gate)

    def noise() -> list[np.ndarray | float]:
        sums = 4 * EPSILON[mx.float32] * (9 + taps + columns / 16)
        y, _, last = (e.magnitude for e in by_definition())
        return [y * sums + overflow(y), 0.0, last * sums + overflow(last)]

    return Case(
        describe(arrays, draw, taps=taps, gate=gate, apart=apart),
        arrays,
        ours=ours,
        twin=of_mx,
        exact=in_type_of,
        of_nothing=lambda: [e.value for e in by_definition()],
        differentiable=range(len(arrays)),
        noise=noise,
        ordinary=False,
    )


def ssm_update(draw: Draw) -> Case:
    batch, steps, groups, heads, rows, columns = _sizes(draw)
    dtype, kind, has_state, limits = draw.dtype(), draw.kind(KINDS), draw.chance(0.7), draw.pick(LIMITS)
    keys, per_head = (batch, steps, groups, columns), (batch, steps, heads)
    shapes = [(*per_head, rows), (heads,), keys, keys, (heads,), per_head, (heads,)]
    arrays = [
        draw.array(draw.numbers(shape, kind if i in (0, 2, 3) else "normal"), dtype) for i, shape in enumerate(shapes)
    ]
    if has_state:
        arrays.append(draw.array(draw.numbers((batch, heads, rows, columns), kind), mx.float32))
    mask = _mask(draw, batch, steps)

    def ours(*a):
        return mm.ssm_update(*a[:7], a[7] if has_state else None, limits, mask)

    def in_type_of(x, a_log, b, c, d, dt, bias, state=None):
        b, c = (mx.repeat(a, heads // groups, 2) for a in (b, c))
        least, most = (mx.array(np.float64(np.float32(limit)), x.dtype) for limit in limits)
        dt = mx.clip(mx.logaddexp(dt + bias, mx.zeros_like(dt)), least, most)
        s = mx.zeros((batch, heads, rows, columns), x.dtype) if state is None else state
        results = []
        for t in range(steps):
            seen = _seen(mask, t)
            decay = mx.exp(-mx.exp(a_log) * dt[:, t])[..., None, None]
            after = s * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
            s = after if seen is None else mx.where(seen, after, s)
            y = (s * c[:, t, :, None, :]).sum(-1)
            results.append(y if seen is None else mx.where(seen[..., 0], y, mx.zeros_like(y)))
        return mx.stack(results, axis=1) + x * d[:, None], s

    def of_mx(*a):
        y, last = in_type_of(*(each.astype(mx.float32) for each in a))
        return y.astype(dtype), last

    def by_definition() -> list[Exact]:
        wide = [to_float64(a) for a in arrays]
        state = wide[7] if has_state else None
        return exact_state_space(*wide[:7], state, limits, None if mask is None else np.array(mask))

    return _case(
        draw,
        arrays,
        by_definition,
        (steps, columns, 2 * EPSILON[dtype]),  # D * x is added in the type
        ours=ours,
        twin=of_mx,
        exact=in_type_of,
        kind=kind,
        limits=limits,
        mask=None if mask is None else mask.tolist(),
    )
