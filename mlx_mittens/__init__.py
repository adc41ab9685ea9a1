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
    from .ops.sampling import *
else:
    # Ops, the patch and calibrations come when the first of them is asked for: tests of other kernels need none.
    def __getattr__(name: str) -> object:
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if _importlib_util.find_spec(f"{__name__}.{name}"):
            return _import_module(f"{__name__}.{name}")
        _import_everything()
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        _import_everything()
        return sorted(globals())


def _import_everything() -> None:
    everything = _import_module(f"{__name__}._everything")
    names = everything.__all__
    globals().update({name: getattr(everything, name) for name in names}, __all__=names)
