"""Random calls of the inputs of recurrences over a prompt."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from verification.fuzz.case import Case
from verification.fuzz.compare import overflow, to_float64
from verification.fuzz.draw import Draw, describe

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON
from mlx_mittens.specs.layer_inputs import exact_gated_delta_inputs, exact_ssm_inputs
from mlx_mittens.specs.op import Exact

TAPS = (2, 3, 4, 4, 4, 5)
STEPS = (0, 1, 2, 3, 5, 16, 17, 33)


def _hidden(draw: Draw, batch: int, steps: int) -> tuple[mx.array | None, mx.array | None]:
    """A mask and lengths, each maybe."""
    mask = mx.array(draw.rng.random((batch, steps)) < 0.7) if draw.chance(0.3) else None
    lengths = mx.array(draw.rng.integers(-2, steps + 3, (batch,)).astype(np.int32)) if draw.chance(0.3) else None
    return mask, lengths


def _convolved(x, past, weight, bias, mask, lengths):
    """In the type of x: all channels behind SiLU, and the next state."""
    (batch, steps, channels), taps = x.shape, weight.shape[1]
    x = x if mask is None else mx.where(mask[..., None], x, mx.zeros_like(x))
    window = mx.concatenate([past, x], axis=1)
    ends = mx.full((batch,), steps) if lengths is None else mx.clip(lengths, 0, steps)
    rows = (ends[:, None] + mx.arange(taps - 1))[..., None]
    last = mx.take_along_axis(window, mx.broadcast_to(rows, (batch, taps - 1, channels)).astype(mx.int32), axis=1)
    c = sum(window[:, j : j + steps] * weight[:, j] for j in range(taps))
    c = c if bias is None else c + bias
    return c * mx.sigmoid(c), last


def gated_delta_inputs(draw: Draw) -> Case:
    batch, steps, key_heads, group = (draw.pick(of) for of in ((1, 1, 2, 3), STEPS, (1, 1, 2, 3), (1, 1, 2, 3)))
    rows, columns = max(draw.size(draw.limit(200, 33)), 1), max(draw.size(draw.limit(300, 140)), 1)
    if steps * batch * key_heads * (columns + group * rows) > draw.limit(200_000, 6_000):
        batch, key_heads, rows, columns = 1, 1, min(rows, 33), min(columns, 140)
    taps, dtype, per_column, heads = draw.pick(TAPS), draw.dtype(), draw.chance(0.4), key_heads * group
    of_column, per_step = (columns,) if per_column else (), (batch, steps, key_heads, group)
    channels = 2 * key_heads * columns + heads * rows
    keys = (batch, steps, key_heads, columns)
    shapes = [keys, keys, (*per_step, rows), (*per_step, *of_column), per_step, (batch, taps - 1, channels)]
    shapes += [(channels, taps), (heads,), (heads, *of_column)]
    arrays = [draw.array(draw.numbers(shape), dtype) for shape in shapes]
    mask, lengths = _hidden(draw, batch, steps)

    def in_type_of(q, k, v, a, b, past, weight, a_log, dt_bias):
        mixed = mx.concatenate([part.reshape(batch, steps, math.prod(part.shape[2:])) for part in (q, k, v)], axis=-1)
        c, last = _convolved(mixed, past, weight, None, mask, lengths)
        of_keys = key_heads * columns
        q, k, v = mx.split(c, [of_keys, 2 * of_keys], axis=-1)
        eps = mx.array(np.float64(np.float32(1e-6)), c.dtype)
        q, k = (part.reshape(keys) for part in (q, k))
        q, k = (part * mx.rsqrt((part * part).sum(-1, keepdims=True) + eps) for part in (q, k))
        time = a.reshape(batch, steps, heads, *of_column) + dt_bias
        time = mx.logaddexp(time, mx.zeros_like(time))
        decay = mx.exp(a_log).reshape(heads, *(1 for _ in of_column))
        scale = mx.array(columns**-0.5, c.dtype)
        return (
            *(q * scale, k, v.reshape(batch, steps, heads, rows), mx.exp(-decay * time)),
            *(mx.sigmoid(b.reshape(batch, steps, heads)), last),
        )

    def of_mx(*given):
        results = in_type_of(*(each.astype(mx.float32) for each in given))
        return [each.astype(mx.float32 if i in (3, 4) else dtype) for i, each in enumerate(results)]

    def by_definition() -> list[Exact]:
        hidden = [None if a is None else np.array(a) for a in (mask, lengths)]
        return exact_gated_delta_inputs(*map(to_float64, arrays), *hidden)

    def noise() -> list[np.ndarray | float]:
        sums = 4 * EPSILON[mx.float32] * (8 + taps + columns / 16)
        sizes = [e.magnitude if e.magnitude is not None else np.abs(e.value) for e in by_definition()]
        limits: list[np.ndarray | float] = [*(size * sums + overflow(size) for size in sizes[:-1]), 0.0]
        # mx.exp gives zero where a gate is less than the smallest normal number, in float64 too.
        limits[3] = limits[3] + float(np.finfo(np.float32).tiny)
        return limits

    return Case(
        describe(arrays, draw, taps=taps, mask=mask is not None, lengths=lengths is not None),
        arrays,
        ours=lambda *given: mm.gated_delta_inputs(*given, mask, lengths),
        twin=of_mx,
        exact=in_type_of,
        of_nothing=lambda: [e.value for e in by_definition()],
        differentiable=range(len(arrays)),
        noise=noise,
        ordinary=False,
        hides=mask is not None,
    )


def ssm_inputs(draw: Draw) -> Case:
    batch, steps, taps = draw.pick((1, 1, 2, 3)), draw.pick(STEPS), draw.pick(TAPS)
    inner, columns = max(draw.size(draw.limit(600, 140)), 1), max(draw.size(draw.limit(300, 140)), 1)
    dtype, has_bias, channels = draw.dtype(), draw.chance(0.7), inner + 2 * columns
    shapes = [(batch, steps, channels), (batch, taps - 1, channels), (channels, taps), (channels,)][: 3 + has_bias]
    arrays = [draw.array(draw.numbers(shape), dtype) for shape in shapes]
    mask, lengths = _hidden(draw, batch, steps)

    def in_type_of(mixed, past, weight, bias=None):
        c, last = _convolved(mixed, past, weight, bias, mask, lengths)
        return *mx.split(c, [inner, inner + columns], axis=-1), last

    def ours(mixed, past, weight, bias=None):
        return mm.ssm_inputs(mixed, past, weight, bias, inner, mask, lengths)

    def by_definition() -> list[Exact]:
        wide = [to_float64(a) for a in arrays]
        hidden = [None if a is None else np.array(a) for a in (mask, lengths)]
        return exact_ssm_inputs(*wide[:3], wide[3] if has_bias else 0.0, *hidden, inner=inner)

    def noise() -> list[np.ndarray | float]:
        sums = 4 * EPSILON[mx.float32] * (4 + taps)
        return [*(e.magnitude * sums + overflow(e.magnitude) for e in by_definition()[:-1]), 0.0]

    return Case(
        describe(arrays, draw, taps=taps, inner=inner, mask=mask is not None, lengths=lengths is not None),
        arrays,
        ours=ours,
        twin=lambda *given: [each.astype(dtype) for each in in_type_of(*(a.astype(mx.float32) for a in given))],
        exact=in_type_of,
        of_nothing=lambda: [e.value for e in by_definition()],
        differentiable=range(len(arrays)),
        noise=noise,
        ordinary=False,
        hides=mask is not None,
    )
