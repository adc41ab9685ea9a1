"""Finds words and numbers that Metal does not have, and words of its that this check does not cover."""

from __future__ import annotations

import re

from ..errors import UNCOVERED
from ..read.builtins import ALLOWED_INTERNALS, is_attribute
from .text import SPACES, WORD, Text

_FORBIDDEN = {
    "double": "Metal has no double: write float",
    "new": "Metal has no new: declare an array of a fixed size",
    "delete": "Metal has no delete: declare an array of a fixed size",
    "try": "Metal has no exceptions: return a value that says what went wrong",
    "catch": "Metal has no exceptions: return a value that says what went wrong",
    "throw": "Metal has no exceptions: return a value that says what went wrong",
    "goto": "Metal has no goto: write a loop",
    "virtual": "Metal has no virtual functions: write a template",
    "typeid": "Metal has no type identification: compare types with metal::is_same",
    "dynamic_cast": "Metal has no dynamic_cast: write static_cast",
    "register": "Metal has no register: leave the word out",
    "wchar_t": "Metal has no wchar_t: write char or ushort",
    "char16_t": "Metal has no char16_t: write ushort",
    "char32_t": "Metal has no char32_t: write uint",
    "thread_local": "Metal has no thread_local: declare a variable in the kernel",
    "asm": "Metal has no inline assembly: call a function of metal_stdlib",
    "__asm__": "Metal has no inline assembly: call a function of metal_stdlib",
    "concept": "Metal has no concepts: write metal::enable_if or static_assert",
    "requires": "Metal has no concepts: write metal::enable_if or static_assert",
    "co_await": "Metal has no coroutines: write a loop",
    "co_return": "Metal has no coroutines: write a loop",
    "co_yield": "Metal has no coroutines: write a loop",
}
_STAGES = {"vertex", "fragment", "mesh", "object"}
_STAGE_ATTRIBUTES = _STAGES | {"intersection", "patch"}
_UNCOVERED_TEMPLATE = re.compile(
    r"(texture(1d|2d|3d|cube|_buffer)\w*|depth(2d|cube)\w*|(visible|intersection)_function_table|intersector|imageblock|mesh"
    r"|patch_control_point|interpolant|intersection_(query|result))$"
)
_UNCOVERED_TYPE = re.compile(
    r"(sampler|((primitive|instance)_)?acceleration_structure|mesh_grid_properties|command_buffer|render_command"
    r"|compute_command|(render|compute)_pipeline_state)$"
)
_LONG_DOUBLE = re.compile(
    r"(\d+\.\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|\d+[eE][+-]?\d+|0[xX][\da-fA-F.]+[pP][+-]?\d+)[lL]$"
)
_RESERVED = {"vertex", "fragment", "kernel"}
_STRINGS_BEHIND = {"static_assert", "_Pragma", "extern", "asm", "__asm__", "__asm", "log", "log_debug", "log_error"}
_NOT_A_TYPE = {"return", "else", "case", "goto", "do", "operator", "new", "throw", "and", "or", "not"}


def check_words(text: Text) -> None:
    """Reports words wherever they stand, after `check_declarations` has found the names of functions."""
    declared = _declared(text)
    for i, token in enumerate(text.tokens):
        before, after = text.token(i - 1), text.token(i + 1)
        if token[0] == '"' and not text.in_attribute[i]:
            _string(text, i)
        elif _LONG_DOUBLE.match(token):
            text.report(i, f"Metal has no long double: write {token[:-1]}f")
        if not WORD.match(token) or before in (".", "->") or (token == "delete" and before == "="):
            continue
        if text.in_attribute[i]:
            if token == "function_constant":
                _function_constant(text, i)
            named = before in ("[", ",") and text.in_attribute[i - 1]
            if named and token in _STAGE_ATTRIBUTES:
                text.report(i, f"{token} functions are not covered by this check", severity=UNCOVERED)
            elif named and not is_attribute(token):
                text.report(i, f"Metal has no attribute {token!r}: leave it out", doubtful=True)
            continue
        if token == "vec" and after == "<":
            _vector_size(text, i)
        if token in _FORBIDDEN:
            text.report(i, _FORBIDDEN[token])
        elif token in _STAGES | _RESERVED:
            _stage(text, i)
        elif token == "long" and after in ("long", "double"):
            text.report(i, f"Metal has no long {after}: write {'long' if after == 'long' else 'float'}")
        elif token == "noexcept" and after == "(" and before not in (")", "const", *SPACES):
            text.report(i, "Metal has no operator noexcept: write what it would say, true or false")
        elif token == "noexcept" and not _in_internals(text, i):
            text.report(i, "Metal has no noexcept: leave the word out", doubtful=True)
        elif _is_uncovered(text, i):
            text.report(i, f"{token!r} is not covered by this check", severity=UNCOVERED)
        elif token in ("struct", "class") and before != "enum":
            _base(text, i)
        elif token.startswith("atomic_") and after == "(":
            _memory_order(text, i)
        elif token == "std" and after == "::":
            text.report(i, "Metal has no std::, write metal::")
        elif token.startswith(("__builtin_", "__nvvm", "__sanitizer", "MITTENS_")):
            if token not in ALLOWED_INTERNALS:
                text.report(i, f"{token!r} is not Metal's: call a function of metal_stdlib", doubtful=True)
        elif before == "::" and text.token(i - 2) == "mittens" and token not in declared:
            text.report(i, f"Metal has no function {token!r}: call one of metal_stdlib", doubtful=True)


