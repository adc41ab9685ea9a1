"""Cache: what is kept on disk for this user, how large it is, and its removal."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
from collections.abc import Iterable
from pathlib import Path

from ..frontend import cache, cache_limit
from ..table import aligned
from .options import UsageError

# Words of `--clear`, and the part of the cache for each.
_PARTS = {
    "kernels": "compiled kernels",
    "calibration": "calibrations of this machine",
    "agx-compiler": "Mesa's compiler for Apple GPUs",
    "all": "everything",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    what = ", ".join(_PARTS)
    parser.add_argument(
        "--clear", nargs="?", const="kernels", choices=_PARTS, metavar="WHAT", help=f"delete: {what} (kernels)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Lists the cache, or deletes a part of it; 0.

    Raises:
        UsageError: The user has no cache folder, or a file cannot be deleted.
    """
    try:
        folder, limit = cache.cache_folder(), cache_limit.limit_bytes()
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from None
    if arguments.clear:
        return _clear(folder, arguments.clear)
    print(f"{folder}, at most {_size(limit)} of compiled kernels ({cache_limit.VARIABLE})")
    rows = []
    found = cache_limit.entries(folder)
    for kind in dict.fromkeys(cache_limit.KINDS.values()):
        rows += _row(kind, [(entry.bytes, entry.used) for entry in found if entry.kind == kind])
    for part in ("calibration", "agx-compiler"):
        rows += _row(_PARTS[part], _sizes(_files(folder, part)))
    if rows:
        print(aligned([["what", "files", "size", "last used"], *rows], left=1))
        print(f"mlx-mittens cache --clear deletes the compiled kernels, {_size(sum(entry.bytes for entry in found))}.")
    else:
        print("It is empty.")
    return 0


def _row(name: str, sizes: list[tuple[int, float]]) -> list[list[str]]:
    if not sizes:
        return []
    day = datetime.date.fromtimestamp(max(used for _, used in sizes)).isoformat()
    return [[name, str(len(sizes)), _size(sum(size for size, _ in sizes)), day]]


def _size(count: int) -> str:
    """Bytes in a unit that suits them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def _files(folder: Path, part: str) -> list[Path]:
    """The files of a part of the cache."""
    if part == "kernels":
        return [entry.path for entry in cache_limit.entries(folder)]
    if part == "calibration":
        return sorted((folder / "calibration").glob("*"))
    if part == "agx-compiler":
        return sorted(folder.glob("asahi_clc-*"))
    return [path for one in _PARTS if one != "all" for path in _files(folder, one)]


def _sizes(paths: Iterable[Path]) -> list[tuple[int, float]]:
    """The size of each file, and when it was used."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_size, max(status.st_atime, status.st_mtime)))
    return found


def _clear(folder: Path, part: str) -> int:
    paths = _files(folder, part)
    freed = sum(size for size, _ in _sizes(paths))
    for path in paths:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as error:
            raise UsageError(f"cannot delete {path}: {error.strerror}") from None
    print(f"{len(paths)} files deleted from {folder}: {_PARTS[part]}, {_size(freed)}")
    return 0
