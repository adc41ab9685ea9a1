"""Which kernel files are an op's, for commands that are given an op."""

from __future__ import annotations

from collections.abc import Iterable

from .. import frontend
from .machine_code import Request

_DENSE_PRODUCTS = (
    *("matmul/gemv.metal", "matmul/gemv_tiles.metal", "matmul/apple/matmul_tiles.metal"),
    "matmul/splitk_reduce.metal",
)

# In the order in which docs/architecture.md has them; those for NVIDIA GPUs alone are left out.
FILES: dict[str, tuple[str, ...]] = {
    "rms_norm": ("norm/rms_norm.metal", "norm/norm_vjp.metal"),
    "layer_norm": ("norm/layer_norm.metal", "norm/norm_vjp.metal"),
    "add_rms_norm": ("norm/add_rms_norm.metal", "norm/norm_vjp.metal"),
    "softmax": ("norm/softmax.metal", "norm/softmax_vjp.metal"),
    "norm_add_norm": ("norm/norm_add_norm.metal", "norm/clipped_norm_add_norm.metal", "norm/norm_vjp.metal"),
    "qk_norm": ("norm/qk_norm.metal", "norm/norm_vjp.metal"),
    "softcap": ("norm/softcap.metal",),
    "sample": ("sampling/sample.metal", "sampling/sample_adjusted.metal", "sampling/sample_logprobs.metal"),
    "matmul": _DENSE_PRODUCTS,
    "gemv": _DENSE_PRODUCTS,
    "quantized_matmul": (
        *("matmul/qmv.metal", "matmul/qmm.metal", "matmul/apple/qmm_tiles.metal", "matmul/qvm.metal"),
        *("matmul/apple/qvm_tiles.metal", "matmul/splitk_reduce.metal"),
        *("matmul/apple/m5/int8_rows.metal", "matmul/apple/m5/qmm_int8.metal"),
    ),
    "quantized_swiglu": ("matmul/quantized_swiglu.metal", "matmul/apple/swiglu_tiles.metal"),
    "block_matmul": ("matmul/gguf_matmul.metal", "matmul/apple/gguf_tiles.metal"),
    "block_masked_mm": ("matmul/apple/block_masked_mm.metal", "matmul/apple/block_masked_row.metal"),
    "block_quantize": ("matmul/gguf_quantize.metal",),
    "block_dequantize": ("matmul/gguf_quantize.metal",),
    "scaled_dot_product_attention": (
        *("attention/attention.metal", "attention/attention_combine.metal", "attention/attention_backward.metal"),
        "attention/attention_ragged.metal",
    ),
    "quantized_scaled_dot_product_attention": (
        *("attention/attention_packed.metal", "attention/attention_combine.metal"),
        "attention/attention_packed_ragged.metal",
    ),
    "cascade_attention": (
        *("attention/attention.metal", "attention/attention_ragged.metal", "attention/attention_cascade.metal"),
    ),
    "paged_attention": (
        *("attention/attention_paged.metal", "attention/attention_packed_paged.metal"),
        "attention/attention_combine.metal",
    ),
    "rope_append": ("cache/rope_append.metal",),
    "index_scores": ("cache/index_scores.metal",),
    "paged_append": ("cache/paged_append.metal",),
    "take_tokens": ("cache/take_tokens.metal",),
    "quantized_rope_append": ("cache/quantized_rope_append.metal",),
    "gather_qmm": ("moe/gather_qmm.metal", "moe/apple/expert_tiles.metal", "moe/apple/gather_qmm_tiles.metal"),
    "gather_mm": ("moe/gather_mm.metal", "moe/apple/expert_tiles.metal", "moe/apple/gather_mm_tiles.metal"),
    "gather_swiglu": (
        *("moe/gather_swiglu.metal", "moe/apple/expert_tiles.metal", "moe/apple/gather_swiglu_tiles.metal"),
    ),
    "gather_sum": (
        *("moe/gather_qmm.metal", "moe/apple/expert_tiles.metal", "moe/apple/gather_qmm_tiles.metal"),
        "moe/apple/row_sums.metal",
    ),
    "mixture": ("moe/mixture.metal", "moe/apple/normed_mixture.metal"),
    "quantized_matmuls": ("matmul/qmv_several.metal",),
    "quantized_embedding": ("matmul/quantized_embedding.metal",),
    "gated_delta_update": ("recurrence/recurrence.metal",),
    "ssm_update": ("recurrence/state_space.metal",),
    "short_conv_token": ("recurrence/short_conv_token.metal", "recurrence/apple/short_conv_product.metal"),
    **dict.fromkeys(("gated_delta_inputs", "ssm_inputs"), ("recurrence/layer_inputs.metal",)),
}


def files_of(op: str) -> tuple[str, ...]:
    """The kernel files of an op; of one that the table does not know the file of its name. Empty if there is none."""
    return FILES.get(op) or tuple(file for file in frontend.files() if file.endswith(f"/{op}.metal"))


def requests(files: Iterable[str]) -> list[Request]:
    """All variants of files, each to be compiled for as many threads as it declares.

    Raises:
        CompileError: The front end refuses a file.
    """
    return [Request(file, variant.name) for file in files for variant in frontend.variants(file)]


def for_apple() -> list[str]:
    """The files whose kernels Apple's plans launch, but for matrix units alone."""
    return [file for file in with_machine_code() if "/nvidia/" not in file]


def with_machine_code() -> list[str]:
    """The files that Mesa compiles: it has no tensors of Metal 4."""
    return [file for file in frontend.files() if not frontend.is_for_matrix_units(file)]


def for_nvidia() -> list[str]:
    """The files whose kernels NVIDIA's plans launch, and that are compiled to PTX."""
    return [file for file in frontend.files() if not frontend.is_for_apple(file)]
