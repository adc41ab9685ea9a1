"""What `import mlx_mittens` offers: ops, modules and the patch beside the testing tools."""

from . import frontend, nn, ops, simulator, switches
from ._ext import DtypeError, ExportError
from .backends import executors, strict
from .info import BuildInfo, build_info
from .ops import *
from .patching import PatchError, patch, patched, unpatch
from .patching.targets import TARGETS
from .stats import stats
from .support import Support, supports

switches.check([*ops.__all__, *(target.switch for target in TARGETS)])

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
