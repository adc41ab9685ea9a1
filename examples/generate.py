"""Generates with an mlx-lm model twice, on our kernels and on mx's, and shows the two side by side.

`python examples/generate.py tiny/4bit` runs the model of train_tiny.py; a name of the Hugging Face hub does as well.
On a CPU mx may take minutes for a token of a large model: its run ends after --mx-seconds. In the end it prints which
op ran on which executor, how often, and what went to mx.

    python examples/generate.py tiny/dense --draft tiny/4bit --kv-bits 8
    python examples/generate.py tiny/4bit --sampler temperature=0.7,top_k=40,top_p=0.95,min_p=0.01

A draft model proposes tokens that the model verifies; attention is exact then. On a CPU tokens are those of plain
decoding, but for mixtures of experts. On a GPU a token may be another, as products of several tokens round unlike those
of one. With a sampler the two runs draw different tokens, and are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load, sample_utils, stream_generate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import mlx_mittens as mm
from mlx_mittens.bench.streams import new_stream, on_stream


@dataclass
class Run:
    """What one run gave."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    drafted: int = 0
    ended: str = "in time"


# What each is read as, and the least and the most that it may be.
SAMPLER = {
    "temperature": (float, 0, float("inf")),
    "top_k": (int, 0, float("inf")),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
}


def sampler_options(text: str) -> dict[str, float]:
    """``temperature=0.7,top_k=40`` as numbers by name."""
    options = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if name not in SAMPLER or not equals:
            raise argparse.ArgumentTypeError(f"{part!r}: expected NAME=NUMBER, NAME one of {', '.join(SAMPLER)}")
        read, least, most = SAMPLER[name]
        try:
            options[name] = read(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r}: expected a number after {name}=") from None
        if not least <= options[name] <= most:
            raise argparse.ArgumentTypeError(f"{part!r}: expected {name} between {least} and {most}")
    if options and not options.get("temperature"):
        raise argparse.ArgumentTypeError("expected a temperature above 0, as in temperature=0.7")
    return options


def options_of(arguments: argparse.Namespace, draft: nn.Module | None) -> dict[str, Any]:
    """What mlx-lm is asked for beside the prompt; its sampler is that of the patch, if that is on."""
    options: dict[str, Any] = {"kv_bits": arguments.kv_bits, "quantized_kv_start": 0} if arguments.kv_bits else {}
    if draft:
        options["draft_model"] = draft
    if arguments.sampler:
        filters = dict(arguments.sampler)
        options["sampler"] = sample_utils.make_sampler(filters.pop("temperature"), **filters)
    return options


def generate(
    model: nn.Module,
    tokenizer,
    prompt: list[int],
    arguments: argparse.Namespace,
    options: dict[str, Any],
    title: str,
    seconds: float,
) -> Run:
    """Tokens, for so long at most."""
    run = Run()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=arguments.tokens)
        start = time.perf_counter()
        for response in stream_generate(model, tokenizer, prompt, max_tokens=arguments.tokens, **options):
            run.tokens.append(response.token)
            run.text += response.text
            run.prompt_tokens, run.prompt_tps = response.prompt_tokens, response.prompt_tps
            run.generation_tps = response.generation_tps
            run.drafted += response.from_draft
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
        count = f"{len(run.tokens)}, {run.drafted} drafted" if run.drafted else str(len(run.tokens))
        table.add_row(name, f"{run.prompt_tps:.1f}", f"{run.generation_tps:.1f}", count, run.ended)
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
    parser.add_argument("--kv-bits", type=int, choices=(2, 3, 4, 6, 8), help="quantize keys and values")
    parser.add_argument("--draft", help="a smaller model with the same tokenizer, whose tokens the model verifies")
    parser.add_argument(
        "--sampler", type=sampler_options, metavar="NAME=NUMBER,...", help=f"of {', '.join(SAMPLER)}; else greedy"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampler")
    parser.add_argument("--mx-seconds", type=float, default=120, help="mx's run ends after so long")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the tokens differ")
    arguments = parser.parse_args()
    if arguments.check and arguments.sampler:
        parser.error("--check compares greedy tokens: leave out --sampler")

    model, tokenizer = load(arguments.model)
    draft = load(arguments.draft)[0] if arguments.draft else None
    prompt = tokenizer.encode(arguments.prompt)
    runs = {}
    for name, context, seconds in (
        ("mlx_mittens", functools.partial(mm.patched, exact=draft is not None), float("inf")),
        ("mx", as_it_is, arguments.mx_seconds),
    ):
        # On one stream mx's run would use the graphs that mx.compile traced in ours, with our kernels.
        with context(), on_stream(new_stream()) as stream:
            options = {**options_of(arguments, draft), **stream}
            for _ in stream_generate(model, tokenizer, prompt, max_tokens=2, **options):  # compiles what it first uses
                pass
            mm.stats(reset=True)
            mx.random.seed(arguments.seed)
            runs[name] = generate(model, tokenizer, prompt, arguments, options, name, seconds)
        if name == "mlx_mittens":
            stats = mm.stats()
        mx.clear_cache()
    print(f"{arguments.prompt}{runs['mlx_mittens'].text}\n")
    show(runs)
    same = bool(arguments.sampler) or compare(model, prompt, *(run.tokens for run in runs.values()))
    print(f"\n{stats}")
    return 0 if same or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
