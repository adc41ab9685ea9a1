"""The mixtures of mlx-lm's models. Routers choose experts in one kernel, and a token on an Apple GPU is two launches.

A function here computes the call of a known class, and gives None where mlx-lm's own call must run: where a layer is
sharded, or no kernel chooses. `targets` names the classes by digests of their calls.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from .digests import digest, digest_in
from .feed_forward import call_of, mixture, weighted_experts
from .linears import products

__all__ = [
    "dbrx_mixture",
    "deepseek_gate",
    "deepseek_mixture",
    "deepseek_v2_gate",
    "deepseek_v2_mixture",
    "deepseek_v3_gate",
    "deepseek_v3_mixture",
    "ernie_mixture",
    "gpt_oss_mixture",
    "granite_gate",
    "granite_hybrid_gate",
    "granite_mixture",
    "hunyuan_mixture",
    "jamba_mixture",
    "kimi_k3_mixture",
    "kimi_mixture",
    "llama4_mixture",
    "longcat_gate",
    "longcat_mixture",
    "mellum_mixture",
    "minimax_m3_mixture",
    "mistral4_mixture",
    "mixtral_mixture",
    "olmoe_mixture",
    "phimoe_mixture",
    "phixtral_mixture",
    "qwen2_mixture",
    "qwen3_mixture",
    "qwen3_next_mixture",
]


# The functions by which gates of DeepSeek-V3's kind choose, and the gates' calls.
_GROUP_SELECTS = ("ca01efe665d9a737", "e8ed7c8317a3499a", "1d8ab5525587f139", "ea2a5454e8c774f2")
_DEEPSEEK_GATE = "b4c556f956e97230"
_V2_GATE = "f5c49a1d2678de7c"
_V3_GATE = "51d7e60aa00e0751"
_MISTRAL_SELECT = "9939996accb1007a"  # mistral4_expert_select
_KIMI_SELECT = "dc9f41c97c84f724"  # _group_expert_select
_KIMI_K3_SELECT = "8b0610622fc66156"
_LONGCAT_GATE = "d607c77fa111e1a9"
_HUNYUAN_GATE = "84a316ffeefaf8e5"
_DBRX_ROUTER = "5d61e593737f69be"
_SPARSE_MIXER = "90703af328788261"  # phimoe.sparsemixer
_GRANITE_GATES = ("3fc5b5c918b88f8f", "e593c4112bc047e7")


def _logits(router: Any, x: mx.array) -> mx.array:
    """A router's. Of a quantized one the norm that x is may be part, which the experts then read likewise."""
    return products(x, [router], alone=True)[0]


def _weighted(
    glu: Any, x: mx.array, logits: mx.array, k: int, bias: mx.array | None = None, rounded: bool = False, **route: Any
) -> mx.array | None:
    """The weighted sum of the experts that a router's logits choose, from the choice on; None where no kernel chooses.

    rounded: as of `weighted_experts`.
    """
    chosen = _ext.try_route_top_k(logits, k, bias, **route)
    return None if chosen is None else weighted_experts(glu, x, chosen[0], chosen[1], rounded)


def _experts(glu: Any, x: mx.array, logits: mx.array, k: int, rounded: bool = False, **route: Any) -> mx.array | None:
    """The same, of a token in two launches where that can be."""
    together = mixture(glu, x, logits, k, **route)
    return _weighted(glu, x, logits, k, rounded=rounded, **route) if together is None else together


def qwen3_mixture(block: Any, x: mx.array) -> mx.array | None:
    if block.sharding_group is not None:
        return None
    route: dict[str, Any] = {"renormalize": block.norm_topk_prob, "descending": False}
    return _experts(block.switch_mlp, x, _logits(block.gate, x), block.top_k, rounded=True, **route)


def mellum_mixture(block: Any, x: mx.array) -> mx.array | None:
    route = {"renormalize": block.norm_topk_prob, "descending": False}
    return _experts(block.switch_mlp, x, _logits(block.gate, x), block.top_k, **route)


