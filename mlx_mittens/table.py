"""Tables as plain text: whole for files and pipes, as wide as the terminal for people."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

# Least width of a column where a table does not fit.
_NARROWEST = 12


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        rank: Where the terminal is too narrow, columns of the highest rank are dropped first; columns of rank 0 stay.
        left: Whether its cells are flush left.
    """

    name: str
    rank: int = 0
    left: bool = False


def aligned(lines: Sequence[Sequence[str]], left: int, width: int | None = None) -> str:
    """Lines of cells in columns; the first `left` columns are flush left and the others flush right.

    Args:
        lines: The cells.
        left: How many columns are flush left.
        width: The terminal's width, into which columns that are flush left are cut; None cuts nothing.
    """
    lines = _narrowed(lines, left, width)
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = []
    for line in lines:
        cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def html(lines: Sequence[Sequence[str]], left: int, notes: Sequence[str] = ()) -> str:
    """A head and lines of cells as a table of a notebook, with notes below.

    Args:
        lines: The cells, of the head first.
        left: How many columns are flush left.
        notes: Lines of text.
    """

    def row(cells: Sequence[str], tag: str) -> str:
        sides = ["left" if i < left else "right" for i in range(len(cells))]
        parts = [f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, sides)]
        return f"<tr>{''.join(parts)}</tr>"

    below = "".join(f"<div>{escape(note)}</div>" for note in notes)
    if len(lines) < 2:
        return below
    body = "".join(row(cells, "td") for cells in lines[1:])
    return f"<table><thead>{row(lines[0], 'th')}</thead><tbody>{body}</tbody></table>{below}"


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Which columns are shown: those with something in them, as many as fit."""
    kept = [i for i, column in enumerate(columns) if not column.rank or any(row[i] for row in rows)]
    widths = {i: max(len(columns[i].name), *(len(row[i]) for row in rows)) for i in kept}
    while width is not None and sum(widths[i] + 2 for i in kept) - 2 > width:
        last = max(kept, key=lambda i: columns[i].rank)
        if not columns[last].rank:
            break
        kept.remove(last)
    return kept


def _plain(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    kept = _fitting(columns, rows, width)
    lines = [[columns[i].name for i in kept], *([row[i] for i in kept] for row in rows)]
    left = sum(columns[i].left for i in kept)
    return aligned(lines, left, width).split("\n")


def _narrowed(lines: Sequence[Sequence[str]], left: int, width: int | None) -> Sequence[Sequence[str]]:
    """Lines whose widest column that is flush left is cut until they fit, where no column can be dropped any more."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    while width is not None and left:
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        widest = max(range(left), key=lambda i: widths[i])
        if excess <= 0 or widths[widest] <= _NARROWEST:
            break
        second = max((widths[i] for i in range(left) if i != widest), default=0)
        widths[widest] = max(widths[widest] - excess, min(second, widths[widest] - 1), _NARROWEST)
    return [[_cut(cell, w) if i < left else cell for i, (cell, w) in enumerate(zip(line, widths))] for line in lines]


def _cut(text: str, width: int) -> str:
    """A text without its middle, where it is longer than that."""
    if len(text) <= width:
        return text
    tail = (width - 2) // 2
    return f"{text[: width - 2 - tail]}..{text[-tail:]}"


def text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    styles: Sequence[str] | None = None,
) -> str:
    """A table, one line a row.

    Args:
        columns: Those that are flush left come first.
        rows: A cell for each column.
        width: That of the terminal, or None for one plain table with all columns. On a terminal each value of the first
            column heads a table of its own, in the place of the second column's name.
        styles: For a terminal with colours: the codes of each row, as in ``"1;31"``, or an empty text.
    """
    if width is None:
        return "\n".join(_plain(columns, rows, None))
    tables = []
    for name, group in groupby(range(len(rows)), key=lambda i: rows[i][0]):
        places = list(group)
        head = [replace(columns[1], name=name), *columns[2:]]
        lines = _plain(head, [rows[i][1:] for i in places], width)
        if styles is not None:
            codes = ["1", *(styles[i] for i in places)]
            lines = [f"\x1b[{code}m{line}\x1b[0m" if code else line for line, code in zip(lines, codes)]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def terminal_width() -> int | None:
    """The columns of the terminal that is stdout, or None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    """Prints a table as it suits stdout."""
    coloured = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    print(text(columns, rows, terminal_width(), styles if coloured else None))
