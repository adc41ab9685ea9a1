"""Checks a kernel's signature: its arguments, their address spaces, indices and attributes, and where it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..read.builtins import GRID_POSITIONS, POSITIONS, SCALAR_POSITIONS, is_type
from ..read.tokens import RewriteError
from ..rewrite.draft import Draft

MOST_INDEX = 30
MOST_ARGUMENTS = 31

_POSITION_TYPE = re.compile(
    r"(?:metal::)?(?:u(?:int|short)([234]?)|unsigned(?:int|short)?|uint(?:16|32)_t|vec<(?:uint|ushort),([234])>)$"
)
_NOT_COVERED = re.compile(
    r"(texture\w*|depth\w*|sampler|patch_control_point|imageblock\w*|mesh|acceleration_structure|visible_function_table"
    r"|intersection_function_table|primitive_acceleration_structure|instance_acceleration_structure|tensor|command_buffer"
    r"|render_command|compute_command|render_pipeline_state|compute_pipeline_state)$"
)
_NOT_COVERED_ATTRIBUTES = ("texture", "sampler", "stage_in", "payload", "vertex_id", "instance_id", "position")


@dataclass(frozen=True)
class Finding:
    """A report at a token: its text, and whether it is a mistake or beyond this check."""

    token: int
    what: str
    covered: bool = True


class Signatures:
    """The kernels of a text."""

    def __init__(self, reader: Draft):
        self.reader = reader
        self.tokens, self.token, self.partner = reader.tokens, reader.token, reader.partner

    def findings(self) -> Iterator[Finding]:
        """Mistakes in the kernels of the text, and parts that are not covered."""
        kernels: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if token == "kernel":
                name = self._definition(i)
                if name is not None:
                    kernels.setdefault(self.tokens[name], name)
                    yield from self._member(i, name)
                    yield from self._arguments(name)
        yield from self._calls(kernels)

    def _definition(self, i: int) -> int | None:
        """The name of the kernel function that the word at i makes one; None if it instantiates a kernel."""
        start = i
        while self.reader.in_attribute[start] and not (self.token(start) == "[" and self.token(start + 1) == "["):
            start -= 1
        while self.token(start - 1) in ("]", "inline", "static", "extern"):
            start = self.partner[start - 1] if self.token(start - 1) == "]" else start - 1
        if self.token(start - 1) == "template" or self.token(start) == "template":
            return None
        if self.reader.in_attribute[i]:
            while i < len(self.tokens) and self.reader.in_attribute[i]:
                i += 1
            i -= 1
        j = i + 1
        while j < len(self.tokens) and (self.tokens[j] not in ("(", ";", "{") or self.reader.in_attribute[j]):
            j += 1
        return j - 1 if self.token(j) == "(" and j - 1 > i and re.match(r"[A-Za-z_]", self.token(j - 1)) else None

    def _member(self, i: int, name: int) -> Iterator[Finding]:
        brace = self.reader.enclosing(i)
        head = brace - 1
        while head >= 0 and self.tokens[head] not in (";", "{", "}", ")"):
            head -= 1
        outer = brace
        while outer >= 0:
            if self.tokens[outer] == "{" and self.token(outer - 1) == "namespace":
                yield Finding(name, f"kernel {self.tokens[name]!r} is in a namespace without a name: give it one")
            outer = self.reader.enclosing(outer)
        if brace >= 0 and {"struct", "class", "union"} & set(self.tokens[head + 1 : brace]):
            yield Finding(name, f"kernel {self.tokens[name]!r} is a member function: write it outside of the class")

    def _calls(self, kernels: dict[str, int]) -> Iterator[Finding]:
        """A kernel cannot be called."""
        for i, token in enumerate(self.tokens):
            if token not in kernels or i == kernels[token] or self.reader.in_attribute[i]:
                continue
            opening = self.reader.after_template_arguments(i + 1)
            if self.token(opening) == "(" and self.token(i - 1) in (
                ";",
                "{",
                "}",
                ")",
                "=",
                "(",
                ",",
                "return",
                "else",
            ):
                yield Finding(i, f"kernel {token!r} is called: write a function that both kernels call")

    def _arguments(self, name: int) -> Iterator[Finding]:
        kernel = self.tokens[name]
        used: dict[str, dict[int, str]] = {"buffer": {}, "threadgroup": {}}
        count = {"buffer": 0, "threadgroup": 0}
        widths: list[tuple[int, int, str]] = []
        for first, last in self.reader.commas(name + 2, self.partner[name + 1]):
            live = [j for j in range(first, last) if not self.reader.in_attribute[j]]
            words = [self.tokens[j] for j in live]
            if not words or words == ["void"]:
                continue
            array = words.index("[") if "[" in words else len(words)
            if "(" in words[:array]:
                continue
            argument = words[array - 1]
            attributes = self.reader.attributes_between(first, last)
            if any(_NOT_COVERED.match(word) for word in words[: array - 1]) or any(
                attribute in _NOT_COVERED_ATTRIBUTES for attribute in attributes
            ):
                yield Finding(
                    live[0], f"argument {argument!r} of kernel {kernel!r} is not covered by this check", False
                )
                continue
            if self._pointers(live[:array]) > 1:
                what = f"argument {argument!r} of kernel {kernel!r} is a pointer to a pointer: put one into a struct"
                yield Finding(live[0], what)
            pointer = array < len(words) or bool({"*", "&"} & set(words))
            spaces = {"device", "constant", "threadgroup", "thread"} & set(words)
            yield from self._space(live[0], kernel, argument, pointer, spaces, attributes)
            if pointer and spaces <= {"device", "constant"} and not set(attributes) - {"function_constant"}:
                count["buffer"] += 1  # the compiler chooses its index
            for kind, space in (("buffer", {"device", "constant"}), ("threadgroup", {"threadgroup"})):
                if kind in attributes:
                    count[kind] += 1
                    if pointer and spaces and not spaces <= space:
                        wanted = "device or constant" if kind == "buffer" else "threadgroup"
                        yield Finding(
                            live[0],
                            f"argument {argument!r} of kernel {kernel!r} is in {min(spaces)} memory but has "
                            f"[[{kind}]]: that is of {wanted} memory",
                        )
                    yield from self._index(live[0], kernel, argument, kind, attributes[kind], used[kind])
            position = next((a for a in attributes if a in POSITIONS), None)
            if position:
                yield from self._position(live[0], kernel, argument, position, words[: array - 1], pointer, widths)
        for kind, number in count.items():
            if number > MOST_ARGUMENTS:
                yield Finding(name, f"kernel {kernel!r} has {number} {kind} arguments: at most {MOST_ARGUMENTS}")
        yield from self._widths(kernel, widths)

    def _pointers(self, live: list[int]) -> int:
        """How many stars a parameter has outside of template arguments."""
        count, end = 0, -1
        for j in live:
            if j >= end:
                end = max(end, self.reader.after_template_arguments(j))
                count += self.tokens[j] == "*"
        return count

    def _space(
        self, at: int, kernel: str, argument: str, pointer: bool, spaces: set[str], attributes: dict[str, str]
    ) -> Iterator[Finding]:
        if not pointer and spaces:
            space = min(spaces)
            yield Finding(
                at,
                f"argument {argument!r} of kernel {kernel!r} is in {space} memory but is no pointer: write * or & "
                f"behind its type",
            )
        elif not pointer and "buffer" in attributes:
            yield Finding(
                at,
                f"argument {argument!r} of kernel {kernel!r} has [[buffer]] but is no pointer: write 'constant', and & "
                "behind its type",
            )
        elif pointer and "thread" in spaces:
            yield Finding(
                at,
                f"argument {argument!r} of kernel {kernel!r} is in thread memory: write device, constant or "
                "threadgroup",
            )
        elif pointer and spaces == {"threadgroup"} and "threadgroup" not in attributes and "buffer" not in attributes:
            yield Finding(
                at,
                f"argument {argument!r} of kernel {kernel!r} is in threadgroup memory but has no index: write "
                "[[threadgroup(0)]]",
            )

    def _index(
        self, at: int, kernel: str, argument: str, kind: str, text: str, used: dict[int, str]
    ) -> Iterator[Finding]:
        try:
            index = self.reader.integer(text, at)
        except RewriteError:
            return
        if not 0 <= index <= MOST_INDEX:
            yield Finding(
                at,
                f"argument {argument!r} of kernel {kernel!r} has {kind} index {index}: write one of 0 to {MOST_INDEX}",
            )
        elif index in used:
            yield Finding(
                at,
                f"argument {argument!r} of kernel {kernel!r} has {kind} index {index}, as {used[index]!r} has: write "
                "another",
            )
        else:
            used[index] = argument

    def _position(
        self,
        at: int,
        kernel: str,
        argument: str,
        attribute: str,
        words: list[str],
        pointer: bool,
        widths: list[tuple[int, int, str]],
    ) -> Iterator[Finding]:
        plain = [word for word in words if word not in ("const", "volatile")]
        kind = _POSITION_TYPE.match("".join(plain))
        wanted = (
            "uint or ushort" if attribute in SCALAR_POSITIONS else "uint, uint2 or uint3, or ushort, ushort2 or ushort3"
        )
        if kind and not pointer:
            width = int(kind[1] or kind[2] or 1)
            if attribute in GRID_POSITIONS and width < 4:
                if not attribute.startswith(("grid_", "stage_in_")):
                    widths.append((at, width, argument))
                return
            if width == 1:
                return
        elif not pointer and not is_type(plain[-1] if plain else ""):
            return  # a name of the text's own, which the compiler checks
        yield Finding(
            at, f"argument {argument!r} of kernel {kernel!r} is {' '.join(plain)!r}: [[{attribute}]] is {wanted}"
        )

    @staticmethod
    def _widths(kernel: str, widths: list[tuple[int, int, str]]) -> Iterator[Finding]:
        for at, width, argument in widths[1:]:
            if width != widths[0][1]:
                names = {1: "one component", 2: "two components", 3: "three components"}
                yield Finding(
                    at,
                    f"argument {argument!r} of kernel {kernel!r} has {names[width]}, {widths[0][2]!r} "
                    f"{names[widths[0][1]]}: positions and sizes of one kernel have equally many",
                )
                return
