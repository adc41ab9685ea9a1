"""Drop-in modules: those of ``mlx.nn``, on our ops, for a model of one's own or in the place of a model's.

Each is a subclass of its twin, so whatever is done with that (quantizing, freezing, loading weights, LoRA) works here.
In a function that MLX exports they do what their twins do: the op then raises an error, since asking before each call
would cost the host time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from . import _ext, exporting
from .matrices import gemv
from .ops import layer_norm, rms_norm

__all__ = ["Embedding", "LayerNorm", "Linear", "QuantizedEmbedding", "QuantizedLinear", "RMSNorm", "convert"]

M = TypeVar("M", bound=nn.Module)


class _Exported:
    """A module that needs to know when MLX exports it, however it is made."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        exporting.mark("modules")
        return super().__new__(cls)


class RMSNorm(_Exported, nn.RMSNorm):
    """``mlx.nn.RMSNorm`` on ``mlx_mittens.rms_norm``."""

    def __call__(self, x: mx.array) -> mx.array:
        try:
            return rms_norm(x, self["weight"], self.eps)
        except _ext.ExportError:
            return super().__call__(x)


class LayerNorm(_Exported, nn.LayerNorm):
    """``mlx.nn.LayerNorm`` on ``mlx_mittens.layer_norm``."""

    def __call__(self, x: mx.array) -> mx.array:
        try:
            return layer_norm(x, self.get("weight"), self.get("bias"), self.eps)
        except _ext.ExportError:
            return super().__call__(x)


class Linear(_Exported, nn.Linear):
    """``mlx.nn.Linear`` on ``mlx_mittens.gemv``."""

    def __call__(self, x: mx.array) -> mx.array:
        try:
            return gemv(self["weight"], x, self.get("bias"))
        except _ext.ExportError:
            return super().__call__(x)

    def to_quantized(self, *args: Any, **kwargs: Any) -> nn.Module:
        return convert(super().to_quantized(*args, **kwargs), fuse=False)


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
    """``mlx.nn.QuantizedLinear`` on ``mlx_mittens.quantized_matmul``, the bias within the kernel."""

    __call__ = _quantized_product(nn.QuantizedLinear.__call__)


class Embedding(_Exported, nn.Embedding):
    """``mlx.nn.Embedding``, whose ``as_linear`` is ``mlx_mittens.gemv``."""

    def as_linear(self, x: mx.array) -> mx.array:
        try:
            return gemv(self["weight"], x)
        except _ext.ExportError:
            return super().as_linear(x)

    def to_quantized(self, *args: Any, **kwargs: Any) -> nn.Module:
        return convert(super().to_quantized(*args, **kwargs), fuse=False)


class QuantizedEmbedding(_Exported, nn.QuantizedEmbedding):
    """``mlx.nn.QuantizedEmbedding``, whose ``as_linear`` is ``mlx_mittens.quantized_matmul``."""

    as_linear = _quantized_product(nn.QuantizedEmbedding.as_linear)


_TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: RMSNorm,
    nn.LayerNorm: LayerNorm,
    nn.Linear: Linear,
    nn.QuantizedLinear: QuantizedLinear,
    nn.Embedding: Embedding,
    nn.QuantizedEmbedding: QuantizedEmbedding,
}


def convert(model: M, *, fuse: bool = True) -> M:
    """Makes the modules of a model ours, in place, for those who want no patch of mx's functions.

    What is frozen and what is shared stays so. Of the classes that a model of mlx-lm brings, attention goes to ours,
    and where a block is built as Llama's is, queries, keys and values become one product (their layers keep views of
    the joined weights, and once they are given others, are multiplied with one by one again), residual and norm one
    op, and the gate, the activation and the product of a quantized feed-forward half another; a block is tried with
    random numbers before it is replaced. All else is left alone. In a function that ``mx.export_function`` or
    ``mx.exporter`` traces the model does what it did before, by mx; these two are replaced for it, from now on.

    Args:
        model (mlx.nn.Module): The model, or a single module.
        fuse (bool): Whether blocks are fused.

    Returns:
        mlx.nn.Module: The same model.
    """
    exporting.mark("modules")
    for _, module in model.named_modules():
        twin = _TWINS.get(type(module))
        if twin is not None:
            # The class alone changes: a module that several others hold stays one.
            module.__class__ = twin
    if fuse:
        from .fusion import fuse_blocks  # which needs the modules above

        fuse_blocks(model)
    return model
