"""Digests of functions of other packages: the patch replaces only functions whose digests are known here."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import types
from typing import Any

from .. import _ext

__all__ = ["as_tuples", "digest", "digest_in", "plain"]


def plain(function: Any) -> Any:
    """The original of a function that the patch has replaced."""
    return function.__wrapped__ if isinstance(function, _ext.FunctionWrapper) else function


def as_tuples(node: Any) -> Any:
    """A syntax tree as tuples, the same in all versions of Python: later ones have fields that are mostly empty."""
    if isinstance(node, ast.AST):
        fields = ((name, as_tuples(value)) for name, value in ast.iter_fields(node) if value not in (None, []))
        return (type(node).__name__, *fields)
    return tuple(map(as_tuples, node)) if isinstance(node, list) else node


@functools.cache
def digest(function: Any) -> str:
    """A digest of a Python function in 16 letters: of its source without comments, annotations and layout.

    Empty where there is no source, and of a function around another: that does more than the source says.
    """
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return ""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(repr(as_tuples(tree)).encode()).hexdigest()[:16]


@functools.cache
def digest_in(module: types.ModuleType, name: str) -> str:
    """The digest of a function of a module's source, whatever decorators made of it; empty where there is none."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return ""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return hashlib.sha256(repr(as_tuples(functions)).encode()).hexdigest()[:16]
