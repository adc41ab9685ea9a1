"""LLVM's PTX of several kernels, taken apart into a text for each."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ENTRY = re.compile(r"\.entry (\w+)\(")
_NAME = re.compile(r"[\w$]+(?=(?:\[\d*\])*(?: = .*)?;)")
_LIMIT = re.compile(r"\bmittens_max_threads_(\w+) = (\d+);")
_END_OF_PARAMETERS = re.compile(r"^\)[^\n]*$", re.M)
_LABEL = re.compile(r"\$L__BB\d+_(\d+)(:.*)?")  # its comment stands in a column of its own
_HEAD = (".version", ".target", ".address_size")  # directives of a line
_MOST_THREADS = 1024


def _statements(text: str) -> Iterator[str]:
    """The declarations and definitions of a module, without the comments between them."""
    lines: list[str] = []
    is_function = False
    for line in text.splitlines():
        if not lines and (not line.strip() or line.lstrip().startswith("//")):
            continue
        lines.append(line)
        is_function = is_function or bool(re.search(r"\.(entry|func)\b", line))
        if line.startswith("}") if is_function else line.endswith(";") or line.startswith(_HEAD):
            yield "\n".join(lines)
            lines, is_function = [], False


def entries(text: str) -> dict[str, str]:
    """A text for each entry of a module, by its name, with all it uses of the module.

    Args:
        text: Of entries, and for each a variable ``mittens_max_threads_`` with its name: the most threads that it
            may be launched with. Its registers depend on them: they are said in PTX's own words.
    """
    head: list[str] = []
    shared: list[tuple[re.Match[str] | None, str]] = []
    functions: list[tuple[str, str]] = []
    limits: dict[str, str] = {}
    for statement in _statements(text):
        if entry := _ENTRY.search(statement):
            functions.append((entry[1], statement))
        elif limit := _LIMIT.search(statement):
            limits[limit[1]] = limit[2]
        elif statement.startswith(_HEAD):
            head.append(statement)
        else:
            shared.append((_NAME.search(statement), statement))
    texts = {}
    for name, function in functions:
        used = [statement for what, statement in shared if not what or _mentions(function, what[0])]
        threads = f")\n.maxntid {limits.get(name, _MOST_THREADS)}, 1, 1"
        function = _LABEL.sub(_first_functions, _END_OF_PARAMETERS.sub(threads, function, count=1))
        texts[name] = "\n".join([*head, *used, function]) + "\n"
    return texts


def _first_functions(label: re.Match[str]) -> str:
    return f"$L__BB0_{label[1]}{':' if label[2] else ''}"


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w$]){re.escape(name)}(?![\w$])", text) is not None
