"""Blocks of a transformer on fused ops, by their structure: `mlx_mittens.nn.convert` beyond single modules.

A block keeps its weights and gets a subclass of its own class, whose call does the same in fewer kernels. Before that
it runs both ways on random numbers: a block that only looks like Llama's (a multiplied residual, say) stays as it is.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from ..patching.adapters import CLIP_RESIDUAL
from ..patching.digests import digest_in
from .experts import route
from .fused_attention import (
    are_alike,
    code_of,
    decode_a_little,
    join,
    joinable,
    joined_attention,
    part,
)
from .modules import QuantizedLinear, RMSNorm
from .norms import call_of, is_norm, looks_offset, offset_norm, offset_of
from .rebinding import class_before, rebind

__all__ = ["fuse_blocks"]

_BLOCK = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
# Further names in a call of such a block: Qwen3-Next's chooses between two kinds of attention.
_CHOICE = {"is_linear", "linear_attn"}
# Blocks that also normalize the outputs of the attention and of the feed-forward part: the norm of the attention's
# output, the norm before the feed-forward part, and the norm of its output. Gemma 2 and 3, GLM-4.
_SANDWICHES = (
    ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
_GATED = ("gate_proj", "up_proj", "down_proj")
# Holds modules that another one needs, so that they are no part of its weights.
_Held = types.SimpleNamespace

# The root mean squares of gates in a trial: where activations differ most, and beyond the clamps of models, at 7 to 16.
_GATES = (1.0, 32.0)
# Names in the call of a feed-forward part whose activation is the approximation of GELU, which no trial in half types
# tells from GELU itself.
_APPROXIMATE = {"gelu_approx", "geglu"}
# Scale of a second trial input: small, so that rounding does not hide the block's addend.
_SMALL = 2.0**-7

_EPSILON = {mx.float32: 1e-5, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


class _Carried(threading.local):
    """Result of the last block of this thread, already normalized for the module after it."""

    total: Any = None  # a weak reference: who adds to an array in place makes another one of it
    norm: nn.Module | None = None
    normed: mx.array | None = None

    def put(self, total: mx.array, norm: nn.Module, normed: mx.array) -> None:
        self.total, self.norm, self.normed = _ext.WeakArray(total), norm, normed

    def take(self, x: mx.array, norm: nn.Module) -> mx.array | None:
        normed = self.normed if norm is self.norm and self.total.is_(x) else None
        self.total = self.norm = self.normed = None
        return normed


_carried = _Carried()


class _RMSNormOfSum(RMSNorm):
    """The norm in a block of mlx-lm's that is not fused. A sum that nobody has asked for yet is computed with it."""

    def __call__(self, x: mx.array) -> mx.array:
        normed = None if _ext.exporting() else _ext.try_rms_norm_layer(self, x)
        return super().__call__(x) if normed is None else normed


class _LastRMSNorm(RMSNorm):
    """The norm after the last block, which may find its work done."""

    def __call__(self, x: mx.array) -> mx.array:
        normed = _carried.take(x, self)
        return super().__call__(x) if normed is None else normed


def _last_offset_norm(self: Any, x: mx.array) -> mx.array:
    """The same where the scale is 1 + weight."""
    normed = _carried.take(x, self)
    return offset_norm(self, x) if normed is None else normed


_last_offset_norm.weight_offset = 1.0  # type: ignore[attr-defined]


def _normed_input(self: Any, x: mx.array) -> mx.array | None:
    """The input of a block normalized, or none where the block is to do all itself."""
    normed = _carried.take(x, self["input_layernorm"])
    if normed is not None:
        return normed
    if _ext.exporting():  # During export no residual is passed on to the next block.
        return None
    return cast(mx.array, self["input_layernorm"](x))


