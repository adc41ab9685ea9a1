"""Parameters and assignments in which Metal names address spaces that clang treats otherwise."""

from __future__ import annotations

from ..read.builtins import is_type
from ..read.tokens import IDENTIFIER, OPEN, SPACES
from .draft import Draft


def parameters(draft: Draft) -> None:
    """Makes arrays among the parameters of functions pointers, and numbers in constant memory const."""
    for i, token in draft.live():
        before = ("(", ",") if token == "constant" else ("(", ",", "const")
        if token in SPACES and draft.token(i - 1) in before:
            parameter(draft, i)


def parameter(draft: Draft, i: int) -> None:
    """Rewrites one from its address space: `constant const int64_t strides[2]`, `constant int& n`."""
    j = i + 1
    while IDENTIFIER.match(draft.token(j)):
        j = draft.after_template_arguments(j + 1)
    if draft.token(i - 1) != "const" and draft.tokens[i] == "constant" and draft.tokens[i + 2 : i + 3] == ["&"]:
        if is_type(draft.tokens[i + 1]):  # members of a struct may be handed on as pointers that are not const
            draft.insert(i, " const")
        return
    after = draft.partner[j] + 1 if draft.token(j) == "[" else len(draft.tokens)
    while after < len(draft.tokens) and draft.in_attribute[after]:
        after += 1
    if draft.token(after) in (",", ")"):
        draft.replace(j - 1, draft.partner[j] + 1, f"* {draft.tokens[j - 1]}")


def _begins_statement(draft: Draft, i: int) -> bool:
    before = draft.token(i - 1)
    if before == ")":
        return draft.token(draft.partner[i - 1] - 1) in ("if", "for", "while")
    return before in (";", "{", "}", "else", "do")


def assignments(draft: Draft) -> None:
    """Copies structs between address spaces by a function: `*((threadgroup A*)(x)) = *((const device A*)(y));`."""
    for i, token in draft.live():
        if token == "*" and _begins_statement(draft, i):
            _assignment(draft, i)


def _assignment(draft: Draft, i: int) -> None:
    equals = i + 1
    while draft.token(equals) not in ("=", ";", ""):
        equals = draft.partner[equals] + 1 if draft.tokens[equals] in OPEN else equals + 1
    if draft.token(equals) != "=" or draft.token(equals + 1) != "*" or draft.token(equals - 1) != ")":
        return
    end = equals + 1
    while draft.token(end) not in (";", ""):
        end = draft.partner[end] + 1 if draft.tokens[end] in OPEN else end + 1
    if not any(draft.tokens[k] in SPACES for k in range(i, end)):
        return
    if draft.tokens[end - 1] != ")" or any(draft.tokens[k] not in OPEN for k in draft.outside(equals + 2, end)):
        return  # an expression of the loaded value: `*(device float*)p + 1`
    draft.edits.append((draft.spans[i][0], draft.spans[i][1], "::mittens::assign("))
    draft.edits.append((draft.spans[equals][0], draft.spans[equals + 1][1], ","))
    draft.edits.append((draft.spans[end][0], draft.spans[end][0], ")"))
