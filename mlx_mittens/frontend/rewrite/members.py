"""Member functions in address spaces: `void f() const device { ... }`, which clang does not know."""

from __future__ import annotations

from collections.abc import Iterator

from ..read.tokens import OPEN, SPACES
from .draft import Draft

Head = tuple[int, str]  # the brace of a class, and a member function up to its address space


def member_functions(draft: Draft) -> None:
    """Takes the address space from member functions; of several with one head, clang knows only the plain one.

    `void f() const device { ... }` goes if there is a `void f() const { ... }`, or was one in another space.
    """
    kept: set[Head] = set()
    plain: dict[int, set[Head]] = {}  # by the class's brace
    for i, before, after in _in_spaces(draft):
        if draft.tokens[i] == "thread":
            draft.replace(i, i + 1, "")
            continue
        start = _member_start(draft, before)
        brace = start and draft.enclosing(start)
        head = (brace, _head(draft, start, draft.partner[before], i))
        draft.result.methods.add(draft.tokens[draft.partner[before] - 1])
        if brace not in plain:
            plain[brace] = _plain_members(draft, brace)
        defaulted = draft.tokens[after] == "=" and draft.token(after + 1) == "default"  # clang makes one of its own
        if defaulted or head in plain[brace] or head in kept:
            draft.replace(start, _member_end(draft, after), "")
        else:
            kept.add(head)
            draft.replace(i, i + 1, "")


def mark_threadgroup_constructors(draft: Draft) -> None:
    """Says in a class that it has a constructor for threadgroup memory, before that goes from the text."""
    marked: set[int] = set()  # braces of classes
    for i, before, _ in _in_spaces(draft):
        brace = draft.enclosing(_member_start(draft, before))
        head = brace - 1
        while head >= 0 and draft.tokens[head] not in (";", "{", "}", ">"):
            head -= 1
        words = draft.tokens[head + 1 : brace]
        is_constructor = draft.tokens[draft.partner[before] - 1] in words and {"struct", "class", "union"} & set(words)
        if draft.tokens[i] == "threadgroup" and is_constructor and brace not in marked:
            marked.add(brace)
            draft.insert(brace, " public: using mittens_in_threadgroup = void; " + "private: " * ("class" in words))


def _in_spaces(draft: Draft) -> Iterator[tuple[int, int, int]]:
    """The address space of each member function, the bracket that ends its parameters, and the token behind both."""
    for i, token in enumerate(draft.tokens):
        if token not in SPACES or draft.dropped[i]:
            continue
        before = i - 1
        while draft.token(before) in ("const", "volatile", "noexcept"):
            before -= 1
        after = i + 1
        while draft.token(after) in ("const", "volatile", "noexcept"):
            after += 1
        if draft.token(before) == ")" and draft.token(after) in ("{", ":", ";", "=", "->"):
            yield i, before, after


def _plain_members(draft: Draft, brace: int) -> set[Head]:
    """The heads of the member functions of a class that work on objects in the thread's own memory."""
    heads = set()
    start, i = brace + 1, brace + 1
    while 0 <= i < draft.partner[brace]:
        token = draft.tokens[i]
        if token in ";}" or (token == ":" and draft.token(i - 1) in ("public", "private", "protected")):
            start = i + 1
        if token == "(" and draft.token(draft.partner[i] + 1) in ("const", "thread", "{", ";", ":", "noexcept"):
            end = draft.partner[i] + 1
            while draft.token(end) in ("const", "volatile", "noexcept"):
                end += 1
            if draft.token(end) not in SPACES or draft.token(end) == "thread":
                heads.add((brace, _head(draft, start, i, end)))
        if token in OPEN:
            i = draft.partner[i]
            if token == "{":
                start = i + 1
        i += 1
    return heads


def _head(draft: Draft, start: int, opening: int, end: int) -> str:
    """A member function without the address space of what it returns: that follows the object's."""
    returned = [token for token in draft.tokens[start:opening] if token not in SPACES]
    return " ".join([*returned, *draft.tokens[opening:end]])


def _member_start(draft: Draft, closing: int) -> int:
    """The first token of the member function whose parameters end at a bracket."""
    i = draft.partner[closing] - 1
    while i >= 0:
        if draft.tokens[i] in (";", "{", "}"):
            break
        if draft.tokens[i] == ":" and draft.token(i - 1) in ("public", "private", "protected"):
            break
        i = draft.partner[i] if draft.tokens[i] in ")]" else i
        i -= 1
    return i + 1


def _member_end(draft: Draft, i: int) -> int:
    """The token behind the body, or the semicolon, of a member function, from the token behind its head."""
    if draft.tokens[i] == ":":  # initialisers, each a name and a pair of brackets
        i += 1
        while True:
            while draft.token(i) not in "({":
                i = max(i + 1, draft.after_template_arguments(i))
            i = draft.partner[i] + 1
            if draft.token(i) != ",":
                break
            i += 1
    while draft.token(i) not in (";", "{"):
        i += 1
    end = i + 1 if draft.tokens[i] == ";" else draft.partner[i] + 1
    return end + 1 if draft.token(end) == ";" else end
