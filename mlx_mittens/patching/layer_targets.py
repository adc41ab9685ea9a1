"""Layers of mlx-lm's models that the patch knows by the digest of their calls: states, mixtures, norms, attention."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _ext
from . import adapters, altup_layers, attention_layers, biased_routers, hyper_connections, recurrent_layers, routers
from .digests import digest, plain
from .target import Attempt, Target


@dataclass(frozen=True)
class _StateLayer:
    """A layer of mlx-lm's models that keeps states, known by the digest of its call.

    Attributes:
        op: Of ours, which computes a token between its projections. Prompts have others.
        attempt: Stands in for the call.
        text: The digest of the call.
        layers: Modules and classes that have it.
        parameters: Of the call.
        needs: Switches of the patch without which mlx-lm computes it.
    """

    op: str
    attempt: Attempt
    text: str
    layers: tuple[str, ...]
    parameters: tuple[str, ...] = ("self", "inputs", "mask", "cache")
    needs: tuple[str, ...] = ("rms_norm",)


_OF_HIDDEN_STATES = ("self", "hidden_states", "mask", "cache")
_STATE_LAYERS = (
    _StateLayer(
        "gated_delta_token",
        recurrent_layers.qwen3_next_delta,
        "0cdfe33557b5ff30",
        ("qwen3_next.Qwen3NextGatedDeltaNet",),
    ),
    _StateLayer("gated_delta_token", recurrent_layers.qwen3_5_delta, "ab4ea6085dd4ed44", ("qwen3_5.GatedDeltaNet",)),
    _StateLayer(
        "gated_delta_token",
        recurrent_layers.kimi_delta,
        "f3313d59a93c2dfe",
        ("kimi_linear.KimiDeltaAttention",),
        ("self", "x", "mask", "cache"),
    ),
    _StateLayer(
        "short_conv_token",
        recurrent_layers.lfm2_convolution,
        "014d36c50549ec90",
        ("lfm2.ShortConv", "lfm2_moe.ShortConv"),
        ("self", "x", "mask", "cache"),
        needs=(),
    ),
    _StateLayer(
        "ssm_token",
        recurrent_layers.mamba2_space,
        "6eea72843bb1b50f",
        ("mamba2.Mamba2Block",),
        _OF_HIDDEN_STATES,
    ),
    _StateLayer(
        "ssm_token",
        recurrent_layers.mamba2_space,
        "7e9d4648fce3eed5",
        ("granitemoehybrid.GraniteMoeHybridMamba2Mixer", "nemotron_h.NemotronHMamba2Mixer"),
        _OF_HIDDEN_STATES,
    ),
    _StateLayer(
        "ssm_token",
        recurrent_layers.falcon_h1_space,
        "50087509c036bf2b",
        ("falcon_h1.FalconH1Mixer",),
        ("self", "input_states", "cache", "mask"),
    ),
)

STATES = [
    Target(
        "recurrence",
        each.op,
        f"mlx_lm.models.{layer.partition('.')[0]}",
        f"{layer.partition('.')[2]}.__call__",
        each.attempt,
        each.parameters,
        optional=True,
        partial=True,  # not without a cache
        text=each.text,
        needs=each.needs,
    )
    for each in _STATE_LAYERS
    for layer in each.layers
]


# Mixtures of mlx-lm's models, by the digests of their calls.
_MIXTURES: tuple[tuple[Attempt, str, tuple[str, ...], tuple[str, ...]], ...] = (
    (routers.qwen3_mixture, "2a9a20a86d90a438", ("qwen3_moe.Qwen3MoeSparseMoeBlock",), ("self", "x")),
    (routers.qwen3_next_mixture, "0313c3d16a342105", ("qwen3_next.Qwen3NextSparseMoeBlock",), ("self", "x")),
    (routers.qwen2_mixture, "54e4f78f3734e168", ("qwen2_moe.Qwen2MoeSparseMoeBlock",), ("self", "x")),
    (routers.mixtral_mixture, "5cfd70c78b6a5528", ("mixtral.MixtralSparseMoeBlock",), ("self", "x")),
    (routers.olmoe_mixture, "b53932468e28e424", ("olmoe.OlmoeSparseMoeBlock",), ("self", "x")),
    (routers.gpt_oss_mixture, "5ead727eea53c6b9", ("gpt_oss.MLPBlock",), ("self", "x")),
    (routers.ernie_mixture, "b5c501d168204ec2", ("ernie4_5_moe.Ernie4_5_MoeMLP",), ("self", "x")),
    (routers.mellum_mixture, "320d35b3ff5b8a32", ("mellum.MellumSparseMoeBlock",), ("self", "x")),
    (routers.deepseek_gate, "b4c556f956e97230", ("deepseek.MoEGate",), ("self", "x")),
    (routers.deepseek_v2_gate, "f5c49a1d2678de7c", ("deepseek_v2.MoEGate",), ("self", "x")),
    (routers.deepseek_v2_mixture, "61457ba0a6bdd2e2", ("deepseek_v2.DeepseekV2MoE",), ("self", "x")),
    (
        routers.deepseek_v3_gate,
        "51d7e60aa00e0751",
        (
            *("deepseek_v3.MoEGate", "deepseek_v32.MoEGate", "dots1.Dots1TopkRouter", "exaone_moe.MoEGate"),
            *("glm4_moe.MoEGate", "glm4_moe_lite.MoEGate", "mimo_v2_flash.MoEGate", "nemotron_h.MoEGate"),
        ),
        ("self", "x"),
    ),
    (
        routers.deepseek_v3_mixture,
        "7dfae2f18c3a8b38",
        (
            *("deepseek_v3.DeepseekV3MoE", "deepseek_v32.DeepseekV32MoE", "glm4_moe.MoE"),
            "glm4_moe_lite.Glm4MoeLiteMoE",
        ),
        ("self", "x"),
    ),
    *(
        (routers.deepseek_v3_mixture, text, (name,), ("self", "x"))
        for text, name in (
            ("0aad2327addca86d", "dots1.Dots1MoE"),
            ("b6a2c566ef6080ac", "exaone_moe.MoE"),
            ("9c836a4a963ae066", "mimo_v2_flash.MoE"),
        )
    ),
    (routers.mistral4_mixture, "f1a994175c8705cd", ("mistral4.Mistral4MoE",), ("self", "x")),
    (
        routers.longcat_gate,
        "d607c77fa111e1a9",
        ("longcat_flash.LongcatFlashTopkRouter",),
        ("self", "hidden_states"),
    ),
    (
        routers.longcat_mixture,
        "0e7997ba34edcee8",
        ("longcat_flash.LongcatFlashMoE",),
        ("self", "hidden_states"),
    ),
    (routers.kimi_mixture, "b153316c706de4c2", ("kimi_linear.KimiSparseMoE",), ("self", "x")),
    (routers.kimi_k3_mixture, "a6949ed9b98a3189", ("kimi_k3.KimiK3SparseMoE",), ("self", "x")),
    (routers.minimax_m3_mixture, "60e4dd62573daafe", ("minimax_m3_vl.SparseMoeBlock",), ("self", "x")),
    (routers.hunyuan_mixture, "3d542a5fbd317857", ("hunyuan.MoeBlock",), ("self", "x")),
    (routers.jamba_mixture, "fead3b54d74b131c", ("jamba.JambaSparseMoeBlock",), ("self", "x")),
    (routers.phimoe_mixture, "cdb0195f90024448", ("phimoe.PhiMoESparseMoeBlock",), ("self", "x")),
    (routers.phixtral_mixture, "8ae96b633d717cea", ("phixtral.MOE",), ("self", "x")),
    (routers.llama4_mixture, "d2276a16af8964fe", ("llama4.MoE",), ("self", "x")),
    (routers.dbrx_mixture, "2de8dc6bcada89f6", ("dbrx.SparseMoeBlock",), ("self", "x")),
    (routers.deepseek_mixture, "07a50cd2b1df68d4", ("deepseek.DeepseekMoE",), ("self", "x")),
    (routers.granite_mixture, "71f00967730d3348", ("granitemoe.GraniteMoeMoE",), ("self", "x")),
    (routers.granite_mixture, "cb99f9fd5c8c4639", ("granitemoehybrid.GraniteMoeHybridMoE",), ("self", "x")),
    (biased_routers.afmoe_mixture, "a433008237ef48e4", ("afmoe.AfmoeMoE",), ("self", "x")),
    (biased_routers.klear_mixture, "f8dfe9022ed22447", ("Klear.KlearSparseMoeBlock",), ("self", "x")),
    (biased_routers.laguna_mixture, "ec12bfdbc447a208", ("laguna.MoE",), ("self", "x")),
    (biased_routers.minimax_mixture, "b449cbba82572136", ("minimax.MiniMaxSparseMoeBlock",), ("self", "x")),
    (biased_routers.bailing_mixture, "de1de1870607f93f", ("bailing_moe.BailingMoeSparseMoeBlock",), ("self", "x")),
    (
        biased_routers.bailing_mixture,
        "9e130ffaea557bd3",
        ("bailing_hybrid.SparseMoeBlock", "bailing_moe_linear.SparseMoeBlock"),
        ("self", "x"),
    ),
    (biased_routers.bailing_v3_mixture, "87ede31980e74198", ("bailing_moe_v3.BailingSparseMoE",), ("self", "x")),
    (biased_routers.lfm2_mixture, "a049723bb0f541af", ("lfm2_moe.Lfm2MoeSparseMoeBlock",), ("self", "x")),
    (biased_routers.step_mixture, "6f182d745aed50e0", ("step3p5.Step3p5MoE",), ("self", "x")),
    (biased_routers.nemotron_mixture, "a075435a5c60fca5", ("nemotron_h.NemotronHMoE",), ("self", "x")),
    (hyper_connections.deepseek_v41_mixture, "ee3c6e112c891232", ("deepseek_v41.MoE",), ("self", "x")),
    (
        routers.granite_gate,
        "3fc5b5c918b88f8f",
        ("granitemoe.GraniteMoeTopKGating",),
        ("self", "hidden_states"),
    ),
    (
        routers.granite_hybrid_gate,
        "e593c4112bc047e7",
        ("granitemoehybrid.GraniteMoeHybridTopKGating",),
        ("self", "hidden_states"),
    ),
)

MIXTURES = [
    Target(
        "router",
        "route_top_k",
        f"mlx_lm.models.{mixture.partition('.')[0]}",
        f"{mixture.partition('.')[2]}.__call__",
        attempt,
        parameters,
        optional=True,
        partial=True,  # not groups of experts, and no sharded layers
        text=text,
    )
    for attempt, text, mixtures, parameters in _MIXTURES
    for mixture in mixtures
]


def mixture_of(base: type) -> Attempt | None:
    """The function that computes the call of a class of mixtures or routers, if that is known."""
    text = digest(plain(base.__call__))
    return next((attempt for attempt, known, _, _ in _MIXTURES if text == known), None)


# Norms of mlx-lm's models whose scale is 1 + weight, by the digests of their calls.
_OFFSET_NORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (adapters.OFFSET_NORM, ("gemma.RMSNorm", "gemma2.RMSNorm", "gemma3_text.RMSNorm", "recurrent_gemma.RMSNorm")),
    (adapters.OFFSET_NORM, ("muse_glimmer.CenteredRMSNorm",)),
    ("f76fa6adf0a299f2", ("minimax_m3_vl.GemmaRMSNorm",)),
    (adapters.GEAR_NORM, ("gear.GearRMSNorm",)),
)

NORMS = [
    Target(
        "rms_norm",
        "rms_norm",
        f"mlx_lm.models.{norm.partition('.')[0]}",
        f"{norm.partition('.')[2]}.__call__",
        adapters.gear_norm if text == adapters.GEAR_NORM else _ext.try_offset_rms_norm_layer,
        ("self", "x"),
        optional=True,
        partial=True,  # mx.fast.rms_norm computes the rest
        text=text,
    )
    for text, norms in _OFFSET_NORMS
    for norm in norms
]


GEMMA = [
    Target(
        "rms_norm",
        "rms_norm",
        "mlx_lm.models.gemma3_text",
        "TransformerBlock.__call__",
        adapters.gemma3_block,
        ("self", "x", "mask", "cache"),
        optional=True,
        partial=True,  # not where norms or the sum are others
        text="b4f558b84aa97783",
    ),
    Target(
        "softcap",
        "softcap",
        "mlx_lm.models.gemma2",
        "Model.__call__",
        adapters.gemma2_logits,
        ("self", "inputs", "cache"),
        optional=True,
        text="e7841159ea6a3916",
    ),
]


# Attention layers of mlx-lm's models, by the digests of their calls: of Llama's kind first, then with norms of heads.
_LAYERS: tuple[tuple[Attempt, tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        _ext.try_attention_layer,
        ("cache", "scaled_dot_product_attention"),
        "0bc66a8672d86d63",
        (
            *("ernie4_5.Attention", "ernie4_5_moe.Attention", "gemma.Attention", "glm4.Glm4Attention"),
            *("granite.Attention", "granitemoe.GraniteMoeAttention", "helium.HeliumAttention", "internlm3.Attention"),
            *("llama.Attention", "mimo.Attention", "phimoe.Attention", "qwen2.Attention", "qwen2_moe.Attention"),
            *("seed_oss.Attention", "starcoder2.Attention"),
        ),
    ),
    (
        _ext.try_normed_attention_layer,
        ("cache", "scaled_dot_product_attention", "rms_norm"),
        "f20832211537a64d",
        ("dots1.Dots1Attention", "mellum.Attention", "qwen3.Attention", "qwen3_moe.Attention"),
    ),
    (
        _ext.try_lfm2_attention_layer,
        ("cache", "scaled_dot_product_attention", "rms_norm"),
        "03e9b59a6810ee67",
        ("lfm2.Attention", "lfm2_moe.Attention"),
    ),
    (
        attention_layers.qwen3_next_attention,
        ("cache", "scaled_dot_product_attention"),
        "154f0bf2a90459fb",
        ("qwen3_next.Qwen3NextAttention",),
    ),
    (
        attention_layers.gemma3_attention,
        ("cache", "scaled_dot_product_attention"),
        "2258d2b3a5d51489",
        ("gemma3_text.Attention",),
    ),
    (
        attention_layers.latent_attention,
        ("cache", "scaled_dot_product_attention"),
        "ce254d7b6c0cc43b",
        ("deepseek_v3.DeepseekV3Attention", "glm4_moe_lite.Glm4MoeLiteAttention"),
    ),
    *(
        (attention_layers.expanded_latent_attention, ("cache", "scaled_dot_product_attention"), text, layers)
        for text, layers in (
            ("9a022e43b1ae9287", ("deepseek_v2.DeepseekV2Attention", "youtu_llm.YoutuLLMAttention")),
            ("62b8d73446fda38f", ("minicpm3.Attention",)),
        )
    ),
    (
        attention_layers.sparse_latent_attention,
        ("cache", "scaled_dot_product_attention"),
        "852b38816ced0304",
        ("deepseek_v32.DeepseekV32Attention",),
    ),
    (
        attention_layers.kimi_latent_attention,
        ("cache", "scaled_dot_product_attention"),
        "b0898c86fdec7259",
        ("kimi_linear.KimiMLAAttention",),
    ),
    (
        attention_layers.kimi_k3_attention,
        ("cache", "scaled_dot_product_attention"),
        "ff8b5837fbd60545",
        ("kimi_k3.KimiK3MLAAttention",),
    ),
    (
        attention_layers.minimax_m3_attention,
        ("cache", "scaled_dot_product_attention"),
        "4bef3ecd2f588d39",
        ("minimax_m3_vl.Attention",),
    ),
    (
        attention_layers.longcat_attention,
        ("cache", "scaled_dot_product_attention"),
        "552eb8266e484353",
        ("longcat_flash.LongcatFlashMLA",),
    ),
    (
        attention_layers.gpt_oss_attention,
        ("cache", "scaled_dot_product_attention"),
        "666f870329209924",
        ("gpt_oss.AttentionBlock",),
    ),
)


ATTENTION = [
    Target(
        "attention_layer",
        "attention_layer",
        f"mlx_lm.models.{layer.partition('.')[0]}",
        f"{layer.partition('.')[2]}.__call__",
        attempt,
        ("self", "x", "mask", "cache"),
        optional=True,
        partial=True,  # one token with a plain cache
        text=text,
        needs=needs,
    )
    for attempt, needs, text, layers in _LAYERS
    for layer in layers
]

ATTENTION += [
    Target(
        "attention_layer",
        "attention_layer",
        "mlx_lm.models.gemma3n",
        "Gemma3nDecoderLayer.__call__",
        altup_layers.gemma3n_layer,
        ("self", "x", "mask", "cache", "per_layer_input", "offset"),
        optional=True,
        partial=True,  # one token with a cache
        text="acef24d9337512ef",
        needs=("cache", "scaled_dot_product_attention"),
    )
]

ATTENTION += [
    Target(
        "attention_layer",
        "index_scores",
        "mlx_lm.models.deepseek_v32",
        "Indexer.__call__",
        attention_layers.chosen_keys,
        ("self", "x", "qr", "mask", "cache"),
        optional=True,
        partial=True,  # a token of each row that sees more keys than it chooses
        text="32abbbcdb19a3967",
    )
]

ATTENTION += [
    Target(
        "swiglu",
        "quantized_swiglu",
        "mlx_lm.models.gemma3n",
        "MLP.__call__",
        altup_layers.gemma3n_mlp,
        ("self", "x"),
        optional=True,
        partial=True,  # prompts of layers that keep few activations
        text="3aae8c564396e9f3",
    )
]

# Functions and layers of deepseek_v41, by their digests.
_STREAMS: tuple[tuple[str, Attempt, str, tuple[str, ...]], ...] = (
    ("_collapse", hyper_connections.collapsed, "f4180e5272d67f2b", ("streams", "mix")),
    ("_expand", hyper_connections.expanded, "b99ed4d57a7aeadb", ("x", "residual", "post", "comb")),
    (
        "_apply_rope",
        hyper_connections.turned,
        "f668d10bce947c18",
        ("x", "rope", "rope_dim", "offset", "scale", "inverse"),
    ),
    ("_fake_quant_fp8", hyper_connections.fp8_rounded, "cf3de7145cad1982", ("x", "block_size")),
    ("_gather_rows", hyper_connections.gathered_rows, "0e1abb0f0ce90065", ("values", "indices")),
    ("HyperConnection.__call__", hyper_connections.hyper_connection, "e35fc10b50ee4608", ("self", "streams")),
    ("DeepseekV41SwiGLU.__call__", hyper_connections.clamped_swiglu, "a3274420f620f3c1", ("self", "up", "gate")),
)

ATTENTION += [
    Target(
        "attention_layer",
        "attention_layer",
        "mlx_lm.models.deepseek_v41",
        path,
        attempt,
        parameters,
        optional=True,
        partial=True,  # other shapes and types
        text=text,
        needs=("rms_norm", "softmax"),
    )
    for path, attempt, text, parameters in _STREAMS
]
