"""mlx-lm's updates of recurrent states, with its dtypes."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from .. import _ext
from ..promotion import result_type
from .target import Attempt


def _wide(state: mx.array | None) -> mx.array | None:
    """A state that a function returns in float32, whatever it is given."""
    return None if state is None else state.astype(mx.float32)


def gated_delta(
    attempt: Attempt,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array] | None:
    """A token or a prompt of mlx-lm's, whose y has the type of the queries."""
    outputs = attempt(q, k, v, g, beta, state, mask)
    return outputs and (outputs[0].astype(q.dtype), outputs[1])


def gated_delta_ops(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, mask: Any) -> Any:
    """mlx-lm's operations for each step, which give a state in float32."""
    return _ext.try_gated_delta_ops(q, k, v, g, beta, _wide(state), mask)


def fast_gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gamma: mx.array,
    beta: mx.array,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    **options: Any,
) -> list[mx.array] | None:
    outputs = _ext.try_gated_delta_update(q, k, v, gamma, beta, _wide(initial_state), mask, **options)
    return outputs and [outputs[0].astype(result_type(q.dtype, k.dtype)), outputs[1]]


@functools.lru_cache(maxsize=64)
def _constant_weight(width: int, value: float, dtype: mx.Dtype) -> mx.array:
    weight = mx.full((width,), value, dtype=dtype)
    mx.eval(weight)  # which every stream and thread may read
    return weight


def normalize_qk(q: mx.array, k: mx.array, *, inv_scale: float, eps: float) -> tuple[mx.array, mx.array] | None:
    """Both norms, and the scales of queries and keys as their weights."""
    if q.ndim == 0 or k.ndim == 0 or q.shape[-1] != k.shape[-1] or q.dtype != k.dtype or _ext.exporting():
        return None
    scales = (_constant_weight(q.shape[-1], scale, q.dtype) for scale in (inv_scale**2, inv_scale))
    return _ext.qk_norm(q, k, *scales, eps * inv_scale**2)


def state_space(
    x: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    step: int = 256,
) -> tuple[mx.array, mx.array] | None:
    """A prompt, or a token off Apple's GPUs. Lengths without a mask mean something else there."""
    if lengths is not None and mask is None:
        return None
    return _ext.try_ssm_update(x, A_log, B, C, D, dt, dt_bias, _wide(state), time_step_limit, mask, lengths)


def state_space_token(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    time_step_limit: tuple[float, float],
) -> tuple[mx.array, mx.array] | None:
    """A token on Apple's GPUs, whose y has the type of hidden_states there, whatever D's is."""
    results = _ext.try_ssm_update(hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit)
    return results and (results[0].astype(hidden_states.dtype), results[1])
