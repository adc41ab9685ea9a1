"""A trial, which every subject makes of a draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One case, drawn but not run.

    Attributes:
        mode: Which kind of case it is, for the counts.
        text: Everything that was drawn, on one line.
        run: Runs it; returns its fault, or None.
    """

    mode: str
    text: str
    run: Callable[[], str | None]