def _beside_shared_expert(block: Any, x: mx.array, renormalize: bool, descending: bool) -> mx.array | None:
    scores, logits = products(x, (block.gate, block.shared_expert_gate), alone=True)
    route: dict[str, Any] = {"renormalize": renormalize, "descending": descending}
    together = mixture(block.switch_mlp, x, scores, block.top_k, block.shared_expert, logits, **route)
    if together is not None:
        return together
    y = _weighted(block.switch_mlp, x, scores, block.top_k, **route)
    return None if y is None else y + mx.sigmoid(logits) * block.shared_expert(x)


def qwen3_next_mixture(block: Any, x: mx.array) -> mx.array | None:
    return None if block.sharding_group is not None else _beside_shared_expert(block, x, block.norm_topk_prob, False)


def qwen2_mixture(block: Any, x: mx.array) -> mx.array | None:
    return _beside_shared_expert(block, x, False, True)


def mixtral_mixture(block: Any, x: mx.array) -> mx.array | None:
    return _experts(block.switch_mlp, x, _logits(block.gate, x), block.num_experts_per_tok, scores="chosen")


def olmoe_mixture(block: Any, x: mx.array) -> mx.array | None:
    flat = x.reshape(-1, x.shape[-1])
    y = _experts(block.switch_mlp, flat, block.gate(flat), block.top_k, renormalize=block.norm_topk_prob)
    return None if y is None else y.reshape(x.shape)


def gpt_oss_mixture(block: Any, x: mx.array) -> mx.array | None:
    if block.sharding_group is not None:
        return None
    route: dict[str, Any] = {"scores": "chosen", "descending": False}
    return _experts(block.experts, x, _logits(block.router, x), block.num_experts_per_tok, **route)


def ernie_mixture(block: Any, x: mx.array) -> mx.array | None:
    scores = {nn.Softmax: "softmax", nn.Sigmoid: "sigmoid"}[type(block.gate_act)]
    route = {"scores": scores, "renormalize": True}
    return _with_shared_expert(block.switch_mlp, x, _logits(block.gate, x), block.k, None, block.shared_experts, route)


def hunyuan_mixture(block: Any, x: mx.array) -> mx.array | None:
    if digest(call_of(block.gate)) != _HUNYUAN_GATE:
        return None
    logits, shared = _logits(block.gate.wg, x), block.get("shared_mlp") if block.use_shared_mlp else None
    return _with_shared_expert(block.switch_mlp, x, logits, block.top_k, None, shared, {}, logits.dtype)


def jamba_mixture(block: Any, x: mx.array) -> mx.array | None:
    return _experts(block.switch_mlp, x, _logits(block.router, x), block.num_experts_per_tok, scores="chosen")


def phixtral_mixture(block: Any, x: mx.array) -> mx.array | None:
    return _weighted(block.switch_mlp, x, block.gate(x), block.num_experts_per_tok, scores="chosen")


@functools.cache
def _numbers(experts: int) -> mx.array:
    numbers = mx.arange(experts, dtype=mx.uint32)
    mx.eval(numbers)
    return numbers


@functools.partial(mx.compile, shapeless=True)
def _in_band(gates: mx.array, tops: mx.array, chosen: mx.array, numbers: mx.array, width: float) -> mx.array:
    """exp(gate - top) of the experts in the band below each chosen one, without the experts chosen before it."""
    is_out = (tops - gates) / mx.maximum(mx.abs(gates), tops) > width
    is_before = (gates > tops) | ((gates == tops) & (numbers < chosen))
    return mx.where(is_out | is_before, 0.0, mx.exp(gates.astype(mx.float32) - tops.astype(mx.float32)))


@functools.partial(mx.compile, shapeless=True)
def _one_over(sums: mx.array, like: mx.array) -> mx.array:
    return (1 / sums).astype(like.dtype)


