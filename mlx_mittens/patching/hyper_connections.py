"""Functions of mlx-lm's deepseek_v41, whose layers keep several streams (hyper-connections).

mlx-lm casts to float32 and back around each step. Here `mx.compile` makes each sum of streams and each activation one
launch, a rotary embedding of trailing columns turns all of a head, and weights are cast once.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import mlx.core as mx

from .. import _ext
from .attention_layers import _YARN
from .digests import digest, plain
from .feed_forward import call_of
from .linears import kept_wide
from .routers import _weighted

__all__ = [
    "clamped_swiglu",
    "collapsed",
    "deepseek_v41_mixture",
    "expanded",
    "fp8_rounded",
    "gathered_rows",
    "hyper_connection",
    "turned",
]

_ROUTER = "de5d7bc21b78292e"
_EXPERTS = "31eaa6e32b52c75e"
_SINKHORN = "d560521234954060"


def _columns(a: mx.array, axis: int) -> list[mx.array]:
    """Slices of one along an axis, as views: an index of one number would be a gather."""
    return [part.squeeze(axis) for part in mx.split(a, a.shape[axis], axis=axis)]


def _sum(parts: list[mx.array]) -> mx.array:
    """A sum in pairs: `mx.compile` fuses up to eleven operations that follow one another."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + parts[len(parts) // 2 * 2 :]
    return parts[0]


@functools.partial(mx.compile, shapeless=True)
def _weighted_streams(streams: list[mx.array], weights: list[mx.array]) -> mx.array:
    products = [stream.astype(mx.float32) * weight for stream, weight in zip(streams, weights, strict=True)]
    return _sum(products).astype(streams[0].dtype)


def collapsed(streams: mx.array, mix: mx.array) -> mx.array | None:
    """The weighted sum of streams [batch, tokens, streams, width]."""
    if streams.ndim != 4 or mix.ndim != 3:
        return None
    return cast(mx.array, _weighted_streams(_columns(streams, 2), list(mx.split(mix, mix.shape[-1], axis=-1))))


@functools.partial(mx.compile, shapeless=True)
def _mixed_streams(
    x: mx.array, post: mx.array, streams: list[mx.array], weights: list[mx.array], like: mx.array
) -> mx.array:
    # Broadcast before it is cast: a cast of fewer elements would be a launch of its own.
    wide = [mx.broadcast_arrays(a, like)[0].astype(mx.float32) for a in (x, *streams)]
    return _sum([a * weight for a, weight in zip(wide, [post, *weights], strict=True)]).astype(like.dtype)


def expanded(x: mx.array, residual: mx.array, post: mx.array, comb: mx.array) -> mx.array | None:
    """The streams that follow: each a sum of all, and of a part's result."""
    if residual.ndim != 4 or comb.ndim != 4 or x.ndim != 3:
        return None
    weights = [part[..., None] for part in _columns(comb, 2)]
    streams = list(mx.split(residual, residual.shape[2], axis=2))
    return cast(mx.array, _mixed_streams(x[..., None, :], post[..., None], streams, weights, residual))


@functools.partial(mx.compile, shapeless=True)
def _before_and_after(
    before: mx.array, after: mx.array, scales: list[mx.array], bases: list[mx.array], eps: mx.array
) -> tuple[mx.array, mx.array]:
    return mx.sigmoid(before * scales[0] + bases[0]) + eps, 2.0 * mx.sigmoid(after * scales[1] + bases[1])


@functools.partial(mx.compile, shapeless=True)
def _affine(x: mx.array, scale: mx.array, base: mx.array) -> mx.array:
    return x * scale + base


def hyper_connection(layer: Any, streams: mx.array) -> tuple[mx.array, mx.array, mx.array] | None:
    sinkhorn = sys.modules["mlx_lm.models.deepseek_v41"]._sinkhorn
    wide = all(a.dtype == mx.float32 for a in (layer.fn, layer.base, layer.scale))
    if not wide or digest(plain(sinkhorn)) != _SINKHORN:
        return None
    count = layer.hc
    flat = streams.reshape(*streams.shape[:2], -1).astype(mx.float32)
    mix = _ext.rms_norm(flat, None, layer.norm_eps) @ layer.fn.T
    before, after, comb = mx.split(mix, [count, 2 * count], axis=-1)
    bases, scales = list(mx.split(layer.base, [count, 2 * count])), list(mx.split(layer.scale, 3))
    before, after = _before_and_after(before, after, scales[:2], bases[:2], layer._eps)
    comb = _affine(comb, scales[2], bases[2])
    comb = _ext.softmax(comb.reshape(*comb.shape[:-1], count, count), axis=-1) + layer._eps
    return before, after, sinkhorn(comb, iters=layer.iters, eps=layer._eps)


