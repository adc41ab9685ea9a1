"""bfloat in LLVM's text, as 16-bit integers with explicit conversions, for a target that has no such type.

That is how Apple's M1 and M2 compute in bfloat: a number is widened to float by a shift, and a result is rounded to the
nearest, ties to even, after every operation. Each operation becomes a call of a function that is defined at the end of
the text and inlined.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_TYPE = r"(bfloat|<\d+ x bfloat>)"
_FLAG = "(?:fast|nnan|ninf|nsz|arcp|contract|afn|reassoc)"
_FLAGS = rf"(?:{_FLAG} )*"
_RESULT = r"^(\s*\S+ = )"
_TAIL = r"((?:, !.*)?)$"
_VALUE = r"(%\"[^\"]*\"|%[\w.$-]+|splat \(.*?\)|<.*?>|\w+)"

_BINARY = re.compile(rf"{_RESULT}(f(?:add|sub|mul|div|rem)) {_FLAGS}{_TYPE} {_VALUE}, {_VALUE}{_TAIL}", re.M)
_NEGATE = re.compile(rf"{_RESULT}fneg {_FLAGS}{_TYPE} {_VALUE}{_TAIL}", re.M)
_COMPARE = re.compile(rf"{_RESULT}fcmp {_FLAGS}(\w+) {_TYPE} {_VALUE}, {_VALUE}{_TAIL}", re.M)
_FROM = re.compile(rf"{_RESULT}(fpext|fptosi|fptoui) {_FLAGS}{_TYPE} {_VALUE} to ([^,\n]+?){_TAIL}", re.M)
_TO = re.compile(rf"{_RESULT}(fptrunc|sitofp|uitofp) {_FLAGS}([^%\n]+?) {_VALUE} to {_TYPE}{_TAIL}", re.M)
_FLAGGED = re.compile(rf"^(\s*\S+ = (?:tail |musttail )?(?:phi|select|call) ){_FLAG}\b(?P<rest>.*)$", re.M)
_INTRINSIC = re.compile(r"@(llvm\.\w+(?:\.\w+)*?\.(?:v\d+)?bf16)\b")
_CONSTANT = re.compile(r"\b0xR([0-9A-Fa-f]{4})\b")
_NAME = "mittens.bf16."


class UnknownOperation(Exception):
    """Of bfloat, which is not lowered here."""


def _like(type_text: str, element: str) -> str:
    """The type with bfloat replaced by another element."""
    return type_text.replace("bfloat", element)


def _constant(type_text: str, element: str, value: int) -> str:
    return f"splat ({element} {value})" if "<" in type_text else str(value)


def _widened(type_text: str, name: str, to: str) -> str:
    """Instructions that make float `to` of bfloat `name`."""
    short, word, single = (_like(type_text, element) for element in ("i16", "i32", "float"))
    return (
        f"  %{to}.word = zext {short} %{name} to {word}\n"
        f"  %{to}.high = shl {word} %{to}.word, {_constant(type_text, 'i32', 16)}\n"
        f"  %{to} = bitcast {word} %{to}.high to {single}\n"
    )


def _rounded(type_text: str, name: str) -> str:
    """Instructions that return float `name` as bfloat; of a NaN a quiet one."""
    short, word, single, truth = (_like(type_text, element) for element in ("i16", "i32", "float", "i1"))

    def constant(value: int) -> str:
        return _constant(type_text, "i32", value)

    return (
        f"  %bits = bitcast {single} %{name} to {word}\n"
        f"  %shifted = lshr {word} %bits, {constant(16)}\n"
        f"  %odd = and {word} %shifted, {constant(1)}\n"
        f"  %raised = add {word} %bits, {constant(0x7FFF)}\n"
        f"  %even = add {word} %raised, %odd\n"
        f"  %quiet = or {word} %bits, {constant(0x400000)}\n"
        f"  %nan = fcmp uno {single} %{name}, %{name}\n"
        f"  %chosen = select {truth} %nan, {word} %quiet, {word} %even\n"
        f"  %upper = lshr {word} %chosen, {constant(16)}\n"
        f"  %result = trunc {word} %upper to {short}\n"
        f"  ret {short} %result\n"
    )


class _Functions:
    """Definitions by name, each made once."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def call(self, what: str, type_text: str, result: str, parameters: list[str], body: Callable[[], str]) -> str:
        """The callee of a call, whose definition is added."""
        size = re.search(r"\d+", type_text)
        name = f"@{_NAME}{what}{'.v' + size[0] if size else ''}"
        if name not in self.texts:
            listed = ", ".join(f"{parameter} %{letter}" for parameter, letter in zip(parameters, "xy"))
            self.texts[name] = f"define internal {result} {name}({listed}) alwaysinline nounwind {{\n{body()}}}\n"
        return f"call {result} {name}"


