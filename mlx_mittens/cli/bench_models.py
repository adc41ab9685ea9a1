"""Benchmark of whole models: decode and prefill of an architecture or of a user's model, on our kernels and on mx's.

Ours run twice: under `patched()`, and in a model that `nn.convert` has fused. We time mlx-lm's own generation
loop for decode, after a prompt that our kernels have processed for all; one call of the model for prefill. On a CPU mx
may take a minute for a token: it then gets fewer tokens, which is said. Where a token takes milliseconds the contenders
take turns, and the best of each one's counts: on a shared machine the host's part scatters.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..bench import architectures, llama_cpp, machine, model_folders
from ..bench.model_folders import ModelError
from ..bench.models import DTYPES, FORMATS, STEPS, Row, Subject, measure, published_layers
from ..table import Column, show
from . import bench_memory, bench_requests
from .completion import offer_list
from .options import UsageError, chosen
from .runs import Ending, JsonFile, each_saved, finish, progress

_COLUMNS = (
    Column("model", left=True),
    Column("weights", left=True),
    Column("dtype", left=True),
    Column("phase", left=True),
    Column("patched"),
    Column("converted", 3),
    Column("mx", 1),
    Column("patched/mx", 2),
    Column("converted/mx", 4),
    Column("mx timed", 5),
    Column("layers", 1),
)


def _cells(row: Row) -> list[str]:
    """A row as text, under `_COLUMNS`; where mx was given fewer tokens, or the model has fewer layers, how many."""
    ours = [f"{row.mittens.tokens_per_s:.4g}", f"{row.converted.tokens_per_s:.4g}"]
    if row.mx is None:
        theirs = ["cannot", "", "", ""]
    else:
        fewer = str(row.mx.tokens) if row.mx.tokens < row.mittens.tokens else ""
        theirs = [f"{row.mx.tokens_per_s:.3g}", f"{row.ratio:.2f}x", f"{row.converted_ratio:.2f}x", fewer]
    layers = f"{row.layers} of {row.published_layers}" if row.layers != row.published_layers else ""
    return [row.model, row.weights, row.dtype, row.phase, *ours, *theirs, layers]


# Defaults of the options that make no sense without --model.
DEFAULTS: dict[str, Any] = {
    "weights": "4-bit,8-bit,half",
    "dtype": "bfloat16",
    "layers": None,
    "prompt": 128,
    "tokens": 64,
    "seconds": 30.0,
    "memory": False,
    "requests": None,
    "kv_bits": None,
}


def given(arguments: argparse.Namespace) -> list[str]:
    """Which of these options were given."""
    return [name for name in DEFAULTS if name in vars(arguments)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the bench command for models."""
    group = parser.add_argument_group("whole models")
    names = ", ".join(architectures.ARCHITECTURES)
    model = group.add_argument(
        "--model",
        metavar="A,B",
        help=f"time these instead of ops: {names}, with random weights; folders or hub names of mlx-lm's models",
    )
    offer_list(model, lambda _: architectures.ARCHITECTURES)
    for name, what, more in (
        ("weights", "formats of random weights", {"metavar": "A,B"}),
        ("dtype", "of random weights that are not quantized", {"metavar": "A,B"}),
        ("layers", "of random weights at most", {"type": int}),
        ("prompt", "tokens of the prompt", {"type": int}),
        ("tokens", "tokens to decode at most", {"type": int}),
        ("seconds", "for one figure, about", {"type": float}),
    ):
        text = f"{what} ({DEFAULTS[name] or 'as many as half of the memory holds'})"
        group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text, **more)
    group.add_argument(
        "--memory",
        action="store_true",
        default=argparse.SUPPRESS,
        help="measure memory in the place of time, with caches of half types, 8 and 4 bits (a prompt of "
        f"{bench_memory.PROMPT} and {bench_memory.TOKENS} tokens)",
    )
    group.add_argument(
        "--requests",
        metavar="A,B",
        default=argparse.SUPPRESS,
        help="time these numbers of requests at once, beside requests one by one",
    )
    group.add_argument(
        "--kv-bits",
        metavar="A,B",
        default=argparse.SUPPRESS,
        help="with --requests: of quantized caches beside half ones",
    )


