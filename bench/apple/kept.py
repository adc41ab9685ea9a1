"""Results of a script, kept in a JSON file, so that the next run goes on where this one ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(file: Path) -> dict[str, Any]:
    """The results of earlier runs; none where there is no file."""
    return json.loads(file.read_text()) if file.exists() else {}


def add(file: Path, found: dict[str, Any], key: str, entry: Any) -> None:
    found[key] = entry
    file.write_text(json.dumps(found))
    print(f"{key}: {entry}", flush=True)


def show(document: str, file: Path | None) -> None:
    """Writes a document to a file, or prints it where there is none."""
    if file is None:
        print(document)
    else:
        file.write_text(document)
