"""Which kernels serve each model file of the installed mlx-lm: the tables of docs/models, a page for each kind.

Each file's model is built small and with random weights of 4 bits. It runs under the patch, and converted: a first
prompt, a second one, then a token, whose launches are those of an Apple GPU in the simulator.

python docs/models.py            prints them
python docs/models.py --write    writes them into the pages
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_mittens.prediction import mlx_graph, mlx_launches

PAGES = Path(__file__).resolve().parent / "models"
# The kinds of layers of a file's model, by the kernels that serve it; the first that is found.
KINDS = {
    "recurrent": re.compile(r"\b(gated_delta_\w+|ssm_\w+|short_conv_\w+)\b"),
    "mixtures": re.compile(r"\b(gather_\w+|route_top_k)\b"),
    "dense": re.compile(""),
}
PATTERN = re.compile(r"(?<=<!-- models: begin -->\n).*?(?=<!-- models: end -->)", re.S)

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


GPU = "m2-max"  # whose launches a token has
_OWN_KERNEL = "metal_kernel"  # a kernel that a model file brings
COPY = "copy"  # of an argument that a kernel cannot read as it lies


def of_mx(model: Any, caches: Any) -> collections.Counter[str]:
    """Launches of mx's for a token: on Metal a composed function is one, and views are none.

    It has what `mx.compile` fuses. Nothing is evaluated: a CPU would compile that as C++.
    """
    import mlx.core as mx

    found: collections.Counter[str] = collections.Counter()
    with mlx_graph.Recorder() as recorder:
        recorder.record(model(mx.array([[0]]), cache=caches), [one.state for one in caches])
    for operations, _ in recorder.evaluations:
        for operation in operations:
            if operation.name == "MittensMetalKernel":
                found[_OWN_KERNEL] += 1
            elif not operation.is_ours:
                planned = mlx_launches.plan(operation, operations)
                name = operation.name.removeprefix("mx.fast.")
                found[name] += len(planned) if isinstance(planned, tuple) else 1
    return +found


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


HOW = ("patched", "converted")
# Each prompt is longer than the windows. The first token after one may make room in the caches.
STEPS = (("first prompt", 9), ("prompt", 11), ("", 1), ("token", 1))


def measure(name: str) -> dict[str, Any]:
    """The kernels and operations of a model file's model, patched and converted, for prompts and for a token.

    Of each: launches of our kernels by op, operations of mx's for a token, and calls that went to mx with the reason.
    """
    import mlx_mittens as mm

    found: dict[str, Any] = {}
    for how in HOW:
        model = build(name)
        found["layers"] = len(model.layers)
        if how == "patched":
            with mm.patched():
                found[how] = _run(name, model)
        else:
            found[how] = _run(name, mm.nn.convert(model))
    return found


def called(name: str, model: Any, inputs: Any, caches: Any) -> Any:
    """Logits that are still to be computed: in the simulator run the kernels called in it, and ops evaluated in it."""
    import mlx_mittens as mm

    with mm.simulator.enabled(watch=False) if name in SIMULATED else contextlib.nullcontext():
        return model(inputs, cache=caches)


def token(model: Any, caches: Any) -> dict[str, dict[str, Any]]:
    """What a token launches on an Apple GPU: of ours by op, of mx's by operation, and why calls went to mx."""
    import mlx.core as mx

    import mlx_mittens as mm

    with mm.simulator.enabled(watch=False, gpu=GPU, pretend_metal=True):
        theirs = of_mx(model, copy.deepcopy(caches))
        mm.stats(reset=True)
        before = mm.simulator.launched()
        mx.disable_compile()
        try:
            mx.eval(model(mx.array([[0]]), cache=caches), [one.state for one in caches])
        finally:
            mx.enable_compile()
    stats = mm.stats(reset=True)
    ours = {op: sum(one["kernels"].values()) for op, one in sorted(stats.items()) if one["kernels"]}
    copies = mm.simulator.launched() - before - sum(ours.values()) - theirs[_OWN_KERNEL]
    if copies:
        ours[COPY] = copies
    return {
        "ours": ours,
        "mx": dict(sorted((+theirs).items())),
        "why": {op: sorted(one["mx"]) for op, one in sorted(stats.items()) if one["mx"]},
    }


def _run(name: str, model: Any) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm.models import cache

    import mlx_mittens as mm

    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    try:  # frequencies and weights of norms are computed once
        mx.eval(called(name, model, mx.array([[0, 1]]), cache.make_prompt_cache(model)))
    finally:
        mx.enable_compile()
    caches = cache.make_prompt_cache(model)
    found: dict[str, Any] = {}

    for kind, tokens in STEPS:
        inputs = mx.array([list(range(tokens))])
        if kind == "token":
            found[kind] = token(model, caches)
            continue
        mm.stats(reset=True)
        mx.disable_compile()  # on a CPU that would compile C++
        try:
            mx.eval(called(name, model, inputs, caches), [one.state for one in caches])
        finally:
            mx.enable_compile()
        stats = mm.stats(reset=True)
        if kind:
            found[kind] = {
                "ours": {op: sum(one["kernels"].values()) for op, one in sorted(stats.items()) if one["kernels"]}
            }
    return found


