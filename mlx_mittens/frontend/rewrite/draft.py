"""A text on its way to clang: its tokens, and the edits so far."""

from __future__ import annotations

from collections.abc import Iterator

from ..read.tokens import Tokens
from .translation import Translation


class Draft(Tokens):
    """Tokens that passes edit.

    Attributes:
        constants: Values of function constants by index, as they are written in C++; None leaves them open, as they are
            before a pipeline is made.
        attributes: Names and arguments of `[[...]]`, by the first token of each.
        in_attribute: Whether a token is part of one.
        dropped: Whether a token was replaced.
        settled: Whether a token is part of a kernel's head, which later passes leave alone.
        edits: Begin, end and new text of each replacement.
        result: The kernels found so far.
    """

    def __init__(self, text: str, constants: dict[int, str] | None = None):
        super().__init__(text)
        self.constants = constants
        self.attributes: dict[int, list[tuple[str, str]]] = {}
        self.in_attribute = [False] * len(self.tokens)
        self.dropped = [False] * len(self.tokens)
        self.settled = [False] * len(self.tokens)
        self.edits: list[tuple[int, int, str]] = []
        self.result = Translation("")

    def live(self) -> Iterator[tuple[int, str]]:
        """Tokens that no pass has replaced or settled, also while a pass replaces some."""
        for i, token in enumerate(self.tokens):
            if not self.dropped[i] and not self.settled[i]:
                yield i, token

    def source(self, first: int, last: int) -> str:
        """The text of live tokens, on one line."""
        parts, end = [], None
        for i in range(first, last):
            if not self.dropped[i]:
                parts += [" " if end is not None and end < self.spans[i][0] else "", self.tokens[i]]
                end = self.spans[i][1]
        return "".join(parts)

    def replace(self, first: int, last: int, new: str) -> None:
        """Puts new text in place of tokens; the lines stay as many as they were."""
        begin, end = self.spans[first][0], self.spans[last - 1][1]
        old = self.text[begin:end]
        kept = "\n".join([""] + [line if line.startswith("#") else "" for line in old.split("\n")[1:]])
        self.edits.append((begin, end, new + kept))
        self.dropped[first:last] = [True] * (last - first)

    def insert(self, i: int, text: str) -> None:
        """Puts text behind token i."""
        self.edits.append((self.spans[i][1], self.spans[i][1], text))

    def attributes_between(self, first: int, last: int) -> dict[str, str]:
        return dict(a for i in range(first, last) for a in self.attributes.get(i, ()))

    def attributes_before(self, i: int) -> dict[str, str]:
        """The attributes of the declaration whose type is token i."""
        found: dict[str, str] = {}
        i -= 1
        while self.token(i) in ("inline", "static", "kernel") or (i >= 0 and self.in_attribute[i]):
            found.update(self.attributes.get(i, ()))
            i -= 1
        return found

    def written(self) -> str:
        """The text with all edits; an edit within a larger one is left out."""
        parts, done = [], 0
        for begin, end, new in sorted(self.edits, key=lambda edit: (edit[0], -edit[1])):
            if begin >= done:
                parts += [self.text[done:begin], new]
                self.result.edits.append((begin, end, len(new)))
                done = end
        return "".join(parts) + self.text[done:]
