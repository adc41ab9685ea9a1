"""Layers of mlx-lm's models that keep a state in the place of keys and values.

A token behind others is one launch between its projections. Prompts, first tokens, and tokens with a mask or lengths
are one launch before the steps of mlx-lm, with exact=True all tokens: the two round differently. LFM2's convolution is
one launch for all of them. A function here computes the call of a known class, and gives None where mlx-lm's own call
must run: without a cache, and for sharded layers. `targets` names the classes by digests of their calls.
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
from .linears import format_of, is_quantized_linear, is_rms_norm, products, weights_of

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
_SPACE_STEPS = ("9ca269ae4e00c179", "a2c9380b7211fc99", "219281442870a583")  # their _ssm; two of them round D
_GATED_NORM = "698a8367d422b09a"  # MambaRMSNormGated.__call__
_GROUPED_NORM = "e647c3e985ff6fe5"  # nemotron_h's, with a norm for each group of heads
_FALCON_NORM = "6e9afa6b4185e89a"  # FalconH1RMSNormGated.__call__


@functools.cache
def _are_known(functions: tuple[tuple[str, str, str], ...]) -> bool:
    return all(digest_in(sys.modules[module], name) == known for module, name, known in functions)


def _is_known_call(inputs: mx.array, mask: Any, cache: Any) -> bool:
    """Whether a call is of tokens with a cache, and a mask of them if any."""
    if inputs.ndim != 3 or inputs.shape[1] == 0 or cache is None or _ext.exporting():
        return False
    if mask is None:
        return True
    return isinstance(mask, mx.array) and mask.shape == inputs.shape[:2] and mask.dtype == mx.bool_


def _is_one_token(inputs: mx.array, mask: Any, cache: Any, states: int) -> bool:
    """Whether a known call is of one token behind others, whose states the cache has, and may round as prompts do not.

    Whether a request's token has a mask depends on its batch: with exact=True its bits must not.
    """
    if inputs.shape[1] != 1 or mask is not None or cache.lengths is not None or _ext.is_exact():
        return False
    return all(cache[i] is not None for i in range(states))


def _has_own_channels(conv: Any) -> bool:
    """Whether a convolution is one of each channel with itself, step by step."""
    if type(conv) is not nn.Conv1d or conv.groups != conv["weight"].shape[0] or conv["weight"].shape[2] != 1:
        return False
    return (conv.stride, conv.padding, conv.dilation) == (1, 0, 1)


def _is_known_delta(layer: Any, inputs: mx.array, mask: Any, cache: Any) -> bool:
    """Whether the parts of a layer with one convolution are known."""
    if not _is_known_call(inputs, mask, cache) or not _are_known(_DELTA):
        return False
    conv, norm = layer["conv1d"], layer["norm"]
    return _has_own_channels(conv) and "bias" not in conv and digest(type(norm).__call__) == _NORM


def _delta_steps(
    layer: Any,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gates: mx.array,
    rates: mx.array,
    state: mx.array | None,
    mask: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """The end of mlx-lm's gated_delta_update, which has the gates and rates already."""
    if state is None:
        state = mx.zeros((q.shape[0], v.shape[2], v.shape[3], q.shape[3]), mx.float32)
    on_apple = mx.default_device() == mx.gpu and mx.metal.is_available()
    if layer.training or not on_apple or q.shape[3] % 32 != 0:
        y, state = _ext.try_gated_delta_ops(q, k, v, gates, rates, state.astype(mx.float32), mask) or (None, state)
        steps = "gated_delta_ops"
    else:
        y, state = _ext.try_gated_delta_kernel(q, k, v, gates, rates, state, mask) or (None, state)
        steps = "gated_delta_kernel"
    if y is None:
        y, state = getattr(sys.modules["mlx_lm.models.gated_delta"], steps)(q, k, v, gates, rates, state, mask)
    return y.astype(q.dtype), state


def _delta(layer: Any, is_one: bool, mask: Any, cache: Any, *projected: mx.array) -> mx.array:
    """The layer's output from its projections: q, k, v, z, a and b."""
    weights = layer["conv1d"]["weight"], layer["A_log"], layer["dt_bias"]
    norm, batch = layer["norm"], projected[0].shape[0]
    if is_one:
        y, cache[0], cache[1] = _ext.gated_delta_token(
            *projected, cache[0], *weights, norm["weight"], cache[1], eps=norm.eps, key_eps=_KEY_EPS
        )
    else:
        q, k, v, z, a, b = projected
        q, k, v, gates, rates, cache[0] = _ext.gated_delta_inputs(
            q, k, v, a, b, cache[0], *weights, mask, cache.lengths, key_eps=_KEY_EPS
        )
        y, cache[1] = _delta_steps(layer, q, k, v, gates, rates, cache[1], mask)
        y = norm(y.reshape(z.shape), z)
    tokens = 1 if is_one else y.shape[1]
    cache.advance(tokens)
    return cast(mx.array, layer["out_proj"](y.reshape(batch, tokens, -1)))