def measured(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The same of several files; of one that fails, why."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            results[name] = {"failed": LEFT_OUT[name]} if name in LEFT_OUT else measure(name)
        except (Exception, SystemExit) as error:  # one asks for a package and exits
            results[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:90]}
    return results


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{op} {n}" for op, n in counts.items())


def _mx_text(counts: dict[str, int]) -> str:
    """Operations of mx's, the most frequent first; fusions of mx.compile have the names of their parts."""
    fused = {op: n for op, n in counts.items() if op.startswith("Compiled")}
    plain = sorted(((op, n) for op, n in counts.items() if op not in fused), key=lambda one: (-one[1], one[0]))
    parts = [f"fused {sum(fused.values())}"] if fused else []
    return ", ".join(parts + [f"{op} {n}" for op, n in plain])


# In the place of a cell that says the same.
AS_FIRST, AS_PATCHED = "as the first", "as patched"
COLUMNS = (
    *("file", "first prompt", "prompt", "token", "converted: first prompt", "converted: prompt", "converted: token"),
    *("launches a layer", "converted", "of mx, a token", "converted", "why"),
)


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    if "failed" in found:
        why = f"not measured: {found['failed'].replace('|', '/')}"
        return f"| {' | '.join([name, *[''] * (len(COLUMNS) - 2), why])} |"
    kinds = [kind for kind, _ in STEPS if kind]
    ours = {how: [_counts(found[how][kind]["ours"]) for kind in kinds] for how in HOW}
    texts = {how: _mx_text(found[how]["token"]["mx"]) for how in HOW}
    converted = [AS_PATCHED if a == b else a for a, b in zip(ours["converted"], ours["patched"], strict=True)]
    for cells in (ours["patched"], converted):
        if cells[1] == cells[0] and cells[0] != AS_PATCHED:
            cells[1] = AS_FIRST
    launches = []
    for how in HOW:
        token = found[how]["token"]
        launches.append(f"{(sum(token['ours'].values()) + sum(token['mx'].values())) / found['layers']:.1f}")
    reasons = {op: why for how in HOW for op, why in found[how]["token"]["why"].items()}
    cells = [
        *(name, *ours["patched"], *converted, *launches, texts["patched"]),
        AS_PATCHED if texts["converted"] == texts["patched"] else texts["converted"],
        "; ".join(f"{op}: {', '.join(reasons[op])}" for op in sorted(reasons)),
    ]
    return f"| {' | '.join(cells)} |"


def made_with() -> str:
    """The line that names the versions that the table depends on."""
    return f"mlx-lm {importlib.metadata.version('mlx-lm')}, mlx {importlib.metadata.version('mlx')}."


def kind_of(line: str) -> str:
    """The page of a row."""
    return next(kind for kind, pattern in KINDS.items() if pattern.search(line))


def table(results: dict[str, dict[str, Any]], kind: str) -> str:
    """The table of a page."""
    lines = ["--:" if name in ("launches a layer", "converted") else "---" for name in COLUMNS]
    lines[COLUMNS.index("of mx, a token") + 1] = "---"
    heading = f"| {' | '.join(COLUMNS)} |\n|{'|'.join(lines)}|\n"
    rows = [row(name, results[name]) for name in sorted(results)]
    return f"{made_with()}\n\n{heading}" + "".join(f"{line}\n" for line in rows if kind_of(line) == kind)


def in_docs() -> str:
    """The tables as the pages have them."""
    texts = [(PAGES / f"{kind}.md").read_text() for kind in KINDS]
    return "".join(match[0] for text in texts if (match := PATTERN.search(text)))


def rows_of_pages() -> dict[str, dict[str, dict[str, str]]]:
    """The cells of each file's row, patched and converted, but for unmeasured ones."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in in_docs().splitlines()]
    rows = {}
    for line in lines:
        if len(line) < len(COLUMNS) or line[0] in ("file", "---") or not line[7]:
            continue
        patched = [*line[1:4], line[7], line[9]]
        patched[1] = patched[0] if patched[1] == AS_FIRST else patched[1]
        converted = [*line[4:7], line[8], line[10]]
        converted = [ours if cell == AS_PATCHED else cell for cell, ours in zip(converted, patched, strict=True)]
        converted[1] = converted[0] if converted[1] == AS_FIRST else converted[1]
        names = (*(kind for kind, _ in STEPS if kind), "launches a layer", "of mx, a token")
        rows[line[0]] = {
            how: dict(zip(names, cells, strict=True)) for how, cells in zip(HOW, (patched, converted), strict=True)
        }
    return rows


def counts_of(cell: str) -> dict[str, int]:
    """A cell of counts, as numbers by name."""
    return {op: int(n) for op, _, n in (part.rpartition(" ") for part in cell.split(", ") if part)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="model files; all by default")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/models")
    options = parser.parse_args()
    results = measured(options.files or files())
    for kind in KINDS:
        text, page = table(results, kind), PAGES / f"{kind}.md"
        if options.write:
            page.write_text(PATTERN.sub(lambda _, text=text: text, page.read_text()))
        else:
            print(text)


if __name__ == "__main__":
    main()
