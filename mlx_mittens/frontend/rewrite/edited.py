"""A text with pieces put in where clang asked for them, and the places of both."""

from __future__ import annotations

import bisect
import re


class Places:
    """Offsets of a text by line and column, and the other way round."""

    def __init__(self, text: str):
        self.starts = [0]
        for newline in re.finditer("\n", text):
            self.starts.append(newline.end())
        self.bytes_differ = not text.isascii()
        self.text = text

    def offset(self, line: int, column: int) -> int:
        start = self.starts[min(line, len(self.starts)) - 1]
        if self.bytes_differ:  # clang counts bytes
            end = self.starts[line] if line < len(self.starts) else len(self.text)
            return start + len(self.text[start:end].encode()[: column - 1].decode(errors="ignore"))
        return start + column - 1

    def line(self, offset: int) -> tuple[int, int]:
        line = bisect.bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1


class Edited:
    """A text with insertions, which maps places back to the original text."""

    def __init__(self, text: str):
        self.text = text
        self.insertions: list[tuple[int, int]] = []  # where in the new text, and how long

    def insert(self, pieces: list[tuple[int, int, str]]) -> None:
        """Puts texts in at offsets of the present text; of those at one offset in the order of their second number."""
        parts, done, shift = [], 0, 0
        places = []
        for at, _, text in sorted(pieces, key=lambda piece: piece[:2]):
            parts += [self.text[done:at], text]
            places.append((at + shift, len(text)))
            done, shift = at, shift + len(text)
        shifts = sorted((at, len(text)) for at, _, text in pieces)
        moved = []
        for at, length in self.insertions:
            moved.append((at + sum(n for place, n in shifts if place <= at), length))
        self.text = "".join([*parts, self.text[done:]])
        self.insertions = sorted([*moved, *places])

    def followed_by(self, end: int, text: str) -> Edited:
        """The same insertions in a text that is the same up to a place; those behind it are left out."""
        moved = end + sum(length for at, length in self.insertions if self.original(at) < end)
        edited = Edited(self.text[:moved] + text[end:])
        edited.insertions = [insertion for insertion in self.insertions if insertion[0] < moved]
        return edited

    def original(self, offset: int) -> int:
        """Where a place of the present text was before any insertion."""
        back = 0
        for at, length in self.insertions:
            if at >= offset:
                break
            back += min(length, offset - at)
        return offset - back
