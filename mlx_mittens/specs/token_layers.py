"""Rows of the table of ops for a token of layers with a short convolution; `specs` puts them into the table."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import recurrent_layers
from . import normed
from .op import Case, Exact, Op, add_outliers, all_rows, cases_for_tests, dequantized, draw_packed, widen
from .recurrent_ops import exact_state_space

Triple = list[mx.array]  # words, scales and, where there are any, biases of groups


@dataclass(frozen=True, kw_only=True)
class ShortConvTokenOp(Op):
    """Projections, the convolution's state and weights. Biases are tested beside the table.

    The shape of a case is ``(batch, taps, channels)``, with the number of tokens behind where there are several. With
    the option ``columns`` the projection is a part of the call. It reads a norm of the first argument plus a
    product of that argument with a matrix of `columns` columns.
    """

    smallest = (1, 2, 3)

    def link(self, case: Case) -> int:
        return 1

    def updated(self, case: Case) -> Mapping[int, int]:
        return {1: 1} if len(case.shape) == 3 else {}

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, taps, channels, *tokens = case.shape
        columns = self.arguments(case).get("columns", 3 * channels)
        return [(batch, *tokens, columns), (batch, taps - 1, channels), (channels, taps)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        numbers = [rng.standard_normal(shape, dtype=np.float32) for shape in self.shapes(case)]
        add_outliers(rng, numbers[0])
        return [mx.array(a).astype(dtype) for a in numbers]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        projected, state, weight = (math.prod(shape) for shape in self.shapes(case))
        return dtype.size * (projected + 2 * state + weight + projected // 3)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        first, *others = (widen(a) for a in arrays if a is not None)
        if "columns" not in options:
            return exact_short_conv_token(first, *others)
        quantized = normed.widths(options)
        square, projection = (
            dequantized(*triple, *[None] * (3 - len(triple)), **quantized)
            for triple in _matrices(case.shape[2], arrays[0].dtype, **options)  # type: ignore[union-attr]
        )
        row, _ = normed.exact_row(first, first @ square.T)
        b, c, x = np.split(row @ projection.T, 3, axis=-1)
        sizes = np.split(np.sqrt((row * row) @ (projection * projection).T), 3, axis=-1)
        of_b, of_c, of_x = (np.abs(a) + size for a, size in zip((b, c, x), sizes))
        y, state = exact_short_conv_token(np.concatenate([b, c, x], -1), *others)
        of_y, of_state = exact_short_conv_token(np.concatenate([of_b, of_c, of_x], -1), *(np.abs(a) for a in others))
        return [Exact(y.value, of_y.value), Exact(state.value, of_state.value)]


@functools.lru_cache(maxsize=32)
def _matrices(channels: int, dtype: mx.Dtype, columns: int, group_size: int, bits: int, mode: str = "affine") -> Any:
    """A square matrix, and the projection of a short convolution."""
    rng = np.random.default_rng(0)
    parts = ("w", columns * bits // 32), ("scales", columns // group_size), ("biases", columns // group_size)
    return [
        [
            draw_packed(rng, name, (rows, width), bits, dtype, columns**-0.5, mode)
            for name, width in parts[: 3 if mode == "affine" else 2]
        ]
        for rows in (columns, 3 * channels)
    ]


def _short_conv_token(
    projected: mx.array, conv_state: mx.array, conv_weight: mx.array, **options: Any
) -> tuple[mx.array, mx.array]:
    if not options:
        return recurrent_layers.short_conv_token(projected, conv_state, conv_weight)
    square, projection = _matrices(len(conv_weight), projected.dtype, **options)
    return normed.short_conv(projected, square, projection, conv_state, conv_weight, options)


def exact_short_conv_token(
    projected: np.ndarray, conv_state: np.ndarray, conv_weight: np.ndarray, conv_bias: np.ndarray | float = 0.0
) -> list[Exact]:
    """A token of a short convolution by its definition, or several, in float64: y, and the next state."""
    batch, channels = projected.shape[0], len(conv_weight)
    b, c, x = np.split(projected.reshape(batch, -1, 3 * channels), 3, axis=-1)
    tokens, weight = x.shape[1], conv_weight.reshape(channels, -1)
    window = np.concatenate([conv_state, b * x], 1)
    products = np.stack([window[:, j : j + tokens] * weight[:, j] for j in range(weight.shape[1])], 2)
    size = np.abs(c) * (np.abs(products).sum(2) + np.abs(conv_bias))
    shape = (*projected.shape[:-1], channels)
    y = c * (products.sum(2) + conv_bias)
    return [Exact(y.reshape(shape), size.reshape(shape)), Exact(window[:, tokens:])]


@dataclass(frozen=True, kw_only=True)
class SsmTokenOp(Op):
    """Projections, the convolution's state, weights and bias, logarithms of decays, D, biases of time steps, a state.

    The shape of a case is ``(batch, taps, groups, heads, rows, columns)``.
    """

    smallest = (1, 2, 1, 2, 3, 8)

    def link(self, case: Case) -> int:
        return 7

    def updated(self, case: Case) -> Mapping[int, int]:
        return {7: 2}

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, taps, groups, heads, rows, columns = case.shape
        channels = heads * rows + 2 * groups * columns
        return [
            *((batch, heads * rows + channels + heads), (batch, taps - 1, channels), (channels, taps), (channels,)),
            *((heads,), (heads,), (heads,), (batch, heads, rows, columns)),
        ]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        numbers = [rng.standard_normal(shape, dtype=np.float32) for shape in self.shapes(case)]
        numbers[2] *= np.float32(case.shape[1] ** -0.5)
        numbers[3] *= np.float32(0.1)
        return [*(mx.array(a).astype(dtype) for a in numbers[:7]), mx.array(numbers[7])]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        *shapes, state = (math.prod(shape) for shape in self.shapes(case))
        return dtype.size * (sum(shapes) + shapes[1] + state // case.shape[-1]) + 8 * state

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        return exact_ssm_token(*(widen(a) for a in arrays if a is not None))


def exact_ssm_token(
    projected: np.ndarray,
    conv_state: np.ndarray,
    conv_weight: np.ndarray,
    conv_bias: np.ndarray,
    a_log: np.ndarray,
    d: np.ndarray,
    dt_bias: np.ndarray,
    state: np.ndarray,
    *,
    limits: tuple[float, float] = (0.001, 100.0),
    gated: bool = True,
) -> list[Exact]:
    """A token of a layer of state spaces by its definition, in float64: y, and both states."""
    batch, heads, rows, columns = state.shape
    inner, channels = heads * rows, conv_weight.shape[0]
    groups = (channels - inner) // (2 * columns)
    z, mixed, dt = np.split(projected, [inner, inner + channels], axis=-1)
    window = np.concatenate([conv_state, mixed[:, None]], 1)
    products = window * conv_weight.reshape(channels, -1).T
    c, c_size = products.sum(1) + conv_bias, np.abs(products).sum(1) + np.abs(conv_bias)
    activated = c / (1 + np.exp(-c))
    size = np.maximum(np.abs(activated), c_size)  # the slope of SiLU is at most 1.1

    def parts(a: np.ndarray) -> list[np.ndarray]:
        x, b, c = np.split(a, [inner, inner + groups * columns], axis=-1)
        each = (batch, 1, groups, columns)
        return [x.reshape(batch, 1, heads, rows), b.reshape(each), c.reshape(each)]

    (x, b, c), (x_size, b_size, c_size) = parts(activated), parts(size)
    call = lambda x, b, c, d, state: exact_state_space(x, a_log, b, c, d, dt[:, None], dt_bias, state, limits)
    y, last = call(x, b, c, d, state)
    # The rounding of the convolution's sums, which cancel, goes into all three.
    y_size, last_size = call(x_size, b_size, c_size, np.abs(d), np.abs(state))
    scale = z / (1 + np.exp(-z)) if gated else np.ones_like(z)
    flat = lambda a: a.reshape(batch, inner)
    return [
        Exact(flat(y.value) * scale, flat(y_size.value) * np.abs(scale), flat(y.inner) * np.abs(scale)),
        Exact(window[:, 1:]),
        Exact(last.value, last_size.value, last.inner),
    ]


def _short_conv_token_twin(projected, conv_state, conv_weight, **options):
    """As mlx-lm's `ShortConv` has it, in mx operations."""
    if options:
        square, projection = _matrices(len(conv_weight), projected.dtype, **options)
        row, _ = normed.row_of_mx(projected, square, None, normed.widths(options))
        projected = mx.quantized_matmul(row, *projection, transpose=True, **normed.widths(options))
    rows = projected[:, None] if projected.ndim == 2 else projected
    b, c, x = mx.split(rows, 3, axis=-1)
    window = mx.concatenate([conv_state, b * x], axis=1)
    y = c * mx.conv1d(window, conv_weight[..., None], groups=window.shape[-1])
    return y.reshape(*projected.shape[:-1], -1), mx.contiguous(window[:, rows.shape[1] :])


