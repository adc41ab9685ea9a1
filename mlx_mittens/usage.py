"""What the commands say about arguments that they cannot serve."""

from __future__ import annotations

from collections.abc import Iterable


class UsageError(Exception):
    """Arguments that cannot be served, with a message for people."""


def chosen(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The names that an option lists, separated by commas.

    Raises:
        UsageError: There are none, or one is not known; the message lists those that are.
    """
    known = list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"{option}: {', '.join(unknown) or 'nothing'} given; there are {', '.join(known)}")
    return names
