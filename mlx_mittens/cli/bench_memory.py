"""Benchmark of memory: what a prompt and the tokens after it take with caches of half types, 8 and 4 bits."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict

from ..bench import machine, model_folders
from ..bench.memory import CACHES, SIDES, Row, measure
from ..bench.models import Subject
from ..table import Column, show
from .options import UsageError
from .runs import Ending, JsonFile, each_saved, finish, progress

_COLUMNS = (
    Column("model", left=True),
    Column("cache", left=True),
    Column("side", left=True),
    Column("weights", 3),
    Column("prompt peak", 1),
    Column("resident peak", 2),
    Column("tokens peak", 1),
    Column("resident", 2),
)

# Where they are not given.
PROMPT, TOKENS = 32768 - 200, 200


def _cells(row: Row) -> list[str]:
    """A row as text, under `_COLUMNS`."""
    head = [row.model, row.cache, row.side]
    if row.prompt is None or row.tokens is None:
        return [*head, "cannot", *[""] * 4]
    figures = (row.loaded, row.prompt.peak, row.prompt.resident_peak, row.tokens.peak, row.tokens.resident)
    return head + [f"{figure / 1e6:.0f}" for figure in figures]


def run(arguments: argparse.Namespace, subjects: Sequence[Subject], file: JsonFile) -> int:
    """Measures the models, each with each kind of cache.

    Raises:
        UsageError: The arguments cannot be served.
    """
    if arguments.peer is not None or "seconds" in vars(arguments):
        raise UsageError(f"--{'peer' if arguments.peer else 'seconds'} does not go with --memory, which times nothing")
    prompt, tokens = (vars(arguments).get(name, at) for name, at in (("prompt", PROMPT), ("tokens", TOKENS)))
    info = machine.describe()
    info["versions"]["mlx_lm"] = model_folders.mlx_lm_version()
    print(machine.headline(info), flush=True)
    todo = list(itertools.product(subjects, CACHES, SIDES))
    rows: list[Row] = []

    def save(ending: Ending | None) -> None:
        head = {"machine": info, **progress(ending, len(rows), len(todo)), "prompt": prompt, "tokens": tokens}
        file.write(head, "rows", [json.dumps(asdict(row)) for row in rows], last=ending is not None)

    def one(item: tuple[Subject, str, str], _: object) -> None:
        rows.append(measure(*item, prompt, tokens))

    ending = each_saved(todo, one, lambda item: " ".join(map(str, item)), save, arguments.minutes)
    print(f"MB of a prompt of {prompt} tokens and of {tokens} after it")
    show(_COLUMNS, [_cells(row) for row in rows], [""] * len(rows))
    for row in rows:
        if row.problem:
            print(f"{row.model} {row.cache} {row.side}: cannot: {row.problem}")
    if not ending.complete:
        print(f"Incomplete: {len(rows)} of {len(todo)} measured.")
    by_mx = {(row.model, row.weights, row.dtype, row.cache) for row in rows if row.side == "mx" and not row.problem}
    passed = not any(row.problem and (row.model, row.weights, row.dtype, row.cache) in by_mx for row in rows)
    return finish("bench", ending, file, passed=passed)
