"""Rows of the table of ops for the inputs of recurrences over a prompt; `specs` puts them into the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import recurrent_layers
from .op import Case, Exact, Op, add_outliers, all_rows, cases_for_tests, widen


def _convolved(
    x: np.ndarray,
    conv_state: np.ndarray | None,
    conv_weight: np.ndarray,
    conv_bias: np.ndarray | float = 0.0,
    mask: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> tuple[Exact, np.ndarray]:
    """The channels of all steps through a convolution and SiLU in float64, and the next state."""
    batch, steps, channels = x.shape
    x = x if mask is None else np.where(mask[..., None], x, 0)
    weight = conv_weight.reshape(channels, conv_weight.shape[1])
    past = weight.shape[1] - 1
    window = np.concatenate([np.zeros((batch, past, channels)) if conv_state is None else conv_state, x], 1)
    ends = np.full(batch, steps) if lengths is None else np.clip(lengths, 0, steps)
    last = np.stack([window[i, end : end + past] for i, end in enumerate(ends)]) if batch else window[:, :past]
    products = np.stack([window[:, j : j + steps] * weight[:, j] for j in range(weight.shape[1])], 2)
    c, size = products.sum(2) + conv_bias, np.abs(products).sum(2) + np.abs(conv_bias)
    activated = c / (1 + np.exp(-c))
    return Exact(activated, np.maximum(np.abs(activated), size)), last  # the slope of SiLU is at most 1.1


@dataclass(frozen=True, kw_only=True)
class GatedDeltaInputsOp(Op):
    """Projections, the convolution's state and weights, logarithms of decays and biases of time steps.

    The shape of a case is ``(batch, steps, taps, key_heads, heads, rows, columns)``. With ``per_column`` it has a gate
    for each column. Masks, lengths and parts of a convolution are tested beside the table.
    """

    smallest = (1, 2, 2, 1, 2, 3, 8)

    def arguments(self, case: Case) -> dict[str, Any]:
        return {name: value for name, value in super().arguments(case).items() if name != "per_column"}

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, steps, taps, key_heads, heads, rows, columns = case.shape
        per_head = (batch, steps, key_heads, heads // key_heads)
        of_column = (columns,) if case.options.get("per_column") else ()
        channels = 2 * key_heads * columns + heads * rows
        keys = (batch, steps, key_heads, columns)
        return [
            *(keys, keys, (*per_head, rows), (*per_head, *of_column), per_head),
            *((batch, taps - 1, channels), (channels, taps), (heads,), (heads, *of_column)),
        ]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        numbers = [rng.standard_normal(shape, dtype=np.float32) for shape in self.shapes(case)]
        add_outliers(rng, numbers[2])
        return [mx.array(a).astype(dtype) for a in numbers]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        q, k, v, a, b, past, weight, *_ = (math.prod(shape) for shape in self.shapes(case))
        return dtype.size * (2 * (q + k + v + past) + a + b + weight) + 4 * (a + b)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        return exact_gated_delta_inputs(*(widen(a) for a in arrays if a is not None))


def exact_gated_delta_inputs(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    conv_state: np.ndarray | None,
    conv_weight: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    mask: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    *,
    key_eps: float = 1e-6,
) -> list[Exact]:
    """Inputs of the gated delta rule, by its definition, in float64: q, k, v, gates, rates, and the next state."""
    (batch, steps, key_heads, columns), (group, rows) = q.shape, v.shape[3:]
    heads, of_keys = key_heads * group, key_heads * columns
    mixed = np.concatenate([part.reshape(batch, steps, math.prod(part.shape[2:])) for part in (q, k, v)], -1)
    c, past = _convolved(mixed, conv_state, conv_weight, 0.0, mask, lengths)

    assert c.magnitude is not None
    sizes = c.magnitude

    def normalized(begin: int, scale: float) -> Exact:
        value, size = (part[..., begin : begin + of_keys].reshape(q.shape) for part in (c.value, sizes))
        root = np.sqrt((value**2).sum(-1, keepdims=True) + key_eps)
        value, size = scale * value / root, scale * size / root
        # A norm of numbers that nearly cancel magnifies the errors before it.
        along = (np.abs(value) * size).sum(-1, keepdims=True) / scale**2
        return Exact(value, size + np.abs(value) * along)

    values = Exact(*(part[..., 2 * of_keys :].reshape(batch, steps, heads, rows) for part in (c.value, sizes)))
    time = np.logaddexp(a.reshape(batch, steps, heads, *a.shape[4:]) + dt_bias, 0)
    exponent = np.exp(a_log.reshape(heads, *(1 for _ in a.shape[4:]))) * time
    gates = np.exp(-exponent)
    return [
        *(normalized(0, max(columns, 1) ** -0.5), normalized(of_keys, 1.0), values),
        Exact(gates, gates * (1 + exponent)),
        *(Exact(1 / (1 + np.exp(-b.reshape(batch, steps, heads)))), Exact(past)),
    ]


@dataclass(frozen=True, kw_only=True)
class SsmInputsOp(Op):
    """Projections, the convolution's state, weights and biases. Masks and lengths are tested beside the table.

    The shape of a case is ``(batch, steps, taps, inner, columns)``.
    """

    smallest = (1, 2, 2, 4, 8)

    def arguments(self, case: Case) -> dict[str, Any]:
        return {**super().arguments(case), "inner": case.shape[3]}

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, steps, taps, inner, columns = case.shape
        channels = inner + 2 * columns
        return [(batch, steps, channels), (batch, taps - 1, channels), (channels, taps), (channels,)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        numbers = [rng.standard_normal(shape, dtype=np.float32) for shape in self.shapes(case)]
        add_outliers(rng, numbers[0])
        return [mx.array(a).astype(dtype) for a in numbers]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        mixed, past, weight, bias = (math.prod(shape) for shape in self.shapes(case))
        return dtype.size * (2 * (mixed + past) + weight + bias)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        return exact_ssm_inputs(*(widen(a) for a in arrays if a is not None), inner=case.shape[3])


def exact_ssm_inputs(
    mixed: np.ndarray,
    conv_state: np.ndarray | None,
    conv_weight: np.ndarray,
    conv_bias: np.ndarray | float,
    mask: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    *,
    inner: int,
) -> list[Exact]:
    """Inputs of a state space, by its definition, in float64: x, B, C, and the next state."""
    c, past = _convolved(mixed, conv_state, conv_weight, conv_bias, mask, lengths)
    ends = [inner, (inner + mixed.shape[-1]) // 2]
    parts = (np.split(a, ends, axis=-1) for a in (c.value, c.magnitude) if a is not None)
    return [*(Exact(*part) for part in zip(*parts, strict=True)), Exact(past)]


def _silu_of_convolution(x, conv_state, conv_weight, conv_bias=None):
    window = mx.concatenate([conv_state, x], axis=1)
    c = mx.conv1d(window, conv_weight[..., None], groups=window.shape[-1])
    c = c if conv_bias is None else c + conv_bias
    return c * mx.sigmoid(c), mx.contiguous(window[:, x.shape[1] :])


def _gated_delta_inputs_twin(q, k, v, a, b, conv_state, conv_weight, a_log, dt_bias):
    """As mlx-lm's `Qwen3NextGatedDeltaNet` has it, in mx operations."""
    (batch, steps, key_heads, columns), heads = q.shape, a_log.size
    mixed = mx.concatenate([part.reshape(batch, steps, -1) for part in (q, k, v)], axis=-1)
    c, past = _silu_of_convolution(mixed, conv_state, conv_weight)
    of_keys, scale = key_heads * columns, columns**-0.5
    q, k, v = mx.split(c, [of_keys, 2 * of_keys], axis=-1)
    normalized = lambda part: mx.fast.rms_norm(part.reshape(batch, steps, key_heads, columns), None, 1e-6 * scale**2)
    q, k = scale**2 * normalized(q), scale * normalized(k)
    wide = lambda part: part.astype(mx.float32)
    time = mx.logaddexp(wide(a).reshape(batch, steps, heads, *a.shape[4:]) + dt_bias, 0)
    decay = mx.exp(wide(a_log)).reshape(heads, *(1 for _ in a.shape[4:]))
    rates = mx.sigmoid(wide(b).reshape(batch, steps, heads))
    return q, k, v.reshape(batch, steps, heads, -1), mx.exp(-decay * time), rates, past


