"""Small models of mlx-lm's classes, for tests of whole models on our ops."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import mlx_mittens as mm
from mlx_mittens.bench import architectures

SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
}
_OWN = {
    "qwen2.5-0.5b": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "gemma-3-1b": {"sliding_window": 8, "sliding_window_pattern": 2},
    "gpt-oss-20b": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3-30b-a3b": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen3-next-80b-a3b": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"shared_expert_intermediate_size": 64, "full_attention_interval": 2},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    },
    "lfm2-1.2b": {
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "full_attn_idxs": [1]},
        **{"block_dim": 128, "block_ff_dim": 256, "block_auto_adjust_ff_dim": False},
    },
    "mamba2-2.7b": {"num_heads": 4, "state_size": 32},
}
FAMILIES = ["llama-3.2-1b", "qwen3-0.6b", "qwen2.5-0.5b", "gemma-3-1b", "gpt-oss-20b"]  # a class of mlx-lm each


def config(name: str) -> dict[str, Any]:
    """An architecture with few and small layers."""
    return {**architectures.ARCHITECTURES[name], **SMALL, **_OWN.get(name, {})}


def build(name: str, dtype: mx.Dtype, bits: int | None = None, **changes: Any) -> nn.Module:
    return architectures.build(name, dtype, bits, **{**config(name), **changes})


def build_varied(name: str, dtype: mx.Dtype, bits: int | None = None, **changes: Any) -> nn.Module:
    """The same with weights drawn for each layer: its texts vary, while `build`'s repeat one token."""
    model = build(name, dtype, **changes)
    matrices = [(path, a) for path, a in tree_flatten(model.parameters()) if a.ndim >= 2 and a.dtype == dtype]
    drawn = [(path, (mx.random.normal(a.shape) * 2 * a.shape[-1] ** -0.5).astype(dtype)) for path, a in matrices]
    model.update(tree_unflatten(drawn))
    if bits:
        nn.quantize(
            model, 64, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] >= 64
        )
    mx.eval(model.parameters())
    return model


def save(folder: Path, name: str, dtype: mx.Dtype, bits: int | None = None, make: Any = build, **changes: Any) -> Path:
    """Writes a small model in mlx-lm's format; its tokenizer has a token for each byte."""
    folder.mkdir()
    weights = dict(tree_flatten(make(name, dtype, bits, **changes).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    quantization = {"quantization": {"group_size": 64, "bits": bits}} if bits else {}
    (folder / "config.json").write_text(json.dumps({**config(name), **changes, **quantization}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tokens(model: nn.Module, prompt: list[int], count: int, **options: Any) -> list[int]:
    """The tokens that mlx-lm generates, greedily."""
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, **options)]


def logits_of_steps(model: nn.Module, prompt: mx.array, each: mx.array) -> list[mx.array]:
    """Of each token behind a prompt, one after another."""
    cache, found = make_prompt_cache(model), []
    mx.eval(model(prompt, cache=cache))
    for t in range(each.shape[1]):
        found.append(model(each[:, t : t + 1], cache=cache))
        mx.eval(found[-1])
    return found


def logits_of_each_way(model: nn.Module, prompt: mx.array, each: mx.array) -> list[list[mx.array]]:
    """As logits_of_steps: plain, patched, and converted, as the model then stays."""
    plain = logits_of_steps(model, prompt, each)
    with mm.patched():
        patched = logits_of_steps(model, prompt, each)
    mm.nn.convert(model)
    return [plain, patched, logits_of_steps(model, prompt, each)]


def token_and_launches(
    model: nn.Module,
    prompt: mx.array,
    token: mx.array,
    patched: AbstractContextManager[object] | None = None,
    simulated: AbstractContextManager[object] | None = None,
) -> tuple[mx.array, dict[str, int]]:
    """A token's logits behind a prompt, and how often kernels of each op ran for the token.

    Args:
        model: Is called with a cache of its own.
        prompt: Tokens before.
        token: The one that counts.
        patched: Around prompt and token.
        simulated: Around the token alone.
    """
    cache = make_prompt_cache(model)
    with patched or nullcontext():
        mx.eval(model(prompt, cache=cache))
        with simulated or nullcontext():
            mm.stats(reset=True)
            logits = model(token, cache=cache)
            mx.eval(logits)
    return logits, {op: sum(count["kernels"].values()) for op, count in mm.stats().items()}


def kernels(op: str) -> int:
    """How often kernels of an op ran since counting began, none of its calls having gone to mx."""
    counts = mm.stats().get(op, {"kernels": {}, "mx": {}})
    assert not counts["mx"], f"{op}: {counts['mx']}"
    return sum(counts["kernels"].values())