def _ssm_token_twin(projected, conv_state, conv_weight, conv_bias, a_log, d, dt_bias, state):
    """As mlx-lm's `Mamba2Block` has it, in mx operations."""
    batch, heads, rows, columns = state.shape
    inner, channels = heads * rows, conv_weight.shape[0]
    of_columns = (channels - inner) // 2
    z, mixed, dt = mx.split(projected[:, None], [inner, inner + channels], axis=-1)
    window = mx.concatenate([conv_state, mixed], axis=1)
    c = mx.conv1d(window, conv_weight[..., None], groups=channels)[:, 0] + conv_bias
    c = c * mx.sigmoid(c)
    x, b, c = mx.split(c, [inner, inner + of_columns], axis=-1)
    by_group = lambda a: mx.repeat(a.reshape(batch, -1, columns), heads * columns // of_columns, 1)[:, :, None]
    x, b, c = (a.astype(mx.float32) for a in (x.reshape(batch, heads, rows), by_group(b), by_group(c)))
    step = mx.clip(mx.logaddexp(dt[:, 0].astype(mx.float32) + dt_bias, 0), 0.001, 100.0)[..., None]
    gate = mx.exp(-mx.exp(a_log.astype(mx.float32))[:, None] * step)
    state = state * gate[..., None] + (step * x)[..., None] * b
    y = ((state * c).sum(-1) + d.astype(mx.float32)[:, None] * x).reshape(batch, inner)
    z = z[:, 0].astype(mx.float32)
    return (y * z * mx.sigmoid(z)).astype(projected.dtype), mx.contiguous(window[:, 1:]), state


TOKEN_LAYER_OPS: tuple[Op, ...] = (
    ShortConvTokenOp(
        name="short_conv_token",
        parameters=all_rows("projected", "conv_state", "conv_weight"),
        outputs=2,
        ours=_short_conv_token,
        twin=_short_conv_token_twin,
        twin_text="mlx-lm's `ShortConv` between its projections",
        summary="a gated short convolution with its state, as LFM2 has it, of a token or a prompt",
        # Channels of one threadgroup and of several, that fill them and that do not; tokens of one thread and of more.
        tests=cases_for_tests((1, 3, 200), (2, 4, 33), (3, 2, 3), (1, 3, 257), (2, 3, 130, 16), (2, 3, 33, 37))
        + cases_for_tests((1, 3, 5, 1), (1, 5, 9, 2), (2, 4, 33, 33))
        # Channels that fill the last simdgroup and that do not, one alone; windows of one tap and of others.
        + cases_for_tests((1, 3, 38), (1, 4, 1), columns=96, group_size=32, bits=4)
        + cases_for_tests((1, 1, 37), columns=1088, group_size=32, bits=4)
        + cases_for_tests((1, 3, 9), columns=96, group_size=32, bits=8)
        + cases_for_tests((1, 3, 33), columns=96, group_size=32, bits=4, mode="mxfp4"),
        cases=(
            Case("LFM2 1.2B", (1, 3, 2048), quick=True),
            Case("LFM2 1.2B, 8 sequences", (8, 3, 2048)),
        ),
    ),
    SsmTokenOp(
        name="ssm_token",
        parameters=all_rows(*("projected", "conv_state", "conv_weight", "conv_bias", "A_log", "D", "dt_bias"), "state"),
        outputs=3,
        ours=recurrent_layers.ssm_token,
        twin=_ssm_token_twin,
        twin_text="mlx-lm's `Mamba2Block` between its projection and its norm",
        summary="one token of a layer of Mamba 2: convolution, time step, state, D and gate",
        # One lane a row of the state, several, and all of a simdgroup; rows that are whole packs, and others.
        tests=(
            *cases_for_tests((1, 4, 1, 4, 33, 128), (2, 4, 2, 4, 9, 64), (1, 3, 2, 2, 5, 33), (1, 2, 1, 1, 3, 8)),
            *cases_for_tests((1, 4, 1, 2, 70, 264)),
        ),
        cases=(
            Case("Mamba 2, 2.7B", (1, 4, 1, 80, 64, 128), quick=True),
            Case("Mamba 2, 2.7B, 4 sequences", (4, 4, 1, 80, 64, 128)),
        ),
    ),
)
