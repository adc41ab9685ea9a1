"""NVIDIA's assembler: whether the PTX of kernels assembles, and how many registers and bytes of memory it takes.

It is part of PyPI's ``nvidia-cuda-nvcc`` and needs no GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# A call that assembles a few files costs less than a call for each; a call with all of them would use one core.
_FILES_PER_CALL = 30


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel on one architecture: registers of a thread, the rest in bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int


def find() -> str | None:
    """The path of ptxas: of the package nvidia-cuda-nvcc, else on PATH; None if there is none."""
    try:
        for file in importlib.metadata.files("nvidia-cuda-nvcc") or ():
            if file.name in ("ptxas", "ptxas.exe") and (path := Path(file.locate())).is_file():
                return str(path)
    except importlib.metadata.PackageNotFoundError:
        pass
    return shutil.which("ptxas")


def assemble(texts: Mapping[str, str], arch: str) -> dict[str, Usage]:
    """Assembles PTX texts, each with one entry.

    Args:
        texts: PTX by the name of its entry.
        arch: The GPU, as in ``sm_90``.

    Returns:
        dict[str, Usage]: By entry.

    Raises:
        FileNotFoundError: There is no ptxas.
        RuntimeError: A text does not assemble; the message is ptxas's.
    """
    program = find()
    if program is None:
        raise FileNotFoundError("there is no ptxas: pip install nvidia-cuda-nvcc")
    names = sorted(texts)

    def some(names: list[str]) -> dict[str, Usage]:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{name}.ptx" for name in names]
            for name, path in zip(names, paths):
                path.write_text(texts[name])
            command = [program, "-v", f"-arch={arch}", *map(str, paths), "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas -arch={arch}: {done.stderr.strip() or done.stdout.strip()}")
        return _usages(done.stdout + done.stderr)

    parts = [names[i : i + _FILES_PER_CALL] for i in range(0, len(names), _FILES_PER_CALL)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {name: usage for found in pool.map(some, parts) for name, usage in found.items()}


def _usages(log: str) -> dict[str, Usage]:
    usages = {}
    _, *parts = re.split(r"Compiling entry function '([^']*)'", log)
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        number = lambda pattern: int(found[1]) if (found := re.search(pattern, part)) else 0
        usages[name] = Usage(
            registers=number(r"Used (\d+) registers"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
            stack=number(r"(\d+) bytes stack frame"),
            shared=number(r"(\d+) bytes smem"),
        )
    return usages
