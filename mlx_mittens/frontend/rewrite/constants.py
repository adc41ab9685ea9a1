"""Function constants, whose values are known when a pipeline is made, and other constants."""

from __future__ import annotations

from .draft import Draft

_STORAGE = ("static", "constexpr", "const", "inline", "extern")


def constants(draft: Draft) -> None:
    """Gives function constants their values, and makes other numbers in constant memory const."""
    for i, token in draft.live():
        if token == "constant" and draft.token(i - 1) in (";", "}", "{", "", *_STORAGE):
            _constant(draft, i)


def function_constant_tests(draft: Draft) -> None:
    """Answers `is_function_constant_defined(x)`."""
    for i, token in draft.live():
        if token == "is_function_constant_defined" and draft.token(i + 2) in draft.result.function_constants:
            index, _ = draft.result.function_constants[draft.tokens[i + 2]]
            if draft.constants is None:
                draft.replace(i, i + 4, "::mittens::function_constant<bool>()")
            else:
                draft.replace(i, i + 4, str(index in draft.constants).lower())


def _constant(draft: Draft, i: int) -> None:
    j = i + 1
    while draft.token(j) not in (";", "=", "(", "{", "") or (j < len(draft.tokens) and draft.in_attribute[j]):
        j += 1
    attributes = draft.attributes_between(i, j)
    if "function_constant" not in attributes:
        words = draft.tokens[i:j]
        number = draft.token(j) == "=" and not {"*", "&", "[", "const", "constexpr"} & set(words)
        if number and len(words) < 5 and draft.token(i - 1) not in ("const", "constexpr"):
            draft.insert(i, " const")
        return
    while draft.token(i - 1) in _STORAGE:
        i -= 1
    live = [k for k in range(i, j) if not draft.dropped[k] and draft.tokens[k] not in (*_STORAGE, "constant")]
    name = draft.tokens[live[-1]]
    type_text = "".join(f"{draft.tokens[k]} " for k in live[:-1]).replace(" :: ", "::").strip()
    index = draft.integer(attributes["function_constant"], i)
    draft.result.function_constants[name] = (index, type_text)
    if draft.constants is None:
        draft.replace(i, j, f"static const {type_text} {name} = ::mittens::function_constant<{type_text}>()")
        return
    value = f"{type_text}({draft.constants[index]})" if index in draft.constants else f"{type_text}()"
    draft.replace(i, j, f"static constexpr {type_text} {name} = {value}")
