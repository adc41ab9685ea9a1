"""Keeps the cache of compiled kernels below a size: the least recently used files are deleted first."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MLX_MITTENS_CACHE_LIMIT"

_DEFAULT = 4.0  # GB
_KEPT_SHARE = 0.8  # of the limit, once it is passed: deleting takes time too
_LOADING = 60.0  # seconds after its use in which a process may still be about to load a kernel
_WRITING = 86400.0  # seconds after which nobody is still writing a file, or waits for its lock

# How the names of files that are being written begin, and of their locks.
UNFINISHED = ".mlx-mittens-"

# Kinds of files, by the end of their names.
KINDS = {
    ".ptx": "PTX for NVIDIA GPUs",
    ".so": "kernels for the simulator",
    ".pch": "the standard library as clang parsed it",
    ".spv": "SPIR-V for Apple machine code",
    ".gz": "Apple machine code",
    ".json": "findings of the dialect check",
}


@dataclass(frozen=True)
class Entry:
    """A compiled kernel in the cache.

    Attributes:
        path: The file.
        kind: A value of `KINDS`.
        bytes: Its size.
        used: When it was used last, in seconds since 1970.
    """

    path: Path
    kind: str
    bytes: int
    used: float


def limit_bytes() -> int:
    """How large the cache may become: ``MLX_MITTENS_CACHE_LIMIT`` in GB, else 4 GB.

    Raises:
        ValueError: The variable is no number above 0.
    """
    text = os.environ.get(VARIABLE) or str(_DEFAULT)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    if not 0 < gigabytes < 1e9:
        raise ValueError(f"{VARIABLE} is {text!r}: expected a number of GB above 0, such as 4")
    return int(gigabytes * 1e9)


def entries(folder: Path) -> list[Entry]:
    """The compiled kernels in a cache folder: neither calibrations nor asahi_clc, nor files that are being written."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for file in os.scandir(folder):
            kind = KINDS.get(os.path.splitext(file.name)[1])
            if kind is None or file.name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError):  # another process deletes, too
                status = file.stat()
                found.append(Entry(Path(file.path), kind, status.st_size, max(status.st_atime, status.st_mtime)))
    return found


def _delete_leftovers(folder: Path) -> None:
    """Deletes files that were being written when their process was ended, and their locks."""
    with contextlib.suppress(OSError):
        for file in os.scandir(folder):
            with contextlib.suppress(OSError):
                if file.name.startswith(UNFINISHED) and file.stat().st_mtime < time.time() - _WRITING:
                    os.unlink(file.path)


def trim(folder: Path, limit: int | None = None) -> list[Entry]:
    """Deletes the least recently used files, if the cache is larger than its limit, and leftovers of killed processes.

    Files used a moment ago stay: another process may be about to load them.

    Args:
        folder: The cache folder.
        limit: Its largest size in bytes; `limit_bytes` without it.

    Returns:
        list[Entry]: The deleted files.
    """
    limit = limit_bytes() if limit is None else limit
    _delete_leftovers(folder)
    found = entries(folder)
    size = sum(entry.bytes for entry in found)
    if size <= limit:
        return []
    deleted = []
    for entry in sorted(found, key=lambda entry: entry.used):
        if size <= _KEPT_SHARE * limit or entry.used > time.time() - _LOADING:
            break
        with contextlib.suppress(OSError):
            entry.path.unlink()
            deleted.append(entry)
            size -= entry.bytes
    return deleted