def lowered(text: str) -> str:
    """LLVM's text of a module without bfloat.

    Raises:
        UnknownOperation: The text has an operation of bfloat that is not lowered here.
    """
    if "bfloat" not in text:
        return text
    functions = _Functions()

    def binary(match: re.Match[str]) -> str:
        head, operation, type_text, x, y, tail = match.groups()
        short, single = _like(type_text, "i16"), _like(type_text, "float")

        def body() -> str:
            return (
                f"{_widened(type_text, 'x', 'a')}{_widened(type_text, 'y', 'b')}"
                f"  %c = {operation} contract {single} %a, %b\n{_rounded(type_text, 'c')}"
            )

        call = functions.call(operation, type_text, short, [short, short], body)
        return f"{head}{call}({short} {x}, {short} {y}){tail}"

    def negate(match: re.Match[str]) -> str:
        head, type_text, x, tail = match.groups()
        return f"{head}xor {_like(type_text, 'i16')} {x}, {_constant(type_text, 'i16', -0x8000)}{tail}"

    def compare(match: re.Match[str]) -> str:
        head, predicate, type_text, x, y, tail = match.groups()
        short, single, truth = (_like(type_text, element) for element in ("i16", "float", "i1"))

        def body() -> str:
            return (
                f"{_widened(type_text, 'x', 'a')}{_widened(type_text, 'y', 'b')}"
                f"  %c = fcmp {predicate} {single} %a, %b\n  ret {truth} %c\n"
            )

        call = functions.call(f"fcmp.{predicate}", type_text, truth, [short, short], body)
        return f"{head}{call}({short} {x}, {short} {y}){tail}"

    def convert_from(match: re.Match[str]) -> str:
        head, operation, type_text, x, to, tail = match.groups()
        short, single = _like(type_text, "i16"), _like(type_text, "float")

        def body() -> str:
            widened = _widened(type_text, "x", "a")
            if to == single:
                return f"{widened}  ret {single} %a\n"
            return f"{widened}  %c = {operation} {single} %a to {to}\n  ret {to} %c\n"

        element = re.sub(r"<\d+ x (\w+)>", r"\1", to)
        call = functions.call(f"{operation}.{element}", type_text, to, [short], body)
        return f"{head}{call}({short} {x}){tail}"

    def convert_to(match: re.Match[str]) -> str:
        head, operation, source, x, type_text, tail = match.groups()
        short, single = _like(type_text, "i16"), _like(type_text, "float")

        def body() -> str:
            if source == single:
                return _rounded(type_text, "x")
            return f"  %c = {operation} {source} %x to {single}\n{_rounded(type_text, 'c')}"

        element = re.sub(r"<\d+ x (\w+)>", r"\1", source)
        call = functions.call(f"{operation}.{element}", type_text, short, [source], body)
        return f"{head}{call}({source} {x}){tail}"

    def unflagged(match: re.Match[str]) -> str:
        if "bfloat" not in match["rest"]:
            return match[0]
        return match[1] + re.sub(rf"^(?: {_FLAG})* ", "", match["rest"])

    for pattern, replace in (
        (_BINARY, binary),
        (_NEGATE, negate),
        (_COMPARE, compare),
        (_FROM, convert_from),
        (_TO, convert_to),
        (_FLAGGED, unflagged),
    ):
        text = pattern.sub(replace, text)
    if unknown := _INTRINSIC.search(text):
        raise UnknownOperation(f"error: {unknown[1]} of bfloat has no form in 16-bit integers")
    text = _CONSTANT.sub(lambda match: str(int(match[1], 16)), text)
    text = re.sub(r"\bbfloat\b", "i16", text)
    return text + "".join(functions.texts.values())