def qwen3_next_delta(layer: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.qwen3_next.Qwen3NextGatedDeltaNet, whose projections hold the parts of one key head together."""
    if not _is_known_delta(layer, inputs, mask, cache):
        return None
    if digest(type(layer).fix_query_key_value_ordering) != _ORDERING:
        return None
    is_one = _is_one_token(inputs, mask, cache, 2)
    each = inputs.shape[:1] if is_one else inputs.shape[:2]
    key_heads, columns, rows = layer.num_k_heads, layer.head_k_dim, layer.head_v_dim
    group = layer.num_v_heads // key_heads
    names = ("in_proj_qkvz", "in_proj_ba")
    qkvz, ba = (y.reshape(*each, key_heads, -1) for y in products(inputs, [layer[name] for name in names], alone=True))
    v, z = (
        qkvz[..., start : start + group * rows].reshape(*each, key_heads, group, rows)
        for start in (2 * columns, 2 * columns + group * rows)
    )
    q, k = qkvz[..., :columns], qkvz[..., columns : 2 * columns]
    return _delta(layer, is_one, mask, cache, q, k, v, z, ba[..., group:], ba[..., :group])


def qwen3_5_delta(layer: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.qwen3_5.GatedDeltaNet, which has a projection for each part."""
    if not _is_known_delta(layer, inputs, mask, cache) or layer.sharding_group is not None:
        return None
    is_one = _is_one_token(inputs, mask, cache, 2)
    each = inputs.shape[:1] if is_one else inputs.shape[:2]
    key_heads, columns, rows = layer.num_k_heads, layer.head_k_dim, layer.head_v_dim
    heads = *each, key_heads, layer.num_v_heads // key_heads
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    qkv, z, b, a = products(inputs, [layer[name] for name in names], alone=True)
    q, k = (qkv[..., start : start + layer.key_dim].reshape(*each, key_heads, columns) for start in (0, layer.key_dim))
    v = qkv[..., 2 * layer.key_dim :].reshape(*heads, rows)
    views = q, k, v, z.reshape(*heads, rows), a.reshape(heads), b.reshape(heads)
    return _delta(layer, is_one, mask, cache, *views)


@functools.partial(mx.compile, shapeless=True)
def _gated_by_sigmoid(y: mx.array, z: mx.array) -> mx.array:
    return y * mx.sigmoid(z)


def kimi_delta(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.kimi_linear.KimiDeltaAttention, which has a decay for each column and three convolutions."""
    convolutions = [layer[name] for name in ("q_conv", "k_conv", "v_conv")]
    convs = [each["conv"] for each in convolutions]
    if not _is_known_call(x, mask, cache) or not _are_known(_DELTA[:3]):
        return None
    if any(digest(type(each).__call__) != _KIMI_CONVOLUTION for each in convolutions):
        return None
    norm = layer["o_norm"]
    if any("bias" in conv or not _has_own_channels(conv) for conv in convs) or not is_rms_norm(norm):
        return None
    is_one = _is_one_token(x, mask, cache, 4)
    heads = *(x.shape[:1] if is_one else x.shape[:2]), layer.num_heads, layer.head_dim
    # At most four share a launch.
    parts = products(x, [layer[name] for name in ("q_proj", "k_proj", "v_proj", "f_a_proj")], alone=True)
    gate, b = products(x, [layer[name] for name in ("g_a_proj", "b_proj")], alone=True)
    q, k, v = (part.reshape(heads) for part in parts[:3])
    a, z = (layer[name](part).reshape(heads) for name, part in (("f_b_proj", parts[3]), ("g_b_proj", gate)))
    v, z, a = (mx.expand_dims(part, -2) for part in (v, z, a))
    b = b.reshape(*heads[:-1], 1)
    states = None if cache[0] is None else tuple(cache[i] for i in range(3))
    weights = (
        tuple(conv["weight"] for conv in convs),
        layer["A_log"].reshape(-1),
        layer["dt_bias"].reshape(heads[-2:]),
    )
    if is_one:
        y, states, cache[3] = _ext.gated_delta_token(
            *(q, k, v, z, a, b, states, *weights, norm["weight"], cache[3]),
            eps=norm.eps,
            key_eps=_KEY_EPS,
            gate="sigmoid",
        )
    else:
        q, k, v, gates, rates, states = _ext.gated_delta_inputs(
            q, k, v, a, b, states, *weights, mask, cache.lengths, key_eps=_KEY_EPS
        )
        y, cache[3] = _delta_steps(layer, q, k, v, gates, rates, cache[3], mask)
        y = _gated_by_sigmoid(norm(y), z.reshape(y.shape))
    cache[0], cache[1], cache[2] = states
    cache.advance(x.shape[1])
    return cast(mx.array, layer["o_proj"](y.reshape(*x.shape[:2], -1)))


@functools.lru_cache(maxsize=64)
def _is_gate(channels: int) -> mx.array:
    """Which columns of LFM2's projection are C."""
    columns = mx.arange(3 * channels) // channels == 1
    mx.eval(columns)  # which every stream and thread may read
    return columns


def _masked(projected: mx.array, mask: mx.array, channels: int) -> mx.array:
    """The parts B, C and x of LFM2's projection, with B and x of 0 where a token is masked."""
    return mx.where(mask[..., None] | _is_gate(channels), projected, 0)


def _state_at_ends(projected: mx.array, state: mx.array, lengths: mx.array) -> mx.array:
    """The next state of rows that end before the last token."""
    b, _, x = mx.split(projected, 3, axis=-1)
    ends = mx.clip(lengths, 0, projected.shape[1])
    positions = ends[:, None] + mx.arange(state.shape[1])
    return mx.take_along_axis(mx.concatenate([state, b * x], axis=1), positions[..., None], axis=1)


def lfm2_convolution(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.lfm2.ShortConv, of a token or a prompt."""
    conv = layer["conv"]
    if not _is_known_call(x, mask, cache) or not _has_own_channels(conv):
        return None
    batch, tokens, _ = x.shape
    weight, projection, state = conv["weight"], layer["in_proj"], cache[0]
    bias = conv["bias"] if "bias" in conv else None
    found = None
    is_one = batch == tokens == 1 and mask is None and cache.lengths is None and state is not None
    if is_one and is_quantized_linear(projection) and "bias" not in projection:
        found = _ext.short_conv_token_of_norm(x, weights_of(projection), *format_of(projection), state, weight, bias)
    if found is None:
        (projected,) = products(x, [projection], alone=True)
        if state is None:
            state = mx.zeros((batch, weight.shape[1] - 1, weight.shape[0]), projected.dtype)
        if mask is not None:
            projected = _masked(projected, mask, weight.shape[0])
        inputs = projected.reshape(batch, -1) if tokens == 1 else projected
        found = _ext.short_conv_token(inputs, state, weight, bias)
        if cache.lengths is not None:
            found = found[0], _state_at_ends(projected, state, cache.lengths)
    y, cache[0] = found
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
    """mlx_lm.models.mamba2.Mamba2Block, and Nemotron-H's and Granite 4's, which differ in their norms."""
    return _space(layer, hidden_states, mask, cache, True)


def falcon_h1_space(layer: Any, input_states: mx.array, cache: Any = None, mask: Any = None) -> mx.array | None:
    """mlx_lm.models.falcon_h1.FalconH1Mixer, which may have no norm."""
    return _space(layer, input_states, mask, cache, layer.mamba_rms_norm)


def _space(layer: Any, x: mx.array, mask: Any, cache: Any, has_norm: bool) -> mx.array | None:
    base, conv = type(layer), layer["conv1d"]
    if not _is_known_call(x, mask, cache) or not _has_own_channels(conv) or not _are_known(_SPACES):
        return None
    steps = digest(base._ssm)
    if digest(base._conv) != _CONVOLUTION or steps not in _SPACE_STEPS:
        return None
    weights = conv["weight"], conv["bias"] if "bias" in conv else None
    if not _is_one_token(x, mask, cache, 2):
        return _space_prompt(layer, x, mask, cache, weights, has_norm)
    norm = _norm_of(layer) if has_norm else lambda y: y
    if norm is None or not _keeps_its_type(layer, steps, x.dtype):
        return None
    (projected,) = products(x, [layer["in_proj"]], alone=True)
    y, cache[0], cache[1] = _ext.ssm_token(
        projected.reshape(x.shape[0], -1),
        cache[0],
        *weights,
        layer["A_log"],
        layer["D"],
        layer["dt_bias"],
        cache[1],
        time_step_limit=tuple(layer.time_step_limit),
    )
    cache.advance(1)
    return cast(mx.array, layer["out_proj"](norm(y.reshape(x.shape[0], 1, -1))))


def _space_prompt(
    layer: Any, x: mx.array, mask: Any, cache: Any, weights: tuple[mx.array, mx.array | None], has_norm: bool
) -> mx.array:
    """The layer's convolution in one launch, then its own steps and norm."""
    inner = layer.intermediate_size
    (projected,) = products(x, [layer["in_proj"]], alone=True)
    z, mixed, dt = mx.split(projected, [inner, inner + weights[0].shape[0]], axis=-1)
    values, b, c, cache[0] = _ext.ssm_inputs(mixed, cache[0], *weights, inner, mask, cache.lengths)
    y = layer._ssm(values, b, c, dt, cache, mask)
    cache.advance(x.shape[1])
    swiglu = sys.modules["mlx_lm.models.activations"].swiglu
    return cast(mx.array, layer["out_proj"](layer["norm"](y, z) if has_norm else swiglu(z, y)))
