"""Compiled kernels on disk, each under a name made of everything that went into it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """$MLX_MITTENS_CACHE, else mlx-mittens in the user's cache folder; it need not be there.

    Raises:
        RuntimeError: The user has no home.
    """
    chosen = os.environ.get("MLX_MITTENS_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "mlx-mittens"


_lock = threading.Lock()


def writable_folder() -> Path:
    """The cache folder, made if it is not there; where it cannot be written to, a temporary one of this process."""
    with _lock:
        try:
            folder = cache_folder()
        except RuntimeError as error:
            return _temporary_folder(f"There is no folder to cache compiled kernels in ({error})")
        return _usable(folder)


@functools.cache
def _usable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return _temporary_folder(f"The cache folder {folder} cannot be written to ({error.strerror})")
    return folder


@functools.cache
def _temporary_folder(problem: str) -> Path:
    folder = tempfile.mkdtemp(prefix="mlx-mittens-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    advice = "Set MLX_MITTENS_CACHE to a folder that can be written to."
    warnings.warn(f"{problem}: kernels are compiled anew for each process. {advice}", RuntimeWarning, stacklevel=2)
    return Path(folder)


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
    with contextlib.suppress(RuntimeError):
        path = cache_folder() / name
        if os.path.exists(path):  # also in a folder that cannot be written to
            return path
    path = writable_folder() / name
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
