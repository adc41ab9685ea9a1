"""The norms of a model's blocks: of ``mlx.nn``, and of Gemma, whose scale is 1 + weight.

mlx-lm has a class of the latter in each model that needs it. Such a module is known by the names in its call, and a
trial confirms it.
"""

from __future__ import annotations

import types
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from ..patching.digests import plain
from .modules import RMSNorm

__all__ = ["call_of", "is_norm", "looks_offset", "offset_norm", "offset_of", "scale_of"]

_NAMES = {"mx", "fast", "rms_norm", "weight", "eps"}
_CASTS = {"astype", "dtype"}  # of a scale to the type of the input


def call_of(module: nn.Module) -> Any:
    """The call of a module's class, without wrappers of the patch or of `rebind`."""
    call = plain(type(module).__call__)
    return getattr(call, "rebound", call)


def offset_norm(self: Any, x: mx.array) -> mx.array:
    """The call of a module whose scale is 1 + weight. A sum that nobody has asked for yet is computed with it."""
    if x.dtype != self["weight"].dtype:  # some calls cast the scale, and some do not
        return cast(mx.array, super(type(self), self).__call__(x))
    normed = None if _ext.exporting() else _ext.try_offset_rms_norm_layer(self, x)
    if normed is not None:
        return cast(mx.array, normed)
    try:
        return _ext.rms_norm(x, self["weight"], self.eps, weight_offset=1.0)
    except _ext.ExportError:
        return super(type(self), self).__call__(x)


offset_norm.weight_offset = 1.0  # type: ignore[attr-defined]  # a mark of such calls


def looks_offset(module: nn.Module) -> bool:
    """Whether a module may be a norm whose scale is 1 + weight: its call does nothing else that has a name."""
    code = getattr(call_of(module), "__code__", None)
    if not isinstance(code, types.CodeType) or code.co_freevars or set(module) != {"weight"}:
        return False
    numbers = {value for value in code.co_consts if not isinstance(value, (str, tuple, type(None)))}
    return set(code.co_names) - _CASTS == _NAMES and numbers == {1.0}


def is_norm(module: Any) -> bool:
    """Whether a module is a root mean square norm of ours."""
    return isinstance(module, RMSNorm) or offset_of(module) > 0


def offset_of(norm: Any) -> float:
    """The number that such a norm adds to its weight."""
    return float(getattr(type(norm).__call__, "weight_offset", 0.0))


def scale_of(norm: Any) -> mx.array:
    """The scale of such a norm, in its weight's type."""
    weight: mx.array = norm["weight"]
    return (weight.astype(mx.float32) + 1.0).astype(weight.dtype) if offset_of(norm) else weight
