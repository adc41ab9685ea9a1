"""Layers of mlx-lm's models that keep a state in the place of keys and values, one token at a time.

LFM2's take prompts too. A function here computes what the call of a known class does, and gives None where that is to
be called: for other prompts, masks, lengths, states that are not there yet, and sharded layers. `targets` names the
classes by what their calls do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from ..promotion import result_type
from .digests import digest, digest_in
from .linears import is_rms_norm, products

__all__ = ["falcon_h1_space", "kimi_delta", "lfm2_convolution", "mamba2_space", "qwen3_5_delta", "qwen3_next_delta"]

_KEY_EPS = 1e-6  # which the calls hand to normalize_qk

# Functions and methods that the calls rest on, by digest. First gated delta layers, then state spaces.
_DELTA = (
    ("mlx_lm.models.gated_delta", "normalize_qk", "f9e548abb6f1f0b1"),
    ("mlx_lm.models.gated_delta", "compute_g", "6d91c7eb8f5ece97"),
    ("mlx_lm.models.gated_delta", "gated_delta_update", "f12d9328f1bbd4c5"),
    ("mlx_lm.models.activations", "precise_swiglu", "d0013ece4cd7b429"),
)
_SPACES = (
    ("mlx_lm.models.ssm", "compute_dt", "3dfc42f0c229794f"),
    ("mlx_lm.models.ssm", "ssm_update", "04f7450dab6aeaef"),
    ("mlx_lm.models.ssm", "ssm_update_kernel", "a9699d473dba1bb2"),
    ("mlx_lm.models.ssm", "ssm_attn", "f60758b30f7f3216"),
    ("mlx_lm.models.activations", "swiglu", "fbb407131b491d1f"),
)
_NORM = "efc6d053ed315c00"  # Qwen3NextRMSNormGated.__call__
_KIMI_CONVOLUTION = "79051f4279e9cdd1"  # ShortConv1d.__call__
_ORDERING = "8f67b5509f348efc"  # Qwen3NextGatedDeltaNet.fix_query_key_value_ordering

_CONVOLUTION = "91399c06594a45a8"  # Mamba2Block._conv and its like
_SPACE_STEPS = ("9ca269ae4e00c179", "a2c9380b7211fc99", "219281442870a583")  # their _ssm, of which two round D
_GATED_NORM = "698a8367d422b09a"  # MambaRMSNormGated.__call__
_GROUPED_NORM = "e647c3e985ff6fe5"  # nemotron_h's, with a norm for each group of heads
_FALCON_NORM = "6e9afa6b4185e89a"  # FalconH1RMSNormGated.__call__


@functools.cache
def _are_known(functions: tuple[tuple[str, str, str], ...]) -> bool:
    return all(digest_in(sys.modules[module], name) == known for module, name, known in functions)


def _is_one_token(inputs: mx.array, mask: Any, cache: Any, states: int) -> bool:
    """Whether a call is of one token behind others, whose states the cache has."""
    if inputs.ndim != 3 or inputs.shape[1] != 1 or mask is not None or cache is None or _ext.exporting():
        return False
    return cache.lengths is None and all(cache[i] is not None for i in range(states))


def _has_own_channels(conv: Any) -> bool:
    """Whether a convolution is one of each channel with itself, step by step."""
    if type(conv) is not nn.Conv1d or conv.groups != conv["weight"].shape[0] or conv["weight"].shape[2] != 1:
        return False
    return (conv.stride, conv.padding, conv.dilation) == (1, 0, 1)


def _state_of(layer: Any, inputs: mx.array, mask: Any, cache: Any) -> tuple[mx.array, mx.array] | None:
    """The states of the convolution and of the heads, where one launch computes a token with them."""
    if not _is_one_token(inputs, mask, cache, 2) or not _are_known(_DELTA):
        return None
    conv, norm = layer["conv1d"], layer["norm"]
    if not _has_own_channels(conv) or "bias" in conv or digest(type(norm).__call__) != _NORM:
        return None
    return cache[0], cache[1]


def _token(layer: Any, states: tuple[mx.array, mx.array], cache: Any, *projected: mx.array) -> mx.array:
    """The layer's output from what is projected: q, k, v, z, a and b."""
    conv_state, state = states
    norm = layer["norm"]
    y, cache[0], cache[1] = _ext.gated_delta_token(
        *projected,
        conv_state,
        layer["conv1d"]["weight"],
        layer["A_log"],
        layer["dt_bias"],
        norm["weight"],
        state,
        eps=norm.eps,
        key_eps=_KEY_EPS,
    )
    cache.advance(1)
    return cast(mx.array, layer["out_proj"](y.reshape(y.shape[0], 1, -1)))


