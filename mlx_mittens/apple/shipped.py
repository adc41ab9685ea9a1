"""Machine code of our own kernels that is in the package, for machines without Mesa's compiler.

`bench/agx.py` writes the file. It has inputs of predictions for each variant that Apple's plans launch: registers, and
instructions by block. A kernel with other code than was compiled is not found.
"""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from .. import frontend
from ..frontend.read import sources

NAME = "machine_code.json.xz"

# Description of a variant: plain numbers and lists, as `machine_code` packs them.
Packed = list[Any]


def digest(file: str) -> str:
    """A digest of the code of a kernel file with the headers that it includes, comments and layout aside."""
    return _digest_of(frontend.flatten(file))


def find(file: str, kernel: str) -> Packed | None:
    """Machine code of a variant from the package; None where it is unknown, or its text is another."""
    known = _table()["files"].get(file)
    if known is None or known["text"] != digest(file):
        return None
    packed: Packed | None = known["kernels"].get(kernel)
    return packed


def opcodes() -> list[str]:
    """The names of opcodes, which packed variants have as numbers."""
    return list(_table()["opcodes"])


def is_there() -> bool:
    """Whether the package has machine code at all."""
    return bool(_table()["files"])


def text_of(variants: Iterable[tuple[str, str, Packed]], opcodes: list[str], made_with: str) -> bytes:
    """The file for variants, each with its file and name."""
    files: dict[str, dict[str, Any]] = {}
    for file, kernel, packed in variants:
        known = files.setdefault(file, {"text": digest(file), "kernels": {}})
        known["kernels"][kernel] = packed
    table = {"made_with": made_with, "opcodes": opcodes, "files": files}
    return lzma.compress(json.dumps(table, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)


def path() -> Path:
    """The file in the source tree."""
    return Path(__file__).with_name(NAME)


@functools.lru_cache(maxsize=64)  # a file is asked for with each of its variants
def _digest_of(text: str) -> str:
    return hashlib.sha256(sources.tokens(text).encode()).hexdigest()[:16]


@functools.cache
def _table() -> dict[str, Any]:
    file = resources.files(__package__) / NAME
    if not file.is_file():
        return {"opcodes": [], "files": {}}
    table: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
    return table
