"""The experts and routers of mlx-lm's mixtures on our ops.

mlx-lm is imported by who has a model of it: its classes are known by their names, and get subclasses when they are met.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from ..patching.feed_forward import SWITCH_LAYERS, gated
from ..patching.layer_targets import mixture_of

__all__ = ["expert_twin", "route"]


def _switch_linear(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    try:
        w = self["weight"].swapaxes(-1, -2)
        return _with_bias(self, _ext.gather_mm(x, w, None, indices, sorted_indices=sorted_indices), indices)
    except _ext.ExportError:
        return cast(mx.array, super(type(self), self).__call__(x, indices, sorted_indices))


def _quantized_switch_linear(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    try:
        y = _ext.gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            None,
            indices,
            True,
            self.group_size,
            self.bits,
            self.mode,
            self.get("global_scale"),
            sorted_indices=sorted_indices,
        )
    except _ext.ExportError:
        return cast(mx.array, super(type(self), self).__call__(x, indices, sorted_indices))
    return _with_bias(self, y, indices)


def _with_bias(layer: Any, y: mx.array, indices: mx.array) -> mx.array:
    return y + mx.expand_dims(layer["bias"][indices], -2) if "bias" in layer else y


def _to_quantized(self: Any, *args: Any, **kwargs: Any) -> nn.Module:
    quantized = super(type(self), self).to_quantized(*args, **kwargs)
    twin = expert_twin(type(quantized))
    if twin is not None:
        quantized.__class__ = twin
    return cast(nn.Module, quantized)


def _switch_glu(self: Any, x: mx.array, indices: mx.array) -> mx.array:
    hidden = gated(self, x, indices)
    if hidden is None:
        return cast(mx.array, super(type(self), self).__call__(x, indices))
    return cast(mx.array, self["down_proj"](hidden, mx.stop_gradient(indices)).squeeze(-2))


_CALLS: dict[str, dict[str, Callable[..., Any]]] = {
    "SwitchLinear": {"__call__": _switch_linear, "to_quantized": _to_quantized},
    "QuantizedSwitchLinear": {"__call__": _quantized_switch_linear},
    "SwitchGLU": {"__call__": _switch_glu},
}


def expert_twin(base: type) -> type | None:
    """The class of ours for one of mlx-lm's layers of experts; none for any other class."""
    return _twin(base) if base.__module__ == SWITCH_LAYERS and base.__name__ in _CALLS else None


@functools.cache
def _twin(base: type) -> type:
    return type(base.__name__, (base,), {**_CALLS[base.__name__], "__module__": __name__})


def route(module: nn.Module) -> None:
    """Makes a mixture's or a router's call ours, where it is one that is known."""
    base = type(module)
    attempt = mixture_of(base)
    if attempt is not None:
        module.__class__ = _routed(base, attempt)


@functools.cache
def _routed(base: type, attempt: Callable[..., Any]) -> type:
    def call(self: Any, x: mx.array) -> Any:
        result = None if _ext.exporting() else attempt(self, x)
        return super(type(self), self).__call__(x) if result is None else result

    call.computes_the_same = True  # type: ignore[attr-defined]
    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})
