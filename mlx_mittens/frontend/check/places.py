"""The columns of a problem in the user's own line, which the preprocessor may have moved."""

from __future__ import annotations

import re

from ..errors import Problem


class Places:
    """Columns of a file's own text, which the preprocessor may have moved."""

    def __init__(self, file: str, flat: str):
        self.lines: dict[tuple[str, int], str] = {}
        name, number = file, 1
        for line in flat.split("\n"):
            marker = re.match(r'#line (\d+) "([^"\n]*)"$', line)
            if marker:
                name, number = marker[2], int(marker[1])
            else:
                self.lines[name, number] = line
                number += 1

    def refined(self, problem: Problem, word: str = "") -> Problem:
        """The problem with the column at which the word stands in the user's line."""
        line = self.lines.get((problem.file, problem.line))
        if line is None:
            return problem
        column = min(max(problem.column, 1), len(line) + 1)
        if not word:
            named = re.search(r"'(\w+)'", problem.what)
            word = named[1] if named and not line.startswith(named[1], column - 1) else ""
        if word and not line.startswith(word, column - 1):
            places = [m.start() + 1 for m in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", line)]
            column = min(places, key=lambda at: abs(at - column)) if places else column
        return Problem(problem.file, problem.line, problem.what, column, problem.severity)
