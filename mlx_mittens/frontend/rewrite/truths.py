"""Vectors of bool in device and constant memory, which are refused."""

from __future__ import annotations

import re

from ..read.tokens import IDENTIFIER
from .draft import Draft


def refuse_truths_in_memory(draft: Draft) -> None:
    """Refuses vectors of bool in memory: a component is a byte in Metal and a bit in clang.

    Raises:
        RewriteError: If the text points to such a vector, or asks for its size.
    """
    names: set[str] = set()  # aliases of such vectors, and structs that have some

    def is_truths(i: int) -> bool:
        token = draft.token(i)
        return (
            token in names
            or re.match(r"bool[234]$", token) is not None
            or draft.tokens[i : i + 3] == ["vec", "<", "bool"]
        )

    def unqualified(i: int) -> int:
        while draft.token(i) in ("const", "volatile", "::", "metal"):
            i += 1
        return i

    for i, token in enumerate(draft.tokens):
        if token == "using" and draft.token(i + 2) == "=" and is_truths(unqualified(i + 3)):
            names.add(draft.tokens[i + 1])
        elif token == "typedef" and is_truths(at := unqualified(i + 1)):
            names.add(draft.token(draft.after_template_arguments(at + 1)))
        elif token in ("struct", "class") and draft.token(i + 2) in ("{", ":"):
            start = i + 2
            while draft.token(start) not in ("{", ";", ""):
                start += 1
            if draft.token(start) != "{":
                continue
            bases = range(i + 3, start)
            body = (k for k in range(start + 1, draft.partner[start]) if draft.enclosing(k) == start)
            if any(map(is_truths, bases)) or any(is_truths(k) and _is_member(draft, k) for k in body):
                names.add(draft.tokens[i + 1])
    for i in range(len(draft.tokens)):
        if not is_truths(i):
            continue
        before, after = i - 1, draft.after_template_arguments(i + 1)
        while draft.token(before) in ("const", "volatile", "::", "metal"):
            before -= 1
        while draft.token(after) in ("const", "volatile"):
            after += 1
        in_memory = draft.token(before) in ("device", "constant") or draft.token(before - 1) == "sizeof"
        if in_memory and (draft.token(after) in ("*", "&") or draft.token(before - 1) == "sizeof"):
            what = "a vector of bool in memory, which is a byte a component in Metal, is not supported"
            raise draft.error(f"error: {what}: write uchar4, and uchar4(v) or v != 0 to convert", i)


def _is_member(draft: Draft, i: int) -> bool:
    """Whether a type declares a variable in a class: `bool4 a, b[2];`."""
    name = draft.after_template_arguments(i + 1)
    return IDENTIFIER.match(draft.token(name)) is not None and draft.token(name + 1) in (";", ",", "[", "=", "{")
