"""Files that `bench --json` wrote: read again to go on with a run, or to compare two."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, fields
from typing import Any

from ..bench.measure import Outcome, Row
from .options import UsageError

# Arguments of a run, which its file keeps; a run that goes on takes them from there.
ASKED = ("ops", "quick", "device", "peer", "seed")

Key = tuple[str, str, str]  # op, case, dtype


def read(option: str, path: str) -> dict[str, Any]:
    """A file of the benchmark of ops.

    Raises:
        UsageError: It cannot be read, or is something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise UsageError(f"{option}: cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{option}: {path} is not JSON: expected what mlx-mittens bench --json has written") from None
    rows = found.get("rows") if isinstance(found, dict) else None
    kinds = {"predicted": "predictions", "shares": "whole models"}
    for name, kind in kinds.items():
        if rows is not None and name in found:
            raise UsageError(f"{option}: {path} is of {kind}: expected a file of ops that were timed")
    if rows is None or "machine" not in found or any("mittens_ms" not in row for row in rows):
        raise UsageError(f"{option}: {path} is not what mlx-mittens bench --json writes")
    return found


def key(row: dict[str, Any]) -> Key:
    """Which row it is."""
    return row["op"], row["case"], row["dtype"]


@dataclass(frozen=True)
class Begun:
    """A run that was ended before it was done.

    Attributes:
        path: Its file.
        machine: The machine, as the file has it.
        asked: The options that it was started with.
        outcomes: Its measurements.
    """

    path: str
    machine: dict[str, Any]
    asked: dict[str, Any]
    outcomes: list[Outcome]

    @classmethod
    def of(cls, path: str) -> Begun:
        """
        Raises:
            UsageError: There is nothing to go on with.
        """
        found = read("--resume", path)
        if "asked" not in found:
            raise UsageError(f"--resume: {path} does not say which cases were asked for: an older version wrote it")
        return cls(path, found["machine"], found["asked"], [_outcome(row) for row in found["rows"]])

    def set_options(self, arguments: argparse.Namespace) -> None:
        """Has a run take the options of this one, and its file where it names no other.

        Raises:
            UsageError: One of them is given too.
        """
        for name in ASKED:
            if getattr(arguments, name) not in (None, False):
                raise UsageError(f"--{name} does not go with --resume: {self.path} says what was asked for")
            setattr(arguments, name, self.asked.get(name))
        arguments.json = arguments.json or self.path

    def check_machine(self, machine: dict[str, Any]) -> None:
        """Refuses to put times of two machines, or of two versions, into one table.

        Raises:
            UsageError: This is another machine, or other versions are installed.
        """
        versions = lambda of: {name: of["versions"].get(name) for name in ("mlx_mittens", "mlx")}
        names = ("processor", "cores", "gpu", "device", "executor")
        before, now = ({name: of.get(name) for name in names} | versions(of) for of in (self.machine, machine))
        for name, value in before.items():
            if now[name] != value:
                raise UsageError(f"--resume: {self.path} is of {name} {value}, this is {now[name]}: start a new file")


def _outcome(row: dict[str, Any]) -> Outcome:
    """A row as it was measured; the errors that JSON cannot hold were infinite."""
    values = {field.name: row[field.name] for field in fields(Row) if field.name in row}
    values |= {name: math.inf for name in ("error", "mx_error") if values[name] is None}
    return Outcome(Row(**values), "wrong" not in row, row.get("wrong", ""))
