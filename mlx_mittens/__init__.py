"""Hand-tuned Metal kernels for MLX, called like mx's own operations."""

import importlib.util as _importlib_util
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from . import _guard

_extension = _guard.chosen(_guard.built(__path__))
_guard.check_libmlx()

import mlx.core as _mx  # (mlx.core before the extension, whose libmlx it loads)

_guard.load(_extension)

from . import _ext

_guard.check_tag(_ext, _mx)

from .stats import stats as stats  # before its module, which has its name, is imported by others

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import calibration as calibration
    from . import ops as ops
    from ._everything import *
    from ._everything import __all__ as __all__

    # A family at a time: of `ops`, whose list of names is put together, type checkers would see nothing.
    from .ops.attention import *
    from .ops.cache import *
    from .ops.matmul import *
    from .ops.moe import *
    from .ops.norm import *
    from .ops.recurrence import *
    from .ops.recurrent_layers import *
    from .ops.sampling import *
else:
    # Names that `_everything` offers beside the ops and the submodules, by the modules that have them.
    _HOMES = {
        "BuildInfo": "info",
        "DtypeError": "_ext",
        "ExportError": "_ext",
        "PatchError": "patching",
        "Support": "support",
        "build_info": "info",
        "executors": "backends",
        "patch": "patching",
        "patched": "patching",
        "strict": "backends",
        "supports": "support",
        "unpatch": "patching",
    }

    # A module is imported when the first of its names is asked for: ops need no patch, and the patch no simulator.
    def __getattr__(name: str) -> object:
        if name == "__all__":
            return _import_module(f"{__name__}._everything").__all__
        if not name.startswith("_"):
            if name in _HOMES:
                globals()[name] = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
                return globals()[name]
            if _importlib_util.find_spec(f"{__name__}.{name}"):
                return _import_module(f"{__name__}.{name}")
            ops = _import_module(f"{__name__}.ops")
            globals().update({op: getattr(ops, op) for op in ops.__all__})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_import_module(f"{__name__}._everything").__all__})
