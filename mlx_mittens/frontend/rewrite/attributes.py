"""Attributes: cut out first, because they may stand anywhere in a declaration."""

from __future__ import annotations

from .draft import Draft


def cut_attributes(draft: Draft) -> None:
    """Cuts out each `[[...]]`, and keeps its names and arguments by its first token."""
    i = 0
    while i < len(draft.tokens):
        if draft.tokens[i] == "[" and draft.token(i + 1) == "[" and draft.partner[i] == draft.partner[i + 1] + 1:
            end = draft.partner[i] + 1
            found = []
            for first, last in draft.commas(i + 2, end - 2):
                inner = draft.source(first + 2, last - 1) if draft.token(first + 1) == "(" else ""
                found.append((draft.tokens[first], inner))
            draft.attributes[i] = found
            draft.replace(i, end, "")
            draft.in_attribute[i:end] = [True] * (end - i)
            i = end
        else:
            i += 1
