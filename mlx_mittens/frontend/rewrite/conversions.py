"""Conversions that Metal has and clang does not, found by compiling and written out as calls of our library.

Clang has no copy of a struct from one address space to another, casts no vector to one of another size, and converts no
half to bfloat. It says where it stops, by the lines and columns of the expressions; there a call of
metal/conversions.h is put around the expression, and the text is compiled again. Lines stay as many as they were.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from .edited import Edited, Places

RANGES = ["-fdiagnostics-print-source-range-info", "-ferror-limit=0", "-fno-caret-diagnostics"]

_ERROR = re.compile(
    r"^(?P<file>.*?):(?P<line>\d+):(?P<column>\d+):(?P<ranges>(?:\{[\d:-]+\})*):? (?:fatal )?error: (?P<what>.*)$", re.M
)
_RANGE = re.compile(r"\{(\d+):(\d+)-(\d+):(\d+)\}")
_ROUNDS = 12

_COPY = re.compile(
    r"no matching (?:constructor for initialization of|function for call to|member function for call to)"
    r"|no viable conversion from"
    r"|no viable constructor copying|call to implicitly-deleted copy constructor"
    r"|binding reference of type '(?:const )?[^']*' to value of type '[^']*' changes address space"
)
# An object with a constructor of its own in constant memory: it becomes one of no address space.
_IN_CONSTANT = re.compile(
    r"no matching constructor for initialization of '(?:const )?"
    r"(?:constant |__attribute__\(\(address_space\([04]\)\)\))"
)
_PLAIN, _COMMENT = "plain", "comment"
_ASSIGNMENT = re.compile(r"no viable overloaded '(?P<operator>[-+*/%&|^]?=|<<=|>>=)'")
_OPERANDS = re.compile(
    r"incompatible operand types \(|invalid operands to binary expression \("
    r"|cannot convert between vector and non-scalar values \("
)
_OBJECT = re.compile(
    r"cannot initialize object parameter of type '(?:const )?[^']*' with an expression of type '[^']*'"
    r"|'this' argument to member function '\w+' is an lvalue, but function has|no matching member function for call to"
    r"|no viable overloaded operator\[\] for type"
)
_LIBRARY = re.compile(r"matrix<|array<|packed_\w+3|(?:float|half)[234]x[234]|uniform<")
_CAST = re.compile(
    r"(?:C-style cast|static_cast|functional-style cast|) ?from (?:vector |scalar )?'[^']*' (?:\(.*?\) )?"
    r"(?:\(aka '[^']*'\) )?"
    r"(?:\(vector.*?\) )?to .*(?:different size|is not allowed)"
)
_OBJECT_CAST = re.compile(
    r"no matching conversion for (?:C-style cast|functional-style cast|static_cast) from "
    r"(?P<space>'[^']*(?:\b(?:device|threadgroup|constant)\b|address_space\())?"
)
_TO_POINTER = re.compile(r" to '[^']*(?:[*&]'|' \(aka '[^']*[*&]'\))")
_ELEMENTS = re.compile(
    r"excess elements in (?:scalar|vector|ext-vector) initializer|cannot initialize a (?:value|variable) of type"
)
_TRUTHS = re.compile(
    r"invalid operands to binary expression \('(?P<type>.*?)' \(.*?vector of (?P<size>\d) '(?P<left>\w+)' values\) and "
    r"'(?:bool\d'\)|(?P=type)'\)|.*\(vector of \d '(?P<right>\w+)' values\)\))"
)
_TRUTH = r"'(?:[^']*Truth<.*?|[^']*)' \((?:aka 'bool __attr|vector of \d 'bool').*"
_NAMED_TRUTHS = re.compile(rf"invalid operands to binary expression \({_TRUTH} and {_TRUTH}\)$")
_COMPONENTS = re.compile(r"illegal vector component name '([xyzw]+|[rgba]+)'$")  # of bool: others are right or wrong
_LIBRARY_CALL = re.compile(r"no matching function for call to '(?:transpose|determinant)'")


@dataclass(frozen=True)
class _Error:
    what: str
    at: int
    ranges: list[tuple[int, int]]


def _errors(log: str, places: Places) -> list[_Error]:
    found = []
    for match in _ERROR.finditer(log):
        if match["ranges"]:
            ranges = [
                (places.offset(int(a), int(b)), places.offset(int(c), int(d)))
                for a, b, c, d in _RANGE.findall(match["ranges"])
            ]
            line = int(_RANGE.match(match["ranges"])[1])  # type: ignore[index]
            found.append(_Error(match["what"], places.offset(line, int(match["column"])), ranges))
    return found


def compiled(
    run: Callable[[str, list[str]], subprocess.CompletedProcess[str]],
    text: str | Edited,
    methods: set[str],
    header: str,
) -> tuple[subprocess.CompletedProcess[str], Edited]:
    """Compiles a text, with conversions written out where clang asks for them.

    Args:
        run: Calls clang with a text and more flags.
        text: The text to compile, perhaps with insertions.
        methods: Names of member functions that the text declares for other address spaces than the thread's.
        header: The folder of our library, errors in which are not mended.

    Returns:
        The messages of the last compilation, and the text with its insertions.
    """
    edited = text if isinstance(text, Edited) else Edited(text)
    tried: set[tuple[int, int, str]] = set()
    for _ in range(_ROUNDS):
        done = run(edited.text, RANGES)
        if done.returncode == 0:
            break
        log = "\n".join(line for line in done.stderr.splitlines() if not line.startswith(header))
        pieces = _pieces(edited, log, methods, tried)
        if not pieces:
            break
        edited.insert(pieces)
    return done, edited


def _pieces(
    edited: Edited, log: str, methods: set[str], tried: set[tuple[int, int, str]]
) -> list[tuple[int, int, str]]:
    """The insertions that the errors of a compilation ask for, none of them within another."""
    text = edited.text
    wraps: list[tuple[int, int, str]] = []

    def wrap(begin: int, end: int, call: str) -> None:
        key = edited.original(begin), edited.original(end), call.split("<")[0]
        if key not in tried and begin < end and not text.startswith(f"::mittens::{call}(", begin):
            tried.add(key)
            wraps.append((begin, end, call))

    for error in _errors(log, Places(text)):
        for begin, end, call in _wraps(text, error, methods):
            wrap(begin, end, call)
    pieces: list[tuple[int, int, str]] = []
    taken: list[tuple[int, int]] = []
    for begin, end, call in sorted(set(wraps), key=lambda w: w[1] - w[0]):
        if not any(begin < e and b < end for b, e in taken):
            taken.append((begin, end))
            if call.startswith("components"):
                dot = text.rindex(".", begin, end)
                pieces += [(begin, 1, f"::mittens::{call}("), (dot, 0, ")/*"), (end, 0, "*/")]
                continue
            before, after = {_PLAIN: ("/*", "*/static const"), _COMMENT: ("/*", "*/")}.get(
                call, ("/*", f"*/{call}") if call[0] == "[" else (f"::mittens::{call}(", ")")
            )
            pieces += [(begin, 1, before), (end, 0, after)]
        else:  # asked for again in the next round
            tried.discard((edited.original(begin), edited.original(end), call.split("<")[0]))
    return pieces


def _wraps(text: str, error: _Error, methods: set[str]) -> list[tuple[int, int, str]]:
    """Ranges and the functions of metal/conversions.h that are to be called with them."""
    what, ranges = error.what, error.ranges
    if not ranges:
        return []
    if (assignment := _ASSIGNMENT.match(what)) and len(ranges) == 2:
        left = "place" if assignment["operator"] == "=" else "in_thread"
        return [(*ranges[0], left), (*ranges[1], "in_thread")]
    components = _COMPONENTS.match(what)
    if components and re.match(rf"\.\s*{components[1]}\b", text[text.rfind(".", 0, error.at) : error.at + 5]):
        return [_components(text, error, components[1])]
    if what.startswith("no viable conversion"):
        return _copies(text, ranges)
    if (truths := _TRUTHS.match(what)) and len(ranges) == 2 and "bool" in (truths["left"], truths["right"] or "bool"):
        if truths["left"] == (truths["right"] or "bool") == "bool":  # of bool, clang has & and | alone
            return [(error.at + 1, error.at + 2, _COMMENT)] if text[error.at : error.at + 2] in ("&&", "||") else []
        number = ranges[1] if truths["left"] == "bool" else ranges[0]
        return [(*number, f"convert<::metal::vec<bool, {truths['size']}>>")]
    if _NAMED_TRUTHS.match(what) and text[error.at : error.at + 2] in ("&&", "||"):
        return [(error.at + 1, error.at + 2, _COMMENT)]
    if _LIBRARY_CALL.match(what):
        opening = text.find("(", error.at)
        return [(opening + 1, _closing(text, opening), "in_thread")] if opening > 0 else []
    if _OPERANDS.match(what) and len(ranges) == 2:
        if not what.startswith("incompatible") and not _LIBRARY.search(what):
            return []
        return [(*found, "in_thread") for found in ranges]
    if _IN_CONSTANT.match(what):
        word = list(re.finditer(r"\bconstant\b", text[max(0, error.at - 200) : error.at]))
        start = max(0, error.at - 200)
        return [(start + word[-1].start(), start + word[-1].end(), _PLAIN)] if word else []
    if (cast := _OBJECT_CAST.match(what)) and (cast["space"] or _LIBRARY.search(what)):
        return [(*ranges[-1], "in_thread")]
    if what.startswith("invalid argument type") and "unary expression" in what and _LIBRARY.search(what):
        return [(*ranges[-1], "in_thread")]
    if _CAST.match(what):
        return [] if _TO_POINTER.search(what) else _cast(text, ranges)
    if _OBJECT.match(what):
        begin, end = ranges[0]
        if member := re.match(r"(.*?)\s*(?:\.|->)\s*(?:template\s+)?(\w+)$", text[begin:end], re.S):
            return [(begin, begin + len(member[1]), "in_thread")] if member[2] in methods else []
        called = re.match(r"\s*(?:\.|->)\s*(?:template\s+)?(\w+)", text[end:])
        if _LIBRARY.search(what) or (called and called[1] in methods) or re.match(r"\s*\[", text[end:]):
            return [(begin, end, "in_thread")]
        return []
    if _ELEMENTS.match(what) and (built := _built(text, error)):
        return [built]
    if _COPY.match(what) and not what.startswith("no matching function"):
        return _copies(text, ranges)
    return []


def _components(text: str, error: _Error, names: str) -> tuple[int, int, str]:
    """`b.x`, `b.xy` of a vector of truths."""
    end = error.at + len(names)
    order = [("xyzw" if names[0] in "xyzw" else "rgba").index(name) for name in names]
    if len(order) == 1:
        return text.rindex(".", 0, error.at), end, f"[{order[0]}]"
    assigned = re.match(r"\s*=(?!=)", text[end : end + 80]) is not None
    return (
        _postfix_start(text, text.rindex(".", 0, error.at)),
        end,
        f"components{'_of' if assigned else ''}<{', '.join(map(str, order))}>",
    )


def _postfix_start(text: str, end: int) -> int:
    """Where the expression begins that a place behind it, such as a dot, belongs to: `f(x)[2].m`."""
    i = end
    while i > 0:
        if text[i - 1] in ")]":
            i = _opening_of(text, i - 1)
        elif text[i - 1].isalnum() or text[i - 1] in "_.:":
            i -= 1
        elif text[i - 2 : i] == "->":
            i -= 2
        else:
            break
    return i


def _opening_of(text: str, closing: int) -> int:
    depth = 0
    for i in range(closing, -1, -1):
        depth += (text[i] in ")]}") - (text[i] in "([{")
        if depth == 0:
            return i
    return 0


_VECTOR_CALL = re.compile(r"(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]\s*\(")


def _copies(text: str, ranges: list[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """The copied expressions: elements in braces, and arguments of a vector's constructor, which is a macro of ours."""
    found = []
    for begin, end in ranges:
        call = _VECTOR_CALL.match(text, begin)
        if text[begin] == "{" and text[end - 1] == "}":
            found += _parts(text, begin + 1, end - 1)
        elif call and _closing(text, call.end() - 1) == end - 1:
            found += _parts(text, call.end(), end - 1)
        else:
            found.append((begin, end))
    return [(*part, "in_thread") for part in found]


