"""The instantiations of a .metal text, found without a compiler, so that Metal compiles only the kernel that is used.

Kernels are instantiated at file level by ``instantiate_kernel`` of mittens/instantiate.h, or by macros that come down
to it. Metal compiles all of them when it is given the text, which takes seconds for a file of 60. `only` leaves one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from . import sources

_BASE = "instantiate_kernel"
_STRING = r'"(?:\\.|[^"\\\n])*"'
_DIRECTIVE = r"^[ \t]*\#(?:\\\n|[^\n])*"
_NAME = r"(?<!\w)[A-Za-z_]\w*"
_PIECE = re.compile(f"{_DIRECTIVE}|{_STRING}|{_NAME}", re.M)
_DEFINE = re.compile(r"\s*#\s*define\s+(\w+)\(([^()]*)\)(.*)", re.S)
_PARAMETER = re.compile(rf"(,\s*##\s*__VA_ARGS__)|(?<!#)#\s*([A-Za-z_]\w*)|\s*##\s*|{_STRING}|({_NAME})")
_PARENTHESIS = re.compile(rf"{_STRING}|[(),]")


class _Unreadable(Exception):
    """A macro that does more than to instantiate kernels, or a call that is not understood."""


@dataclass(frozen=True)
class _Macro:
    parameters: list[str]
    body: str


@dataclass(frozen=True)
class _Site:
    """A call at file level, and its instantiations: the arguments of `instantiate_kernel` by the kernel's name."""

    begin: int
    end: int
    kernels: dict[str, str]


def _arguments(text: str, at: int) -> tuple[list[str], int] | None:
    """The arguments of a call whose name ends at a place, and where the call ends; None if it is no call."""
    opening = re.compile(r"\s*\(").match(text, at)
    if opening is None:
        return None
    depth, start, found = 1, opening.end(), []
    for mark in _PARENTHESIS.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(mark[0], 0)
        if depth == 0 or (depth == 1 and mark[0] == ","):
            found.append(text[start : mark.start()].strip())
            start = mark.end()
        if depth == 0:
            return found, mark.end()
    raise _Unreadable


def _substitute(macro: _Macro, arguments: list[str]) -> str:
    named = [name for name in macro.parameters if name != "..."]
    rest = arguments[len(named) :]
    if len(arguments) < len(named) or (rest and len(named) == len(macro.parameters)):
        raise _Unreadable
    values = {**dict(zip(named, arguments)), "__VA_ARGS__": ", ".join(rest)}

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f", {values['__VA_ARGS__']}" if rest else ""
        if found[2]:
            text = re.sub(r"\s+", " ", values[found[2]])
            return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
        if found[3]:
            return values.get(found[3], found[3])
        return "" if found[0].strip() == "##" else found[0]

    return _PARAMETER.sub(value, macro.body)


class _Reader:
    def __init__(self) -> None:
        self.macros: dict[str, _Macro] = {}
        self.instantiating = {_BASE}  # names of macros that come down to it

    def read(self, text: str) -> Iterator[_Site]:
        """The calls of a text at file level that instantiate kernels."""
        done = 0
        for piece in _PIECE.finditer(text):
            if piece.start() < done:
                continue
            if piece[0].lstrip().startswith("#"):
                self._define(piece[0])
            elif piece[0] in self.instantiating:
                call = _arguments(text, piece.end())
                if call is None:
                    raise _Unreadable
                done = call[1]
                yield _Site(piece.start(), done, dict(self._expand(piece[0], call[0])))

    def _define(self, directive: str) -> None:
        found = _DEFINE.match(directive)
        if found is None or found[1] == _BASE:
            return
        name, body = found[1], found[3].replace("\\\n", " ")
        self.macros[name] = _Macro([parameter.strip() for parameter in found[2].split(",")], body)
        self.instantiating.discard(name)
        if self.instantiating & set(re.findall(_NAME, re.sub(_STRING, "", body))):
            self.instantiating.add(name)

    def _expand(self, name: str, arguments: list[str]) -> Iterator[tuple[str, str]]:
        if name == _BASE:
            literals = re.findall(_STRING, arguments[0])
            if len(arguments) < 2 or not literals or re.sub(_STRING, "", arguments[0]).strip():
                raise _Unreadable
            kernel = "".join(literal[1:-1] for literal in literals)
            yield kernel, ", ".join([f'"{kernel}"', *arguments[1:]])
            return
        text = _substitute(self.macros[name], arguments)
        done = 0
        for piece in re.finditer(f"{_STRING}|{_NAME}", text):
            if piece.start() < done:
                continue
            call = _arguments(text, piece.end()) if piece[0] in self.instantiating else None
            if call is None or text[done : piece.start()].strip(" \t;"):
                raise _Unreadable
            done = call[1]
            yield from self._expand(piece[0], call[0])
        if text[done:].strip(" \t;"):
            raise _Unreadable


@functools.lru_cache(maxsize=64)
def _sites(text: str) -> list[_Site]:
    try:
        return list(_Reader().read(sources.without_comments(text)))
    except _Unreadable:
        return []


def kernels(text: str) -> list[str]:
    """The kernels that a flattened text instantiates by macros; none where one of the macros cannot be read."""
    return list(dict.fromkeys(kernel for site in _sites(text) for kernel in site.kernels))


def only(text: str, kernel: str) -> str | None:
    """The flattened text with one of its instantiations, on the same lines; None if it has none of that name."""
    sites = _sites(text)
    if not any(kernel in site.kernels for site in sites):
        return None
    parts, done = [], 0
    for site in sites:
        parts.append(text[done : site.begin])
        if kernel in site.kernels:
            parts.append(f"{_BASE}({site.kernels[kernel]})")
        parts.append("\n" * text.count("\n", site.begin, site.end))
        done = site.end
    return "".join([*parts, text[done:]])


def metal_text(file: str, kernel: str) -> tuple[str, str]:
    """The text for Metal's compiler with a kernel, and the name of the kernel if it is the only one in the text.

    Registered sources, and files with instantiations that cannot be read, are given whole: then the name is empty.
    """
    text = sources.flatten(file)
    one = None if sources.is_registered(file) else only(text, kernel)
    return (text, "") if one is None else (one, kernel)


def metal_kernels(file: str) -> list[str]:
    """The kernels of one of our files, without asking a compiler; none where only a compiler can tell."""
    return [] if sources.is_registered(file) else kernels(sources.flatten(file))
