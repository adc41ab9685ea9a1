"""Modules of ``mlx.nn`` on our ops.

Each is a subclass of its twin, so its other uses (quantizing, freezing, loading weights, LoRA) work here.
During export the op raises ExportError, and the module calls its mlx.nn base class. A check before each call would cost
host time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from .. import _ext, exporting
from ..ops.matmul import gemv, quantized_embedding
from ..ops.norm import layer_norm, rms_norm
from .experts import expert_twin

Module = TypeVar("Module", bound=nn.Module)
Made = TypeVar("Made", bound="_Exported")


class _Exported:
    """A module that needs to know when MLX exports it, however it is made."""

    __slots__ = ()

    def __new__(cls: type[Made], *args: Any, **kwargs: Any) -> Made:
        exporting.mark("modules")
        return super().__new__(cls)


class RMSNorm(_Exported, nn.RMSNorm):
    """``mlx.nn.RMSNorm`` on ``mlx_mittens.rms_norm``.

    Example:
        >>> y = mm.nn.RMSNorm(8, eps=1e-5)(mx.ones((2, 8)))
    """

    def __call__(self, x: mx.array) -> mx.array:
        try:
            return rms_norm(x, self["weight"], self.eps)
        except _ext.ExportError:
            return super().__call__(x)


class LayerNorm(_Exported, nn.LayerNorm):
    """``mlx.nn.LayerNorm`` on ``mlx_mittens.layer_norm``.

    Example:
        >>> y = mm.nn.LayerNorm(8, bias=False)(mx.ones((2, 8)))
    """

    def __call__(self, x: mx.array) -> mx.array:
        try:
            return layer_norm(x, self.get("weight"), self.get("bias"), self.eps)
        except _ext.ExportError:
            return super().__call__(x)


class Linear(_Exported, nn.Linear):
    """``mlx.nn.Linear`` on ``mlx_mittens.gemv``.

    Example:
        >>> mm.nn.Linear(64, 16)(mx.ones((2, 64))).shape
        (2, 16)
    """

    def __call__(self, x: mx.array) -> mx.array:
        try:
            return gemv(self["weight"], x, self.get("bias"))
        except _ext.ExportError:
            return super().__call__(x)

    def to_quantized(self, *args: Any, **kwargs: Any) -> nn.Module:
        return adopt(super().to_quantized(*args, **kwargs))


def _quantized_product(twin: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A method in the place of a twin's: x times a module's quantized weights, and its bias, if it has one."""

    def product(module: nn.Module, x: mx.array) -> mx.array:
        try:
            # A model calls this a hundred times a token: the extension itself, by position.
            return _ext.quantized_matmul(
                x,
                module["weight"],
                module["scales"],
                module.get("biases"),
                True,
                module.group_size,
                module.bits,
                module.mode,
                bias=module.get("bias"),
            )
        except _ext.ExportError:
            return twin(module, x)

    return product


class QuantizedLinear(_Exported, nn.QuantizedLinear):
    """``mlx.nn.QuantizedLinear`` on ``mlx_mittens.quantized_matmul``, the bias within the kernel.

    Example:
        >>> layer = mm.nn.QuantizedLinear(64, 16, group_size=32, bits=4)
        >>> layer(mx.ones((2, 64))).shape
        (2, 16)
    """

    __call__: Callable[..., mx.array] = _quantized_product(nn.QuantizedLinear.__call__)


class Embedding(_Exported, nn.Embedding):
    """``mlx.nn.Embedding``, whose ``as_linear`` is ``mlx_mittens.gemv``.

    Example:
        >>> table = mm.nn.Embedding(100, 64)
        >>> table.as_linear(table(mx.array([3]))).shape  # the logits of a model with tied weights
        (1, 100)
    """

    def as_linear(self, x: mx.array) -> mx.array:
        try:
            return gemv(self["weight"], x)
        except _ext.ExportError:
            return super().as_linear(x)

    def to_quantized(self, *args: Any, **kwargs: Any) -> nn.Module:
        return adopt(super().to_quantized(*args, **kwargs))


class QuantizedEmbedding(_Exported, nn.QuantizedEmbedding):
    """``mlx.nn.QuantizedEmbedding`` on ``mlx_mittens.quantized_embedding``; ``as_linear`` is ``quantized_matmul``.

    Example:
        >>> table = mm.nn.QuantizedEmbedding(100, 64, group_size=32, bits=4)
        >>> table.as_linear(table(mx.array([3]))).shape
        (1, 100)
    """

    def __call__(self, x: mx.array) -> mx.array:
        try:
            return quantized_embedding(
                x, self["weight"], self["scales"], self.get("biases"), self.group_size, self.bits, self.mode
            )
        except _ext.ExportError:
            return super().__call__(x)

    as_linear: Callable[..., mx.array] = _quantized_product(nn.QuantizedEmbedding.as_linear)


_TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: RMSNorm,
    nn.LayerNorm: LayerNorm,
    nn.Linear: Linear,
    nn.QuantizedLinear: QuantizedLinear,
    nn.Embedding: Embedding,
    nn.QuantizedEmbedding: QuantizedEmbedding,
}


def adopt(model: Module) -> Module:
    """Makes the modules of a model, or a single one, ours in place: each that has a twin here becomes of its class."""
    exporting.mark("modules")
    for _, module in model.named_modules():
        twin = _TWINS.get(type(module)) or expert_twin(type(module))
        if twin is not None:
            # The class alone changes: a module that several others hold stays one.
            module.__class__ = twin
    return model
