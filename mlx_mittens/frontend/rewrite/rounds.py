"""Loops in which lanes part around functions of their SIMD-group: the simulator counts their rounds."""

from __future__ import annotations

from ..read.tokens import IDENTIFIER, SPACES
from .draft import Draft

_NO_FUNCTIONS = frozenset("if for while switch catch constexpr decltype alignas __attribute__ sizeof".split())
_PARTING = frozenset("if for while do switch continue break return ?".split())


def count_rounds(draft: Draft) -> None:
    """Counts the rounds of loops in which lanes part around functions of their SIMD-group."""
    collective = _collective(draft)
    tails: set[int] = set()  # the `while` of `do ... while`
    for i, token in enumerate(draft.tokens):
        if token not in ("for", "while", "do") or i in tails or draft.in_attribute[i]:
            continue
        body = i + 1 if token == "do" else draft.partner[i + 1] + 1
        end = draft.statement_end(body)
        if token == "do":
            tails.add(end)
        region = range(i + 1, draft.partner[end + 1] if token == "do" else end)
        parts = any(_may_part(draft, k) for k in range(body, end))
        if not any(_is_collective(draft, k, collective) for k in region):
            continue
        if not parts and not any(draft.tokens[k] in collective for k in region):
            continue
        draft.insert(body - 1, " { const ::mittens::Round mittens_round; ")
        draft.insert(end - 1, " }")


def _function_of(draft: Draft, brace: int) -> str | None:
    """The name of the function whose body a brace opens."""
    i = brace - 1
    while draft.token(i) in ("const", "volatile", "noexcept", "mutable", *SPACES):
        i -= 1
    name = draft.token(draft.partner[i] - 1) if draft.token(i) == ")" else ""
    return name if IDENTIFIER.match(name) and name not in _NO_FUNCTIONS else None


def _collective(draft: Draft) -> set[str]:
    """The functions of the text that call a function of SIMD-groups, themselves or through others."""
    names: set[str] = set()
    waiting = {i: name for i, token in enumerate(draft.tokens) if token == "{" and (name := _function_of(draft, i))}
    while True:
        found = [
            brace
            for brace in waiting
            if any(_is_collective(draft, k, names) for k in range(brace + 1, draft.partner[brace]))
        ]
        if not found:
            return names
        names |= {waiting.pop(brace) for brace in found}


def _may_part(draft: Draft, i: int) -> bool:
    token = draft.tokens[i]
    is_lazy = token in "&|" and token == draft.token(i + 1) and draft.spans[i][1] == draft.spans[i + 1][0]
    return is_lazy or token in _PARTING


def _is_collective(draft: Draft, i: int, names: set[str]) -> bool:
    token = draft.tokens[i]
    return (token in names or token.startswith(("simd_", "quad_"))) and draft.token(i + 1) in ("(", "<")
