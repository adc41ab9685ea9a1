"""Compiled kernels on disk, each under a name made of everything that went into it."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from . import cache_limit


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
        if folder not in _problems:
            try:
                _probe(folder)
                return folder
            except OSError as error:
                _problems[folder] = f"The cache folder {folder} cannot be written to ({error.strerror})"
        return _temporary_folder(_problems[folder])


_problems: dict[Path, str] = {}  # of folders that could not be written to


def _probe(folder: Path) -> None:
    """Makes a folder, again if it was deleted, and writes a block, which a full disk refuses."""
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()


_temporary: dict[str, Path] = {}  # folders, by the problem that they are for


def _temporary_folder(problem: str) -> Path:
    folder = _temporary.get(problem)
    if folder is None or not folder.is_dir():
        import tempfile

        made = tempfile.mkdtemp(prefix="mlx-mittens-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        _temporary[problem] = Path(made)
    if folder is None:
        advice = "Set MLX_MITTENS_CACHE to a folder that can be written to."
        warnings.warn(f"{problem}: kernels are compiled anew for each process. {advice}", RuntimeWarning, stacklevel=3)
    return _temporary[problem]


_checked: set[Path] = set()  # folders whose size this process has looked at


def _keep_below_limit(folder: Path) -> None:
    """Deletes old files where the cache is too large; once for a process, since it takes as long as a listing."""
    if folder in _checked:
        return
    _checked.add(folder)
    try:
        cache_limit.trim(folder)
    except ValueError as error:
        warnings.warn(f"{error}. Nothing is deleted.", RuntimeWarning, stacklevel=3)


def key(*parts: str) -> str:
    """A name for a file made of these parts."""
    import hashlib

    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    return digest.hexdigest()[:32]


def _is_there(path: Path) -> bool:
    """Whether a file is there; then marks it as used now, since most disks do not record reads."""
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), changed))
    return True


_LONGEST_WAIT = 600.0  # seconds


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Waits while another process or thread makes a file; where the disk has no locks, not at all."""
    lock = path.with_name(f"{cache_limit.UNFINISHED}{path.name}.lock")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):
            import fcntl  # Windows has none

            file = held.enter_context(open(lock, "w"))
            end = time.monotonic() + _LONGEST_WAIT
            while time.monotonic() < end:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The path of a file of the cache, made by `make(path)` if it is not there yet.

    We wait for a result that another process is making. If that takes too long both make it: each writes its own file
    and moves it into place.
    """
    with contextlib.suppress(RuntimeError):
        path = cache_folder() / name
        if _is_there(path):  # also in a folder that cannot be written to
            return path
    path = writable_folder() / name
    with _only_one(path):
        if not _is_there(path):
            import tempfile

            handle, temporary = tempfile.mkstemp(prefix=cache_limit.UNFINISHED, suffix=path.suffix, dir=path.parent)
            os.close(handle)
            try:
                make(Path(temporary))
                os.replace(temporary, path)
                _keep_below_limit(path.parent)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
    return path
