"""Errors of the commands about arguments that they cannot serve."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..nearest import nearest
from .completion import offer_list

if TYPE_CHECKING:
    import numpy as np


class UsageError(Exception):
    """Arguments that cannot be served, with a message for people."""


def add_ops(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ops``, whose names `chosen` reads."""
    action = parser.add_argument("--ops", metavar="A,B", help="only these ops, comma separated (all)")
    offer_list(action, lambda _: _names_of_ops())


def _names_of_ops() -> list[str]:
    from .. import specs

    return [op.name for op in specs.OPS]


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Adds ``--seed``; without it the command draws one by `drawn`."""
    parser.add_argument("--seed", type=_natural, metavar="N", help="of random inputs, as a failure prints it (drawn)")


def add_minutes(parser: argparse.ArgumentParser, usual: float | None = None) -> None:
    """Adds ``--minutes``, after which a run ends."""
    text = "end after about N minutes, with what is there" + (f" ({usual:g})" if usual else "")
    parser.add_argument("--minutes", type=_minutes, metavar="N", default=usual, help=text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return minutes


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no natural number")
    return int(text)


def natural_64(text: str) -> int:
    """A natural number that the extension takes, as ``type`` of an option."""
    number = _natural(text)
    if number >= 2**64:
        raise argparse.ArgumentTypeError(f"{text} is not below 2^64")
    return number


def drawn(seed: int | None) -> int:
    """The seed that was given, or a random one."""
    return int.from_bytes(os.urandom(4), "little") if seed is None else seed


def inputs(seed: int, *names: str) -> np.random.Generator:
    """The random numbers of a case: the same ones whichever cases run before it."""
    import zlib

    import numpy as np

    return np.random.default_rng([seed, zlib.crc32(" ".join(names).encode())])


def listed(word: str, known: Iterable[str]) -> str:
    """Which names there are, after the one that is nearest to an unknown word, if one is."""
    known = list(known)
    found = nearest(word, known)
    hint = f"did you mean {found}? There are" if found else "there are"
    return f"{hint} {', '.join(known)}"


def chosen(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The names that an option lists, separated by commas.

    Raises:
        UsageError: There are none, or one is not known; the message suggests the nearest and lists the known ones.
    """
    known = list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"{option}: {', '.join(unknown) or 'nothing'} given; {listed(','.join(unknown[:1]), known)}")
    return names


_METAL = (".metal", ".h", ".hpp", "")  # suffixes of files in Metal's language


def registered(path: str) -> str:
    """The name by which the front end knows a .metal file from now on.

    Raises:
        UsageError: It cannot be read, or is of another language.
    """
    from .. import frontend
    from ..frontend.read.sources import metal_folder

    if Path(path).suffix.lower() not in _METAL:
        raise UsageError(f"{path} is no Metal file: expected one that ends in .metal, or a header")
    resolved = Path(path).resolve()
    if resolved.is_relative_to(metal_folder().resolve()):
        return resolved.relative_to(metal_folder().resolve()).as_posix()
    try:
        frontend.register_source(path, resolved.read_text(encoding="utf-8", errors="replace"), resolved.parent)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return path


def writable(option: str, path: str | None) -> None:
    """Refuses, before any work is done, a file that cannot be written.

    Raises:
        UsageError: The folder is not there or cannot be written to, or the path is a folder.
    """
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"{option}: the folder {folder} does not exist")
    if os.path.isdir(path):
        raise UsageError(f"{option}: cannot write {path}: it is a folder, choose a file")
    opened = path if os.path.exists(path) else folder
    if not os.access(opened, os.W_OK):
        raise UsageError(f"{option}: cannot write {path}: choose another file, or make {opened} writable")
