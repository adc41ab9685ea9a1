"""The nearest of some known words to one that is unknown, as errors suggest it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# The similarity, of 1 for the same word, from which on a word is suggested.
_LIKE = 0.6


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The first known word that has this one as a part, else the one most like it; None where none is like it."""
    folded: dict[str, str] = {}
    for one in known:
        folded.setdefault(_folded(one), one)
    asked = _folded(word)
    if not asked:
        return None
    parts = [one for one in folded if asked in one]
    close = difflib.get_close_matches(asked, folded, n=1, cutoff=_LIKE)
    found = parts[:1] or close
    return folded[found[0]] if found else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """A clause that suggests the nearest known word, or an empty string."""
    found = nearest(word, known)
    return "" if found is None else f"; did you mean {found}?"


def _folded(word: str) -> str:
    """A word in lower case without the characters that join its parts."""
    return word.lower().lstrip("-").replace("_", "").replace("-", "").replace(" ", "")
