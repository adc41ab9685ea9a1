"""Random calls of one token of layers with a short convolution."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from verification.fuzz.case import Case
from verification.fuzz.compare import overflow, to_float64
from verification.fuzz.draw import Draw, describe

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON
from mlx_mittens.specs.op import Exact
from mlx_mittens.specs.token_layers import exact_short_conv_token, exact_ssm_token

LIMITS = ((0.001, 100.0), (0.0, float("inf")), (0.1, 1.0))


def _convolution(draw: Draw, batch: int, channels: int, taps: int, has_bias: bool, dtype: mx.Dtype) -> list[mx.array]:
    """The state, the weights and maybe the bias."""
    shapes = [(batch, taps - 1, channels), (channels, taps), (channels,)][: 2 + has_bias]
    return [draw.array(draw.numbers(shape), dtype) for shape in shapes]


def short_conv_token(draw: Draw) -> Case:
    batch, channels, taps = draw.pick((1, 1, 2, 3)), draw.size(draw.limit(1100, 300)), draw.pick((2, 3, 3, 3, 4))
    dtype, has_bias = draw.dtype(), draw.chance(0.5)
    channels = max(channels, 1)
    tokens = [] if draw.chance(0.6) else [draw.pick((0, 1, 2, 5, 16, 17, 33))]
    arrays = [draw.array(draw.numbers((batch, *tokens, 3 * channels)), dtype)]
    arrays += _convolution(draw, batch, channels, taps, has_bias, dtype)

    def in_type_of(projected, past, weight, bias=None):
        b, c, x = mx.split(projected if tokens else projected[:, None], 3, axis=-1)
        count = x.shape[1]
        window = mx.concatenate([past, b * x], axis=1)
        total = sum(window[:, j : j + count] * weight[:, j] for j in range(taps))
        y = c * (total if bias is None else total + bias)
        return y if tokens else y[:, 0], window[:, count:]

    def of_mx(*given):
        b, _, x = mx.split(given[0] if tokens else given[0][:, None], 3, axis=-1)
        y, _ = in_type_of(*(each.astype(mx.float32) for each in given))
        return y.astype(dtype), mx.concatenate([given[1], b * x], axis=1)[:, x.shape[1] :]

    def by_definition() -> list[Exact]:
        return exact_short_conv_token(*map(to_float64, arrays))

    def noise() -> list[np.ndarray | float]:
        y, past = by_definition()
        rounded = 4 * EPSILON[mx.float32] * (4 + taps) + EPSILON[dtype]  # b * x is of the type
        return [y.magnitude * rounded + overflow(y.magnitude), overflow(np.abs(past.value))]

    return Case(
        describe(arrays, draw, taps=taps),
        arrays,
        ours=mm.short_conv_token,
        twin=of_mx,
        exact=in_type_of,
        of_nothing=lambda: [e.value for e in by_definition()],
        differentiable=range(len(arrays)),
        noise=noise,
    )


def ssm_token(draw: Draw) -> Case:
    batch, groups, each = draw.pick((1, 1, 2, 3)), draw.pick((1, 1, 2, 3)), draw.pick((1, 1, 2, 3))
    rows, columns = max(draw.size(draw.limit(80, 33)), 1), max(draw.size(draw.limit(520, 129)), 1)
    if rows * columns * groups * each * batch > draw.limit(400_000, 10_000):
        batch, groups, rows = 1, 1, min(rows, 9)
    heads, taps, dtype, limits = groups * each, draw.pick((2, 3, 4, 4, 4, 5)), draw.dtype(), draw.pick(LIMITS)
    inner, gated, has_bias = heads * rows, draw.chance(0.7), draw.chance(0.7)
    channels = inner + 2 * groups * columns
    arrays = [draw.array(draw.numbers((batch, inner + channels + heads)), dtype)]
    arrays += _convolution(draw, batch, channels, taps, has_bias, dtype)
    arrays += [draw.array(draw.numbers((heads,)), dtype) for _ in range(3)]
    arrays.append(draw.array(draw.numbers((batch, heads, rows, columns)), mx.float32))

    def named(given):
        return (*given[:3], *(given[3:] if has_bias else (None, *given[3:])))

    def ours(*given):
        return mm.ssm_token(*named(given), time_step_limit=limits, gated=gated)

    def in_type_of(*given):
        projected, past, weight, bias, a_log, d, dt_bias, state = named(given)
        z, mixed, dt = mx.split(projected, [inner, inner + channels], axis=-1)
        window = mx.concatenate([past, mixed[:, None]], axis=1)
        c = (window * weight.T).sum(1)
        c = c if bias is None else c + bias
        x, b, c = mx.split(c * mx.sigmoid(c), [inner, inner + groups * columns], axis=-1)
        x = x.reshape(batch, groups, each, rows, 1)
        b, c = (part.reshape(batch, groups, 1, 1, columns) for part in (b, c))
        by_head = lambda part: part.reshape(1, groups, each, 1, 1)
        least, most = (mx.array(np.float64(np.float32(limit)), projected.dtype) for limit in limits)
        step = dt.reshape(batch, groups, each, 1, 1) + by_head(dt_bias)
        step = mx.clip(mx.logaddexp(step, mx.zeros_like(step)), least, most)
        s = state.reshape(batch, groups, each, rows, columns) * mx.exp(-mx.exp(by_head(a_log)) * step)
        s = s + step * x * b
        y = ((s * c).sum(-1, keepdims=True) + by_head(d) * x).reshape(batch, inner)
        return y * z * mx.sigmoid(z) if gated else y, window[:, 1:], s.reshape(state.shape)

    def of_mx(*given):
        y, past, last = in_type_of(*(each.astype(mx.float32) for each in given))
        return y.astype(dtype), past.astype(dtype), last

    def by_definition() -> list[Exact]:
        wide = list(named([to_float64(a) for a in arrays]))
        wide[3] = np.zeros(channels) if wide[3] is None else wide[3]
        return exact_ssm_token(*wide, limits=limits, gated=gated)

    def noise() -> list[np.ndarray | float]:
        sums = 4 * EPSILON[mx.float32] * (9 + taps + columns / 16)
        y, _, last = by_definition()
        sizes = [e.magnitude + np.nan_to_num(e.inner) for e in (y, last)]
        return [sizes[0] * sums + overflow(sizes[0]), 0.0, sizes[1] * sums + overflow(sizes[1])]

    return Case(
        describe(arrays, draw, taps=taps, limits=limits, gated=gated, has_bias=has_bias),
        arrays,
        ours=ours,
        twin=of_mx,
        exact=in_type_of,
        of_nothing=lambda: [e.value for e in by_definition()],
        differentiable=range(len(arrays)),
        noise=noise,
        ordinary=False,
    )
