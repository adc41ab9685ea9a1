"""The parser of the command line: it answers an unknown word with the nearest word that it knows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ..nearest import nearest, suggestion

# Positional arguments that take all that follows, options too: they belong to another program.
_TAKE_ALL = (argparse.PARSER, argparse.REMAINDER)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, and suggests the nearest known word."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\n{self.prog} --help shows what it takes", file=sys.stderr)
        raise SystemExit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of argparse, but an unknown option is reported before a missing argument is, which it may stand for."""
        given = sys.argv[1:] if args is None else list(args)
        if not any(action.nargs in _TAKE_ALL for action in self._actions):
            for before, word in zip(["", *given], given):
                if word == "--":
                    break
                if not (" " in word and self._takes_value(before)):
                    self._check_option(word)
        return super().parse_known_args(given, namespace)

    def options(self) -> list[str]:
        """The long options."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def refuse(self, words: Sequence[str], known: Iterable[str]) -> NoReturn:
        """Ends the program for words that no argument takes.

        Args:
            words: They, one at least.
            known: Values of options that the command takes, which may have been meant.
        """
        word = words[0]
        self._check_option(word)
        if word.startswith("-") and word != "-" and " " not in word:
            self.error(f"unknown option {word}")
        hint = ""
        if "--ops" in self.options():
            meant = nearest(word, known)
            hint = f"; did you mean --ops {meant}?" if meant else ""
        self.error(f"unexpected argument {word!r}{hint}")

    def _takes_value(self, word: str) -> bool:
        """Whether a word is an option, perhaps shortened, whose value comes next."""
        return word.startswith("-") and any(
            action.nargs != 0 and any(option.startswith(word) for option in action.option_strings)
            for action in self._actions
        )

    def _check_option(self, word: str) -> None:
        """Refuses an unknown option; a word with a space in its name is no option, as for argparse."""
        name = word.partition("=")[0]
        known = self.options()
        if " " in name or len(name) <= 2 or not name.startswith("--"):
            return
        if not any(option.startswith(name) for option in known):
            self.error(f"unknown option {name}{suggestion(name, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's hook for `choices`, whose message has no suggestion before Python 3.14."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
        options = "/".join(action.option_strings)
        where = f"{options}: " if options else ""
        hint = suggestion(str(value), known)
        self.error(f"{where}unknown {what} {value!r}{hint or '; there are ' + ', '.join(known)}")
