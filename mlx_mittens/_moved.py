"""Imports of modules by their names before 0.1: they work for one more release, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any

_PACKAGE = __package__

# Old module to new, below the package. `ops`, `nn`, `simulator`, `frontend`, `bench` and `patching` kept their names.
MOVED = {
    "attention": "ops.attention",
    "attention_cases": "specs.attention",
    "caches": "nn.caches",
    "cases": "specs",
    "check": "cli.check",
    "counts": "stats",
    "doctor": "cli.doctor",
    "executors": "backends",
    "frontend.dialect_code": "frontend.lint_ir",
    "frontend.dialect_text": "frontend.lint_source",
    "frontend.tensor_products": "frontend.mma_lowering",
    "fused_attention": "nn.fused_attention",
    "fusion": "nn.fusion",
    "launch": "ops.custom",
    "machine": "bench.machine",
    "matrices": "ops.matmul",
    "matrix_cases": "specs.matmul",
    "metal_kernel": "simulator.metal_kernel",
    "model_bench": "bench.models",
    "models": "bench.architectures",
    "peer": "bench.mlx_metal",
    "plot": "bench.plot",
    "ptxas": "frontend.ptxas",
    "reference": "specs.reference",
    "rope": "ops.cache",
    "rope_cases": "specs.cache",
    "runs": "cli.runs",
    "sampling": "bench.timing",
    "seams": "patching.targets",
    "simulate": "cli.simulate",
    "usage": "cli.options",
}


class _Module(types.ModuleType):
    """An old name; what is asked of it is the new module's."""

    _new: types.ModuleType

    def __getattr__(self, name: str) -> Any:
        return getattr(self._new, name)


class _Loader(importlib.abc.Loader):
    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module._new = importlib.import_module(self._new)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package, _, old = name.partition(".")
        if package != _PACKAGE or old not in MOVED:
            return None
        new = f"{_PACKAGE}.{MOVED[old]}"
        warnings.warn(f"{name} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
        return importlib.machinery.ModuleSpec(name, _Loader(new))


def install() -> None:
    """Makes the old names importable, where no module has them."""
    sys.meta_path.append(_Finder())
