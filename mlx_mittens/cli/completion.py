"""Completion in a shell, by argcomplete: what words an argument takes. Without argcomplete nothing is completed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

Words = Callable[[argparse.Namespace], Iterable[str]]


def offer(action: argparse.Action, words: Words) -> None:
    """Has an argument completed by words, which may depend on the arguments before it."""

    def complete(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        return list(words(parsed_args))

    action.completer = complete  # type: ignore[attr-defined]  # argcomplete's name


def offer_list(action: argparse.Action, words: Words) -> None:
    """Completes the last of several names separated by commas."""

    def complete(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        before, comma, last = prefix.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{word}" for word in words(parsed_args) if word.startswith(last) and word not in given]

    action.completer = complete  # type: ignore[attr-defined]


def is_asked() -> bool:
    """Whether a shell asks for completions."""
    return "_ARGCOMPLETE" in os.environ


def answer(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks for completions, and ends the process; without argcomplete does nothing."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)