def phimoe_mixture(block: Any, x: mx.array) -> mx.array | None:
    """A chosen expert's weight is its softmax over the band below it, in which it is the largest."""
    if digest_in(sys.modules["mlx_lm.models.phimoe"], "sparsemixer") != _SPARSE_MIXER:
        return None
    gates, k = _logits(block.gate, x), block.top_k
    chosen = _ext.try_route_top_k(gates, k, None, "chosen")
    if chosen is None:
        return None
    indices = mx.stop_gradient(chosen[0])
    tops = mx.take_along_axis(gates, indices, axis=-1)
    numbers = _numbers(gates.shape[-1])
    terms = _in_band(gates[..., None, :], tops[..., None], indices[..., None], numbers, 2 * block.jitter_eps)
    return weighted_experts(block.switch_mlp, x, indices, _one_over(terms.sum(axis=-1), gates))


def granite_mixture(block: Any, x: mx.array) -> mx.array | None:
    gate = block.router
    if digest(call_of(gate)) not in _GRANITE_GATES:
        return None
    route: dict[str, Any] = {"scores": "chosen", "descending": False}
    return _experts(block.switch_mlp, x, _logits(gate.layer, x), gate.top_k, rounded=True, **route)


@functools.partial(mx.compile, shapeless=True)
def _scaled_by_sigmoid(x: mx.array, logits: mx.array) -> mx.array:
    return x * mx.sigmoid(logits.astype(mx.float32)).astype(x.dtype)


def llama4_mixture(block: Any, x: mx.array) -> mx.array | None:
    """One expert, whose input is weighed instead of its output."""
    logits = _logits(block.router, x)
    chosen = _ext.try_route_top_k(logits, 1, None, "chosen")
    if chosen is None:
        return None
    indices = chosen[0]
    scaled = _scaled_by_sigmoid(x, mx.take_along_axis(logits, mx.stop_gradient(indices), axis=-1))
    return block.experts(scaled, indices).squeeze(2) + block.shared_expert(x)


@functools.partial(mx.compile, shapeless=True)
def _weighted_sum(rows: list[mx.array], weights: list[mx.array]) -> mx.array:
    y = sum(row.astype(mx.float32) * weight for row, weight in zip(rows, weights, strict=True))
    return cast(mx.array, y).astype(rows[0].dtype)


def dbrx_mixture(block: Any, x: mx.array) -> mx.array | None:
    """Experts with matrices of their own, not in stacks: mlx-lm waits for the choice too."""
    if block.training or _ext.exporting() or digest(call_of(block.router)) != _DBRX_ROUTER:
        return None
    flat, k = x.reshape(-1, x.shape[-1]), block.num_experts_per_tok
    chosen = _ext.try_route_top_k(_logits(block.router.layer, flat), k, renormalize=True, precise=True)
    if chosen is None:
        return None
    indices, weights = chosen
    rows = []
    for i, numbers in enumerate(cast("list[list[int]]", indices.tolist())):
        row = flat[i : i + 1]
        rows.append(
            _weighted_sum([block.experts[e](row) for e in numbers], [weights[i : i + 1, j : j + 1] for j in range(k)])
        )
    return (rows[0] if len(rows) == 1 else mx.concatenate(rows)).reshape(x.shape)


def deepseek_gate(gate: Any, x: mx.array) -> Any:
    return _ext.try_route_top_k(x @ gate.weight.T, gate.top_k)


def deepseek_mixture(block: Any, x: mx.array) -> mx.array | None:
    gate = block.gate
    if digest(call_of(gate)) != _DEEPSEEK_GATE:
        return None
    logits, shared = x @ gate.weight.T, block.get("shared_experts")
    return _with_shared_expert(block.switch_mlp, x, logits, gate.top_k, None, shared, {}, logits.dtype)


def deepseek_v2_gate(gate: Any, x: mx.array) -> Any:
    if gate.topk_method == "group_limited_greedy":
        return None
    return _ext.try_route_top_k(x @ gate.weight.T, gate.top_k, scale=gate.routed_scaling_factor)