def _vector_size(text: Text, i: int) -> None:
    """A vector has 2, 3 or 4 components: `vec<float, 5>`."""
    parts = list(text.commas(i + 2, text.after_template_arguments(i + 1) - 1))
    size = text.tokens[slice(*parts[1])] if len(parts) == 2 else []
    known = ("2", "3", "4", "8") if text.eights else ("2", "3", "4")
    if len(size) == 1 and size[0].isdigit() and size[0] not in known:  # code.py sees sizes with names
        text.report(i, f"a vector has 2 to 4 components, not {size[0]}: write an array")


def _is_uncovered(text: Text, i: int) -> bool:
    """Whether token i is a type of textures, ray tracing or mesh functions, not a name."""
    token, before = text.tokens[i], text.token(i - 1)
    if token in text.types or before in ("struct", "class", "enum", "union", "typename"):
        return False
    if _UNCOVERED_TEMPLATE.match(token):
        return text.after_template_arguments(i + 1) > i + 1
    if token == "raytracing":
        return before == "::" or text.token(i + 1) == "::"
    return _UNCOVERED_TYPE.match(token) is not None and WORD.match(text.token(i + 1)) is not None


def _memory_order(text: Text, i: int) -> None:
    """Atomic operations are relaxed; others are the orders of a fence, which Metal 3.2 brought."""
    token = text.tokens[i]
    if token == "atomic_thread_fence":
        if not text.fences:
            what = "Metal 3.1 has no atomic_thread_fence: write threadgroup_barrier, or check --std metal3.2"
            text.report(i, what, doubtful=True)
    elif token.endswith("_explicit"):
        for j in range(i + 2, text.partner[i + 1]):
            if text.tokens[j].startswith("memory_order_") and text.tokens[j] != "memory_order_relaxed":
                what = (
                    f"{token} with {text.tokens[j]}: atomic operations are relaxed, write memory_order_relaxed, "
                    "and atomic_thread_fence of Metal 3.2 before or behind it"
                )
                text.report(j, what)


def _function_constant(text: Text, i: int) -> None:
    """One is of a number or a vector, and has no value in the text."""
    first = i
    while text.token(first - 1) not in (";", "}", "{", "", "(", ","):
        first -= 1
    declared = [j for j in range(first, i) if not text.in_attribute[j] and WORD.match(text.tokens[j])]
    classes = [j for j in declared[:-1] if text.tokens[j] in text.classes]
    if classes and "constant" in (text.tokens[j] for j in declared):
        what = f"{text.tokens[declared[-1]]!r} is a function constant of a struct: write one for each number in it"
        text.report(classes[0], what)


def _string(text: Text, i: int) -> None:
    j = i - 1
    while j >= 0 and text.tokens[j] not in (";", "{", "}"):
        if text.tokens[j] in _STRINGS_BEHIND or text.tokens[j].startswith("os_log"):
            return
        j -= 1
    text.report(i, "Metal has no strings: write numbers, in an array of char")


def _stage(text: Text, i: int) -> None:
    """A function of a graphics pipeline, or a word that is no name."""
    token, before, after = text.tokens[i], text.token(i - 1), text.token(i + 1)
    starts = before in ("", ";", "}", "{", ">", "]", "inline", "static", "extern")
    if token == "kernel" and (starts or before in ("template", ")")) and WORD.match(after):
        return
    if starts and WORD.match(after):
        j = i + 1
        while text.token(j) not in ("(", ";", "{", "}", "=", ""):
            j = max(j + 1, text.after_template_arguments(j))
        if text.token(j) == "(" and token in _STAGES:
            text.report(i, f"{token} functions are not covered by this check", severity=UNCOVERED)
            return
    if token in _RESERVED:
        text.report(i, f"{token!r} is a word of Metal's language: choose another name")


def _base(text: Text, i: int) -> None:
    """Metal derives no classes, but where a pragma switches its internals on, as its own headers and MLX's do."""
    j = i + 1
    while text.token(j) not in (":", "{", ";", "(", ")", ",", ">", "=", "") or text.token(j - 1) == "alignas":
        j = text.partner[j] + 1 if text.token(j) in ("(", "[") else max(j + 1, text.after_template_arguments(j))
    if text.token(j) != ":":
        return
    bases, after = [], ":"
    while text.token(j) not in ("{", ";", "(", ")", ""):
        if WORD.match(text.token(j)) and after in (":", ",", "::", "public", "private", "protected", "typename"):
            bases.append(text.tokens[j])
        after = text.tokens[j]
        j = max(j + 1, text.after_template_arguments(j))
    own = all(base.startswith("_") for base in bases)  # of Metal's library, as numeric limits are specialized
    if text.token(j) == "{" and not own and not _in_internals(text, i):
        text.report(i, f"Metal has no derived classes: make {bases[-1]!r} a member, or repeat what it declares")


def _in_internals(text: Text, i: int) -> bool:
    """Whether token i stands behind `#pragma METAL internals : enable`."""
    switches = [on for at, on in text.internals if at < text.spans[i][0]]
    return bool(switches) and switches[-1]


def _declared(text: Text) -> set[str]:
    """Names that the text itself declares: functions, types, template parameters, variables."""
    names = set(text.functions)
    for i, token in enumerate(text.tokens):
        before = text.token(i - 1)
        after_a_type = (WORD.match(before) and before not in _NOT_A_TYPE) or before in (">", "...")
        if WORD.match(token) and (
            after_a_type or (before in ("*", "&") and text.token(i + 1) in (";", ",", ")", "=", "["))
        ):
            names.add(token)
    return names
