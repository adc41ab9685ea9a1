"""The ops, a module a family."""

from .attention import quantized_scaled_dot_product_attention, scaled_dot_product_attention
from .cache import rope_append
from .matmul import block_dequantize, block_matmul, block_quantize, gemv, quantized_matmul, quantized_swiglu
from .norm import add_rms_norm, layer_norm, rms_norm, softmax

__all__ = [
    "add_rms_norm",
    "block_dequantize",
    "block_matmul",
    "block_quantize",
    "gemv",
    "layer_norm",
    "quantized_matmul",
    "quantized_scaled_dot_product_attention",
    "quantized_swiglu",
    "rms_norm",
    "rope_append",
    "scaled_dot_product_attention",
    "softmax",
]