def _ssm_inputs_twin(mixed, conv_state, conv_weight, conv_bias, inner):
    """As mlx-lm's `Mamba2Block` has it, in mx operations."""
    c, past = _silu_of_convolution(mixed, conv_state, conv_weight, conv_bias)
    return *mx.split(c, [inner, (inner + c.shape[-1]) // 2], axis=-1), past


_NAMES = ("q", "k", "v", "a", "b", "conv_state", "conv_weight", "A_log", "dt_bias")

LAYER_INPUT_OPS: tuple[Op, ...] = (
    GatedDeltaInputsOp(
        name="gated_delta_inputs",
        parameters=all_rows(*_NAMES),
        outputs=6,
        ours=recurrent_layers.gated_delta_inputs,
        twin=_gated_delta_inputs_twin,
        twin_text="mlx-lm's `Qwen3NextGatedDeltaNet` and `KimiDeltaAttention` before their steps",
        summary="what `gated_delta_update` takes of a prompt: convolution, norms of q and k, gates and rates",
        # Four taps and others; steps of one simdgroup and of more; blocks of a simdgroup's channels, fewer and more;
        # channels that lie in fours, and that do not.
        tests=(
            *cases_for_tests((1, 5, 4, 2, 4, 32, 64), (2, 19, 4, 1, 2, 9, 33), (1, 17, 3, 2, 2, 130, 200)),
            *cases_for_tests((2, 2, 2, 1, 3, 3, 8), (1, 3, 1, 1, 1, 128, 128)),
            *cases_for_tests((1, 18, 4, 2, 2, 24, 40), per_column=True),
        ),
        cases=(
            Case("Qwen3-Next, 512 steps", (1, 512, 4, 16, 32, 128, 128), quick=True),
            Case("Kimi Linear, 512 steps", (1, 512, 4, 32, 32, 128, 128), {"per_column": True}),
        ),
    ),
    SsmInputsOp(
        name="ssm_inputs",
        parameters=all_rows("mixed", "conv_state", "conv_weight", "conv_bias"),
        outputs=4,
        ours=recurrent_layers.ssm_inputs,
        twin=_ssm_inputs_twin,
        twin_text="mlx-lm's `Mamba2Block` before its steps",
        summary="what `ssm_update` takes of a prompt: a convolution and its activation, in three parts",
        tests=cases_for_tests((1, 5, 4, 96, 32), (2, 19, 4, 130, 33), (1, 33, 2, 3, 8)),
        cases=(Case("Mamba 2, 2.7B, 512 steps", (1, 512, 4, 5120, 128), quick=True),),
    ),
)
