"""Decoder layers of Gemma 3n for one token, with one operation each between products and norms.

The layer keeps several streams (AltUp). mlx-lm casts, permutes and clips one after another; here `mx.compile` makes
each sum of streams one launch, and weights that were clipped once are not clipped again.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, cast

import mlx.core as mx

from .. import _ext
from .attention_layers import _attend, _heads, _is_token
from .digests import digest, plain
from .feed_forward import call_of, geglu_layer
from .linears import products

__all__ = ["gemma3n_layer", "gemma3n_mlp"]

_METHODS = {
    "predict": "da178351fde97b01",
    "correct": "6c6ebefc0e5c6ec2",
    "compute_router_modalities": "7fecf8af56edba7b",
}
_LAUREL = "046fa69489f1887e"  # Gemma3nLaurelBlock.__call__
_ATTENTION = "01e44e25f5e11e0e"  # Gemma3nAttention.__call__


@functools.partial(mx.compile, shapeless=True)
def _modality(routed: mx.array, scale: float) -> mx.array:
    return mx.tanh(routed.astype(mx.float32) * scale)


@functools.partial(mx.compile, shapeless=True)
def _predicted(x: mx.array, streams: list[mx.array], coefficients: list[mx.array]) -> mx.array:
    y = x.astype(mx.float32)
    for stream, coefficient in zip(streams, coefficients, strict=True):
        y = y + stream.astype(mx.float32) * coefficient
    return y.astype(x.dtype)


@functools.partial(mx.compile, shapeless=True)
def _corrected(predictions: mx.array, active: mx.array, activated: mx.array, coefficients: mx.array) -> mx.array:
    return ((activated - active) * (coefficients + 1.0) + predictions).astype(activated.dtype)


@functools.partial(mx.compile, shapeless=True)
def _joined(active: mx.array, attended: mx.array, normed: mx.array, laurel: mx.array) -> mx.array:
    return ((active + attended) + (normed + laurel)) * (2.0**-0.5)


@functools.partial(mx.compile, shapeless=True)
def _gated_input(gate: mx.array, x: mx.array) -> mx.array:
    """As nn.gelu_approx, without a power: that would be a launch of its own."""
    cube = gate * gate * gate
    return 0.5 * gate * (1.0 + mx.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * cube))) * x


@functools.partial(mx.compile, shapeless=True)
def _added(streams: mx.array, x: mx.array, is_first: mx.array) -> mx.array:
    return mx.where(is_first, streams, streams + x)


@functools.cache
def _first(count: int) -> mx.array:
    """Whether a stream is the first, [count, 1, 1, 1]."""
    first = (mx.arange(count) == 0).reshape(count, 1, 1, 1)
    mx.eval(first)
    return first


def _stream(streams: mx.array, index: int) -> mx.array:
    """One of them, [batch, tokens, width], as a view: an index of one number would be a gather."""
    return streams[index : index + 1].squeeze(0)


def _clip(linear: Any, most: float | None) -> None:
    """Makes weights float32 and clips them, as each call does, unless the last call did so."""
    weight = linear.weight
    if linear.__dict__.get("_clipped") is weight:
        return
    weight = weight.astype(mx.float32)
    linear.weight = weight if most is None else mx.clip(weight, -most, most)
    object.__setattr__(linear, "_clipped", linear.weight)


def _modalities(altup: Any, x: mx.array) -> mx.array:
    return cast(mx.array, _modality(altup.modality_router(altup.router_norm(x)), altup.config.hidden_size**-1.0))


def _attended(layer: Any, x: mx.array, mask: Any, cache: Any, offset: Any) -> mx.array:
    """mlx_lm.models.gemma3n.Gemma3nAttention, which turns queries before keys are appended."""
    if layer.is_kv_shared_layer:
        return cast(mx.array, layer(x, mask, cache, offset=offset))
    queries, keys, values = products(x, [layer[name] for name in ("q_proj", "k_proj", "v_proj")])
    queries = layer["q_norm"](_heads(queries, layer.n_heads))
    keys = layer["k_norm"](_heads(keys, layer.n_kv_heads))
    values = layer["v_norm"](_heads(values, layer.n_kv_heads))
    queries, keys = (layer.rope(heads, offset=offset) for heads in (queries, keys))
    output = _attend(queries, keys, values, cache, scale=layer.scale, mask=mask).transpose(0, 2, 1, 3)
    return cast(mx.array, layer["o_proj"](output.reshape(1, 1, -1)))


def gemma3n_mlp(layer: Any, x: mx.array) -> mx.array | None:
    """mlx_lm.models.gemma3n.MLP; the first layers keep only the largest activations."""
    if layer.activation_sparsity == 0:
        return geglu_layer(layer, x)
    if x.size != x.shape[-1] or _ext.exporting():
        return None
    gate, up = products(x, [layer["gate_proj"], layer["up_proj"]])
    kept = sys.modules["mlx_lm.models.gemma3n"].gelu_topk(gate, layer._std_multiplier)
    return cast(mx.array, layer["down_proj"](kept * up))


def _is_known(layer: Any) -> bool:
    altup = type(layer.altup)
    return (
        all(digest(plain(getattr(altup, name))) == text for name, text in _METHODS.items())
        and digest(call_of(layer.laurel)) == _LAUREL
        and digest(call_of(layer.self_attn)) == _ATTENTION
        and not any("bias" in one for one in (layer.altup.prediction_coefs, layer.altup.correction_coefs))
    )


def gemma3n_layer(
    layer: Any, x: mx.array, mask: Any = None, cache: Any = None, per_layer_input: Any = None, offset: Any = 0
) -> mx.array | None:
    """mlx_lm.models.gemma3n.Gemma3nDecoderLayer."""
    if not _is_token(_stream(x, 0), cache) or per_layer_input is None or not _is_known(layer) or _ext.is_exact():
        return None
    altup, laurel = layer.altup, layer.laurel
    count, active, most = (getattr(layer.config, f"altup_{name}") for name in ("num_inputs", "active_idx", "coef_clip"))
    _clip(altup.prediction_coefs, most)
    coefficients = altup.prediction_coefs(_modalities(altup, _stream(x, active))).reshape(count, count, 1, 1, 1)
    # The coefficients of stream j, for each prediction: [count, 1, 1, 1].
    columns = [coefficients[:, j : j + 1].squeeze(1) for j in range(count)]
    predictions = _predicted(x, [_stream(x, j) for j in range(count)], columns)

    prediction = _stream(predictions, active)
    normed = layer.input_layernorm(prediction)
    laurel_normed = laurel.post_laurel_norm(laurel.linear_right(laurel.linear_left(normed)))
    attended = layer.post_attention_layernorm(_attended(layer.self_attn, normed, mask, cache, offset))
    joined = _joined(prediction, attended, normed, laurel_normed)
    activated = joined + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(joined)))

    _clip(altup.correction_coefs, most)
    coefficients = altup.correction_coefs(_modalities(altup, activated)).reshape(count, 1, 1, 1)
    streams = _corrected(predictions, prediction, activated, coefficients)
    first = _stream(streams, active)
    if layer.config.altup_correct_scale:
        first = first * altup.correct_output_scale
    first = layer.per_layer_projection(_gated_input(layer.per_layer_input_gate(first), per_layer_input))
    return cast(mx.array, _added(streams, layer.post_per_layer_input_norm(first), _first(count)))
