"""Divisions and shifts of integers as Metal has them, in LLVM's text before any optimization.

By zero a quotient and a remainder are of no certain value in Metal, and so is the quotient of the least integer and -1:
x86 ends the process there, and an optimizer may assume that it never happens. And a shift takes the lowest bits of its
amount, where LLVM's has no value if the amount is not below the width.
"""

from __future__ import annotations

import re

_NAME = r'%[\w.$-]+|%"[^"]*"'
_VALUE = rf"(?:{_NAME}|-?\d+|<[^<>]*>|splat \(i\d+ -?\d+\)|zeroinitializer|poison|undef)"
_OPERATION = re.compile(
    rf"^  (?P<name>{_NAME}) = (?P<operation>[su](?:div|rem)|shl|lshr|ashr)(?P<flags>(?: exact| nuw| nsw)*) "
    rf"(?P<type>i(?P<width>\d+)|<(?P<count>\d+) x i(?P<bits>\d+)>) (?P<left>{_VALUE}), (?P<right>{_VALUE})"
    r"(?P<tail>(?:, !.*)?)$",
    re.M,
)
_NUMBER = re.compile(r"i\d+ (-?\d+)")


def _constants(value: str) -> list[int] | None:
    """The elements of a constant; None if the value is none, or has elements that are of no value."""
    if value.lstrip("-").isdigit():
        return [int(value)]
    if value == "zeroinitializer":
        return [0]
    if value.startswith("splat") or (value[0] == "<" and "poison" not in value and "undef" not in value):
        return [int(number) for number in _NUMBER.findall(value)]
    return None


def lowered(text: str) -> str:
    """LLVM's text of a module in which divisions and shifts are defined for all numbers."""
    count = 0

    def lower(match: re.Match[str]) -> str:
        nonlocal count
        operation, kind, right, tail = match["operation"], match["type"], match["right"], match["tail"]
        width = int(match["width"] or match["bits"])
        constants = _constants(right)

        def constant(value: int) -> str:
            return f"splat (i{width} {value})" if match["count"] else str(value)

        count += 1
        name = f"%mittens.integer.{count}"
        head = f"  {match['name']} = {operation}{match['flags']} {kind} {match['left']}, {name}{tail}"
        if operation in ("shl", "lshr", "ashr"):
            if constants is not None and all(0 <= value < width for value in constants):
                return match[0]
            return f"  {name} = and {kind} {right}, {constant(width - 1)}{tail}\n{head}"
        signed = operation[0] == "s"
        if constants is not None and all(value not in (0, -1) for value in constants):
            return match[0]
        truth = f"<{match['count']} x i1>" if match["count"] else "i1"
        lines = [f"{name}.zero = icmp eq {kind} {right}, {constant(0)}"]
        wrong = f"{name}.zero"
        if signed:
            lines += [
                f"{name}.least = icmp eq {kind} {match['left']}, {constant(-(1 << (width - 1)))}",
                f"{name}.one = icmp eq {kind} {right}, {constant(-1)}",
                f"{name}.over = and {truth} {name}.least, {name}.one",
                f"{name}.wrong = or {truth} {name}.zero, {name}.over",
            ]
            wrong = f"{name}.wrong"
        lines.append(f"{name} = select {truth} {wrong}, {kind} {constant(1)}, {kind} {right}")
        return "".join(f"  {line}{tail}\n" for line in lines) + head

    return _OPERATION.sub(lower, text)
