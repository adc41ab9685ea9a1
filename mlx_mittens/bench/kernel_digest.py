"""A digest of our kernels and of the code that translates them: tables of registers and instructions name it."""

from __future__ import annotations

import ast

from ..frontend import cache, library
from ..frontend.read import sources
from ..patching.digests import as_tuples

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digest(*others: str) -> str:
    """The digest, also of other texts that a table depends on. Comments and layout do not change it."""
    headers = sorted(path for path in library.INCLUDE.rglob("*") if path.is_file() and path.name != "abi.h")
    headers.append(library.abi_folder() / "simulator" / "abi.h")  # elsewhere in an installed package
    texts = [sources.flatten(file) for file in sources.files()] + [path.read_text() for path in headers]
    python = [code_of(path.read_text()) for path in sorted(library.INCLUDE.parent.rglob("*.py"))]
    return cache.key(*map(sources.tokens, texts), *python, *others)[:16]


def code_of(text: str) -> str:
    """Python code without comments, docstrings and layout, the same for all versions of Python."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return repr(as_tuples(tree))
