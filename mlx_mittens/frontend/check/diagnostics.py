"""Clang's diagnostics: the mistakes in Metal among them, in Metal's words."""

from __future__ import annotations

import re

from ..errors import Problem
from .advice import advised

HEAD = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):(?P<column>\d+):(?:\{[\d:{}-]+\}:)? "
    r"(?P<kind>fatal error|error|warning|note): (?P<what>.*)$"
)


def in_metals_words(what: str) -> str:
    for space, number in (("device", 1), ("threadgroup", 3), ("constant", 0), ("constant", 4)):
        what = what.replace(f"__attribute__((address_space({number})))", space)
    return re.sub(r"([\w:]+) __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"vec<\1, \2>", what)


def counts(warning: str) -> bool:
    """Whether a mere warning of clang's is a mistake in Metal."""
    if "::mittens::" in warning:
        return False
    if "cannot be narrowed" in warning:
        return _NARROWED.match(warning) is not None
    if warning.startswith("implicit conversion"):
        return conversion(warning) is not None
    return "incompatible with C++" not in warning or any(new in warning for new in _NEWER)


_NARROWED = re.compile(r"(?:type|.*from type) '(?:float|half)'.* cannot be narrowed to '[^']*(?:char|short|int|long)'")
_FLOATS = re.compile(
    r"implicit conversion .*floating-point precision: (?P<source>'[^']*'.*?) to (?P<target>'[^']*'.*)$"
)


def conversion(warning: str) -> str | None:
    """Metal's error for an implicit conversion between floating-point types; None if it has it, as from integers."""
    if not (types := _FLOATS.match(warning)):
        return None
    source, target = (re.search(r"__bf16|bfloat", types[name]) is not None for name in ("source", "target"))
    if target and not source:
        return "a float becomes a bfloat without a cast: write bfloat(...) around it"
    if source and re.search(r"_Float16|half", types["target"]):
        return "a bfloat and a half have no type in common: write float(...) around one of them"
    return None


# The few features newer than C++14 that clang does not take there as an extension.
_NEWER = ("class template argument deduction", "declared with 'auto'", "'consteval'", "'constinit'")

_OWN = re.compile(r"^(.+?):(\d+):(?:(\d+):)? (?:fatal )?(?:error): (.*)$", re.M)


def own_errors(log: str, file: str) -> list[Problem]:
    """Mistakes that the front end itself and the preprocessor report."""
    problems = [
        Problem(name, int(line), advised(what), int(column or 1)) for name, line, column, what in _OWN.findall(log)
    ]
    return problems or [Problem(file, 1, log.strip(), 1)]