def deepseek_v2_mixture(block: Any, x: mx.array) -> mx.array | None:
    gate = block.gate
    grouped = gate.topk_method == "group_limited_greedy"
    if block.sharding_group is not None or grouped or digest(call_of(gate)) != _V2_GATE:
        return None
    route = {"scale": gate.routed_scaling_factor}
    logits, shared = x @ gate.weight.T, block.get("shared_experts")
    return _with_shared_expert(block.switch_mlp, x, logits, gate.top_k, None, shared, route, logits.dtype)


def _deepseek_v3_route(gate: Any) -> dict[str, Any] | None:
    """How a gate of DeepSeek-V3's kind chooses."""
    if digest_in(sys.modules[type(gate).__module__], "group_expert_select") not in _GROUP_SELECTS:
        return None
    renormalize = gate.norm_topk_prob and gate.top_k > 1
    route = {"scores": "sigmoid", "renormalize": renormalize, "scale": gate.routed_scaling_factor}
    return {**route, "groups": (gate.n_group, gate.topk_group)}


def deepseek_v3_gate(gate: Any, x: mx.array) -> Any:
    route = _deepseek_v3_route(gate)
    if route is None:
        return None
    logits = (x @ gate.weight.T).astype(mx.float32)
    return _ext.try_route_top_k(logits, gate.top_k, gate.e_score_correction_bias, **route)


def deepseek_v3_mixture(block: Any, x: mx.array) -> mx.array | None:
    gate = block.gate
    if getattr(block, "sharding_group", None) is not None or digest(call_of(gate)) != _V3_GATE:
        return None
    route = _deepseek_v3_route(gate)
    if route is None:
        return None
    glu = block["experts"] if "experts" in block else block["switch_mlp"]
    logits, bias = x @ gate.weight.T, gate.e_score_correction_bias
    return _with_shared_expert(glu, x, logits, gate.top_k, bias, block.get("shared_experts"), route)


def mistral4_mixture(block: Any, x: mx.array) -> mx.array | None:
    options, module = block.args, sys.modules["mlx_lm.models.mistral4"]
    if block.sharding_group is not None:
        return None
    if digest_in(module, "mistral4_expert_select") != _MISTRAL_SELECT:
        return None
    route = {"renormalize": options.norm_topk_prob, "scale": options.routed_scaling_factor}
    route["groups"] = (options.n_group, options.topk_group)
    logits, k = _logits(block.gate, x), options.num_experts_per_tok
    return _with_shared_expert(block.switch_mlp, x, logits, k, None, block.get("shared_experts"), route)


def longcat_gate(router: Any, hidden_states: mx.array) -> Any:
    logits, bias = _logits(router.classifier, hidden_states), router.e_score_correction_bias
    route = {"renormalize": router.norm_topk_prob, "scale": router.routed_scaling_factor}
    return _ext.try_route_top_k(logits, router.top_k, bias, "softmax", **route)


@functools.cache
def _kinds(ndim: int) -> mx.array:
    """Whether an expert gives its input: false for experts that do not, then true for experts that do."""
    kinds = mx.array([False, True]).reshape(2, *[1] * ndim)
    mx.eval(kinds)
    return kinds


@functools.partial(mx.compile, shapeless=True)
def _by_kinds(indices: mx.array, weights: mx.array, kinds: mx.array, experts: int) -> mx.array:
    return mx.where((indices >= experts) == kinds, weights, 0.0)


@functools.partial(mx.compile, shapeless=True)
def _plus_scaled(y: mx.array, x: mx.array, scale: mx.array) -> mx.array:
    return y + x * scale


