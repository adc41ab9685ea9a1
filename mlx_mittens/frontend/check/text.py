"""A text that is checked: its tokens, the names it declares, and the problems found so far."""

from __future__ import annotations

import functools
import re

from ..errors import Problem
from ..rewrite.attributes import cut_attributes
from ..rewrite.draft import Draft

WORD = re.compile(r"[A-Za-z_]\w*$")
SPACES = {"device", "constant", "threadgroup", "thread", "ray_data", "object_data"}


class Text(Draft):
    """The tokens of a file after the preprocessor.

    Attributes:
        lambdas: Whether the version of the language has them.
        fences: Whether it has `atomic_thread_fence`.
        eights: Whether it has vectors of eight, in which MLX's kernels of Metal 4 hold fragments.
        found: Problems that every one of Apple's compilers refuses.
        doubtful: Problems that some of them take.
        functions: Names of the functions that the text declares.
        pointers: Aliases of pointers and references that name no address space.
    """

    def __init__(self, text: str, lambdas: bool = False, fences: bool = True, eights: bool = False):
        super().__init__(text)
        cut_attributes(self)
        self.lambdas, self.fences, self.eights = lambdas, fences, eights
        self.found: list[Problem] = []
        self.doubtful: list[Problem] = []
        self.functions: set[str] = set()
        self.pointers: set[str] = set()

    def report(self, i: int, what: str, doubtful: bool = False, severity: str = "error") -> None:
        position = self.spans[i][0]
        file, line = self.lines.at(position)
        problem = Problem(file, line, what, self.lines.column(position), severity)
        (self.doubtful if doubtful else self.found).append(problem)

    @functools.cached_property
    def classes(self) -> set[str]:
        """Classes that the text declares."""
        words = ("struct", "class", "union")
        return {
            self.token(i + 1) for i, token in enumerate(self.tokens) if token in words and WORD.match(self.token(i + 1))
        }

    @functools.cached_property
    def internals(self) -> list[tuple[int, bool]]:
        """Where the text switches Metal's internals, and whether on."""
        pragma = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+METAL[ \t]+internals[ \t]*:[ \t]*(enable|disable)", re.M)
        return [(m.start(), m[1] == "enable") for m in pragma.finditer(self.text)]

    @functools.cached_property
    def parameters(self) -> set[str]:
        """Names of types that are arguments of templates."""
        return {self.token(i + 1) for i, token in enumerate(self.tokens) if token == "typename"} | {
            self.token(i + 1) for i, token in enumerate(self.tokens) if token == "class" and self.token(i - 1) in "<,"
        }

    @functools.cached_property
    def types(self) -> set[str]:
        """Types that the text declares: classes, aliases, template parameters."""
        names = set()
        for i, token in enumerate(self.tokens):
            after = self.token(i + 1)
            if token in ("struct", "class", "union", "enum", "typename") and WORD.match(after):
                names.add(after)
            elif token == "using" and self.token(i + 2) == "=":
                names.add(after)
            elif token == "typedef":
                end = i
                while self.token(end) not in (";", ""):
                    end = self.partner[end] + 1 if self.tokens[end] in ("(", "[", "{") else end + 1
                names.add(self.token(end - 1))
        return names
