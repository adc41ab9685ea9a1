"""Hand-tuned Metal kernels for MLX, called like mx's own operations."""

from . import _guard

_guard.check_built()
from ._build import MLX_VERSION as _mlx_version

_guard.check_mlx(_mlx_version)
_guard.check_libmlx()

import mlx.core as _mx  # (mlx.core before the extension, whose libmlx it loads)

from . import _ext

_guard.check_tag(_ext, _mx)

from . import _moved, calibration, frontend, nn, ops, simulator
from ._ext import DtypeError, ExportError
from .backends import executors, strict
from .ops import *
from .patching import PatchError, patch, patched, unpatch
from .stats import stats

__version__ = "0.1.0"

_moved.install()
calibration.load()


def __getattr__(name: str) -> type:
    if name == "SeamError":
        import warnings

        warnings.warn("mlx_mittens.SeamError is now mlx_mittens.PatchError", DeprecationWarning, stacklevel=2)
        return PatchError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DtypeError",
    "ExportError",
    "PatchError",
    "executors",
    "frontend",
    "nn",
    "patch",
    "patched",
    "simulator",
    "stats",
    "strict",
    "unpatch",
]
__all__ += ops.__all__