def qwen3_next_delta(layer: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.qwen3_next.Qwen3NextGatedDeltaNet, whose projections hold the parts of one key head together."""
    states = _state_of(layer, inputs, mask, cache)
    if states is None or digest(type(layer).fix_query_key_value_ordering) != _ORDERING:
        return None
    batch, key_heads, columns, rows = inputs.shape[0], layer.num_k_heads, layer.head_k_dim, layer.head_v_dim
    group = layer.num_v_heads // key_heads
    names = ("in_proj_qkvz", "in_proj_ba")
    qkvz, ba = (y.reshape(batch, key_heads, -1) for y in products(inputs, [layer[name] for name in names], alone=True))
    v, z = (
        qkvz[..., start : start + group * rows].reshape(batch, key_heads, group, rows)
        for start in (2 * columns, 2 * columns + group * rows)
    )
    q, k = qkvz[..., :columns], qkvz[..., columns : 2 * columns]
    return _token(layer, states, cache, q, k, v, z, ba[..., group:], ba[..., :group])


def qwen3_5_delta(layer: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.qwen3_5.GatedDeltaNet, which has a projection for each part."""
    states = _state_of(layer, inputs, mask, cache)
    if states is None or layer.sharding_group is not None:
        return None
    batch, key_heads, columns, rows = inputs.shape[0], layer.num_k_heads, layer.head_k_dim, layer.head_v_dim
    heads = batch, key_heads, layer.num_v_heads // key_heads
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    qkv, z, b, a = products(inputs, [layer[name] for name in names], alone=True)
    q, k = (qkv[..., start : start + layer.key_dim].reshape(batch, key_heads, columns) for start in (0, layer.key_dim))
    v = qkv[..., 2 * layer.key_dim :].reshape(*heads, rows)
    return _token(layer, states, cache, q, k, v, z.reshape(*heads, rows), a.reshape(heads), b.reshape(heads))


def kimi_delta(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.kimi_linear.KimiDeltaAttention, which has a decay for each column and three convolutions."""
    convolutions = [layer[name] for name in ("q_conv", "k_conv", "v_conv")]
    convs = [each["conv"] for each in convolutions]
    if not _is_one_token(x, mask, cache, 4) or not _are_known(_DELTA[:3]):
        return None
    if any(digest(type(each).__call__) != _KIMI_CONVOLUTION for each in convolutions):
        return None
    norm = layer["o_norm"]
    if any("bias" in conv or not _has_own_channels(conv) for conv in convs) or not is_rms_norm(norm):
        return None
    heads = x.shape[0], layer.num_heads, layer.head_dim
    # At most four share a launch.
    parts = products(x, [layer[name] for name in ("q_proj", "k_proj", "v_proj", "f_a_proj")], alone=True)
    gate, b = products(x, [layer[name] for name in ("g_a_proj", "b_proj")], alone=True)
    q, k, v = (part.reshape(heads) for part in parts[:3])
    a, z = (layer[name](part).reshape(heads) for name, part in (("f_b_proj", parts[3]), ("g_b_proj", gate)))
    y, states, cache[3] = _ext.gated_delta_token(
        *(q, k, v[:, :, None], z[:, :, None], a[:, :, None], b.reshape(*heads[:2], 1)),
        tuple(cache[i] for i in range(3)),
        tuple(conv["weight"] for conv in convs),
        layer["A_log"].reshape(-1),
        layer["dt_bias"].reshape(heads[1:]),
        norm["weight"],
        cache[3],
        eps=norm.eps,
        key_eps=_KEY_EPS,
        gate="sigmoid",
    )
    cache[0], cache[1], cache[2] = states
    cache.advance(1)
    return cast(mx.array, layer["o_proj"](y.reshape(x.shape[0], 1, -1)))


def lfm2_convolution(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.lfm2.ShortConv, of a token or a prompt."""
    conv = layer["conv"]
    if x.ndim != 3 or x.shape[1] == 0 or mask is not None or cache is None or _ext.exporting():
        return None
    if cache.lengths is not None or not _has_own_channels(conv):
        return None
    batch, tokens, _ = x.shape
    weight = conv["weight"]
    (projected,) = products(x, [layer["in_proj"]], alone=True)
    state = cache[0]
    if state is None:
        state = mx.zeros((batch, weight.shape[1] - 1, weight.shape[0]), projected.dtype)
    bias = conv["bias"] if "bias" in conv else None
    inputs = projected.reshape(batch, -1) if tokens == 1 else projected
    y, cache[0] = _ext.short_conv_token(inputs, state, weight, bias)
    cache.advance(tokens)
    return cast(mx.array, layer["out_proj"](y.reshape(batch, tokens, -1)))


def _norm_of(layer: Any) -> Callable[[mx.array], mx.array] | None:
    """The norm of a Mamba 2 layer's gated result; None where it is not known."""
    norm = layer["norm"]
    known = digest(type(norm).__call__)
    if known == _GATED_NORM:
        return lambda y: _ext.rms_norm(y, norm["weight"], norm.eps)
    if known == _FALCON_NORM and not norm.norm_before_gate:
        return lambda y: _ext.rms_norm(y, norm["weight"], norm.variance_epsilon)
    if known != _GROUPED_NORM:
        return None

    def grouped(y: mx.array) -> mx.array:
        each = _ext.rms_norm(y.reshape(*y.shape[:-1], -1, norm.group_size), None, norm.eps)
        return norm["weight"] * each.reshape(y.shape)

    return grouped


def _keeps_its_type(layer: Any, steps: str, dtype: mx.Dtype) -> bool:
    """Whether mlx-lm's result has the type of the projection: on a CPU D makes it wider where it is not rounded."""
    rounds = steps != _SPACE_STEPS[0] or (mx.default_device() == mx.gpu and mx.metal.is_available())
    return rounds or result_type(layer["D"].dtype, dtype) == dtype


def mamba2_space(layer: Any, hidden_states: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.mamba2.Mamba2Block, and those of Nemotron-H and Granite 4, which differ in their norms."""
    norm = _norm_of(layer)
    return None if norm is None else _space(layer, hidden_states, mask, cache, norm)


def falcon_h1_space(layer: Any, input_states: mx.array, cache: Any = None, mask: Any = None) -> mx.array | None:
    """mlx_lm.models.falcon_h1.FalconH1Mixer, which may have no norm."""
    norm = _norm_of(layer) if layer.mamba_rms_norm else lambda y: y
    return None if norm is None else _space(layer, input_states, mask, cache, norm)


def _space(layer: Any, x: mx.array, mask: Any, cache: Any, norm: Callable[[mx.array], mx.array]) -> mx.array | None:
    base, conv = type(layer), layer["conv1d"]
    if not _is_one_token(x, mask, cache, 2) or not _has_own_channels(conv) or not _are_known(_SPACES):
        return None
    steps = digest(base._ssm)
    if digest(base._conv) != _CONVOLUTION or steps not in _SPACE_STEPS:
        return None
    if not _keeps_its_type(layer, steps, x.dtype):
        return None
    (projected,) = products(x, [layer["in_proj"]], alone=True)
    y, cache[0], cache[1] = _ext.ssm_token(
        projected.reshape(x.shape[0], -1),
        cache[0],
        conv["weight"],
        conv["bias"] if "bias" in conv else None,
        layer["A_log"],
        layer["D"],
        layer["dt_bias"],
        cache[1],
        time_step_limit=tuple(layer.time_step_limit),
    )
    cache.advance(1)
    return cast(mx.array, layer["out_proj"](norm(y.reshape(x.shape[0], 1, -1))))
