"""The tokens of a preprocessed text, and the shapes they form: brackets, lists, statements."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from .lines import LineMap

IDENTIFIER = re.compile(r"[A-Za-z_]\w*$")
SPACES = ("device", "constant", "threadgroup", "thread")
OPEN = {"(": ")", "[": "]", "{": "}"}
CLOSE = {close: open for open, close in OPEN.items()}

_TOKEN = re.compile(
    r"""^\#[^\n]*$|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.])*|::|->|[^\s\w]""",
    re.M,
)
_ARITHMETIC = re.compile(r"(?:\d[\dxXa-fA-F]*[uUlL]*|[-+*/%()|&^~]|<<|>>|\s)+$")


class RewriteError(Exception):
    """A mistake in a text, as a compiler reports it: file, line, error."""


def _integer(text: str) -> int | None:
    """The value of an expression of numbers; None if it is another."""
    if not _ARITHMETIC.match(text) or "**" in text:
        return None
    try:
        return int(eval(re.sub(r"(?<=[\dA-Fa-f])[uUlL]+\b", "", text).replace("/", "//"), {"__builtins__": {}}))
    except (SyntaxError, ArithmeticError, ValueError, TypeError):
        return None


# A check reads a text twice, and rewrites it once.
@functools.lru_cache(maxsize=1)
def _read(text: str) -> tuple[list[str], list[tuple[int, int]], list[int], list[int]]:
    """Splits a text: its tokens, their spans, the partner of each bracket and the bracket around each token."""
    matches = [m for m in _TOKEN.finditer(text) if not m[0].startswith("#")]
    tokens = [m[0] for m in matches]
    partner, outer = [-1] * len(tokens), []
    stack: list[int] = []

    def error(what: str, i: int) -> RewriteError:
        file, line = LineMap(text).at(matches[i].start())
        return RewriteError(f"{file}:{line}: error: {what}")

    for i, token in enumerate(tokens):
        outer.append(stack[-1] if stack else -1)
        if token in OPEN:
            stack.append(i)
        elif token in CLOSE:
            if not stack or tokens[stack[-1]] != CLOSE[token]:
                raise error(f"{token!r} closes nothing", i)
            partner[i] = stack.pop()
            partner[partner[i]] = i
    if stack:
        raise error(f"{tokens[stack[-1]]!r} is never closed", stack[-1])
    return tokens, [m.span() for m in matches], partner, outer


