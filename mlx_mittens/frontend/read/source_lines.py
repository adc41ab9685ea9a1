"""The text of the lines that a fault names."""

from __future__ import annotations

import re

from .sources import without_comments
from .tokens import RewriteError, Tokens

_PLACE = re.compile(r"(?:\(|, )(?P<file>[^(),:\n]+):(?P<first>\d+)(?: to (?P<last>\d+))?\b\)?")
_MARKER = re.compile(r'#line (\d+) "([^"\n]*)"$')
_ENDLESS = "(step_limit)"
_COUNTED = re.compile(
    r"[^;]*;(?P<name>\w+)(?:<=?\w+;(?:\+\+(?P=name)|(?P=name)\+\+|(?P=name)\+=\w+)"
    r"|>=?\w+;(?:--(?P=name)|(?P=name)--|(?P=name)-=\w+))"
)

Lines = dict[tuple[str, int], str]


def with_lines(message: str, flat: str) -> str:
    """A message, and below it the text of each line that it names; of a loop without an end the line where it begins.

    Args:
        message: A text with places as (file:line), or behind a comma.
        flat: The text that was launched, with `#line` directives.
    """
    lines = _lines(flat)
    places: list[tuple[str, int]] = []
    for place in _PLACE.finditer(message):
        file, first = place["file"], int(place["first"])
        if _ENDLESS in message:
            first = _loop_around(lines, file, first, int(place["last"] or first)) or first
            message = message.replace(place[0], f"({file}:{first})")
        places.append((file, first))
    written = [f"{file}:{line}: {lines[file, line].strip()}" for file, line in places if (file, line) in lines]
    return "\n  ".join([message, *dict.fromkeys(written)])


def _lines(flat: str) -> Lines:
    """The lines of a text by their files and numbers."""
    lines: Lines = {}
    name, number = "", 1
    for line in flat.split("\n"):
        if marker := _MARKER.match(line):
            name, number = marker[2], int(marker[1])
        else:
            lines.setdefault((name, number), line)
            number += 1
    return lines


def _loop_around(lines: Lines, file: str, first: int, last: int) -> int | None:
    """The line of the innermost loop that holds some lines."""
    text = "\n".join(lines.get((file, k), "") for k in range(1, max(k for name, k in lines if name == file) + 1))
    try:
        reader = Tokens(without_comments(text))
    except RewriteError:
        return None
    found = None
    for i, token in enumerate(reader.tokens):
        if token in ("for", "while", "do"):
            begin = reader.lines.at(reader.spans[i][0])[1]
            end = reader.lines.at(reader.spans[reader.statement_end(i) - 1][0])[1]
            if begin <= first and last <= end and not (found and _is_counted(reader, i)):
                found = begin
    return found


def _is_counted(reader: Tokens, i: int) -> bool:
    """Whether a loop counts its rounds, so that the compiler may unroll it: `for (int k = 0; k < 4; ++k)`."""
    opening = i + 1
    if reader.tokens[i] != "for":
        return False
    head = "".join(reader.tokens[opening + 1 : reader.partner[opening]])
    counted = _COUNTED.fullmatch(head)
    if counted is None:
        return False
    name = counted["name"]
    body = " ".join(reader.tokens[reader.partner[opening] + 1 : reader.statement_end(i)])
    return re.search(rf"\b{name} (?:[-+*/%&|^] ?)?= (?!=)|\b{name} (?:\+ \+|- -)|(?:\+ \+|- -) {name}\b", body) is None
