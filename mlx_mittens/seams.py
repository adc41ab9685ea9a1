"""Where a model meets its ops: the functions and methods that the patch takes the place of, as data."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import sum_gradients

from . import _ext

__all__ = ["SEAMS", "Seam", "SeamError", "importing"]

importing: set[str] = set()  # modules that are not yet what they will be

Attempt = Callable[..., Any]  # an op's result, or None where the original is to be called


class SeamError(RuntimeError):
    """A function that the patch takes the place of is not where it was, or takes other arguments."""


def _all_to_sharded(module: Any, x: mx.array) -> mx.array | None:
    return _ext.attempt_linear(module, sum_gradients(module.group)(x))


def _sharded_to_all(module: Any, x: mx.array) -> mx.array | None:
    part = _ext.attempt_gemv(module["weight"], x)
    if part is None:
        return None
    y = mx.distributed.all_sum(part, group=module.group)
    return y + module["bias"] if "bias" in module else y


@dataclass(frozen=True)
class Seam:
    """A function of another package, and the op that stands in for it."""

    switch: str  # what patch() calls it
    op: str  # what stats() calls it
    module: str  # where the function is
    path: str  # and its name there, with dots
    attempt: Attempt
    parameters: tuple[str, ...] = ()  # of a Python function, which must be these; mx's own are those of its version
    optional: bool = False  # a package that need not be installed; patched once it is imported
    partial: bool = False  # some calls are the original's in strict mode too
    shared: bool = False  # the package's other modules import it by name

    @property
    def name(self) -> str:
        """The function's full name."""
        return f"{self.module}.{self.path}"

    def owner(self) -> tuple[Any, str]:
        """What holds the function, and under which name.

        Raises:
            SeamError: It is not there, or takes other arguments than those known.
        """
        *parents, leaf = self.path.split(".")
        try:
            owner = functools.reduce(getattr, parents, importlib.import_module(self.module))
            function = getattr(owner, leaf)
        except (ImportError, AttributeError) as error:
            raise SeamError(self._complaint(f"is not there ({error})")) from error
        if self.parameters and not hasattr(function, "__wrapped__"):
            found = tuple(inspect.signature(function).parameters)
            if found != self.parameters:
                raise SeamError(self._complaint(f"takes ({', '.join(found)}): expected ({', '.join(self.parameters)})"))
        return owner, leaf

    def importers(self, function: Any) -> list[Any]:
        """The package's modules that hold a function under the seam's name."""
        if not self.shared:
            return []
        inside = f"{self.module.rpartition('.')[0]}."
        modules = [module for name, module in list(sys.modules.items()) if name.startswith(inside)]
        return [module for module in modules if getattr(module, "__dict__", {}).get(self.path) is function]

    def is_loaded(self) -> bool:
        """Whether its module has been imported; the others are imported when they are patched."""
        return not self.optional or (self.module in sys.modules and self.module not in importing)

    def _complaint(self, what: str) -> str:
        package = self.module.split(".")[0].replace("_", "-")
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        return (
            f"[patch] {self.name} {what}; installed is {package} {version}. "
            f"mm.patch({self.switch}=False) leaves it alone."
        )


SEAMS = [
    Seam("rms_norm", "rms_norm", "mlx.core", "fast.rms_norm", _ext.attempt_pending_add_rms_norm),
    Seam(
        "rms_norm",
        "rms_norm",
        "mlx.nn",
        "RMSNorm.__call__",
        _ext.attempt_rms_norm_layer,
        ("self", "x"),
        partial=True,  # what it leaves is mx.fast.rms_norm's
    ),
    Seam("layer_norm", "layer_norm", "mlx.core", "fast.layer_norm", _ext.attempt_layer_norm),
    Seam("softmax", "softmax", "mlx.core", "softmax", _ext.attempt_softmax),
    Seam("quantized_matmul", "quantized_matmul", "mlx.core", "quantized_matmul", _ext.attempt_quantized_matmul),
    Seam(
        "quantized_matmul",
        "quantized_matmul",
        "mlx.nn",
        "QuantizedLinear.__call__",
        _ext.attempt_quantized_linear,
        ("self", "x"),
        partial=True,  # what it leaves is mx.quantized_matmul's
    ),
    Seam(
        "scaled_dot_product_attention",
        "scaled_dot_product_attention",
        "mlx.core",
        "fast.scaled_dot_product_attention",
        _ext.attempt_scaled_dot_product_attention,
    ),
    Seam(
        "quantized_scaled_dot_product_attention",
        "quantized_scaled_dot_product_attention",
        "mlx_lm.models.base",
        "quantized_scaled_dot_product_attention",
        _ext.attempt_quantized_scaled_dot_product_attention,
        ("queries", "q_keys", "q_values", "scale", "mask", "group_size", "bits"),
        optional=True,
    ),
    Seam(
        "cache",
        "cache",
        "mlx_lm.models.cache",
        "KVCache.update_and_fetch",
        _ext.attempt_update_and_fetch,
        ("self", "keys", "values"),
        optional=True,
        partial=True,  # a cache that has no room makes it
    ),
    Seam(
        "cache",
        "rope",
        "mlx.core",
        "fast.rope",
        _ext.attempt_rope,
        partial=True,  # mx's own, which an append to a cache may find
    ),
    Seam("cache", "rope", "mlx.nn", "RoPE.__call__", _ext.attempt_rope_layer, ("self", "x", "offset"), partial=True),
    Seam(
        "cache",
        "rope",
        "mlx_lm.models.rope_utils",
        "Llama3RoPE.__call__",
        _ext.attempt_rope_layer,
        ("self", "x", "offset"),
        optional=True,
        partial=True,
    ),
    Seam(
        "swiglu",
        "quantized_swiglu",
        "mlx_lm.models.activations",
        "swiglu",
        _ext.attempt_swiglu,
        optional=True,
        partial=True,  # only two quantized products that are still to be computed are one
        shared=True,
    ),
    Seam("linear", "gemv", "mlx.nn", "Linear.__call__", _ext.attempt_linear, ("self", "x")),
    Seam("linear", "gemv", "mlx.nn", "Embedding.as_linear", _ext.attempt_linear, ("self", "x")),
    Seam("linear", "gemv", "mlx.nn", "AllToShardedLinear.__call__", _all_to_sharded, ("self", "x")),
    Seam("linear", "gemv", "mlx.nn", "ShardedToAllLinear.__call__", _sharded_to_all, ("self", "x")),
]
