"""Finds declarations that Metal does not have: pointers without an address space, variables outside of functions."""

from __future__ import annotations

from ..errors import NOTE
from ..read.builtins import is_type
from .text import SPACES, WORD, Text

_SPACE_ADVICE = "write device, constant, threadgroup or thread before it"


def check_declarations(text: Text) -> None:
    """Reports declarations that Metal does not allow; keeps the names of functions and of aliases of pointers."""
    _scope(text, 0, len(text.tokens))


# Namespaces and classes: declarations and definitions, one after the other.


def _scope(text: Text, first: int, last: int, in_class: bool = False) -> None:
    i = start = first
    while i < last:
        token = text.tokens[i]
        if token == "template" and i == start and text.token(i + 1) == "<":
            i = start = text.after_template_arguments(i + 1)
        elif token in "([":
            i = text.partner[i] + 1
        elif token == "{":
            i, start = _block(text, start, i, in_class)
        elif token == ";":
            _declaration(text, start, i, in_class)
            i = start = i + 1
        elif token == ":" and text.token(i - 1) in ("public", "private", "protected"):
            i = start = i + 1
        else:
            i += 1


def _block(text: Text, start: int, i: int, in_class: bool) -> tuple[int, int]:
    """The kind of a brace, and where to go on: the next token, and where its declaration starts."""
    end = text.partner[i] + 1
    opening = _parameters(text, start, i)
    words = text.tokens[start : opening or i]
    if "namespace" in words or "extern" in words:
        _scope(text, i + 1, end - 1)
    elif opening is None and {"struct", "class", "union"} & set(words):
        _scope(text, i + 1, end - 1, in_class=True)
        return end, start
    elif opening is not None:
        closing = text.partner[opening]
        if ":" in text.tokens[closing + 1 : i] and (WORD.match(text.token(i - 1)) or text.token(i - 1) == ">"):
            return end, start  # of a member, before the body
        _signature(text, start, opening)
        _body(text, start, opening, i)
    else:
        return end, start
    return end, end


def _parameters(text: Text, start: int, end: int) -> int | None:
    """Where the parameters of a function open, if start..end-1 declares one."""
    j = start
    while j < end:
        token = text.tokens[j]
        if token == "operator":
            j += 3 if text.tokens[j + 1 : j + 3] == ["(", ")"] else 1
            while text.token(j) != "(":
                j += 1
            return j
        if token == "<" and WORD.match(text.token(j - 1)):
            j = max(j + 1, text.after_template_arguments(j))
        elif token == "(":
            before = text.token(j - 1)
            if WORD.match(before) and before not in ("decltype", "alignas", "__attribute__"):
                return j
            if before == ">" and _name_at(text, start, j) > start:  # of a specialization: `float f<int>(int x)`
                return j
            j = text.partner[j] + 1
        elif token in "[{":
            j = text.partner[j] + 1
        elif token == "=" or token in ("using", "typedef", "static_assert"):
            return None
        else:
            j += 1
    return None


def _name_at(text: Text, start: int, opening: int) -> int:
    """Where the name of a function stands whose parameters open, before its template arguments; -1 if none does."""
    j = opening - 1
    if text.token(j) != ">":
        return j
    return next(
        (k - 1 for k in range(j, start, -1) if text.tokens[k] == "<" and text.after_template_arguments(k) == opening),
        -1,
    )


def _declaration(text: Text, start: int, end: int, in_class: bool) -> None:
    words = text.tokens[start:end]
    if not words or words[0] in ("template", "static_assert", "friend", "enum", "concept"):
        return
    if words[0] in ("using", "typedef"):
        _alias(text, start, end)
        return
    opening = _parameters(text, start, end)
    if opening is not None:
        if not in_class or "=" not in words:
            _signature(text, start, opening)
    elif _needs_space(text, start, end):
        text.report(
            start, f"pointer or reference {_named(text, start, end)[-1]!r} names no address space: {_SPACE_ADVICE}"
        )
    elif not in_class and len(words) > 1 and not {"constant", "struct", "class", "union", "sampler"} & set(words):
        name = _named(text, start, end)[-1]
        text.report(
            start, f"{name!r} is a variable outside of a function: it has to be 'constant', write that before it"
        )
    elif in_class and "static" in words and "constant" not in words:
        text.report(
            start,
            f"{_named(text, start, end)[-1]!r} is a static member: it has to be 'constant', write that before it",
        )


def _alias(text: Text, start: int, end: int) -> None:
    """Keeps the name of an alias whose pointer or reference names no address space: it is refused where it is used.

    An alias of a pointer to a template's argument is left out, since Metal takes such a pointer to be of thread
    memory.
    """
    is_using = text.tokens[start] == "using"
    if is_using and text.token(start + 2) != "=":
        return
    first = start + 3 if is_using else start + 1
    if _needs_space(text, first, end, named=not is_using) and not text.parameters & set(text.tokens[first:end]):
        text.pointers.add(text.token(start + 1 if is_using else end - 1))


def _signature(text: Text, start: int, opening: int) -> None:
    words = text.tokens[start:opening]
    at = words.index("operator") if "operator" in words else _name_at(text, start, opening) - start
    name = "".join(words[at:])
    text.functions.add(name)
    if _needs_space(text, start, start + at, named=False):
        text.report(start, f"what {name!r} returns names no address space: {_SPACE_ADVICE}")
    for first, last in text.commas(opening + 1, text.partner[opening]):
        if "auto" in _named(text, first, last):
            text.report(first, f"an argument of {name!r} is auto: write a template, with a name for its type")
        if _needs_space(text, first, last):
            argument = next((t for t in reversed(_named(text, first, last)) if WORD.match(t)), "?")
            text.report(first, f"argument {argument!r} of {name!r} names no address space: {_SPACE_ADVICE}")
        elif "kernel" in text.tokens[start:opening] and _is_array(text, first, last):
            argument = _named(text, first, last)[-1]
            what = f"array argument {argument!r} of {name!r} is a pointer and names no address space: {_SPACE_ADVICE}"
            text.report(first, what)


