"""Mixtures of mlx-lm's models whose routers add a bias to the scores of experts, each known by digests of its calls.

A function here gives None where the class's own call is to run.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import mlx.core as mx

from .digests import digest, digest_in, plain
from .feed_forward import call_of, mixture
from .linears import is_quantized_linear, kept_wide, weights_of
from .routers import _V3_GATE, _deepseek_v3_route, _logits, _weighted, _with_shared_expert

__all__ = [
    "afmoe_mixture",
    "bailing_mixture",
    "bailing_v3_mixture",
    "klear_mixture",
    "laguna_mixture",
    "lfm2_mixture",
    "minimax_mixture",
    "nemotron_mixture",
    "step_mixture",
]

_AFMOE_ROUTER = "2058ef7b290bc3e2"
_LAGUNA = {"__call__": "6cceea09d0f12794", "_routing_scores": "7cdd5211b1e6b0da"}  # MoEGate's
_BAILING_HYBRID_GATE = "a05ab5cdd0657687"
_BAILING_GATE = "0edee382b8e8af04"
_BAILING_SELECT = "580eab52c05ab68a"  # bailing_moe.group_expert_select
_BAILING_LINEAR_SELECT = "d2145504c45f5bce"
_BAILING_V3_GATE = "5d7eabbaf7313c92"
_BAILING_V3_SELECT = "cb6f7052409ccdf4"
_STEP_GATE = "5f775db7ef249556"
_STEP_SELECT = "b7114e4e5ea23e07"  # moe_gate_select
_LOWEST = -float("inf")


def _route(scores: str, renormalize: bool, scale: float, **more: Any) -> dict[str, Any]:
    """scores: as a model's configuration names them; all but sigmoid are softmax."""
    scores = "sigmoid" if scores == "sigmoid" else "softmax"
    return {"scores": scores, "renormalize": renormalize, "scale": scale, **more}


_of_sigmoid = functools.partial(_route, "sigmoid")


def afmoe_mixture(block: Any, x: mx.array) -> mx.array | None:
    if digest(call_of(block.router)) != _AFMOE_ROUTER:
        return None
    k, shared = block.num_experts_per_tok, block.get("shared_experts")
    groups = {"groups": (block.n_group, block.topk_group)}
    route = _route(block.score_func, block.route_norm and k > 1, block.route_scale, **groups)
    return _with_shared_expert(block.experts, x, _logits(block.router.gate, x), k, block.expert_bias, shared, route)


@functools.partial(mx.compile, shapeless=True)
def _between(y: mx.array, shared: mx.array, first: mx.array, second: mx.array) -> mx.array:
    """A sum of two by the softmax of two logits, which is a sigmoid of their difference."""
    difference = first.astype(mx.float32) - second.astype(mx.float32)
    return (y * mx.sigmoid(difference) + shared * mx.sigmoid(-difference)).astype(y.dtype)


def klear_mixture(block: Any, x: mx.array) -> mx.array | None:
    route = _of_sigmoid(block.norm_topk_prob, 1.0)
    logits, bias = _logits(block.gate, x), block.expert_bias
    y = _with_shared_expert(block.experts, x, logits, block.top_k, bias, None, route)
    if y is None:
        return None
    return _between(y, block.shared_experts(x), *mx.split(block.coefficient(x), 2, axis=-1))


def laguna_mixture(block: Any, x: mx.array) -> mx.array | None:
    gate = block.gate
    known = all(digest(plain(getattr(type(gate), name))) == text for name, text in _LAGUNA.items())
    if not known or gate.softcap > 0 or gate.score_func != "sigmoid":
        return None
    route, bias = _of_sigmoid(True, block.routed_scaling_factor), gate.e_score_correction_bias
    logits = _logits(gate.proj, x)
    return _with_shared_expert(block.switch_mlp, x, logits, gate.top_k, bias, block.shared_expert, route)


def _wide_product(linear: Any, x: mx.array) -> mx.array:
    """A product in float32, for which scales are not cast at each call."""
    x = x.astype(mx.float32)
    if not is_quantized_linear(linear) or linear.mode != "affine" or "bias" in linear:
        return cast(mx.array, linear(x))
    weight, *narrow = weights_of(linear)
    scales, biases = kept_wide(linear, narrow)
    return mx.quantized_matmul(x, weight, scales, biases, group_size=linear.group_size, bits=linear.bits)


