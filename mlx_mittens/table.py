"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines of cells in columns, so many of which are flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = []
    for line in lines:
        cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)