def longcat_mixture(block: Any, hidden_states: mx.array) -> mx.array | None:
    if block.sharding_group is not None or block.zero_expert_type != "identity":
        return None
    if digest(call_of(block.router)) != _LONGCAT_GATE:
        return None
    chosen = longcat_gate(block.router, hidden_states)
    if chosen is None:
        return None
    weights = chosen[1].astype(hidden_states.dtype)
    experts = block.n_routed_experts
    weights, of_input = _by_kinds(chosen[0], weights, _kinds(weights.ndim), experts)
    # Any expert may stand for one that gives its input: its weight is 0.
    y = weighted_experts(block.switch_mlp, hidden_states, mx.minimum(chosen[0], experts - 1), weights)
    return _plus_scaled(y, hidden_states, of_input.sum(axis=-1, keepdims=True))


def kimi_mixture(block: Any, x: mx.array) -> mx.array | None:
    options = block.args
    module = sys.modules["mlx_lm.models.kimi_linear"]
    if options.moe_router_activation_func != "sigmoid":
        return None
    if digest_in(module, "_group_expert_select") != _KIMI_SELECT:
        return None
    k = options.num_experts_per_token
    renormalize = options.moe_renormalize and k > 1
    route = {"scores": "sigmoid", "renormalize": renormalize, "scale": options.routed_scaling_factor}
    route["groups"] = (options.num_expert_group, options.topk_group)
    logits, bias = _logits(block.gate, x), block.e_score_correction_bias
    return _with_shared_expert(block.switch_mlp, x, logits, k, bias, block.shared_experts, route)


def kimi_k3_mixture(block: Any, x: mx.array) -> mx.array | None:
    options, module = block.args, sys.modules["mlx_lm.models.kimi_k3"]
    if block.sharding_group is not None:
        return None
    if digest_in(module, "_group_expert_select") != _KIMI_K3_SELECT:
        return None
    k = options.num_experts_per_token
    route = {
        "scores": "sigmoid",
        "renormalize": options.moe_renormalize and k > 1,
        "scale": options.routed_scaling_factor,
        "groups": (options.num_expert_group, options.topk_group),
    }
    logits = _logits(block.gate, x)
    y = x if block.latent_size is None else block.routed_expert_down_proj(x)
    y = _weighted(block.switch_mlp, y, logits, k, block.e_score_correction_bias, precise=True, **route)
    if y is None:
        return None
    if block.routed_expert_norm is not None:
        y = block.routed_expert_norm(y)
    if block.latent_size is not None:
        y = block.routed_expert_up_proj(y)
    return y if block.shared_experts is None else y + block.shared_experts(x)


def minimax_m3_mixture(block: Any, x: mx.array) -> mx.array | None:
    if block.sharding_group is not None:
        return None
    flat = x.reshape(-1, x.shape[-1])
    route = {"scores": "sigmoid", "renormalize": True, "scale": block.routed_scaling_factor}
    logits, bias, k = _logits(block.gate, flat), block.e_score_correction_bias, block.num_experts_per_tok
    y = _with_shared_expert(block.switch_mlp, flat, logits, k, bias, block.shared_experts, route)
    return None if y is None else y.reshape(x.shape)


def _with_shared_expert(
    glu: Any,
    x: mx.array,
    logits: mx.array,
    k: int,
    bias: mx.array | None,
    shared: Any,
    route: dict[str, Any],
    dtype: mx.Dtype = mx.float32,
) -> mx.array | None:
    """Experts that a gate chooses, with a bias of its scores or without, beside one that all tokens take.

    dtype: of the scores.
    """
    precise = dtype == mx.float32
    together = mixture(glu, x, logits, k, shared, router_bias=bias, precise=precise, **route)
    if together is not None:
        return together
    y = _weighted(glu, x, logits.astype(dtype), k, bias, rounded=True, **route)
    return y if y is None or shared is None else y + shared(x)


def granite_gate(gate: Any, hidden_states: mx.array) -> Any:
    return _ext.try_route_top_k(gate.layer(hidden_states).astype(mx.float32), gate.top_k, None, "chosen", False, False)


def granite_hybrid_gate(gate: Any, hidden_states: mx.array) -> Any:
    return _ext.try_route_top_k(gate.layer(hidden_states), gate.top_k, None, "chosen", False, False)
