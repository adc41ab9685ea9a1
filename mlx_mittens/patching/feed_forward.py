"""Feed-forward parts. Experts of a token are one call from the router's logits on; of tokens they are the choice, then
gate, activation and up, then the weighted sum of the down projections.

mlx-lm's layers are known by their classes' names: who has a model has imported them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from .digests import digest, plain
from .linears import format_of, is_quantized_linear, weights_of

__all__ = ["SWITCH_LAYERS", "gated", "geglu_layer", "mixture", "weighted_experts"]

SWITCH_LAYERS = "mlx_lm.models.switch_layers"
_MOST_UNSORTED = 64  # indices, from which on mlx-lm sorts tokens by their experts

# The activation of gather_swiglu that equals a class of mlx-lm's.
_ACTIVATIONS = {
    f"{SWITCH_LAYERS}.SwiGLU": "swiglu",
    "mlx_lm.models.gemma4_text.GeGLU": "geglu",
    "mlx_lm.models.gpt_oss.SwiGLU": "clipped",  # before 0.32
    "mlx_lm.models.activations.SwigluOAI": "clipped",
}
_CLIPPED = (1.702, 7.0)  # of gpt-oss
_SWITCH_GLU = "e69df5c55fdb4748"  # SwitchGLU.__call__
_GLU = ("gate_proj", "up_proj", "down_proj")
# Calls of shared experts: of Qwen3NextMLP and its like, and of DeepSeek-V3's kind.
_SHARED_EXPERTS = ("2bf452938b26f61d", "a7b836f717147942")
_STEP_EXPERT = "3a42eddc89b93288"  # Step3p5MLP's, which is like them where it has no limit


def geglu_layer(layer: Any, x: mx.array) -> mx.array:
    """A feed-forward part of Gemma 2 and 3."""
    gate, up = layer.gate_proj(x), layer.up_proj(x)
    y = _ext.try_geglu(gate, up)
    return cast(mx.array, layer.down_proj(nn.gelu_approx(gate) * up if y is None else y))


def _is_a(layer: Any, name: str) -> bool:
    """Whether a layer is of mlx-lm's class, or of the one that `nn.convert` makes of it."""
    bases = type(layer).__mro__[: 2 if type(layer).__module__.startswith("mlx_mittens.") else 1]
    return any(base.__module__ == SWITCH_LAYERS and base.__name__ == name for base in bases)


def _is_wanted(layer: Any) -> bool:
    """Whether a layer was converted, or experts are patched."""
    return type(layer).__module__.startswith("mlx_mittens.") or isinstance(mx.gather_qmm, _ext.FunctionWrapper)


def _activation(module: Any) -> str | None:
    kind = type(module)
    constants = (getattr(module, "_alpha", _CLIPPED[0]), getattr(module, "_limit", _CLIPPED[1]))
    known = _ACTIVATIONS.get(f"{kind.__module__}.{kind.__name__}")
    return known if known != "clipped" or constants == _CLIPPED else None


def _is_plain(layer: Any) -> bool:
    return _is_a(layer, "QuantizedSwitchLinear") and layer.get("global_scale") is None


def _takes_unsorted(layer: Any, x: mx.array, indices: mx.array) -> bool:
    """Whether products with a layer's experts take many tokens in any order."""
    return _ext.takes_unsorted_experts(x, layer["weight"], indices, *format_of(layer))


def gated(glu: Any, x: mx.array, indices: mx.array) -> mx.array | None:
    """Input of a SwitchGLU's last layer, of shape ``[..., chosen, 1, hidden]``.

    None where it is not one product: of layers that are not quantized alike, or of many tokens on a GPU where mx is
    faster, which goes through them sorted by their experts.
    """
    gate, up = glu["gate_proj"], glu["up_proj"]
    activation = _activation(glu.activation)
    if activation is None or _ext.exporting() or not (_is_plain(gate) and _is_plain(up)):
        return None
    if indices.size >= _MOST_UNSORTED and mx.default_device() == mx.gpu and not _takes_unsorted(gate, x, indices):
        return None
    alike = format_of(gate) == format_of(up) and gate["weight"].shape == up["weight"].shape
    if not alike or ("bias" in gate) != ("bias" in up):
        return None
    return cast(
        mx.array,
        _ext.gather_swiglu(
            mx.expand_dims(x, (-2, -3)),
            weights_of(gate),
            weights_of(up),
            None,
            mx.stop_gradient(indices),
            *format_of(gate),
            bias=(gate["bias"], up["bias"]) if "bias" in gate else None,
            activation=activation,
        ),
    )


def _activated(glu: Any, x: mx.array, indices: mx.array) -> mx.array | None:
    """The same where the activation is one that no kernel knows, of few tokens."""
    if indices.size >= _MOST_UNSORTED or _ext.exporting():
        return None
    if digest(plain(sys.modules[SWITCH_LAYERS].SwitchGLU.__call__)) != _SWITCH_GLU:
        return None
    x, indices = mx.expand_dims(x, (-2, -3)), mx.stop_gradient(indices)
    up, gate = (glu[name](x, indices, sorted_indices=False) for name in ("up_proj", "gate_proj"))
    return cast(mx.array, glu.activation(up, gate))


