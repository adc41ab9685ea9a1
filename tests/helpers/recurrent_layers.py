"""Small layers of mlx-lm's models that keep a state."""

from mlx_lm.models import cache as caches
from mlx_lm.models import (
    falcon_h1,
    granitemoehybrid,
    kimi_linear,
    mamba2,
    nemotron_h,
    qwen3_5,
    qwen3_next,
)

WIDTH = 64

NEXT = {
    **{"model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 96, "rope_theta": 1e4},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 24},
    **{"linear_conv_kernel_dim": 4, "num_experts": 0, "num_experts_per_tok": 0, "decoder_sparse_step": 1},
    **{"shared_expert_intermediate_size": 64, "mlp_only_layers": [0, 1], "moe_intermediate_size": 64},
    **{
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512,
        "full_attention_interval": 2,
    },
}


def next_layer():
    return qwen3_next.Qwen3NextGatedDeltaNet(qwen3_next.ModelArgs.from_dict(NEXT))


def layer_of_5():
    return qwen3_5.GatedDeltaNet(qwen3_5.TextModelArgs.from_dict({**NEXT, "model_type": "qwen3_5"}))


KIMI = {
    **{"model_type": "kimi_linear", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64, "rope_theta": 1e4},
    **{"rms_norm_eps": 1e-6, "model_max_length": 512, "num_experts": 0, "moe_intermediate_size": 64},
    **{"kv_lora_rank": 64, "linear_attn_config": {"kda_layers": [1, 2], "num_heads": 2, "head_dim": 24}},
}


def kimi_layer():
    return kimi_linear.KimiDeltaAttention(kimi_linear.ModelArgs.from_dict(KIMI), 0)


LAYERS_OF = {"qwen3_next": next_layer, "qwen3_5": layer_of_5, "kimi_linear": kimi_layer}


def is_kimi(layer):
    return isinstance(layer, kimi_linear.KimiDeltaAttention)


def norm_name(layer):
    return "o_norm" if is_kimi(layer) else "norm"


def empty_cache(layer):
    """A state of the heads, behind the states of convolutions."""
    return caches.ArraysCache(size=4 if is_kimi(layer) else 2)


class Arguments:
    """The part of a model's arguments that a layer reads."""

    def __init__(self, **values):
        vars(self).update(values)


def convolution(module, bias):
    return module.ShortConv(Arguments(conv_L_cache=3, conv_bias=bias, hidden_size=WIDTH), 0)


def mamba(groups=1, bias=True):
    given = Arguments(
        **{"num_heads": 4, "head_dim": 24, "hidden_size": WIDTH, "ssm_state_size": 32, "conv_kernel": 4},
        **{"n_groups": groups, "use_bias": bias, "use_conv_bias": bias, "time_step_limit": (0.0, float("inf"))},
        layer_norm_epsilon=1e-5,
    )
    return mamba2.Mamba2Block(given, 0)


def granite():
    given = Arguments(
        **{"mamba_n_heads": 4, "mamba_d_head": 24, "hidden_size": WIDTH, "mamba_d_state": 32, "mamba_d_conv": 4},
        **{"mamba_n_groups": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "rms_norm_eps": 1e-5},
        time_step_limit=(0.001, 0.1),
    )
    return granitemoehybrid.GraniteMoeHybridMamba2Mixer(given)


def nemotron():
    given = Arguments(
        **{"mamba_num_heads": 4, "mamba_head_dim": 24, "hidden_size": WIDTH, "ssm_state_size": 32, "conv_kernel": 4},
        **{"n_groups": 2, "use_conv_bias": True, "mamba_proj_bias": False, "layer_norm_epsilon": 1e-5},
        time_step_limit=(0.0, 1.0),
    )
    return nemotron_h.NemotronHMamba2Mixer(given)


def falcon(norm=True, before=False):
    given = Arguments(
        **{"mamba_n_heads": 4, "mamba_d_head": 24, "hidden_size": WIDTH, "mamba_d_state": 32, "mamba_d_conv": 4},
        **{"mamba_d_ssm": 96, "mamba_n_groups": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
        **{"rms_norm_eps": 1e-5, "mamba_rms_norm": norm, "mamba_norm_before_gate": before, "projectors_bias": False},
        mamba_chunk_size=8,
    )
    return falcon_h1.FalconH1Mixer(given)
