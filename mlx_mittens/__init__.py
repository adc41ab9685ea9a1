"""Hand-tuned Metal kernels for MLX, called like mx's own operations."""

from . import _guard

_guard.check_built()
from ._build import MLX_VERSION as _mlx_version  # noqa: E402

_guard.check_mlx(_mlx_version)
_guard.check_libmlx()

import mlx.core as _mx  # noqa: E402  (mlx.core before the extension, whose libmlx it loads)

from . import _ext  # noqa: E402

_guard.check_tag(_ext, _mx)

from . import simulator  # noqa: E402
from ._ext import DtypeError  # noqa: E402
from .executors import executors, strict  # noqa: E402
from .ops import add_rms_norm, layer_norm, rms_norm, softmax  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "DtypeError",
    "add_rms_norm",
    "executors",
    "layer_norm",
    "rms_norm",
    "simulator",
    "softmax",
    "strict",
]