def _fused_block(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    normed = _normed_input(self, x)
    if normed is None:
        return super(type(self), self).__call__(x, mask, cache)
    normed, h = _add_norm(self["self_attn"](normed, mask, cache), x, self["post_attention_layernorm"])
    y = self["mlp"](normed)
    following = _following_of(self, y)
    if following is None:
        return h + y
    normed, total = _add_norm(y, h, following.norm)
    _carried.put(total, following.norm, normed)
    return total


def _following_of(block: Any, y: mx.array) -> Any:
    """The owner of the norm after a block; None while this process has only a part of the norm's weight."""
    following = getattr(block, "_following", None)
    return following if following and following.norm["weight"].shape == y.shape[-1:] else None


def _add_norm(x: mx.array, residual: mx.array, norm: Any) -> tuple[mx.array, mx.array]:
    return _ext.add_rms_norm(x, residual, norm["weight"], norm.eps, weight_offset=offset_of(norm))


def _fused_sandwich(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    sandwich = self._sandwich
    normed = _normed_input(self, x)
    if normed is None:
        return super(type(self), self).__call__(x, mask, cache)
    of_attention, before_mlp, of_mlp = (self[name] for name in sandwich.norms)
    clips = sandwich.clips
    normed, h = _norm_add_norm(self["self_attn"](normed, mask, cache), x, of_attention, before_mlp, clips)
    y = self["mlp"](normed)
    following = _following_of(self, y)
    if following is None or following.norm.eps != of_mlp.eps:
        return _norm_add_norm(y, h, of_mlp, None, clips)[1] if clips else h + of_mlp(y)
    normed, total = _norm_add_norm(y, h, of_mlp, following.norm, clips)
    _carried.put(total, following.norm, normed)
    return total


def _norm_add_norm(
    x: mx.array, residual: mx.array, norm: Any, following: Any, clips: bool
) -> tuple[mx.array, mx.array]:
    return _ext.norm_add_norm(
        x,
        residual,
        norm["weight"],
        None if following is None else following["weight"],
        norm.eps,
        weight_offset=offset_of(norm),
        next_weight_offset=0.0 if following is None else offset_of(following),
        clip_sum=clips,
    )


def _is_block(module: nn.Module) -> bool:
    code = code_of(module)
    return (
        code is not None
        and set(code.co_names) <= {*_BLOCK, *_CHOICE}
        and all(name in module for name in _BLOCK)
        and is_norm(module["post_attention_layernorm"])
    )


def _sandwich_of(module: nn.Module) -> types.SimpleNamespace | None:
    """The norms of a block that has them on both sides of its parts; none if it is no such block."""
    code = code_of(module)
    named = set(code.co_names) if code else set()
    for norms in _SANDWICHES if code else ():
        names = {"self_attn", "mlp", "input_layernorm", *norms}
        known = named <= {*names, "clip_residual"} and all(name in module for name in names)
        if known and all(is_norm(module[name]) for name in norms) and len({module[name].eps for name in norms}) == 1:
            # Gemma 3 keeps sums in float16 finite, which a trial does not show.
            clips = "clip_residual" in named
            if clips and digest_in(sys.modules[class_before(module).__module__], "clip_residual") != CLIP_RESIDUAL:
                return None
            return _Held(norms=norms, clips=clips)
    return None


def _is_pair(gate: Any, up: Any) -> bool:
    """Whether two layers can be multiplied with in one kernel."""
    return type(gate) is QuantizedLinear and gate.mode == "affine" and "bias" not in gate and are_alike((gate, up))


def _fused_mlp(self: Any, x: mx.array) -> mx.array:
    gate, up, pair = self["gate_proj"], self["up_proj"], self._pair
    if gate is not pair.gate or up is not pair.up or "bias" in gate or "bias" in up:  # adapters or biases have come
        return super(type(self), self).__call__(x)
    try:
        y = _ext.swiglu_of_norm(
            x,
            (gate["weight"], gate["scales"], gate["biases"]),
            (up["weight"], up["scales"], up["biases"]),
            gate.group_size,
            gate.bits,
            activation=pair.activation,
        )
    except _ext.ExportError:
        return super(type(self), self).__call__(x)
    return self["down_proj"](y)


_fused_mlp.computes_the_same = True  # type: ignore[attr-defined]  # as the call of the class behind it


@functools.cache
def _subclass(base: type, call: Callable[..., Any]) -> type:
    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _same(a: mx.array, b: mx.array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype not in _EPSILON:
        return False
    limit = 2 * _EPSILON[a.dtype]
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return cast(bool, (mx.mean(mx.square(a - b)) < limit**2 * mx.mean(mx.square(a))).item())  # zeros show nothing


def _try(
    module: nn.Module,
    call: Callable[..., Any],
    width: int,
    dtype: mx.Dtype,
    run: Callable[[nn.Module, mx.array], list[mx.array]] = lambda module, x: [module(x)],
) -> bool:
    """Gives a module the call if it computes the same; random numbers show it."""
    before = type(module)
    if before.__call__ is call:  # converted before
        return True
    x = mx.random.normal((1, 3, width), key=mx.random.key(0)).astype(dtype)
    try:
        expected = run(module, x)
        module.__class__ = _subclass(before, call)
        if all(_same(*pair) for pair in zip(expected, run(module, x), strict=True)):
            return True
    except Exception:  # a class of another structure may raise anything
        pass
    module.__class__ = before
    return False


def _usual_and_large(mlp: nn.Module, x: mx.array) -> list[mx.array]:
    """A feed-forward part's results, also of numbers beyond the limits of clamped ones."""
    gates = mlp["gate_proj"](x).astype(mx.float32)
    size = mx.sqrt(mx.mean(mx.square(gates)))
    return [mlp((x * (scale / size)).astype(x.dtype)) for scale in _GATES]


def _activations_of(mlp: nn.Module) -> tuple[str, ...]:
    """Whether an object may be the activation of a feed-forward part."""
    if type(mlp).__call__ is _fused_mlp:
        return (mlp._pair.activation,)
    code = getattr(call_of(mlp), "__code__", None)
    return ("swiglu", "geglu") if code and _APPROXIMATE & set(code.co_names) else ("swiglu",)


def _usual_and_small(block: nn.Module, x: mx.array, *mask: str) -> list[mx.array]:
    """A block's results, also of an input that is small beside the block's addend."""
    return [block(x, *mask), block(x * _SMALL, *mask)]


def _input_of(layer: nn.Module) -> tuple[int, mx.Dtype]:
    """Width and type of the input of a linear layer."""
    width = layer["weight"].shape[1]
    if type(layer) is QuantizedLinear:
        return width * 32 // layer.bits, layer["scales"].dtype
    return width, layer["weight"].dtype


def fuse_blocks(model: nn.Module) -> None:
    """Fuses the blocks of a model whose modules are ours already."""
    modules: list[nn.Module] = [module for _, module in model.named_modules()]
    for module in modules:
        if looks_offset(module):
            weight = module["weight"]
            _try(module, offset_norm, weight.shape[0], weight.dtype)
    rebind(modules)
    for module in modules:
        if joinable(module):
            join(module)
            if not _try(module, joined_attention, *_input_of(module["q_proj"]), decode_a_little):
                part(module)
    for module in modules:
        route(module)
    for module in modules:
        if all(name in module for name in _GATED) and _is_pair(module["gate_proj"], module["up_proj"]):
            gate = module["gate_proj"]
            for activation in _activations_of(module):
                module._pair = _Held(gate=gate, up=module["up_proj"], activation=activation)
                if _try(module, _fused_mlp, *_input_of(gate), _usual_and_large):
                    break
            else:
                del module._pair
    for module in modules:
        if sandwich := _sandwich_of(module):
            module._sandwich = sandwich
            weight = module[sandwich.norms[0]]["weight"]
            if not _try(module, _fused_sandwich, weight.shape[0], weight.dtype, _usual_and_small):
                del module._sandwich
        elif _is_block(module):
            weight = module["post_attention_layernorm"]["weight"]
            _try(module, _fused_block, weight.shape[0], weight.dtype, lambda *of: _usual_and_small(*of, "causal"))
    for module in modules:
        _chain(module)
    if any(class_before(module).__module__.startswith("mlx_lm.") for module in modules):
        for module in modules:
            if type(module) is RMSNorm:
                module.__class__ = _RMSNormOfSum


def _is_fused(module: Any) -> bool:
    return type(module).__call__ in (_fused_block, _fused_sandwich)


def _chain(module: nn.Module) -> None:
    """Lets every block of a list, and the norm after it, find its input normalized by the block before."""
    layers, last = module.get("layers"), module.get("norm")
    if not isinstance(layers, list) or not layers or not all(map(_is_fused, layers)):
        return
    norms = [layer["input_layernorm"] for layer in layers[1:]]
    if type(last) is RMSNorm:
        last.__class__ = _LastRMSNorm
        norms.append(last)
    elif type(last).__call__ is offset_norm:
        last.__class__ = _subclass(type(last).__mro__[1], _last_offset_norm)
        norms.append(last)
    for layer, norm in zip(layers, norms):
        if is_norm(norm):
            layer._following = _Held(norm=norm)