def weighted_experts(
    glu: Callable[..., mx.array], x: mx.array, indices: mx.array, weights: mx.array, rounded: bool = False
) -> mx.array:
    """The weighted sum of a SwitchGLU's outputs over the experts of each token.

    rounded: whether the sum has the type of these outputs, whatever the weights' type.
    """
    layer: Any = glu
    known = (rounded or weights.dtype == x.dtype) and _is_a(layer, "SwitchGLU") and _is_wanted(layer)
    known = known and _is_plain(layer["down_proj"])
    known = known and (indices.size < _MOST_UNSORTED or _takes_unsorted(layer["down_proj"], x, indices))
    hidden = gated(layer, x, indices) if known else None
    if hidden is None and known:
        hidden = _activated(layer, x, indices)
    if hidden is None:
        y = glu(x, indices)
        total = (y * weights[..., None]).sum(axis=-2)
        return total.astype(y.dtype) if rounded else total
    down = layer["down_proj"]
    w, scales, *biases = weights_of(down)
    group_size, bits, mode = format_of(down)
    return cast(
        mx.array,
        _ext.gather_sum(
            hidden.squeeze(-2),
            w,
            scales,
            biases[0] if biases else None,
            mx.stop_gradient(indices),
            weights,
            bias=down.get("bias"),
            group_size=group_size,
            bits=bits,
            mode=mode,
        ),
    )


def call_of(layer: Any) -> Any:
    """The call of a layer's class, without fusions that compute the same."""
    for base in type(layer).__mro__:
        call = base.__dict__.get("__call__")
        if call is not None and not getattr(call, "computes_the_same", False):
            return plain(call)
    return None


@functools.cache
def _always(dtype: mx.Dtype, ndim: int) -> mx.array:
    """The logit of a shared expert without a gate: its sigmoid is 1 in float32."""
    always = mx.full([1] * ndim, 64.0, dtype)
    mx.eval(always)
    return always


def _layers_beside(stacks: list[Any], shared: Any, activation: str) -> list[Any] | None:
    """The layers of a shared expert; None where they cannot be part of the launches of the chosen ones."""
    text = digest(call_of(shared))
    is_known = text in _SHARED_EXPERTS or (text == _STEP_EXPERT and shared.limit is None)
    if activation != "swiglu" or not is_known:
        return None
    layers = [shared[name] for name in _GLU]
    known = all(map(is_quantized_linear, layers)) and not any("bias" in layer for layer in layers)
    alike = known and all(
        format_of(one) == format_of(stacks[0]) and stack["weight"].shape[1:] == one["weight"].shape
        for stack, one in zip(stacks, layers, strict=True)
    )
    return layers if alike else None


def mixture(
    glu: Any,
    x: mx.array,
    logits: mx.array,
    k: int,
    shared: Any = None,
    shared_logits: mx.array | None = None,
    **route: Any,
) -> mx.array | None:
    """The weighted sum of a SwitchGLU's outputs for a token, from the logits of its router on.

    None where it is not two launches: on the CPU, of many tokens, and of layers that are not quantized alike.

    Args:
        glu: The SwitchGLU.
        x: The token.
        logits: The router's.
        k: How many experts are chosen.
        shared: A shared expert, whose output is added.
        shared_logits: Of its gate, whose sigmoid multiplies that output.
        route: Options of `route_top_k`.
    """
    if _ext.exporting() or x.size != x.shape[-1] or logits.dtype != x.dtype:
        return None
    if not (_is_a(glu, "SwitchGLU") and _is_wanted(glu)):
        return None
    activation = _activation(glu.activation)
    stacks = [glu[name] for name in _GLU]
    if activation is None or not all(map(_is_plain, stacks)):
        return None
    biased = ["bias" in layer for layer in stacks]
    if any(format_of(layer) != format_of(stacks[0]) for layer in stacks) or len(set(biased)) > 1:
        return None
    beside = None if shared is None else _layers_beside(stacks, shared, activation)
    gate = None
    if beside is not None:
        gate = _always(x.dtype, x.ndim) if shared_logits is None else shared_logits
    y = _ext.try_mixture(
        x,
        logits,
        k,
        *map(weights_of, stacks),
        *(map(weights_of, beside) if beside else [None] * 3),
        gate,
        *format_of(stacks[0]),
        bias=[layer["bias"] for layer in stacks] if biased[0] else None,
        activation=activation,
        **route,
    )
    if y is None or shared is None or beside is not None:
        return cast("mx.array | None", y)
    return y + (shared(x) if shared_logits is None else mx.sigmoid(shared_logits) * shared(x))
