"""Benchmark of requests: many at once beside one by one, with caches of half types and quantized ones."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ..bench import machine, model_folders
from ..bench.models import Speed, Subject
from ..bench.requests import Row, measure
from ..table import Column, show
from .options import UsageError
from .runs import Ending, JsonFile, each_saved, finish, progress

_BITS = ("2", "3", "4", "5", "6", "8")
_COLUMNS = (
    Column("model", left=True),
    Column("weights", 3, left=True),
    Column("requests", left=True),
    Column("cache", left=True),
    Column("at once"),
    Column("one by one"),
    Column("mx one by one"),
    Column("at once/one by one", 1),
    Column("at once/mx", 1),
    Column("at once/half", 2),
    Column("mx timed", 4),
)


def _per_s(speed: Speed | None) -> str:
    return f"{speed.tokens_per_s:.4g}" if speed else "cannot"


def _ratio(speed: Speed | None, of: Speed | None) -> str:
    return f"{speed.tokens_per_s / of.tokens_per_s:.2f}x" if speed and of else ""


def _cells(row: Row, half: Row, tokens: int) -> list[str]:
    """A row as text, under `_COLUMNS`.

    Args:
        row: The row.
        half: The same requests with caches of half types.
        tokens: Those of a request.
    """
    fewer = str(row.mx.tokens) if row.mx and row.mx.tokens < row.requests * tokens else ""
    return [
        *(row.model, f"{row.weights} {row.dtype}", str(row.requests), row.cache),
        *(_per_s(row.at_once), _per_s(row.one_by_one), _per_s(row.mx)),
        *(_ratio(row.at_once, row.one_by_one), _ratio(row.at_once, row.mx)),
        *("" if row is half else _ratio(row.at_once, half.at_once), fewer),
    ]


def _numbers(option: str, text: str, known: Sequence[str] = ()) -> list[int]:
    """Whole numbers above zero, separated by commas, each once."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part)) or (known and part not in known):
            expected = f"some of {', '.join(known)}" if known else "numbers above 0"
            raise UsageError(f"{option} {text}: expected {expected}, separated by commas")
    return [int(part) for part in parts]


def run(arguments: argparse.Namespace, options: argparse.Namespace, subjects: Sequence[Subject], file: JsonFile) -> int:
    """Times requests to the models.

    Args:
        arguments: As they were given.
        options: The same, with defaults.
        subjects: The models.
        file: For the rows.

    Raises:
        UsageError: The arguments cannot be served.
    """
    if arguments.peer is not None or options.memory:
        raise UsageError(f"--{'peer' if arguments.peer else 'memory'} does not go with --requests")
    counts = _numbers("--requests", options.requests)
    bits = _numbers("--kv-bits", options.kv_bits, _BITS) if options.kv_bits is not None else []
    caches: dict[str, int | None] = {"half": None, **{f"{n}-bit": n for n in bits}}
    info = machine.describe()
    info["versions"]["mlx_lm"] = model_folders.mlx_lm_version()
    print(machine.headline(info), flush=True)
    rows: list[Row] = []
    done = 0

    def save(ending: Ending | None) -> None:
        asked = {"prompt": options.prompt, "tokens": options.tokens}
        head = {"machine": info, **progress(ending, done, len(subjects)), **asked}
        file.write(head, "rows", [json.dumps(asdict(row)) for row in rows], last=ending is not None)

    def one(subject: Subject, step: Callable[[str], None]) -> None:
        nonlocal done
        for found in measure(subject, counts, caches, options.tokens, options.prompt, options.seconds, step):
            rows.extend(found)
            save(None)
        done += 1

    ending = each_saved(subjects, one, str, save, arguments.minutes, len(subjects) * len(counts))
    if rows:
        print(f"tokens/s of all requests, each of {options.tokens} tokens behind up to {options.prompt}")
        halves = [rows[i - i % len(caches)] for i in range(len(rows))]
        cells = [_cells(row, half, options.tokens) for row, half in zip(rows, halves, strict=True)]
        show(_COLUMNS, cells, [""] * len(rows))
    for row in rows:
        for name, problem in row.problems.items():
            print(f"{row.model} {row.requests} {row.cache}: {name.replace('_', ' ')}: cannot: {problem}")
    if not ending.complete:
        print(f"Incomplete: {done} of {len(subjects)} measured.")
    passed = not any(row.mx and not (row.at_once and row.one_by_one) for row in rows)
    return finish("bench", ending, file, passed=passed)
