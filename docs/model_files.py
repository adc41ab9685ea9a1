"""mlx-lm's model files as small models with random weights of 4 bits: docs/models and tests run them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import typing
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 28

# Sizes by the names that model files give them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dim", "d_model", "n_embd", "model_dim", "embedding_dim", "emb_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "mlp_hidden_size", "d_ff", "n_inner"), 256),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_key_value_groups"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "head_size"), 64),
    **dict.fromkeys(("vocab_size", "n_vocab"), 320),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon"), 1e-5),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rotary_base", "rope_base"), 1e4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_router_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_hidden_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "use_bias", "qkv_bias", "use_qkv_bias"), False),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob"), True),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 64),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "qk_rope_head_dim": 32,
    "rotary_pct": 0.5,
    "partial_rotary_factor": 1.0,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "sliding_window_pattern": 2,
    "hidden_act": "silu",
    "logit_scale": 1.0,
    "rope_scaling": None,
}


_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {
    **{"type": "yarn", "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "rope_theta": 1e4},
    "llama_4_scaling_beta": 0.1,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_LFM2 = {
    **{"full_attn_idxs": [1, 3], "conv_L_cache": 3, "conv_bias": False, "block_ff_dim": 256, "block_dim": 128},
    **{"block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 64},
}
_LONGCAT = {
    **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity", "attention_method": "MLA"},
    **{"ffn_hidden_size": 256, "expert_ffn_hidden_size": 64, "zero_expert_num": 2, "num_layers": 4},
}
_INDEXER = {"index_head_dim": 64, "index_n_heads": 4, "index_topk": 8}  # of fewer keys than a token sees
_KIMI_LINEAR = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 64}
_GEMMA4 = {
    **{"layer_types": _ALTERNATING, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 320},
    **{"hidden_size_per_layer_input": 64, "global_head_dim": 128, "num_global_key_value_heads": 1},
}

# Fields of single files, and of the text configurations in them.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("afmoe", "exaone_moe"), {"layer_types": _ALTERNATING, "is_moe_layer": [False, True] * 2}),
    **dict.fromkeys(("deepseek_v2", "kimi_k25"), {"rope_scaling": _YARN}),
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    **dict.fromkeys(("lfm2", "lfm2-vl"), _LFM2),
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), _LONGCAT),
    **dict.fromkeys(("ministral3", "mistral4"), {"rope_parameters": _YARN}),
    # Tied embeddings of these are multiplied as they are stored, which quantized ones cannot be.
    **dict.fromkeys(("minicpm", "seed_oss"), {"head_dim": 32, "tie_word_embeddings": False}),
    "afm7": {"num_layers": 4, "num_kv_reuse_layers": 1},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2, "tie_word_embeddings": False},
    "bitnet": {"head_dim": 32},
    "cohere2": {"head_dim": 32},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v32": _INDEXER,
    "exaone": {"head_dim": 32, "num_layers": 4},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "gemma3n": {
        **{"layer_types": _ALTERNATING, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.95, 0, 0]},
        **{"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 320, "rope_local_base_freq": 1e4},
        **{"altup_num_inputs": 4, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0},
        **{"laurel_rank": 64, "final_logit_softcapping": 30.0},
    },
    "glm_moe_dsa": {
        **{"rope_parameters": _ROPE, **_INDEXER},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    },
    "gptj": {"rotary_dim": 32},
    "granitemoehybrid": {
        **{"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 256, "mamba_n_heads": 4},
        **{"mamba_d_head": 64, "mamba_proj_bias": False, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1},
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        **{"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "use_qk_norm": True},
        **{"use_mixed_mlp_moe": True, "num_shared_expert": 1, "use_cla": True, "cla_share_factor": 2},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": {
        **{"hidden_act": "situ", "num_experts_per_token": 2, "num_shared_experts": 1, "attn_res_block_size": 2},
        "linear_attn_config": {**_KIMI_LINEAR, "short_conv_kernel_size": 4},
    },
    "kimi_linear": {"linear_attn_config": {**_KIMI_LINEAR, "short_conv_kernel_size": 4}},
    "lfm2_moe": {"full_attn_idxs": [1, 3], "conv_L_cache": 3},
    "llama4": {
        **{"attention_chunk_size": 8, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 256},
        **{"use_qk_norm": True, "num_experts_per_tok": 1},
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0], "intermediate_size_mlp": 256, "tie_word_embeddings": False},
    "mamba2": {"time_step_limit": (0.0, 1e9), "intermediate_size": 256, "n_groups": 1, "state_size": 16},
    "mellum": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {"full_attention": _YARN, "sliding_attention": _ROPE},
    },
    "mimo_v2_flash": {
        **{"moe_layer_freq": [0, 1, 1, 1], "hybrid_layer_pattern": [0, 1, 0, 1], "swa_num_attention_heads": 4},
        **{"swa_num_key_value_heads": 2, "swa_head_dim": 64, "swa_v_head_dim": 64, "swa_rope_theta": 1e4},
        **{"add_swa_attention_sink_bias": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    },
    "minicpm3": {
        "rope_scaling": {
            **{"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 16},
            "original_max_position_embeddings": 256,
        }
    },
    "minimax_m3_vl": {
        **{"moe_layer_freq": [0, 1, 1, 1], "dense_intermediate_size": 256, "shared_intermediate_size": 64},
        **{"index_n_heads": 2, "index_head_dim": 64, "index_block_size": 4, "index_topk_blocks": 2},
        **{"rotary_dim": 32, "rope_parameters": None, "layer_types": None, "mlp_layer_types": None},
    },
    "muse_spark": {
        **{"layer_types": _ALTERNATING, "layer_rope_theta": [1e4, 0, 1e4, 0], "rope_parameters": _ROPE},
        **{"post_norm_eps": 1e-5, "final_logit_softcapping": 30.0, "output_multiplier": 1.0, "moe_hidden_size": 64},
        **{"num_shared_experts": 0},
    },
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}] * 3
        + [{"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}}]
    },
    "nemotron_h": {
        **{"hybrid_override_pattern": ["M", "*", "E", "-"], "mamba_num_heads": 4, "mamba_head_dim": 64},
        **{"ssm_state_size": 16, "n_groups": 1, "moe_shared_expert_intermediate_size": 64},
    },
    "openelm": {
        **{"num_query_heads": [4] * 4, "num_kv_heads": [2] * 4, "ffn_multipliers": [2.0] * 4},
        "ffn_dim_divisor": 64,
    },
    # Logits of fixed tokens are set to -inf.
    "phi3small": {"ff_intermediate_size": 256, "dense_attention_every_n_layers": 2, "vocab_size": 100352},
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        **{"schema_version": 1, "tensor_namespace": "mlx-lm-text", "num_experts": 0, "intermediate_size": 512},
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": f"model.layers.{i}.mlp.{name}_proj", "embedding": False, "dtype": "float16", "block": block}
            for i in range(4)
            for name, block in (("gate", 0), ("up", 0), ("down", 512))
        ],
    },
    "qwen": {"kv_channels": 32, "intermediate_size": 512},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "logits_soft_cap": 30.0},
    "spark2_5": {
        **{"layer_types": _ALTERNATING, "hidden_act": "gelu"},
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "step3p5": {
        **{"layer_types": _ALTERNATING, "num_attention_groups": 2, "moe_top_k": 2, "moe_intermediate_size": 64},
        "share_expert_dim": 64,
    },
}

# Files that are not measured.
LEFT_OUT = {"olmo": "it needs the package ai2-olmo"}
# Files with kernels of their own, for mx.fast.metal_kernel: these run in the simulator, all else as on any CPU.
SIMULATED = {"bitnet", "muse_spark"}

TEXT_MODELS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4_text",
    "lfm2-vl": "lfm2",
    "llama4": "llama4_text",
    "mistral3": "llama",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


def files() -> list[str]:
    """The model files that have a model of their own."""
    import mlx_lm.models as models

    names = sorted(module.name for module in pkgutil.iter_modules(models.__path__) if not module.ispkg)
    texts = {name: (Path(models.__path__[0]) / f"{name}.py").read_text() for name in names}
    return [name for name in names if "class Model(" in texts[name] and "class ModelArgs" in texts[name]]


def arguments(cls: Any, name: str) -> Any:
    """The arguments of a small model, by the names of its fields."""
    types = typing.get_type_hints(cls)
    given = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.name == "model_type":
            given[field.name] = name
        elif field.name in OWN.get(name, {}):
            given[field.name] = OWN[name][field.name]
        elif field.name == "text_config":
            given[field.name] = {**SIZES, "model_type": TEXT_MODELS.get(name, name), **OWN.get(name, {})}
        elif field.name in SIZES:
            given[field.name] = SIZES[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            given[field.name] = {int: 4, float: 1.0, bool: False, str: "silu"}.get(types[field.name])
    return cls(**given)


def is_quantized(model: Any, path: str, part: Any) -> bool | dict[str, Any]:
    """Whether mlx-lm quantizes a part of a model, and how."""
    if not hasattr(part, "to_quantized") or part.weight.shape[-1] % 64 != 0:
        return False
    if "mode" not in inspect.signature(part.to_quantized).parameters:
        return False  # afm7's layers of one weight cannot be quantized by mlx 0.32
    chooses = getattr(model, "quant_predicate", None)
    return True if chooses is None else chooses(path, part)


def build(name: str, dtype: Any = None) -> Any:
    """The small model of a file, in float16 by default."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_unflatten

    mx.random.seed(0)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(arguments(module.ModelArgs, name))
    size = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    if size > MOST_BYTES:
        raise ValueError(f"its parameters take {size >> 20} MB: the table of sizes lacks some of its fields")
    cast = getattr(model, "cast_predicate", lambda _: True)  # what mlx-lm casts where it converts a model
    for key, value in tree_flatten(model.parameters()):
        if cast(key) and mx.issubdtype(value.dtype, mx.floating):
            model.update(tree_unflatten([(key, value.astype(dtype or mx.float16))]))
    nn.quantize(model, 64, 4, class_predicate=lambda path, part: is_quantized(model, path, part))
    mx.eval(model.parameters())
    return model.eval()  # as mlx-lm loads one
