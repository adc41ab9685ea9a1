"""Generates with an mlx-lm model twice, on our kernels and on mx's, and shows the two side by side.

`python examples/generate.py tiny/4bit` runs the model of train_tiny.py; a name of the Hugging Face hub does as well.
On a CPU mx may take minutes for a token of a large model: its run ends after --mx-seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load, stream_generate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import mlx_mittens as mm


@dataclass
class Run:
    """What one run gave."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    ended: str = "in time"


def generate(
    model: nn.Module, tokenizer, prompt: list[int], arguments: argparse.Namespace, title: str, seconds: float
) -> Run:
    """Greedy tokens, for so long at most."""
    run = Run()
    options = {"kv_bits": arguments.kv_bits, "quantized_kv_start": 0} if arguments.kv_bits else {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=arguments.tokens)
        start = time.perf_counter()
        for response in stream_generate(model, tokenizer, prompt, max_tokens=arguments.tokens, **options):
            run.tokens.append(response.token)
            run.text += response.text
            run.prompt_tokens, run.prompt_tps = response.prompt_tokens, response.prompt_tps
            run.generation_tps = response.generation_tps
            bar.update(task, completed=len(run.tokens))
            if time.perf_counter() - start > seconds and len(run.tokens) < arguments.tokens:
                run.ended = f"after {seconds:g} s"
                break
    return run


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    yield


def show(runs: dict[str, Run]) -> None:
    table = Table("", "prompt, tokens/s", "generation, tokens/s", "tokens", "ended")
    for name, run in runs.items():
        table.add_row(name, f"{run.prompt_tps:.1f}", f"{run.generation_tps:.1f}", str(len(run.tokens)), run.ended)
    ours, theirs = runs.values()
    if theirs.generation_tps:
        table.add_row(
            "ratio", f"{ours.prompt_tps / theirs.prompt_tps:.2f}", f"{ours.generation_tps / theirs.generation_tps:.2f}"
        )
    Console().print(table)


def compare(model: nn.Module, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Says whether the tokens are the same, as far as both runs went, and if not which float32 takes."""
    common = min(len(ours), len(theirs))
    for i, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            model.set_dtype(mx.float32)
            logits = model(mx.array([prompt + ours[:i]]))[0, -1]
            ahead = (logits[a] - logits[b]).item()
            print(
                f"the first {i} of {common} tokens are the same; then {a} patched, {b} by mx: in float32 "
                f"{'ours' if ahead > 0 else 'that of mx'} is {abs(ahead):.1e} nats ahead"
            )
            return False
    print(f"the same {common} tokens")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", help="a folder in mlx-lm's format, or a name of the hub")
    parser.add_argument("--prompt", default="The for statement is used to iterate over the elements of a sequence")
    parser.add_argument("--tokens", type=int, default=200, help="to generate at most")
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="quantize keys and values")
    parser.add_argument("--mx-seconds", type=float, default=120, help="mx's run ends after so long")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the tokens differ")
    arguments = parser.parse_args()

    model, tokenizer = load(arguments.model)
    prompt = tokenizer.encode(arguments.prompt)
    runs = {}
    for name, context, seconds in (
        ("mlx_mittens", mm.patched, float("inf")),
        ("mx", as_it_is, arguments.mx_seconds),
    ):
        with context():
            for _ in stream_generate(model, tokenizer, prompt, max_tokens=2):  # kernels are compiled on first use
                pass
            mm.stats(reset=True)
            runs[name] = generate(model, tokenizer, prompt, arguments, name, seconds)
        if name == "mlx_mittens":
            stats = mm.stats()
        mx.clear_cache()
    print(f"{arguments.prompt}{runs['mlx_mittens'].text}\n")
    show(runs)
    same = compare(model, prompt, *(run.tokens for run in runs.values()))
    print(f"\n{stats}")
    return 0 if same or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
