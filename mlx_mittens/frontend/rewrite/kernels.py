"""Kernels, their arguments and their instantiations."""

from __future__ import annotations

import re

from ..read.builtins import POSITIONS
from ..read.tokens import IDENTIFIER, OPEN, SPACES
from .draft import Draft
from .spaces import parameter
from .translation import Argument, Kernel, Variant

_SPACED = re.compile(r"\b(?:device|constant|threadgroup|thread)\b")


def kernels(draft: Draft) -> None:
    """Reads kernels and their instantiations, which go from the text and become variants."""
    i = 0
    while i < len(draft.tokens):
        token, end = draft.tokens[i], None
        if draft.dropped[i]:
            pass
        elif token == "template" and i + 1 in draft.attributes:
            end = _instantiation(draft, i)
        elif token == "void" and "kernel" in draft.attributes_before(i):
            end = _kernel(draft, i)
        elif token == "kernel" and draft.token(i + 1) == "void":
            draft.replace(i, i + 1, "")
            end = _kernel(draft, i + 1)
        i = i + 1 if end is None else end + 1
    result = draft.result
    instantiated = {variant.function for variant in result.variants}
    for kernel in result.kernels.values():
        if kernel.template is None and kernel.name not in instantiated:
            result.variants.append(Variant(kernel.name, kernel.name, None, kernel.site))


def _instantiation(draft: Draft, i: int) -> int | None:
    """Makes a variant of an explicit instantiation. Returns its last token; None if it is not of a kernel."""
    end = i
    while draft.token(end) != ";":
        end = draft.partner[end] + 1 if draft.tokens[end] in OPEN else end + 1
        if end >= len(draft.tokens):
            raise draft.error("error: an instantiation without an end", i)
    attributes = draft.attributes_between(i, end)
    if "host_name" not in attributes and "kernel" not in attributes:
        return None
    j = i + 1
    while draft.dropped[j] or draft.tokens[j] in ("kernel", "void"):
        j += 1
    if draft.tokens[j] == "decltype":
        j = draft.partner[j + 1] + 1
    while draft.token(j) not in ("<", "(", ";") or (draft.token(j) == "<" and _is_type_argument(draft, j)):
        j = draft.after_template_arguments(j) if draft.token(j) == "<" else j + 1
    first = j - 1
    while draft.token(first - 1) == "::":
        first -= 2
    function = "".join(draft.tokens[first:j]).removeprefix("::")
    spaces = _namespaces(draft, i)
    names = ["::".join([*spaces[:n], function]) for n in range(len(spaces), 0, -1)]
    function = next((name for name in names if name in draft.result.kernels), function)
    after = draft.after_template_arguments(j)
    arguments = draft.source(j + 1, after - 1) if after > j else None
    # Names are put together from pieces: "a" "b".
    name = "".join(re.findall(r'"([^"]*)"', attributes.get("host_name", f'"{function}"')))
    draft.result.variants.append(Variant(name, function, arguments, draft.lines.at(draft.spans[i][0])))
    draft.replace(i, end + 1, "")
    return end


def _is_type_argument(draft: Draft, i: int) -> bool:
    """Whether a template argument list belongs to the type of an instantiated kernel, whose name follows."""
    return IDENTIFIER.match(draft.token(draft.after_template_arguments(i))) is not None


def _kernel(draft: Draft, i: int) -> int | None:
    """Reads the head of a kernel from its `void`. Returns the bracket that ends it; None if there is none."""
    name, opening = draft.token(i + 1), i + 2
    if draft.token(opening) != "(":
        return None
    closing = draft.partner[opening]
    attributes = draft.attributes_before(i)
    attributes.update(draft.attributes_between(closing, closing + 2))
    name = "::".join([*_namespaces(draft, i), name])
    kernel = Kernel(
        name,
        _template_before(draft, i),
        _arguments(draft, opening + 1, closing),
        attributes.get("max_total_threads_per_threadgroup"),
        draft.lines.at(draft.spans[i][0]),
    )
    draft.result.kernels[name] = kernel
    draft.settled[i : closing + 1] = [True] * (closing + 1 - i)
    for j in range(opening + 1, closing):
        if draft.tokens[j] in SPACES and not draft.dropped[j] and draft.token(j - 1) in ("(", ",", "const"):
            parameter(draft, j)
    return closing


def _namespaces(draft: Draft, i: int) -> list[str]:
    """The namespaces in which token i stands, the outermost first, without inline ones."""
    names: list[str] = []
    brace = draft.enclosing(i)
    while brace >= 0:
        first = brace
        while first > 0 and (draft.tokens[first - 1] == "::" or IDENTIFIER.match(draft.tokens[first - 1])):
            first -= 1
        head = draft.tokens[first:brace]
        if "namespace" in head and "inline" not in head:
            names[:0] = [token for token in head[head.index("namespace") + 1 :] if token != "::"]
        brace = draft.enclosing(brace)
    return names


def _template_before(draft: Draft, i: int) -> str | None:
    """The template parameters, as written, of the function whose type is token i; None if it has none."""
    i -= 1
    while draft.token(i) in ("inline", "static", "kernel") or (i >= 0 and draft.in_attribute[i]):
        i -= 1
    if draft.token(i) != ">":
        return None
    end = i
    while i >= 0 and draft.tokens[i] not in (";", "{", "}"):
        if draft.tokens[i] == "template" and draft.after_template_arguments(i + 1) == end + 1:
            return draft.source(i + 2, end)
        i = draft.partner[i] - 1 if draft.tokens[i] in ")]" else i - 1
    return None


def _arguments(draft: Draft, first: int, last: int) -> list[Argument]:
    """The arguments of a kernel; a buffer without an index gets the lowest that is left.

    Raises:
        RewriteError: If an argument lacks a name or an attribute, or has one that is not Metal's.
    """
    arguments, used = [], set()
    parts = list(draft.commas(first, last))
    for start, end in parts:
        attributes = draft.attributes_between(start, end)
        if "buffer" in attributes:
            used.add(draft.integer(attributes["buffer"], start))
    for start, end in parts:
        attributes = draft.attributes_between(start, end)
        live = [j for j in range(start, end) if not draft.dropped[j]]
        array = next((j for j in live if draft.tokens[j] == "["), None)
        at = (live.index(array) if array is not None else len(live)) - 1
        if at < 0:
            raise draft.error("error: a kernel has an argument without a name: write one, or drop the comma", start)
        name = draft.tokens[live[at]]
        kind_of = " ".join(draft.tokens[j] for j in live[:at])
        kind: str | None
        index: int | None = None
        if array is not None and _SPACED.search(kind_of):
            kind_of += " *"
        if "buffer" in attributes:
            kind, index = "buffer", draft.integer(attributes["buffer"], start)
        elif "threadgroup" in attributes:
            kind, index = "threadgroup", draft.integer(attributes["threadgroup"], start)
        else:
            kind = next((a for a in attributes if a in POSITIONS), None)
            unknown = [a for a in attributes if a != "function_constant"]
            if kind is None and unknown:
                what = f"error: argument {name!r} of a kernel has no attribute of Metal's but {unknown[0]!r}"
                raise draft.error(what, start)
        if kind is None:
            if not re.search(r"[*&]\s*(const|restrict|__restrict)?$", kind_of):
                raise draft.error(f"error: argument {name!r} of a kernel has no attribute", start)
            index = next(k for k in range(len(used) + 1) if k not in used)
            used.add(index)
            kind = "buffer"
        arguments.append(Argument(name, kind, index, kind_of))
    return arguments