@functools.partial(mx.compile, shapeless=True)
def _clamped(up: mx.array, gate: mx.array, limit: mx.array) -> mx.array:
    gate = mx.minimum(gate.astype(mx.float32), limit)
    up_to = mx.maximum(mx.minimum(up.astype(mx.float32), limit), -limit)
    return (gate * mx.sigmoid(gate) * up_to).astype(up.dtype)


@functools.cache
def _number(value: float) -> mx.array:
    number = mx.array(value)
    mx.eval(number)
    return number


def clamped_swiglu(activation: Any, up: mx.array, gate: mx.array) -> mx.array | None:
    return cast(mx.array, _clamped(up, gate, _number(activation.limit))) if activation.limit > 0 else None


def turned(
    x: mx.array, rope: Any, rope_dim: int, offset: Any = 0, scale: float = 1.0, inverse: bool = False
) -> mx.array | None:
    """Heads whose trailing columns are turned; those before them are turned by no angle."""
    known = digest(call_of(rope)) == _YARN and rope.mscale == 1 and rope.traditional
    if not known or rope_dim == 0 or rope.dims != rope_dim or x.shape[-1] % 2 != 0:
        return None
    made = rope.__dict__.setdefault("_of_heads", {})
    width = x.shape[-1]
    if (width, inverse) not in made:
        still = mx.full(((width - rope_dim) // 2,), float("inf"))
        freqs = mx.concatenate([still, -rope._freqs if inverse else rope._freqs])
        mx.eval(freqs)
        made[width, inverse] = freqs
    heads = x.transpose(0, 2, 1, 3) if x.ndim == 4 else x
    options = {"traditional": True, "base": None, "scale": scale, "freqs": made[width, inverse]}
    y = mx.fast.rope(heads, width, offset=offset, **options)
    return y.transpose(0, 2, 1, 3) if x.ndim == 4 else y


@functools.partial(mx.compile, shapeless=True)
def _magnitudes(x: mx.array) -> mx.array:
    return mx.abs(x.astype(mx.float32))


@functools.partial(mx.compile, shapeless=True)
def _scaled(x: mx.array, largest: mx.array) -> mx.array:
    scale = 2.0 ** mx.ceil(mx.log2(mx.maximum(largest, 1e-4) / 448.0))
    return mx.maximum(mx.minimum(x.astype(mx.float32) / scale, 448.0), -448.0)


@functools.partial(mx.compile, shapeless=True)
def _unscaled(rounded: mx.array, largest: mx.array, x: mx.array) -> mx.array:
    scale = 2.0 ** mx.ceil(mx.log2(mx.maximum(largest, 1e-4) / 448.0))
    return (rounded * scale).astype(x.dtype)


def fp8_rounded(x: mx.array, block_size: int = 32) -> mx.array | None:
    """x as fp8 has it, with a power of two as the scale of each block."""
    if x.shape[-1] % block_size != 0:
        return None
    blocks = x.reshape(*x.shape[:-1], -1, block_size)
    largest = _magnitudes(blocks).max(axis=-1, keepdims=True)
    rounded = mx.from_fp8(mx.to_fp8(_scaled(blocks, largest)), mx.float32)
    return cast(mx.array, _unscaled(rounded, largest, blocks)).reshape(x.shape)


def gathered_rows(values: mx.array, indices: mx.array) -> mx.array | None:
    """The rows that indices name, of a batch of one; -1 is any."""
    if values.shape[0] != 1:
        return None
    return values.squeeze(0)[mx.maximum(indices, 0)]


def deepseek_v41_mixture(block: Any, x: mx.array) -> mx.array | None:
    """The router's product is in float32, with weights that are not cast at each call."""
    gate, experts = block.gate, block.experts
    known = digest(call_of(gate)) == _ROUTER and digest(call_of(experts)) == _EXPERTS
    if block.sharding_group is not None or not known:
        return None
    flat = x.reshape(-1, block.dim)
    (weight,) = kept_wide(gate, [gate.weight])
    logits = flat.astype(mx.float32) @ weight.T
    logits = logits if gate.gate_temp == 1 else logits / gate.gate_temp
    scores = gate.score_func if gate.score_func in ("sigmoid", "softmax") else "sqrtsoftplus"
    route = {"scores": scores, "renormalize": gate.norm_topk_prob and gate.top_k > 1, "scale": gate.route_scale}
    bias = gate.e_score_correction_bias
    y = _weighted(experts.switch_mlp, flat, logits, gate.top_k, bias, rounded=True, **route)
    return None if y is None else (y + block.shared_experts(flat)).reshape(x.shape)
