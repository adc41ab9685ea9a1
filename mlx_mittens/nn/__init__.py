"""Drop-in modules: ``mlx.nn``'s, on our ops, for a model of one's own or in the place of a model's."""

from ..patching.batch_caches import BatchQuantizedKVCache
from ..patching.batch_windows import BatchRotatingQuantizedKVCache
from .convert import convert
from .modules import Embedding, LayerNorm, Linear, QuantizedEmbedding, QuantizedLinear, RMSNorm

__all__ = [
    "BatchQuantizedKVCache",
    "BatchRotatingQuantizedKVCache",
    "Embedding",
    "LayerNorm",
    "Linear",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "RMSNorm",
    "convert",
]
