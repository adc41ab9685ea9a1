"""The texts of users' kernels by their compiled libraries: kernels of one name may differ in their text."""

from __future__ import annotations

import threading
from pathlib import Path

from .. import frontend
from ..frontend.check import dialect
from ..frontend.read import source_lines

_texts: dict[str, str] = {}
_compiling = threading.Lock()


def compiled(file: str, text: str, kernel: str, watch: bool, fuse: bool, flush_subnormals: bool) -> str:
    """The path of a kernel's library, made of the text that MLX generated.

    Raises:
        CompileError: If it does not compile, or would not on a Mac.
    """
    with _compiling:  # kernels of one name may differ in their text
        frontend.register_source(file, text)
        library = frontend.simulator_library(file, watch, private=watch, fuse=fuse, flush_subnormals=flush_subnormals)
        refused = dialect.refused(file)
    _texts[library] = text
    if refused:
        log = "\n".join(f"{problem.file}:{problem.line}: error: {problem.what}" for problem in refused)
        raise frontend.CompileError(file, kernel, log)
    return library


def with_lines(message: str, file: str, library: str) -> str:
    """A fault's message, and below it the text of the lines that it names.

    Args:
        message: The message.
        file: The launch's.
        library: The launch's.
    """
    text = _texts.get(library)
    return source_lines.with_lines(message, frontend.flatten(file) if text is None else text)


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
