"""Names that `import mlx_mittens` offers, for `import *` and type checks: ops, modules, the patch and testing tools."""

from . import frontend, nn, ops, simulator
from ._ext import DtypeError, ExportError
from .backends import executors, strict
from .info import BuildInfo, build_info
from .ops import *
from .patching import PatchError, patch, patched, unpatch
from .stats import stats
from .support import Support, supports

__all__ = [
    "BuildInfo",
    "DtypeError",
    "ExportError",
    "PatchError",
    "Support",
    "build_info",
    "executors",
    "frontend",
    "nn",
    "patch",
    "patched",
    "simulator",
    "stats",
    "strict",
    "supports",
    "unpatch",
]
__all__ += ops.__all__
