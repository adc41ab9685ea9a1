"""The file and line that each position of a preprocessed text comes from."""

from __future__ import annotations

import bisect
import re


class LineMap:
    """Where positions in preprocessed text are from, by its line markers."""

    _MARKER = re.compile(r'^#(?:line)? (\d+) "([^"\n]*)"[^\n]*\n', re.M)

    def __init__(self, text: str):
        self._text = text
        self._marks = [(0, "", 1), *((m.end(), m[2], int(m[1])) for m in self._MARKER.finditer(text))]
        self._starts = [start for start, _, _ in self._marks]
        self._ends = [m.start() for m in re.finditer("\n", text)]  # of lines

    def at(self, position: int) -> tuple[str, int]:
        """The file and the line of a position."""
        start, file, line = self._marks[bisect.bisect_right(self._starts, position) - 1]
        return file, line + bisect.bisect_left(self._ends, position) - bisect.bisect_left(self._ends, start)

    def column(self, position: int) -> int:
        """The column of a position, from 1."""
        return position - self._text.rfind("\n", 0, position)