def _named(text: Text, first: int, last: int) -> list[str]:
    """Tokens of a declaration that are outside of brackets and before its default value, at least one."""
    tokens, i = [], first
    while i < last and text.tokens[i] != "=":
        if text.tokens[i] == "<" and text.after_template_arguments(i) > i:
            i = text.after_template_arguments(i)
        elif text.tokens[i] in "([{":
            i = text.partner[i] + 1
        else:
            tokens.append(text.tokens[i])
            i += 1
    return tokens or [text.token(first)]


def _is_array(text: Text, first: int, last: int) -> bool:
    """Whether a parameter is an array without an address space. Outside of kernels it lies in the thread's memory."""
    words = text.tokens[first:last]
    end = words.index("=") if "=" in words else len(words)
    brackets = [j for j in range(first, first + end) if text.tokens[j] == "[" and not text.in_attribute[j]]
    return bool(brackets) and brackets[0] > first + 1 and not SPACES & set(words) and "(" not in words[:end]


def _needs_space(text: Text, first: int, last: int, named: bool = True) -> bool:
    """Whether a declaration, whose last token is a name if it has one, is of a pointer without an address space."""
    tokens = _named(text, first, last)
    types = set(tokens[:-1] if named else tokens)
    return bool({"*", "&"} & set(tokens) or text.pointers & types) and not SPACES & set(tokens)


# Functions.


def _body(text: Text, start: int, opening: int, brace: int) -> None:
    kernel = "kernel" in text.tokens[start:opening]
    at = _name_at(text, start, opening)
    name, end = text.tokens[at], text.partner[brace]
    if kernel and text.token(at - 1) != "void":
        text.report(opening - 1, f"kernel {name!r} returns something: a kernel is void")
    depth = 0
    for i in range(brace + 1, end):
        token, before = text.tokens[i], text.tokens[i - 1]
        depth += {"{": 1, "}": -1}.get(token, 0)
        if token == "static" and text.token(i + 1) not in ("constexpr", "const", "constant"):
            text.report(
                i,
                f"{name!r} has a static variable: keep it in a buffer, or write 'constant' outside of a function",
            )
        elif token == "[" and text.token(i + 1) != "[" and _starts_expression(before):
            if not text.lambdas and text.token(text.partner[i] + 1) in ("(", "{", "<"):
                text.report(i, "Metal 3.1 has no lambda expressions: write a function, or check --std metal3.2")
        elif token == "threadgroup" and before in (";", "{", "}", ":"):
            _threadgroup(text, i, name, kernel, depth)
        elif (is_type(token) or token in text.types) and text.token(i + 1) in ("*", "&"):
            _pointer(text, i)
        if token in ("using", "typedef") and before in (";", "{", "}"):
            last = i
            while text.token(last) not in (";", ""):
                last = text.partner[last] + 1 if text.tokens[last] in ("(", "[", "{") else last + 1
            _alias(text, i, last)
        elif token in text.pointers:
            _hidden_pointer(text, i)


def _pointer(text: Text, i: int) -> None:
    """A pointer or reference to one of Metal's types: a local variable, in a cast, as a template argument."""
    before = text.token(i - 2 if text.token(i - 1) == "const" else i - 1)
    name, after = text.token(i + 2), text.token(i + 3)
    if before in (";", "{", "}", "(") and WORD.match(name) and after in ("=", ";", ":", ",", "{"):
        text.report(i, f"pointer or reference {name!r} names no address space: {_SPACE_ADVICE}")
    elif (before, name) in (("(", ")"), ("<", ">")):
        text.report(i, f"'{text.tokens[i]}{text.tokens[i + 1]}' names no address space: {_SPACE_ADVICE}")


def _hidden_pointer(text: Text, i: int) -> None:
    """A local variable whose type is an alias of a pointer that names no address space: `P p = values;`."""
    first = i
    while text.token(first - 1) in ("const", "volatile", "constexpr") or text.token(first - 1) == "::":
        first -= 2 if text.token(first - 1) == "::" and WORD.match(text.token(first - 2)) else 1
    name = i + 1
    while text.token(name) in ("const", "volatile", "&", "*"):
        name += 1
    declared = WORD.match(text.token(name)) and text.token(name + 1) in ("=", ";", ":", ",", "{", "[", "(")
    if text.token(first - 1) in (";", "{", "}", "(") and declared:
        what = f"pointer or reference {text.token(name)!r} names no address space: {_SPACE_ADVICE}"
        text.report(i, f"{what}, in the alias {text.tokens[i]!r}")


def _starts_expression(before: str) -> bool:
    return before in ("=", "(", ",", "{", ";", "return", "&", "|", "!", "?", ":", "}")


def _threadgroup(text: Text, i: int, name: str, kernel: bool, depth: int) -> None:
    end, initialised = i, False
    while text.token(end) not in (";", ""):
        initialised = initialised or text.token(end) in ("=", "{")
        end = text.partner[end] + 1 if text.token(end) in ("(", "[", "{") else end + 1
    if {"*", "&"} & set(_named(text, i, end)):
        return
    if not kernel:
        what = f"threadgroup memory stands in {name!r}, which is not a kernel: declare it in one, pass a pointer"
        text.report(i, what)
    if initialised:
        what = "threadgroup memory has an initial value, which is not stored: write it, then threadgroup_barrier"
        text.report(i, what, doubtful=True, severity=NOTE)
