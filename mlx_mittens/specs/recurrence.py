"""Rows of the table of ops for linear recurrences; `specs` puts them into the table."""

from __future__ import annotations

import mlx.core as mx

from ..ops import recurrence, recurrent_layers
from .op import Case, Op, all_rows, cases_for_tests
from .recurrent_ops import GatedDeltaOp, GatedDeltaTokenOp, StateSpaceOp


def _ours(q, k, v, gamma, beta, initial_state, per_column=False, state=True):
    return recurrence.gated_delta_update(q, k, v, gamma, beta, initial_state)


def _twin(q, k, v, gamma, beta, initial_state, per_column=False, state=True):
    if not per_column and hasattr(mx.fast, "gated_delta_update"):  # from mlx 0.32.3 on
        return mx.fast.gated_delta_update(q, k, v, gamma, beta, initial_state)
    (batch, steps, key_heads, columns), (heads, rows) = q.shape, v.shape[2:]
    s = mx.zeros((batch, heads, rows, columns)) if initial_state is None else initial_state
    queries, keys = (mx.repeat(a, heads // key_heads, 2) for a in (q, k))
    results = []
    for t in range(steps):
        key, query = keys[:, t, :, None, :], queries[:, t, :, None, :]
        s = s * (gamma[:, t, :, None] if per_column else gamma[:, t, :, None, None])
        s = s + key * ((v[:, t] - (s * key).sum(-1)) * beta[:, t, :, None])[..., None]
        results.append((s * query).sum(-1).astype(q.dtype))
    return mx.stack(results, axis=1), s


def _gated_delta_token(q, k, v, z, a, b, conv_state, conv_weight, a_log, dt_bias, norm_weight, state, gate="silu"):
    """With gates of columns the convolution has three states and weights, as Kimi Linear's; these are views here."""
    arrays = a_log, dt_bias, norm_weight, state
    if a.ndim == 3:
        return recurrent_layers.gated_delta_token(q, k, v, z, a, b, conv_state, conv_weight, *arrays, gate=gate)
    ends = [q[0].size, 2 * q[0].size]
    parts = (tuple(mx.split(array, ends, axis)) for array, axis in ((conv_state, 2), (conv_weight, 0)))
    y, past, last = recurrent_layers.gated_delta_token(q, k, v, z, a, b, *parts, *arrays, gate=gate)
    return y, mx.concatenate(past, axis=2), last


def _gated_delta_token_twin(q, k, v, z, a, b, conv_state, conv_weight, a_log, dt_bias, norm_weight, state, gate="silu"):
    """As mlx-lm's `Qwen3NextGatedDeltaNet` and `KimiDeltaAttention` have it, in mx operations."""
    (batch, key_heads, columns), (group, rows) = q.shape, v.shape[2:]
    heads, of_keys = key_heads * group, key_heads * columns
    mixed = mx.concatenate([part.reshape(batch, 1, -1) for part in (q, k, v)], axis=-1)
    window = mx.concatenate([conv_state, mixed], axis=1)
    c = mx.conv1d(window, conv_weight[..., None], groups=window.shape[-1])[:, 0]
    c = c * mx.sigmoid(c)
    query, key = (c[:, i * of_keys : (i + 1) * of_keys].reshape(batch, 1, key_heads, columns) for i in (0, 1))
    value = c[:, 2 * of_keys :].reshape(batch, 1, heads, rows)
    query = mx.fast.rms_norm(query, None, 1e-6 / columns) * (1 / columns)
    key = mx.fast.rms_norm(key, None, 1e-6 / columns) * columns**-0.5
    each = a.shape[3:]
    time = mx.logaddexp(a.reshape(batch, 1, heads, *each) + dt_bias, 0)
    gates = mx.exp(-mx.exp(a_log.astype(mx.float32)).reshape(heads, *[1] * len(each)) * time)
    y, last = _twin(query, key, value, gates, mx.sigmoid(b.reshape(batch, 1, heads)), state)
    y = mx.fast.rms_norm(y[:, 0], norm_weight, 1e-6).astype(mx.float32)
    z = z.reshape(batch, heads, rows).astype(mx.float32)
    factor = mx.sigmoid(z) if gate == "sigmoid" else z * mx.sigmoid(z)
    return (y * factor).astype(q.dtype), mx.contiguous(window[:, 1:]), last


# Steps whose products with each other are one matrix.
_CHUNK = 256


def _by_products(reads, writes, values, log_decays, state):
    """An uncorrected recurrence by products of matrices: all are in float32, [batch, steps, heads, ..]."""
    results = []
    for start in range(0, values.shape[1], _CHUNK):
        q, k, v, logs = (a[:, start : start + _CHUNK].swapaxes(1, 2) for a in (reads, writes, values, log_decays))
        since = mx.cumsum(logs, axis=-1)
        steps = mx.arange(since.shape[-1])
        seen = steps[:, None] >= steps
        decays = mx.exp(mx.where(seen, since[..., None] - since[..., None, :], -mx.inf))
        of_state = mx.exp(since)[..., None] * (q @ state.swapaxes(-1, -2))
        results.append(((q @ k.swapaxes(-1, -2) * decays) @ v + of_state).swapaxes(1, 2))
        left = mx.exp(since[..., -1:] - since)[..., None]
        state = mx.exp(since[..., -1])[..., None, None] * state + (v * left).swapaxes(-1, -2) @ k
    return mx.concatenate(results, axis=1), state


def _ssm(x, a_log, b, c, d, dt, dt_bias, state):
    return recurrence.ssm_update(x, a_log, b, c, d, dt, dt_bias, state)


def _ssm_twin(x, a_log, b, c, d, dt, dt_bias, state):
    heads, groups = x.shape[2], b.shape[2]
    wide = dt.astype(mx.float32) + dt_bias.astype(mx.float32)
    step = mx.clip(mx.logaddexp(wide, 0), 0.001, 100.0)
    log_decays = -mx.exp(a_log.astype(mx.float32)) * step
    writes, reads = (mx.repeat(a, heads // groups, 2).astype(mx.float32) for a in (b, c))
    values = step[..., None] * x
    if x.shape[1] > 1:
        y, state = _by_products(reads, writes, values, log_decays, state)
    else:
        added = values[:, 0, ..., None] * writes[:, 0, :, None, :]
        state = state * mx.exp(log_decays[:, 0])[..., None, None] + added
        y = (state @ reads[:, 0, :, :, None])[..., 0][:, None]
    return y.astype(x.dtype) + x * d[:, None], state


RECURRENCE_OPS: tuple[Op, ...] = (
    GatedDeltaOp(
        name="gated_delta_update",
        parameters=all_rows("q", "k", "v", "gamma", "beta", "initial_state"),
        outputs=2,
        ours=_ours,
        twin=_twin,
        twin_text="`mx.fast.gated_delta_update`, mlx-lm's `gated_delta_update`",
        summary="the gated delta rule over a prompt or a token, with its state",
        # One lane a row of the state, several, and all of a simdgroup; rows that are whole packs, and others.
        tests=(
            *cases_for_tests((1, 1, 2, 4, 33, 128), (2, 5, 1, 2, 9, 64), (1, 3, 2, 2, 5, 33), (1, 2, 1, 1, 3, 8)),
            *cases_for_tests((1, 2, 1, 2, 3, 264), state=False),
            *cases_for_tests((1, 4, 2, 4, 6, 128), (2, 3, 1, 2, 5, 20), per_column=True),
        ),
        cases=(
            Case("Qwen3-Next", (1, 1, 16, 32, 128, 128), quick=True),
            Case("Qwen3-Next, prompt", (1, 64, 16, 32, 128, 128)),
            Case("Qwen3-Next, prompt", (1, 1024, 16, 32, 128, 128), gpu_only=True),
            Case("Kimi Linear", (1, 1, 32, 32, 128, 128), {"per_column": True}),
        ),
    ),
    GatedDeltaTokenOp(
        name="gated_delta_token",
        parameters=all_rows(
            *("q", "k", "v", "z", "a", "b", "conv_state", "conv_weight", "A_log", "dt_bias", "norm_weight"), "state"
        ),
        outputs=3,
        ours=_gated_delta_token,
        twin=_gated_delta_token_twin,
        twin_text="mlx-lm's `Qwen3NextGatedDeltaNet` and `KimiDeltaAttention` between their projections",
        summary="one token of a gated delta layer: convolution, norms, gates, state and gated norm",
        tests=(
            *cases_for_tests((1, 4, 2, 4, 33, 128), (2, 4, 1, 2, 9, 64), (1, 3, 2, 2, 5, 33), (1, 2, 1, 1, 3, 8)),
            *cases_for_tests((1, 4, 1, 2, 70, 264)),
            *cases_for_tests((1, 4, 2, 2, 33, 128), (2, 3, 1, 2, 9, 24), per_column=True, gate="sigmoid"),
        ),
        cases=(
            Case("Qwen3-Next", (1, 4, 16, 32, 128, 128), quick=True),
            Case("Kimi Linear", (1, 4, 32, 32, 128, 128), {"per_column": True, "gate": "sigmoid"}),
            Case("Qwen3-Next, 4 sequences", (4, 4, 16, 32, 128, 128)),
        ),
    ),
    StateSpaceOp(
        name="ssm_update",
        parameters=(
            *(("hidden_states", "rows"), ("A_log", "rows"), ("B", "rows"), ("C", "rows"), ("D", "rows")),
            *(("dt", "rows"), ("dt_bias", "rows"), ("state", "rows")),
        ),
        outputs=2,
        ours=_ssm,
        twin=_ssm_twin,
        twin_text="mlx-lm's `ssm_update`",
        summary="the state-space step of Mamba 2 over a prompt or a token, with its state",
        tests=(*cases_for_tests((1, 1, 1, 4, 33, 128), (2, 5, 1, 2, 9, 64), (1, 3, 2, 4, 5, 33)),),
        cases=(
            Case("Mamba 2, 2.7B", (1, 1, 1, 80, 64, 128), quick=True),
            Case("Mamba 2, 2.7B, prompt", (1, 64, 1, 80, 64, 128)),
        ),
    ),
)
