"""Mistakes that only the code of functions shows: recursion, calls by pointers, casts between address spaces,
threadgroup memory that does not fit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ..errors import WARNING, Problem
from ..rewrite.translation import Translation

THREADGROUP_BYTES = 32 * 1024

_ENTRY = re.compile(r"mittens_entry_\d+P")
_FUNCTION = re.compile(r'^define [^\n]*?@("[^"\n]+"|[\w.$]+)\(([^\n]*)\{\n(.*?)^\}', re.M | re.S)
_DEBUG = re.compile(r"!dbg !(\d+)")
_SYMBOL = re.compile(r"@(\"[^\"]+\"|[\w.$]+)")
_ARRAY = re.compile(r"@\w*threadgroup_memory_of\w*\([^,]+, [^,]+, i64 (?:noundef )?(\d+)")
_SUBPROGRAM = re.compile(r'^!(\d+) = distinct !DISubprogram\(name: "([^"]*)".*?file: !(\d+), line: (\d+)', re.M)
_FILE = re.compile(r'^!(\d+) = !DIFile\(filename: "([^"]*)", directory: "([^"]*)"', re.M)
_CAST = re.compile(
    r"addrspacecast (?:\()?ptr(?: addrspace\((\d)\))? [^\n]*? to ptr(?: addrspace\((\d)\))?[^\n]*!dbg !(\d+)"
)
_BY_POINTER = re.compile(r"\bcall\b[^@%\n]*(?:%[\w.\"]+ )?%\w+\([^\n]*!dbg !(\d+)")
_VECTOR = re.compile(r"^[^\n]*?<([5-9]|[1-9]\d+) x (?:i(?:8|16|32|64)|half|bfloat|float)>[^\n]*!dbg !(\d+)", re.M)
_LOCATION = re.compile(r"^!(\d+) = !DILocation\(line: (\d+), column: (\d+), scope: !(\d+)", re.M)
_SCOPE = re.compile(r"^!(\d+) = (?:distinct )?!DI(?:Subprogram|LexicalBlock)\([^\n]*?file: !(\d+)", re.M)
_SPACES = {"1": "device", "3": "threadgroup", "4": "constant"}


def recursion(code: str, library: str) -> list[Problem]:
    """Functions outside the folder `library` that call themselves when a kernel runs."""
    functions, edges = _calls(code)
    files = _files(code, library)
    places = {n: (name, files[file], int(line)) for n, name, file, line in _SUBPROGRAM.findall(code) if file in files}
    problems = []
    for name in _in_cycles(_reached(edges)):
        debug = _DEBUG.search(functions[name][0])
        place = places.get(debug[1]) if debug else None
        if place:
            problems.append(
                Problem(place[1], place[2], f"{place[0]!r} calls itself: Metal has no recursion, write a loop")
            )
    return problems


def casts(code: str, library: str) -> list[Problem]:
    """Casts from one address space to another, outside the folder `library`."""
    found = {}
    for cast in _CAST.finditer(code):
        source, target = (_SPACES.get(cast[k] or "", "thread") for k in (1, 2))
        found[cast[3]] = f"a pointer to {source} memory is cast to {target} memory: copy what it points to"
    return _located(code, library, found)


def calls_by_pointer(code: str, library: str) -> list[Problem]:
    """Calls of functions by pointers, outside the folder `library`; template arguments are no pointers."""
    what = "a function is called by a pointer, which Metal has not: write a template whose argument it is, or a switch"
    return _located(code, library, {call[1]: what for call in _BY_POINTER.finditer(code)})


def vectors(code: str, library: str, eights: bool = False) -> list[Problem]:
    """Vectors of more than four components, outside the folder `library`.

    Args:
        code: Clang's.
        library: The folder.
        eights: Whether there are vectors of eight: MLX's kernels of Metal 4 hold fragments in them.
    """
    found = {  # a vector of bool is one of 8 bits, whatever its size
        vector[2]: f"a vector has 2 to 4 components, not {vector[1]}: write an array"
        for vector in _VECTOR.finditer(code)
        if " x i1>" not in vector[0] and not (eights and vector[1] == "8")
    }
    return _located(code, library, found)


def _located(code: str, library: str, found: dict[str, str]) -> list[Problem]:
    """Finds by the number of their place, without the folder `library`."""
    if not found:
        return []
    files, scopes = _files(code, library), dict(_SCOPE.findall(code))
    problems = []
    for number, line, column, scope in _LOCATION.findall(code):
        file = files.get(scopes.get(scope, ""))
        if number in found and file is not None:
            problems.append(Problem(file, int(line), found[number], int(column)))
    return problems


def _files(code: str, library: str) -> dict[str, str]:
    """The files of a text by their numbers, without the folder `library`, which may lie below clang's own."""
    files = _FILE.findall(code)
    return {n: name for n, name, folder in files if not os.path.join(folder, name).startswith(library)}


def threadgroup_memory(code: str, translation: Translation) -> list[Problem]:
    """Kernels that ask for more threadgroup memory than a GPU has: they compile, but cannot be launched."""
    functions, edges = _calls(code)
    own = {name: sum(map(int, _ARRAY.findall(body))) for name, (_, body) in functions.items()}
    problems = []
    for number, variant in enumerate(translation.variants):
        entry = next((name for name in functions if f"mittens_entry_{number}P" in name), None)
        size = _total(entry, edges, own, {}) if entry else 0
        if size > THREADGROUP_BYTES:
            what = (
                f"kernel {variant.name!r} has {size} bytes of threadgroup memory: it compiles, but no GPU launches "
                f"more than {THREADGROUP_BYTES}, make its arrays smaller"
            )
            problems.append(Problem(*translation.kernels[variant.function].site, what, 1, WARNING))
    return problems


def _calls(code: str) -> tuple[dict[str, tuple[str, str]], dict[str, list[str]]]:
    """The head and the body of each function, and which others it calls."""
    functions = {name: (head, body) for name, head, body in _FUNCTION.findall(code)}
    edges = {name: [s for s in _SYMBOL.findall(body) if s in functions] for name, (_, body) in functions.items()}
    return functions, edges


def _total(name: str, edges: dict[str, list[str]], own: dict[str, int], known: dict[str, int]) -> int:
    """Threadgroup bytes of a function and of all that it calls, each call counted."""
    if name not in known:
        known[name] = 0  # should it come round to itself
        known[name] = own[name] + sum(_total(callee, edges, own, known) for callee in edges[name])
    return known[name]


def _reached(edges: dict[str, list[str]]) -> dict[str, list[str]]:
    """Functions that kernels call, directly or not; functions that only clang calls, for a constant, are left out."""
    reached: dict[str, list[str]] = {}
    waiting = [name for name in edges if _ENTRY.search(name)]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = edges[name]
            waiting += edges[name]
    return reached


def _in_cycles(edges: dict[str, list[str]]) -> Iterator[str]:
    """Functions that come round to themselves."""
    for name in edges:
        seen, waiting = set(), list(edges[name])
        while waiting:
            callee = waiting.pop()
            if callee == name:
                yield name
                break
            if callee not in seen:
                seen.add(callee)
                waiting += edges[callee]
