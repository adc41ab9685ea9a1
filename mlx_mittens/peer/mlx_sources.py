"""The text of MLX's own Metal kernels, out of the installed mlx wheel: one instantiation of a kernel at a time."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import mlx.core as mx

from .. import frontend

_KERNELS = "mlx/backend/metal/kernels"
# The kernels for matrix units end in _nax.
HEADERS = {
    "softmax": ("utils.h", "softmax.h"),
    "gemv": ("utils.h", "gemv.h"),
    "quantized": ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"),
    "fp_quantized": ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h"),
    "splitk": ("utils.h", "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_splitk.h"),
    "steel_gemm": ("utils.h", "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"),
    "steel_gather": ("utils.h", "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_gather.h"),
    "sdpa_vector": ("utils.h", "sdpa_vector.h"),
    "steel_attention": ("utils.h", "steel/attn/attn.h", "steel/attn/kernels/steel_attention.h"),
    "quantized_nax": ("utils.h", "steel/gemm/gemm_nax.h", "quantized_utils.h", "quantized_nax.h"),
    "fp_quantized_nax": ("utils.h", "steel/gemm/gemm_nax.h", "quantized_utils.h", "fp_quantized_nax.h"),
    "fused_nax": ("utils.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_fused_nax.h"),
    "thin_nax": ("utils.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_thin_nax.h"),
    "splitk_nax": ("utils.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_splitk_nax.h"),
    "gather_nax": ("utils.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_gather_nax.h"),
    "segmented_nax": ("utils.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_segmented_nax.h"),
    "attention_nax": ("utils.h", "steel/attn/kernels/steel_attention_nax.h"),
}
TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}
# Names a checkout of MLX's repository, for kernels that the wheel lacks.
CHECKOUT = "MLX_MITTENS_MLX_SOURCE"


@functools.cache
def instance(family: str, function: str, *template: object, name: str = "") -> tuple[str, str]:
    """Registers one instantiation of a kernel of MLX's.

    Args:
        family: Of the kernel: a key of `HEADERS`.
        function: The kernel.
        template: Its template arguments.
        name: Begins the name of the instantiation; the kernel's if left out.

    Returns:
        tuple[str, str]: The source's name and the kernel's, as `launch` and `mlx_mittens.frontend` take them.
    """
    arguments = [str(a).lower() if isinstance(a, bool) else str(a) for a in template]
    kernel = "_".join([name or function, *arguments])
    file = f"mlx/{kernel}.metal"
    includes = "".join(f'#include "{_KERNELS}/{header}"\n' for header in HEADERS[family])
    frontend.register_source(file, f'{includes}instantiate_kernel("{kernel}", {function}, {", ".join(arguments)})\n')
    return file, kernel


def has_checkout() -> bool:
    """Whether `CHECKOUT` names a folder with the kernels that MLX's wheel lacks."""
    return (Path(os.environ.get(CHECKOUT, "")) / _KERNELS / "rms_norm.metal").is_file()


def of_checkout(file: str) -> str:
    """Registers a .metal file of MLX's repository; returns its name as a source.

    Raises:
        ValueError: There is no checkout.
    """
    if not has_checkout():
        folder = os.environ.get(CHECKOUT)
        raise ValueError(
            f"[peer] {CHECKOUT} is {folder!r}: expected a checkout of MLX's repository, since MLX's wheel lacks {file}"
        )
    name = f"mlx/{file}"
    frontend.register_source(name, (Path(os.environ[CHECKOUT]) / _KERNELS / file).read_text())
    return name
