"""The texts of users' kernels by what was compiled of them: kernels of one name may differ in their text."""

from __future__ import annotations

from pathlib import Path

from .. import frontend

_texts: dict[str, str] = {}


def keep(library: str, text: str) -> None:
    """Notes the text that a library was made of."""
    _texts[library] = text


def register(library: str, file: str) -> str:
    """Registers the text that a library was made of with the front end, under a name that is its own.

    Args:
        library: A launch's.
        file: A launch's.

    Returns:
        str: The source's name; `file` itself where the library is not of a user's kernel.
    """
    if library not in _texts:
        return file
    name = f"{Path(library).stem}/{file}"
    frontend.register_source(name, _texts[library])
    return name
