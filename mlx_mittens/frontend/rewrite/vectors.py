"""Constructors of vectors, casts to them, and their names where they are no constructors."""

from __future__ import annotations

import re

from ..read.builtins import is_type
from ..read.tokens import IDENTIFIER, SPACES
from .draft import Draft

_VECTOR = re.compile(r"(bool|u?char|u?short|u?int|u?long|half|bfloat|float)([234])$")


def constructors(draft: Draft) -> None:
    """Makes `vec<T, 4>(a, b, c, d)` a call: `mittens::construct<vec<T, 4>>(a, b, c, d)`."""
    for i, token in draft.live():
        if token == "vec" and draft.token(i + 1) == "<":
            _constructor(draft, i)


def _constructor(draft: Draft, i: int) -> None:
    end = draft.after_template_arguments(i + 1)
    first = i
    while draft.token(first - 1) == "::":
        first -= 2 if IDENTIFIER.match(draft.token(first - 2)) else 1
    if draft.token(end) != "(" or end == i + 1 or draft.token(first - 1) == "operator":
        return
    if draft.token(end + 1) in ("&", "*") and draft.token(draft.partner[end] + 1) == "[":
        return  # a reference or a pointer to an array: vec<T, 2> (&name)[4]
    draft.edits.append((draft.spans[first][0], draft.spans[first][0], "::mittens::construct<"))
    draft.insert(end - 1, ">")


def casts(draft: Draft) -> None:
    """Writes out casts to vectors by name: clang's `(float4)x` takes the bits, Metal's converts the elements."""
    for i, token in draft.live():
        if token == "(":
            kind = draft.tokens[i + 1 : draft.partner[i]]
            is_named = len(kind) == 1 and _VECTOR.match(kind[0]) is not None
            if is_named or (kind[:2] == ["vec", "<"] and draft.after_template_arguments(i + 2) == draft.partner[i]):
                _cast(draft, i)


def named_casts(draft: Draft) -> None:
    """Writes out casts to aliases and template parameters, which may be vectors: `(V)x`, `V(x)`."""
    for i, token in draft.live():
        if token == "(":
            kind = draft.tokens[i + 1 : draft.partner[i]]
            if len(kind) == 1 and kind[0] in draft.named_types and not _VECTOR.match(kind[0]):
                _cast(draft, i)
        elif token != "vec" or draft.token(i + 1) != "<":
            _named_cast(draft, i)


def _cast(draft: Draft, i: int) -> None:
    """Writes out the cast whose type stands in the brackets at i."""
    closing = draft.partner[i]
    kind = draft.tokens[i + 1 : closing]
    before = draft.token(i - 1)
    if before in (")", "]", ">") or (IDENTIFIER.match(before) and before not in ("return", "case", "else", "do")):
        return  # the parameters of a function, of sizeof
    end = _operand_end(draft, closing + 1)
    if end > closing + 1:
        draft.edits.append((*draft.spans[closing], f")::mittens::convert<{''.join(kind)}>("))
        draft.insert(end - 1, ")")


def _named_cast(draft: Draft, i: int) -> None:
    """Writes out `V(x)` and `static_cast<V>(x)`."""
    is_static = draft.tokens[i] == "static_cast" and draft.token(i + 2) in draft.named_types
    if not is_static and (draft.tokens[i] not in draft.named_types or draft.token(i + 1) != "("):
        return
    if draft.lines.at(draft.spans[i][0])[0].startswith("mlx/"):
        return  # MLX's own headers have none of vectors
    if is_static and draft.token(i + 3) == ">":
        draft.edits.append((*draft.spans[i], "::mittens::convert"))
        return
    follows, closing = draft.token(i + 2), draft.partner[i + 1]
    is_declarator = follows in ("&", "*") and draft.token(closing + 1) in ("(", "[")
    if not is_declarator and follows not in (")", "{") and draft.token(i - 1) not in (".", "->", "::", "operator"):
        draft.edits.append((*draft.spans[i], f"::mittens::convert<{draft.tokens[i]}>"))


def _operand_end(draft: Draft, i: int) -> int:
    """The token behind the operand of a cast that starts at i; i if none does."""
    start = i
    while draft.token(i) in ("-", "+", "!", "~", "*", "&"):
        i += 1
    if draft.token(i) == "(":
        inner, i = draft.tokens[i + 1 : draft.partner[i]], draft.partner[i] + 1
        if len(inner) == 1 and is_type(inner[0]):
            return _operand_end(draft, i)
    elif IDENTIFIER.match(draft.token(i)):
        i = draft.after_template_arguments(i + 1)
        while draft.token(i) == "::":
            i = draft.after_template_arguments(i + 2)
    elif draft.token(i)[:1].isdigit() or draft.token(i)[:1] == ".":
        i += 1
    else:
        return start
    while True:
        token = draft.token(i)
        if token in ("(", "["):
            i = draft.partner[i] + 1
        elif token in (".", "->") and IDENTIFIER.match(draft.token(i + 1)):
            i += 2
        else:
            return i


def types(draft: Draft) -> None:
    """Makes `float4` a type where the macro of that name would make it a constructor.

    In `operator float2()`, in `uint4 (&name)[2]`, and behind `metal::`.
    """
    for i, token in draft.live():
        if draft.token(i + 1) != "(" or not (vector := _VECTOR.match(token)):
            continue
        if _is_conversion(draft, i):
            qualified = "" if draft.token(i - 1) == "::" else "::metal::"
            draft.replace(i, i + 1, f"{qualified}vec<{vector[1]}, {vector[2]}>")
            continue
        _vector_array(draft, i, vector)
        if draft.token(i - 1) == "::":  # the macro brings its own
            draft.replace(i - 2 if IDENTIFIER.match(draft.token(i - 2)) else i - 1, i, "")


def _is_conversion(draft: Draft, i: int) -> bool:
    """Whether a type names a conversion function: `operator metal::float2() const`."""
    i -= 1
    while draft.token(i) in ("::", "metal", "const", "volatile"):
        i -= 1
    return draft.token(i) == "operator"


def _vector_array(draft: Draft, i: int, vector: re.Match[str]) -> None:
    """Rewrites the type of `uint4 (&name)[2]`."""
    declarator = draft.tokens[i + 2 : i + 6]
    if len(declarator) == 4 and IDENTIFIER.match(declarator[1]) and declarator[2:] == [")", "["]:
        qualified = draft.token(i - 1) in (*SPACES, "const")  # else `uint4(*p)[0]` may be an element
        if declarator[0] == "&" or (declarator[0] == "*" and qualified):
            draft.replace(i, i + 1, f"vec<{vector[1]}, {vector[2]}>")
