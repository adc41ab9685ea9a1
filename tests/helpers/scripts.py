"""Running the command line and the example scripts as a user does, and loading the benchmark's scripts."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from types import ModuleType

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def command(*arguments: object, before: str = "pass") -> list[str]:
    """`mlx-mittens` in a process of its own, after some statements: what to run."""
    code = f"{before}; import sys; sys.argv[0] = 'mlx-mittens'; from mlx_mittens_cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, *map(str, arguments)]


def load(name: str) -> ModuleType:
    """The module of bench/<name>.py, which imports scripts beside it as `python` would."""
    file = ROOT / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where its dataclasses look for it
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def run(name: str, *arguments: object) -> str:
    """Runs an example and gives its output, or fails with it."""
    result = try_run(name, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def try_run(name: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)
