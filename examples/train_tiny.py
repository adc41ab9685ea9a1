"""Trains a small Llama-shaped model on text that every Python brings, with our ops and their gradients.

`python examples/train_tiny.py --out tiny` writes tiny/dense and tiny/4bit in mlx-lm's format, for examples/generate.py
or mlx-lm itself, and tiny/loss.png. With --moe the model is a mixture of experts of Qwen3's kind, and there is
tiny/mxfp4 too. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import pathlib
import pydoc_data.topics
import re
import time

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama, qwen3_moe
from mlx_lm.utils import load_tokenizer, quantize_model, save
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import mlx_mittens as mm

VOCABULARY = 1024
END = "<|end|>"


def sample_text() -> str:
    """The language reference that `help()` shows: half a megabyte of English, its lines joined, without underlines."""
    text = "\n".join(pydoc_data.topics.topics.values())
    return " ".join(re.sub(r"[*=~^-]{3,}", " ", text).split())


def make_tokenizer(text: str, folder: pathlib.Path) -> Tokenizer:
    """A byte-level BPE of this text, saved as transformers reads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tokenizer


def make_config(arguments: argparse.Namespace, tokenizer: Tokenizer) -> dict:
    heads = arguments.width // 64
    config = {
        "model_type": "llama",
        "hidden_size": arguments.width,
        "num_hidden_layers": arguments.layers,
        "intermediate_size": 3 * arguments.width,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id(END),
    }
    if not arguments.moe:
        return config
    # As many weights for a token as the dense model has: half of its feed-forward for each of two experts.
    return config | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3 * arguments.width // 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def loss_of(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def train(model: nn.Module, tokens: np.ndarray, arguments: argparse.Namespace) -> list[float]:
    """Trains on random pieces of the text; the loss of each step."""
    rng = np.random.default_rng(arguments.seed)
    warmup = max(1, arguments.steps // 20)
    rate = optim.join_schedules(
        [
            optim.linear_schedule(0, arguments.rate, warmup),
            optim.cosine_decay(arguments.rate, arguments.steps - warmup),
        ],
        [warmup],
    )
    optimizer = optim.AdamW(learning_rate=rate, betas=[0.9, 0.95], weight_decay=0.01, bias_correction=True)
    gradient = nn.value_and_grad(model, loss_of)
    losses = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=arguments.steps)
        for _ in range(arguments.steps):
            starts = rng.integers(0, len(tokens) - arguments.length - 1, arguments.batch)
            batch = mx.array(np.stack([tokens[start : start + arguments.length + 1] for start in starts]))
            loss, gradients = gradient(model, batch)
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            optimizer.update(model, gradients)
            mx.eval(loss, model.parameters(), optimizer.state)
            losses.append(loss.item())
            bar.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
    return losses


def plot(losses: list[float], kind: str, path: pathlib.Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="#4c6a92")
    axes.axhline(math.log(VOCABULARY), color="black", linewidth=0.8, linestyle=":", label="a uniform guess")
    axes.set(xlabel="step", ylabel="loss, nats for a token", title=f"A small {kind} on the Python language reference")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tiny"), help="folder to write to")
    parser.add_argument("--text", type=pathlib.Path, help="a file to train on (Python's language reference)")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a piece of text")
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64: that is a head's width")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--moe", action="store_true", help="a mixture of 8 experts, of which each token takes 2")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="to save in")
    arguments = parser.parse_args()
    if arguments.width % 64 or arguments.width < 64:
        parser.error(f"--width {arguments.width}: expected a multiple of 64")
    text = arguments.text.read_text() if arguments.text else sample_text()

    mx.random.seed(arguments.seed)
    folder = arguments.out / "dense"
    tokenizer = make_tokenizer(text, folder)
    tokens = np.array(tokenizer.encode(text).ids, np.uint32)
    if len(tokens) <= arguments.length + 1:
        parser.error(f"the text has {len(tokens)} tokens: expected more than {arguments.length + 1}, one piece")
    config = make_config(arguments, tokenizer)
    architecture = qwen3_moe if arguments.moe else llama
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    print(f"{len(tokens)} tokens of text")

    mm.patch()
    start = time.perf_counter()
    losses = train(model, tokens, arguments)
    seconds = time.perf_counter() - start
    done = arguments.steps * arguments.batch * arguments.length
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {seconds:.0f} s, {done / seconds:.0f} tokens/s")
    print(mm.stats())

    plot(losses, "mixture of experts" if arguments.moe else "Llama", arguments.out / "loss.png")
    model.update(tree_map(lambda a: a.astype(getattr(mx, arguments.dtype)), model.parameters()))
    wrapped = load_tokenizer(folder)
    # Copies are saved and quantized: both take the model's weights away.
    save(folder, folder, copy.deepcopy(model), wrapped, config)
    written = [folder]
    for name, mode in (("4bit", "affine"), *([("mxfp4", "mxfp4")] if arguments.moe else [])):
        quantized, described = quantize_model(copy.deepcopy(model), config, None, None, mode=mode)
        save(arguments.out / name, folder, quantized, wrapped, described)
        written.append(arguments.out / name)
    print(f"wrote {', '.join(map(str, written))} and {arguments.out / 'loss.png'}")


if __name__ == "__main__":
    main()
