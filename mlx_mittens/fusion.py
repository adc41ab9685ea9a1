"""Blocks of a transformer on fused ops, by their structure: what `mlx_mittens.nn.convert` does beyond single modules.

A block keeps its weights and gets a subclass of its own class, whose call does the same in fewer kernels. Before that
it runs both ways on random numbers: a block that only looks like Llama's (a multiplied residual, say) stays as it is.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import quantized_scaled_dot_product_attention, scaled_dot_product_attention
from .matrices import quantized_swiglu
from .nn import QuantizedLinear, RMSNorm
from .ops import add_rms_norm

__all__ = ["fuse_blocks"]

_BLOCK = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_GATED = ("gate_proj", "up_proj", "down_proj")
_EPSILON = {mx.float32: 1e-5, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


class _Following:
    """The norm after a block, held so that it is no part of the block's weights."""

    def __init__(self, norm: RMSNorm):
        self.norm = norm


class _Carried(threading.local):
    """What the last block of this thread gave, normalized already as the module after it will want it."""

    total: mx.array | None = None
    norm: RMSNorm | None = None
    normed: mx.array | None = None

    def put(self, total: mx.array, norm: RMSNorm, normed: mx.array) -> None:
        self.total, self.norm, self.normed = total, norm, normed

    def take(self, x: mx.array, norm: RMSNorm) -> mx.array | None:
        normed = self.normed if x is self.total and norm is self.norm else None
        self.total = self.norm = self.normed = None
        return normed


_carried = _Carried()


class _LastRMSNorm(RMSNorm):
    """The norm after the last block, which may find its work done."""

    def __call__(self, x: mx.array) -> mx.array:
        normed = _carried.take(x, self)
        return super().__call__(x) if normed is None else normed


def _fused_block(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    normed = _carried.take(x, self["input_layernorm"])
    if normed is None:
        normed = self["input_layernorm"](x)
    norm = self["post_attention_layernorm"]
    normed, h = add_rms_norm(self["self_attn"](normed, mask, cache), x, norm["weight"], norm.eps)
    y = self["mlp"](normed)
    following = getattr(self, "_following", None)
    if following is None:
        return h + y
    normed, total = add_rms_norm(y, h, following.norm["weight"], following.norm.eps)
    _carried.put(total, following.norm, normed)
    return total


def _is_pair(gate: Any, up: Any) -> bool:
    """Whether two layers can be multiplied with in one kernel."""
    return (
        type(gate) is type(up) is QuantizedLinear
        and gate.mode == up.mode == "affine"
        and (gate.group_size, gate.bits) == (up.group_size, up.bits)
        and "bias" not in gate
        and "bias" not in up
    )


def _fused_mlp(self: Any, x: mx.array) -> mx.array:
    gate, up = self["gate_proj"], self["up_proj"]
    if not _is_pair(gate, up):  # they were when this class was chosen; adapters may have come since
        return super(type(self), self).__call__(x)
    triples = [(layer["weight"], layer["scales"], layer["biases"]) for layer in (gate, up)]
    return self["down_proj"](quantized_swiglu(x, *triples, group_size=gate.group_size, bits=gate.bits))


@functools.cache
def _subclass(base: type, call: Callable[..., Any]) -> type:
    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _same(a: mx.array, b: mx.array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype not in _EPSILON:
        return False
    limit = 2 * _EPSILON[a.dtype]
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return mx.sqrt(mx.mean(mx.square(a - b)) / mx.mean(mx.square(a))).item() <= limit


def _try(module: nn.Module, call: Callable[..., Any], width: int, dtype: mx.Dtype, *arguments: Any) -> None:
    """Gives a module the call if it computes the same; random numbers show it."""
    x = mx.random.normal((1, 3, width)).astype(dtype)
    before = type(module)
    try:
        expected = module(x, *arguments)
        module.__class__ = _subclass(before, call)
        if _same(expected, module(x, *arguments)):
            return
    except Exception:  # a class of another structure may raise anything
        pass
    module.__class__ = before


def _attend(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> mx.array:
    """mlx-lm's function between a model's attention and mx's, on ours."""
    if not hasattr(cache, "bits"):
        return scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    if sinks is not None:
        raise ValueError("Quantized SDPA does not support attention sinks.")
    return quantized_scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, group_size=cache.group_size, bits=cache.bits
    )


@functools.cache
def _attending(call: types.FunctionType) -> types.FunctionType:
    """A class's call as it is, but for the attention that it finds by name."""
    names = {**call.__globals__, "scaled_dot_product_attention": _attend}
    ours = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    ours.__kwdefaults__ = call.__kwdefaults__
    return functools.wraps(call)(ours)


def _redirect_attention(module: nn.Module) -> None:
    base = sys.modules.get("mlx_lm.models.base")
    call = type(module).__call__
    if base is None or not isinstance(call, types.FunctionType):
        return
    if call.__globals__.get("scaled_dot_product_attention") is base.scaled_dot_product_attention and (
        "scaled_dot_product_attention" in call.__code__.co_names
    ):
        module.__class__ = _subclass(type(module), _attending(call))


def fuse_blocks(model: nn.Module) -> None:
    """Fuses what can be fused of a model whose modules are ours already."""
    modules = [module for _, module in model.named_modules()]
    for module in modules:
        _redirect_attention(module)
    for module in modules:
        if all(name in module for name in _GATED) and _is_pair(module["gate_proj"], module["up_proj"]):
            gate = module["gate_proj"]
            width = gate["weight"].shape[-1] * 32 // gate.bits
            _try(module, _fused_mlp, width, gate["scales"].dtype)
    for module in modules:
        if all(name in module for name in _BLOCK) and type(module["post_attention_layernorm"]) is RMSNorm:
            weight = module["post_attention_layernorm"]["weight"]
            _try(module, _fused_block, weight.shape[0], weight.dtype, "causal")
    for module in modules:
        _chain(module)


def _is_fused(module: Any) -> bool:
    return type(module).__call__ is _fused_block


def _chain(module: nn.Module) -> None:
    """Lets every block of a list, and the norm after it, find its input normalized by the block before."""
    layers, last = module.get("layers"), module.get("norm")
    if not isinstance(layers, list) or not layers or not all(map(_is_fused, layers)):
        return
    norms = [layer["input_layernorm"] for layer in layers[1:]]
    if type(last) is RMSNorm:
        last.__class__ = _LastRMSNorm
        norms.append(last)
    for layer, norm in zip(layers, norms):
        if isinstance(norm, RMSNorm):
            layer._following = _Following(norm)