def minimax_mixture(block: Any, x: mx.array) -> mx.array | None:
    """The router's product is in float32."""
    if block.sharding_group is not None:
        return None
    k, bias = block.num_experts_per_tok, block.e_score_correction_bias
    logits = _wide_product(block.gate, x)
    return _weighted(block.switch_mlp, x, logits, k, bias, rounded=True, **_of_sigmoid(True, 1.0))


def _bailing_route(gate: Any, **more: Any) -> dict[str, Any]:
    renormalize, groups = gate.norm_topk_prob and gate.top_k > 1, (gate.n_group, gate.topk_group)
    return _route(gate.score_function, renormalize, gate.routed_scaling_factor, groups=groups, **more)


def bailing_mixture(block: Any, x: mx.array) -> mx.array | None:
    """bailing_moe's, which sorts in ascending order, bailing_moe_linear's and bailing_hybrid's."""
    gate = block.gate
    if digest(call_of(gate)) == _BAILING_HYBRID_GATE:
        route = _bailing_route(gate, dropped=_LOWEST)
    else:
        select = digest_in(sys.modules[type(gate).__module__], "group_expert_select")
        if digest(call_of(gate)) != _BAILING_GATE or select not in (_BAILING_SELECT, _BAILING_LINEAR_SELECT):
            return None
        route = _bailing_route(gate, descending=select == _BAILING_LINEAR_SELECT)
    logits, shared = _logits(gate.gate_proj, x), block.shared_experts
    return _with_shared_expert(block.switch_mlp, x, logits, gate.top_k, gate.expert_bias, shared, route)


def bailing_v3_mixture(block: Any, x: mx.array) -> mx.array | None:
    """The router's product is in float32, with weights that are not cast at each call."""
    gate = block.gate
    known = digest_in(sys.modules[type(gate).__module__], "_group_expert_select") == _BAILING_V3_SELECT
    if not known or digest(call_of(gate)) != _BAILING_V3_GATE:
        return None
    (weight,) = kept_wide(gate, [gate.weight])
    logits = x.astype(mx.float32) @ weight.T
    groups = {"groups": (gate.n_group, gate.topk_group), "dropped": _LOWEST}
    route = _of_sigmoid(True, gate.routed_scaling_factor, **groups)
    y = _weighted(block.switch_mlp, x, logits, gate.top_k, gate.expert_bias, rounded=True, **route)
    return None if y is None else y + block.shared_experts(x)


def lfm2_mixture(block: Any, x: mx.array) -> mx.array | None:
    route = _of_sigmoid(block.norm_topk_prob, block.routed_scaling_factor, eps=1e-6, descending=False)
    logits, bias = _logits(block.gate, x), block.expert_bias if block.use_expert_bias else None
    together = mixture(block.switch_mlp, x, logits, block.top_k, router_bias=bias, **route)
    return _weighted(block.switch_mlp, x, logits, block.top_k, bias, **route) if together is None else together


def step_mixture(block: Any, x: mx.array) -> mx.array | None:
    gate = block.gate
    known = digest_in(sys.modules[type(gate).__module__], "moe_gate_select") == _STEP_SELECT
    if block.sharding_group is not None or not known or digest(call_of(gate)) != _STEP_GATE:
        return None
    route, logits = _of_sigmoid(gate.norm_topk_prob, gate.routed_scaling_factor), _logits(gate.gate, x)
    return _with_shared_expert(block.switch_mlp, x, logits, gate.top_k, gate.router_bias, block.share_expert, route)


def nemotron_mixture(block: Any, x: mx.array) -> mx.array | None:
    """Experts without gates, of a latent where the model has one."""
    gate, route = block.gate, _deepseek_v3_route(block.gate)
    if route is None or digest(call_of(gate)) != _V3_GATE:
        return None
    logits, bias = x @ gate.weight.T, gate.e_score_correction_bias
    y = x if block.moe_latent_size is None else block.fc1_latent_proj(x)
    y = _weighted(block.switch_mlp, y, logits.astype(mx.float32), gate.top_k, bias, rounded=True, **route)
    if y is None:
        return None
    if block.moe_latent_size is not None:
        y = block.fc2_latent_proj(y)
    return y if block.config.n_shared_experts is None else y + block.shared_experts(x)