def run(arguments: argparse.Namespace, file: JsonFile) -> int:
    """Times the models that were asked for.

    Raises:
        UsageError: The arguments cannot be served.
    """
    options = argparse.Namespace(**{**DEFAULTS, **vars(arguments)})
    if min(options.prompt, options.tokens) < 2 or not options.seconds > 0:
        raise UsageError("--prompt and --tokens take 2 or more, --seconds more than 0")
    todo = _subjects(options)
    _check_layers(todo, options.layers)
    unused = [name for name in ("weights", "dtype", "layers") if name in vars(arguments)]
    if unused and not any(subject.weights for subject in todo):
        raise UsageError(f"--{unused[0]} is of random weights: {todo[0].model} has its own")
    _check_models(todo)
    if options.requests is not None:
        return bench_requests.run(arguments, options, todo, file)
    if options.kv_bits is not None:
        raise UsageError("--kv-bits goes with --requests")
    if options.memory:
        return bench_memory.run(arguments, todo, file)
    peer = _peer(options.peer, todo)
    info = machine.describe()
    info["versions"]["mlx_lm"] = model_folders.mlx_lm_version()
    print(machine.headline(info), flush=True)
    rows: list[Row] = []
    share: dict[str, dict[str, float]] = {}
    figures: list[llama_cpp.Figure] = []

    def save(ending: Ending | None) -> None:
        head = {"machine": info, **progress(ending, len(share), len(todo)), "shares": share}
        if peer:
            head["peer"] = [asdict(figure) for figure in figures]
        file.write(head, "rows", [json.dumps(_as_json(row)) for row in rows], last=ending is not None)

    def one(subject: Subject, step: Callable[[str], None]) -> None:
        new, parts = measure(subject, options.tokens, options.prompt, options.seconds, step)
        rows.extend(new)
        share[str(Subject(new[0].model, new[0].weights, new[0].dtype))] = parts
        if peer:
            figures.extend(llama_cpp.measure(*peer, prompt=options.prompt, tokens=options.tokens))
        mx.clear_cache()

    ending = each_saved(todo, one, str, save, arguments.minutes, STEPS * len(todo))
    if rows:
        print("tokens/s")
        show(_COLUMNS, [_cells(row) for row in rows], [""] * len(rows))
    for figure in figures:
        print(figure)
    for problem in dict.fromkeys(f"{row.model} {row.weights}: mx cannot: {row.problem}" for row in rows if row.problem):
        print(problem)
    if share:
        print("\nshare of a token's time, each op waited for:")
    for what, parts in share.items():
        print(f"  {what}: " + ", ".join(f"{label} {part:.0%}" for label, part in parts.items()))
    if not ending.complete:
        print(f"Incomplete: {len(share)} of {len(todo)} measured.")
    return finish("bench", ending, file, passed=True)


def _peer(name: str | None, subjects: Sequence[Subject]) -> tuple[str, Path] | None:
    """llama-bench and its file, where it is asked for; one file is of one model."""
    if name is None:
        return None
    if len(subjects) != 1:
        raise UsageError(
            f"--peer llama.cpp times one model in one format, that of {llama_cpp.MODEL}: --model, --weights and "
            f"--dtype name {len(subjects)}"
        )
    try:
        return llama_cpp.find()
    except llama_cpp.PeerError as error:
        raise UsageError(f"--peer llama.cpp: {error}") from None


def _subjects(options: argparse.Namespace) -> list[Subject]:
    """Models to time: each architecture in each format, and each model of the user's."""
    text = options.model
    names = [text] if os.path.isdir(text) else [name for part in text.split(",") if (name := part.strip())]
    formats = list(itertools.product(*_formats(options)))
    if not names or not all(map(_is_users, names)):
        try:
            chosen("--model", ",".join(name for name in names if not _is_users(name)), architectures.ARCHITECTURES)
        except UsageError as error:
            raise UsageError(f"{error}, folders and names on the Hugging Face hub") from None
    subjects: list[Subject] = []
    for name in names:
        subjects += [Subject(name)] if _is_users(name) else [Subject(name, *one, options.layers) for one in formats]
    return subjects


def _formats(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    return chosen("--weights", options.weights, FORMATS), chosen("--dtype", options.dtype, DTYPES)


def _is_users(name: str) -> bool:
    """Whether it is a folder or a name on the hub, instead of an architecture."""
    return name not in architectures.ARCHITECTURES and model_folders.is_one(name)


def _check_models(subjects: Sequence[Subject]) -> None:
    """Refuses to begin where the installed mlx-lm lacks a model."""
    for subject in subjects:
        try:
            version = model_folders.mlx_lm_version()
            if not subject.weights:
                model_folders.check(subject.model)
                continue
            module = f"mlx_lm.models.{architectures.ARCHITECTURES[subject.model]['model_type']}"
            if importlib.util.find_spec(module) is None:
                raise ModelError(f"mlx-lm {version} has no {module}")
        except ModelError as error:
            raise UsageError(f"--model {subject.model}: {error}") from None


def _check_layers(subjects: Sequence[Subject], layers: int | None) -> None:
    """Refuses a number of layers that a model cannot have."""
    if layers is None:
        return
    if layers < 1:
        raise UsageError(f"--layers {layers}: expected 1 or more")
    for name in {subject.model: None for subject in subjects if subject.weights}:
        period, published = architectures.period(name), published_layers(name)
        if layers < published and layers % period:
            raise UsageError(f"--layers {layers}: expected a multiple of {period} for {name}, whose layers take turns")


def _as_json(row: Row) -> dict[str, Any]:
    ratios = {"ratio": row.ratio, "converted_ratio": row.converted_ratio} if row.mx else {}
    return {**asdict(row), **ratios}
