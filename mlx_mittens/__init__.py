"""Hand-tuned Metal kernels for MLX, called like mx's own operations."""

from . import _guard

_extension = _guard.chosen(_guard.built(__path__))
_guard.check_libmlx()

import mlx.core as _mx  # (mlx.core before the extension, whose libmlx it loads)

_guard.load(_extension)

from . import _ext

_guard.check_tag(_ext, _mx)

from . import calibration, frontend, nn, ops, simulator
from ._ext import DtypeError, ExportError
from .backends import executors, strict

# A family at a time: of `ops`, whose list of names is put together, type checkers would see nothing.
from .ops.attention import *
from .ops.cache import *
from .ops.matmul import *
from .ops.moe import *
from .ops.norm import *
from .ops.recurrence import *
from .ops.sampling import *
from .patching import PatchError, patch, patched, unpatch
from .stats import stats

__version__ = "0.1.0"

calibration.load()

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
