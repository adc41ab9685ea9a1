"""Arrays in threadgroup memory and in a thread's own."""

from __future__ import annotations

from ..read.tokens import IDENTIFIER, OPEN
from .draft import Draft

_NO_DECLARATION = frozenset(
    "return else case goto delete new throw typedef using struct class union enum template constexpr const static "
    "extern threadgroup device constant if for while do switch break continue default".split()
)


def threadgroup_arrays(draft: Draft) -> None:
    """Makes `threadgroup float x[32];` a call of the target's MITTENS_THREADGROUP_ARRAY."""
    for i, token in draft.live():
        if token != "threadgroup" or draft.token(i - 1) not in (";", "{", "}", ")", ":"):
            continue
        found = _declarators(draft, i + 1)
        if found is not None:
            type_text, variables, end = found
            calls = [f"MITTENS_THREADGROUP_ARRAY({name}, {type_text} {extents})" for name, extents, _ in variables]
            draft.replace(i, end, "; ".join(calls))


def private_arrays(draft: Draft) -> None:
    """Shows the watcher `float x[4];` of a function, which then sees reads before writes."""
    for i, _ in draft.live():
        if draft.token(i - 1) in (";", "{", "}"):
            _private_array(draft, i)


def _private_array(draft: Draft, i: int) -> None:
    first = i + 1 if draft.tokens[i] == "thread" else i
    if draft.tokens[first] in _NO_DECLARATION or not IDENTIFIER.match(draft.tokens[first]):
        return
    found = _declarators(draft, first)
    brace = draft.enclosing(i)
    if found is None or brace < 0 or not draft.is_block(brace):
        return
    if draft.token(draft.partner[brace - 1] - 1) == "switch":
        return  # a label may follow, which passes by no initial value
    watched = [name for name, extents, has_value in found[1] if extents and not has_value]
    for j in range(first, found[2]):
        if draft.tokens[j] in watched and draft.token(j + 1) == "[":
            draft.insert(j, "_memory")
    end = draft.spans[found[2]][1]
    draft.edits += [(end, end, f" MITTENS_PRIVATE_ARRAY({name})") for name in watched]


def _declarators(draft: Draft, i: int) -> tuple[str, list[tuple[str, str, bool]], int] | None:
    """Reads a declaration from token i.

    Returns:
        The type, each variable's name, `[extents]` and whether it has an initial value, and the semicolon; None if it
        declares pointers or is no declaration.
    """
    while draft.token(i) in ("alignas", "__attribute__") and draft.token(i + 1) == "(":
        i = draft.partner[i + 1] + 1
    j = i
    while draft.token(j) in ("const", "volatile", "typename", "static"):
        j += 1
    while draft.token(j) in ("unsigned", "signed"):
        j += 1
    while IDENTIFIER.match(draft.token(j)):
        j = draft.after_template_arguments(j + 1)
        if draft.token(j) != "::":
            break
        j += 1
    while draft.token(j) in ("const", "volatile"):
        j += 1
    type_text = draft.source(i, j)
    variables = []
    while IDENTIFIER.match(draft.token(j)):
        name, k = draft.tokens[j], j + 1
        while draft.token(k) == "[":
            k = draft.partner[k] + 1
        variables.append((name, draft.source(j + 1, k), draft.token(k) in ("=", "{")))
        if draft.token(k) in ("=", "{"):  # an initial value, which Metal does not store
            while draft.token(k) not in (",", ";", ""):
                k = draft.partner[k] + 1 if draft.tokens[k] in OPEN else k + 1
        if draft.token(k) == ";":
            return type_text, variables, k
        if draft.token(k) != ",":
            return None
        j = k + 1
    return None
