"""Running the example scripts as a user does."""

from __future__ import annotations

import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    """Runs an example and gives what it printed, or fails with it."""
    result = try_run(name, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def try_run(name: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)
