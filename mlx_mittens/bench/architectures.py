"""Architectures as their published configurations give them, built with mlx-lm's classes and random weights."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

__all__ = ["ARCHITECTURES", "build", "fitting_layers", "from_config", "period"]

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 201088,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
        "rope_theta": 1000000.0,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "norm_eps": 1e-5,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "rope_theta": 1000000.0,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "intermediate_size": 5120,
        "num_heads": 80,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, float("inf")],
        "time_step_rank": "auto",
        "vocab_size": 50288,
        "tie_word_embeddings": True,
    },
}

# Drawing billions of numbers on a CPU would take longer than the measurement. A prime, so that no two rows are alike.
_DRAWN = 1_000_003

# The scale of random weights in formats whose scales are bytes: 1/128 and 2**-15 as exponents, 0.5 as an fp8 number.
_SCALES = {"mxfp4": 120, "mxfp8": 112, "nvfp4": 48}


def _filled(values: mx.array, shape: tuple[int, ...]) -> mx.array:
    """An array of this shape that repeats the values, in memory of its own."""
    size = 1
    for n in shape:
        size *= n
    if size <= values.size:
        return mx.contiguous(values[:size].reshape(shape))
    whole = mx.broadcast_to(values[None], (size // values.size, values.size)).reshape(-1)
    return mx.concatenate([whole, values[: size % values.size]]).reshape(shape)


def _weights(model: nn.Module, dtype: mx.Dtype) -> list[tuple[str, mx.array]]:
    """Random weights for a model, of the size that keeps activations near 1."""
    normal = mx.random.normal((_DRAWN,))
    words = mx.random.randint(0, 2**32 - 1, (_DRAWN,), mx.uint32)
    mx.eval(normal, words)
    modules = dict(model.named_modules())
    weights = []
    for name, a in dict(tree_flatten(model.parameters())).items():
        parent, _, leaf = name.rpartition(".")
        if a.dtype == mx.uint8:  # scales of the fp4 and fp8 modes
            weights.append((name, mx.full(a.shape, _SCALES[modules[parent].mode], mx.uint8)))
        elif leaf in ("scales", "biases"):
            module = modules[parent]
            largest = 2**module.bits - 1
            columns = a.shape[-1] * module.group_size
            scale = (12.0 / columns) ** 0.5 / largest  # integers spread evenly deviate by largest / sqrt(12)
            value = (1 + 0.1 * normal) * scale if leaf == "scales" else (1 + 0.1 * normal) * scale * -largest / 2
            weights.append((name, _filled(value.astype(dtype), a.shape)))
        elif a.dtype == mx.uint32:
            finite = mx.array(0xF7F7F7F7 if modules[parent].mode == "mxfp8" else 0xFFFFFFFF, mx.uint32)
            weights.append((name, _filled(words & finite, a.shape)))  # no byte is NaN
        elif a.ndim >= 2:
            weights.append((name, _filled((normal * a.shape[-1] ** -0.5).astype(dtype), a.shape)))
        elif leaf == "weight":  # of a norm
            weights.append((name, _filled((1 + 0.1 * normal).astype(dtype), a.shape)))
        else:
            weights.append((name, _filled((0.1 * normal).astype(dtype), a.shape)))
        mx.eval(weights[-1][1])
    return weights


def build(
    name: str, dtype: mx.Dtype, bits: int | None = None, group_size: int = 64, mode: str = "affine", **changes: Any
) -> nn.Module:
    """A model of mlx-lm's own class with random weights, none of them downloaded.

    Args:
        name (str): One of ``ARCHITECTURES``.
        dtype (Dtype): Of unquantized weights.
        bits (int, optional): 4 or 8 to quantize linear layers and embeddings; with ``None`` nothing is quantized.
        group_size (int): Of the quantization.
        mode (str): Of the quantization, as ``mx.quantize`` takes it.
        changes: Changes to the published configuration, for a smaller model.

    Returns:
        mlx.nn.Module: The model, its weights in memory.
    """
    return from_config({**ARCHITECTURES[name], **changes}, dtype, _quantization(bits, group_size, mode))


def _quantization(bits: int | None, group_size: int, mode: str) -> dict[str, Any] | None:
    return None if bits is None else {"bits": bits, "group_size": group_size, "mode": mode}


def fitting_layers(
    name: str, dtype: mx.Dtype, nbytes: int, bits: int | None = None, group_size: int = 64, mode: str = "affine"
) -> int:
    """The number of layers of an architecture that fit some bytes, beside its embeddings and its head.

    Args:
        name (str): One of ``ARCHITECTURES``.
        dtype (Dtype): Of unquantized weights.
        nbytes (int): For the weights.
        bits, group_size, mode: As `build` takes them.

    Returns:
        int: All or the first of them, a multiple of `period`; 0 if so few are too many.
    """
    layers: dict[int, int] = {}
    others = 0
    model = _lazy(ARCHITECTURES[name], _quantization(bits, group_size, mode))
    for path, a in dict(tree_flatten(model.parameters())).items():
        size = a.nbytes if a.dtype in (mx.uint8, mx.uint32) else a.size * dtype.size
        found = re.search(r"(?:^|\.)layers\.(\d+)\.", path)
        if found:
            layers[int(found[1])] = layers.get(int(found[1]), 0) + size
        else:
            others += size
    fitting = 0
    left = nbytes - others
    while fitting < len(layers) and layers[fitting] <= left:
        left -= layers[fitting]
        fitting += 1
    return fitting if fitting == len(layers) else fitting - fitting % period(name)


def period(name: str) -> int:
    """After how many layers of an architecture its kinds of layers repeat; mlx-lm's classes need as many at least."""
    config = ARCHITECTURES[name]
    if "full_attn_idxs" in config:
        return int(config["num_hidden_layers"])  # in no order
    of_kinds = config.get("sliding_window_pattern") or config.get("full_attention_interval")
    return int(of_kinds or (2 if config["model_type"] == "gpt_oss" else 1))


def from_config(config: dict[str, Any], dtype: mx.Dtype, quantization: dict[str, Any] | None = None) -> nn.Module:
    """A model of mlx-lm's own class with random weights.

    Args:
        config (dict): As its config.json has it.
        dtype (Dtype): Of unquantized weights.
        quantization (dict, optional): ``bits``, ``group_size`` and ``mode`` of linear layers and embeddings, and by the
            path of a layer its own settings, as mlx-lm writes them. None: nothing is quantized.

    Returns:
        mlx.nn.Module: The model, its weights in memory.

    Raises:
        ValueError: mlx-lm has no such model.
    """
    model = _lazy(config, quantization)
    model.update(tree_unflatten(_weights(model, dtype)))
    model.eval()
    return model


def _lazy(config: dict[str, Any], quantization: dict[str, Any] | None) -> nn.Module:
    """The model with weights that are never computed: they have shapes and types."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    if quantization is not None:
        group_size, mode = quantization["group_size"], quantization.get("mode", "affine")

        def choice(path: str, module: nn.Module) -> bool | dict:
            if path in quantization:
                return quantization[path]
            if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
                return False
            asked = getattr(model, "quant_predicate", None)
            return asked(path, module) if asked else True

        nn.quantize(model, group_size, quantization["bits"], mode=mode, class_predicate=choice)
    return model
