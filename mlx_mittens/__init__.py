"""Hand-tuned Metal kernels for MLX, called like mx's own operations."""

from . import _guard

_guard.check_built()
from ._build import MLX_VERSION as _mlx_version  # noqa: E402

_guard.check_mlx(_mlx_version)
_guard.check_libmlx()

import mlx.core as _mx  # noqa: E402  (mlx.core before the extension, whose libmlx it loads)

from . import _ext  # noqa: E402

_guard.check_tag(_ext, _mx)

from . import nn, simulator  # noqa: E402
from ._ext import DtypeError, ExportError  # noqa: E402
from .attention import quantized_scaled_dot_product_attention, scaled_dot_product_attention  # noqa: E402
from .counts import stats  # noqa: E402
from .executors import executors, strict  # noqa: E402
from .matrices import (  # noqa: E402
    block_dequantize,
    block_matmul,
    block_quantize,
    gemv,
    quantized_matmul,
    quantized_swiglu,
)
from .ops import add_rms_norm, layer_norm, rms_norm, softmax  # noqa: E402
from .patching import patch, patched, unpatch  # noqa: E402
from .rope import rope_append  # noqa: E402
from .seams import SeamError  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "DtypeError",
    "ExportError",
    "SeamError",
    "add_rms_norm",
    "block_dequantize",
    "block_matmul",
    "block_quantize",
    "executors",
    "gemv",
    "layer_norm",
    "nn",
    "patch",
    "patched",
    "quantized_matmul",
    "quantized_scaled_dot_product_attention",
    "quantized_swiglu",
    "rms_norm",
    "rope_append",
    "scaled_dot_product_attention",
    "simulator",
    "softmax",
    "stats",
    "strict",
    "unpatch",
]
