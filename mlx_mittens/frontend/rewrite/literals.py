"""Strings and numbers."""

from __future__ import annotations

import re
import struct

from ..read.builtins import is_type
from ..read.tokens import CLOSE, IDENTIFIER, OPEN
from .draft import Draft

_FLOAT_LITERAL = re.compile(
    r"((?:\d+\.\d*|\.\d+|\d+(?=[eE]|[hHbB]))(?:[eE][+-]?\d+)?|0[xX][\da-fA-F.]+[pP][+-]?\d+)(h|H|bf|BF)?$"
)
_INTEGER = re.compile(r"(?:0[xX][\da-fA-F]+|\d+)[uUlL]*$")
_OF_STRINGS = ("static_assert", "_Pragma", "extern", "asm", "__asm__", "__attribute__", "diagnose_if")


def strings(draft: Draft) -> None:
    """Puts strings, which only logs take, into constant memory."""
    for i, token in draft.live():
        if token[0] == '"' and draft.token(i - 1) in ("(", ",", "{") and draft.token(i - 2) not in _OF_STRINGS:
            _string(draft, i)


def _string(draft: Draft, i: int) -> None:
    end = i
    while draft.token(end + 1)[:1] == '"':
        end += 1
    before = i - 1
    while draft.token(before) not in ("(", ";", "{", "}", ""):
        before = draft.partner[before] - 1 if draft.tokens[before] in CLOSE else before - 1
    if draft.token(before - 1) not in _OF_STRINGS:
        draft.edits.append((draft.spans[i][0], draft.spans[i][0], "(constant char*)("))
        draft.insert(end, ")")


def numbers(draft: Draft) -> None:
    """Makes `1.0` a float, `1.0h` and `1.0bf` `half(1.0f)` and `bfloat(1.0f)`."""
    for i, token in draft.live():
        literal = _FLOAT_LITERAL.match(token)
        if literal:
            draft.edits.append((*draft.spans[i], _typed(literal, f"{literal[1]}f")))


def inexact_numbers(draft: Draft) -> None:
    """Does as `numbers` for a text that is checked: its floats are none that a bfloat holds.

    So clang warns where one becomes a bfloat without a cast, integers that become floats included.
    """
    for i, token in draft.live():
        if not (token[0].isdigit() or token[0] == "."):
            continue
        if literal := _FLOAT_LITERAL.match(token.rstrip("fF") if _is_float(token) else token):
            value = f"{literal[1]}f" if literal[2] else _inexact(literal[1])
            draft.edits.append((*draft.spans[i], _typed(literal, value)))
        elif token.isdigit() and _becomes_float(draft, i):
            draft.edits.append((*draft.spans[i], _inexact(token)))


def inexact_expressions(draft: Draft) -> None:
    """Does the same for expressions of integers that clang computes: `constant float x = 2 * n;`, `float(n)`."""
    for i, token in draft.live():
        if token == "float":
            _inexact_expression(draft, i)


def _typed(literal: re.Match[str], value: str) -> str:
    """A number as an expression of the type that its suffix names."""
    return {None: "{}", "h": "half({})", "b": "bfloat({})"}[literal[2] and literal[2][0].lower()].format(value)


def _is_float(token: str) -> bool:
    """Whether a number ends in the f of a float."""
    return token[-1] in "fF" and token[-2:].lower() != "bf" and ("." in token or "e" in token.lower())


def _inexact(literal: str) -> str:
    """A float next to this one that no bfloat holds, so that clang warns where it becomes one."""
    try:
        value = float.fromhex(literal) if literal[:2].lower() == "0x" else float(literal)
        bits = struct.unpack("<I", struct.pack("<f", value))[0] | 1
    except (ValueError, OverflowError):
        return literal + "f"
    return (
        struct.unpack("<f", struct.pack("<I", bits))[0].hex() + "f"
        if bits & 0x7F800000 != 0x7F800000
        else literal + "f"
    )


def _becomes_float(draft: Draft, i: int) -> bool:
    """Whether an integer is cast to float where it stands, or is the initial value of one: `const float x = 1;`."""
    before = i - 2 if draft.token(i - 1) in ("+", "-") else i - 1
    opened = draft.token(before) in ("(", "{") and draft.token(i + 1) in (")", "}")
    cast = draft.tokens[max(before - 4, 0) : before]
    if opened and (cast[-1:] == ["float"] or cast == ["static_cast", "<", "float", ">"]):
        return True
    if draft.tokens[max(before - 2, 0) : before + 1] == ["(", "float", ")"]:
        return draft.token(before - 3) not in ("sizeof", "alignof")
    initial = opened or (draft.token(before) == "=" and draft.token(i + 1) in (",", ";"))
    return initial and draft.token(before - 2) == "float" and IDENTIFIER.match(draft.token(before - 1)) is not None


def _inexact_expression(draft: Draft, i: int) -> None:
    if draft.token(i + 1) == "(":
        first, last = i + 2, draft.partner[i + 1]
    elif draft.token(i + 2) == "=" and {"const", "constexpr", "constant"} & {draft.token(i - 1), draft.token(i - 2)}:
        first = last = i + 3
        while draft.token(last) not in (";", ",", "{", ""):
            last = draft.partner[last] + 1 if draft.tokens[last] in OPEN else last + 1
    else:
        return
    named = last > first and IDENTIFIER.match(draft.tokens[first]) is not None
    if (named or last > first + 1) and _is_arithmetic(draft, first, last):
        draft.edits.append((draft.spans[first][0], draft.spans[first][0], "::mittens::inexact("))
        draft.insert(last - 1, ")")


def _is_arithmetic(draft: Draft, first: int, last: int) -> bool:
    """Whether tokens are integers, names and operators, with no call but casts to Metal's types."""
    k = first
    while k < last:
        token, called = draft.tokens[k], draft.token(k + 1) == "("
        if token == "sizeof" and called:
            k = draft.partner[k + 1]
        elif IDENTIFIER.match(token):
            if called != is_type(token):
                return False
        elif not _INTEGER.match(token) and (token not in "()+-*/%|^~:?::" or (k == first and token == "*")):
            return False
        k += 1
    return True
