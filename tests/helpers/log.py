"""Logs of long runs: a line of JSON for each entry, from which a run that was cut off goes on."""

import json
import os
from pathlib import Path
from typing import Any


def entries(path: Path) -> list[Any]:
    """The entries of a log. A last line that was cut off is removed from the file, so that one can add to it."""
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def add(path: Path, entry: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
