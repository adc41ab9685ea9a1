"""Layers of mlx-lm's models that keep a state in the place of keys and values, one token at a time.

A function here computes what the call of a known class does, and gives None where that is to be called: for prompts,
masks, lengths, states that are not there yet, and sharded layers. `targets` names the classes by what their calls do.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from .digests import digest, digest_in
from .linears import products

__all__ = ["qwen3_5_delta", "qwen3_next_delta"]

_KEY_EPS = 1e-6  # which the calls hand to normalize_qk

# What the calls rest on: functions of modules, and methods, by what they do.
_FUNCTIONS = (
    ("mlx_lm.models.gated_delta", "normalize_qk", "f9e548abb6f1f0b1"),
    ("mlx_lm.models.gated_delta", "compute_g", "6d91c7eb8f5ece97"),
    ("mlx_lm.models.gated_delta", "gated_delta_update", "f12d9328f1bbd4c5"),
    ("mlx_lm.models.activations", "precise_swiglu", "d0013ece4cd7b429"),
)
_NORM = "efc6d053ed315c00"  # Qwen3NextRMSNormGated.__call__
_ORDERING = "8f67b5509f348efc"  # Qwen3NextGatedDeltaNet.fix_query_key_value_ordering


@functools.cache
def _functions_are_known() -> bool:
    return all(digest_in(sys.modules[module], name) == known for module, name, known in _FUNCTIONS)


def _state_of(layer: Any, inputs: mx.array, mask: Any, cache: Any) -> tuple[mx.array, mx.array] | None:
    """The states of the convolution and of the heads, where one launch computes a token with them."""
    if inputs.ndim != 3 or inputs.shape[1] != 1 or mask is not None or cache is None or _ext.exporting():
        return None
    conv, norm = layer["conv1d"], layer["norm"]
    if type(conv) is not nn.Conv1d or "bias" in conv or digest(type(norm).__call__) != _NORM:
        return None
    known = _functions_are_known() and conv.groups == conv["weight"].shape[0] and conv["weight"].shape[2] == 1
    if not known or cache.lengths is not None or cache[0] is None or cache[1] is None:
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
    qkvz, ba = (y.reshape(batch, key_heads, -1) for y in products(inputs, [layer[name] for name in names]))
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
    qkv, z, b, a = products(inputs, [layer[name] for name in names])
    q, k = (qkv[..., start : start + layer.key_dim].reshape(batch, key_heads, columns) for start in (0, layer.key_dim))
    v = qkv[..., 2 * layer.key_dim :].reshape(*heads, rows)
    return _token(layer, states, cache, q, k, v, z.reshape(*heads, rows), a.reshape(heads), b.reshape(heads))