def _parts(text: str, begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of a list, between its commas."""
    parts, start, i = [], begin, begin
    while i < end:
        if text[i] in "([{":
            i = _closing(text, i)
        elif text[i] == ",":
            parts.append((start, i))
            start = i + 1
        i += 1
    parts.append((start, end))
    return [
        (a + len(text[a:b]) - len(text[a:b].lstrip()), a + len(text[a:b].rstrip()))
        for a, b in parts
        if text[a:b].strip()
    ]


def _cast(text: str, ranges: list[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """`(float4)x`, `static_cast<float4>(x)`, `V(x)`: the operand is converted first, so that the cast does nothing."""
    if len(ranges) < 2:
        return []
    (begin, _), (first, last) = ranges[0], ranges[-1]
    head = text[begin:first].strip()
    name = (
        re.match(r"static_cast\s*<(.*)>\s*\($", head, re.S)
        or re.match(r"\((.*)\)$", head, re.S)
        or re.match(r"(.*?)[({]$", head, re.S)
    )
    return [(first, last, f"convert<{name[1].strip()}>")] if name else []


_OPENING = {"(": ")", "{": "}"}
_NO_TYPES = {"return", "else", "case", "typename", "const", "auto", "in"}
_TYPE_BEFORE = re.compile(r"((?:::)?[A-Za-z_][\w:]*(?:\s*<[^;{}()]*>)?)\s*$")


def _built(text: str, error: _Error) -> tuple[int, int, str] | None:
    """`float2 v(1, 2)`, `V(1, 2)`, `V{xy, z, w}`: a vector from parts, in brackets behind a type or a variable."""
    opening = _opening_before(text, error.ranges[0][0])
    if opening is None:
        return None
    closing = _closing(text, opening)
    inner = text[opening + 1 : closing]
    if closing < 0 or not inner.strip() or inner.lstrip().startswith("::mittens::"):
        return None
    if template := re.search(r"((?:::)?[A-Za-z_][\w:]*\s*<[^;{}()]*>)\s*$", text[:opening]):
        target = template[1]
    elif word := re.search(r"([A-Za-z_][\w:]*)\s*(?:=\s*)?$", text[:opening]):
        declared = _TYPE_BEFORE.search(text, max(0, word.start() - 200), word.start())
        target = declared[1] if declared and declared[1] not in _NO_TYPES else word[1]
    else:
        return None
    begin = opening + 1 + len(inner) - len(inner.lstrip())
    return begin, opening + 1 + len(inner.rstrip()), f"convert<{target}>"


def _opening_before(text: str, at: int) -> int | None:
    """The bracket, round or curly, that opens last before a place and is not closed there."""
    depth = 0
    for i in range(at - 1, max(at - 4000, -1), -1):
        if text[i] in ")}]":
            depth += 1
        elif text[i] in "({[":
            if depth == 0:
                return i if text[i] in _OPENING else None
            depth -= 1
        elif text[i] == ";" and depth == 0:
            return None
    return None


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        if text[i] in "({[":
            depth += 1
        elif text[i] in ")}]":
            depth -= 1
            if depth == 0:
                return i
    return -1
