"""Compiled kernels on disk, each under a name made of everything that went into it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """$MLX_MITTENS_CACHE, else mlx-mittens in the user's cache folder; made if it is not there."""
    chosen = os.environ.get("MLX_MITTENS_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(chosen) if chosen else Path(base) / "mlx-mittens"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def key(*parts: str) -> str:
    """A name for what is made of these parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    return digest.hexdigest()[:32]


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The path of a file of the cache, made by `make(path)` if it is not there yet.

    Two processes may make the same file at once: each writes its own and moves it into place.
    """
    path = cache_folder() / name
    if not path.exists():
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        try:
            make(Path(temporary))
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    return path