class Tokens:
    """The tokens of a text, which stay as they are.

    Attributes:
        text: The preprocessed text, line markers included.
        tokens: Each token as it is written.
        spans: Begin and end of each token in the text.
        partner: The matching bracket of each bracket; -1 for other tokens.
        lines: The file and line of each position.
    """

    def __init__(self, text: str):
        self.text = text
        self.tokens, self.spans, self.partner, self._outer = _read(text)
        self.lines = LineMap(text)
        self._list_ends: dict[int, int] = {}

    def error(self, message: str, i: int) -> RewriteError:
        file, line = self.lines.at(self.spans[i][0])
        return RewriteError(f"{file}:{line}: {message}")

    def integer(self, text: str, i: int) -> int:
        """The value of a constant expression: of an index."""
        expression = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: str(self._named_integers.get(m[0], m[0])), text)
        value = _integer(expression)
        if value is None:
            raise self.error(f"error: {text!r} is no constant expression: write a number", i)
        return value

    @functools.cached_property
    def _named_integers(self) -> dict[str, int]:
        """Integers that the text names: `constant int N = 4;`, `enum { N = 4 };`."""
        names: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if token == "=" and IDENTIFIER.match(self.token(i - 1)):
                end = i + 1
                while self.token(end) not in (";", ",", "}", ""):
                    end += 1
                text = re.sub(
                    r"\b[A-Za-z_]\w*\b", lambda m: str(names.get(m[0], m[0])), "".join(self.tokens[i + 1 : end])
                )
                value = _integer(text) if end - i < 12 else None
                if value is not None:
                    names.setdefault(self.tokens[i - 1], value)
        return names

    def token(self, i: int) -> str:
        return self.tokens[i] if 0 <= i < len(self.tokens) else ""

    def after_template_arguments(self, i: int) -> int:
        """The token after the template argument list that opens at i, or i if none does."""
        if self.token(i) != "<" or self._is_operator(i):
            return i
        return self._list_end(i + 1) + 1 or i

    def _is_operator(self, i: int) -> bool:
        """Whether an angle bracket is part of `<<`, `<=`, `>=`; of `>>` each closes a list."""
        second = ("<", "=") if self.tokens[i] == "<" else ("=",)
        return self.token(i + 1) in second and self.spans[i][1] == self.spans[i + 1][0]

    def _list_end(self, j: int) -> int:
        """The `>` that closes the template argument list within which token j stands; -1 if none does.

        Where a `<` may open a list or be a comparison, it opens one if the rest can then be closed.
        """
        if j in self._list_ends:
            return self._list_ends[j]
        start, found = j, -1
        while j < len(self.tokens):
            token = self.tokens[j]
            if token in OPEN:
                j = self.partner[j] + 1
            elif token in (";", ")", "]", "}"):
                break
            elif token in ("<", ">") and self._is_operator(j):
                j += 2
            elif token == ">":
                found = j
                break
            elif token == "<" and IDENTIFIER.match(self.token(j - 1)):
                inner = self._list_end(j + 1)
                found = self._list_end(inner + 1) if inner >= 0 else -1
                if found < 0:
                    found = self._list_end(j + 1)
                break
            else:
                j += 1
        self._list_ends[start] = found
        return found

    def commas(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The parts between the top-level commas of first..last-1."""
        start, i = first, first
        while i < last:
            token = self.tokens[i]
            if token in OPEN:
                i = self.partner[i]
            elif token == "<" and IDENTIFIER.match(self.token(i - 1)):
                end = self.after_template_arguments(i)
                i = end - 1 if i < end <= last else i
            elif token == ",":
                yield start, i
                start = i + 1
            i += 1
        if start < last:
            yield start, last

    def enclosing(self, i: int) -> int:
        """The bracket within which a token stands; -1 if none."""
        return self._outer[i]

    def statement_end(self, i: int) -> int:
        """The token behind the statement that starts at i."""
        while self.token(i) == "[" and self.token(i + 1) == "[":
            i = self.partner[i] + 1
        token = self.token(i)
        if token == "{":
            return self.partner[i] + 1
        if token in ("if", "for", "while", "switch"):
            opening = i + 1
            while self.token(opening) not in ("(", ""):
                opening += 1
            end = self.statement_end(self.partner[opening] + 1)
            return self.statement_end(end + 1) if token == "if" and self.token(end) == "else" else end
        if token == "do":
            end = self.statement_end(i + 1)  # `while`, a pair of brackets and a semicolon
            return self.partner[end + 1] + 2
        while self.token(i) not in (";", "", "}"):
            i = self.partner[i] + 1 if self.tokens[i] in OPEN else i + 1
        return i + 1

    def is_block(self, brace: int) -> bool:
        """Whether a brace opens statements, not a class, a namespace or a list of values."""
        start = brace - 1
        while start >= 0 and self.tokens[start] not in (";", "{", "}"):
            start = self.partner[start] - 1 if self.tokens[start] in ")]" else start - 1
        head = self.tokens[start + 1 : brace]
        classes = {"struct", "class", "union", "enum", "namespace", "extern"}
        return self.tokens[brace] == "{" and head[-1:] != ["="] and not (classes & set(head) and ")" not in head)

    def outside(self, first: int, last: int) -> Iterator[int]:
        """Tokens of first..last-1 outside of brackets, and opening brackets."""
        while first < last:
            yield first
            first = self.partner[first] + 1 if self.tokens[first] in OPEN else first + 1

    @functools.cached_property
    def named_types(self) -> set[str]:
        """Aliases and template parameters, which may be vectors."""
        names: set[str] = set()
        for i, token in enumerate(self.tokens):
            if token == "using" and self.token(i + 2) == "=":
                names.add(self.tokens[i + 1])
            elif token in ("typename", "class") and self.token(i + 2) in (",", ">", "="):
                names.add(self.tokens[i + 1])
            elif token == "typedef":
                end = i
                while self.token(end) not in (";", ""):
                    end += 1
                names.add(self.tokens[end - 1])
        return names
