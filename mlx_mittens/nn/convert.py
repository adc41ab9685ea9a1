"""A whole model on our modules and fused blocks."""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from .fusion import fuse_blocks
from .modules import adopt

Module = TypeVar("Module", bound=nn.Module)


def convert(model: Module, *, fuse: bool = True) -> Module:
    """Makes the modules of a model ours, in place, for those who want no patch of mx's functions.

    Frozen parameters and shared ones stay so. The classes that a model of mlx-lm brings get subclasses. Their calls
    are the same, but find ours in the place of the functions that ``mlx_mittens.patch`` replaces, and append to caches
    by our kernels. Where a block is built as Llama's is, queries, keys and values become one product (their layers
    keep views of the joined weights, and once they are given others, are multiplied with one by one again), residual
    and norm one op, and the gate, the activation and the product of a quantized feed-forward half another; a block is
    tried with random numbers before it is replaced. In a function that ``mx.export_function`` or
    ``mx.exporter`` traces the model calls mx as before; these two are replaced for it, from now on.

    Args:
        model (mlx.nn.Module): The model, or a single module.
        fuse (bool): Whether blocks are fused.

    Returns:
        mlx.nn.Module: The same model.

    Raises:
        TypeError: The model is no module.

    Example:
        >>> import mlx.nn as nn
        >>> model = mm.nn.convert(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)))
        >>> isinstance(model.layers[1], mm.nn.RMSNorm)
        True
    """
    if not isinstance(model, nn.Module):
        found = "None" if model is None else f"a {type(model).__name__}"
        raise TypeError(
            f"[convert] model is {found}: expected an mlx.nn.Module, as the first of the two that mlx_lm.load gives"
        )
    adopt(model)
    if fuse:
        fuse_blocks(model)
        mx.clear_cache()  # of weights that were joined
        _ext.cpu_give_back()
    return model
