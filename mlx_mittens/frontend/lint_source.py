"""What a text shows by itself: words and shapes that Metal does not have, address spaces left out."""

from __future__ import annotations

import re

from .builtins import is_attribute, is_builtin, is_type
from .errors import Problem
from .rewrite import _Rewriter

_SPACES = {"device", "constant", "threadgroup", "thread", "ray_data", "object_data"}
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
    "thread_local": "Metal has no thread_local: declare a variable in the kernel",
    "asm": "Metal has no inline assembly: call a function of metal_stdlib",
    "__asm__": "Metal has no inline assembly: call a function of metal_stdlib",
    "concept": "Metal has no concepts: write metal::enable_if or static_assert",
    "requires": "Metal has no concepts: write metal::enable_if or static_assert",
    "co_await": "Metal has no coroutines: write a loop",
    "co_return": "Metal has no coroutines: write a loop",
    "co_yield": "Metal has no coroutines: write a loop",
}
_NOT_A_CALL = {
    *("if", "else", "for", "while", "do", "switch", "case", "return", "and", "or", "not", "void", "auto", "constexpr"),
    *("sizeof", "alignof", "alignas", "decltype", "static_assert", "static_cast", "reinterpret_cast", "const_cast"),
    *("operator", "explicit", "noexcept", "kernel", "defined", "__attribute__", "_Pragma"),
}
_NOT_A_TYPE = {"return", "else", "case", "goto", "do", "operator", "new", "throw", "and", "or", "not"}
_WORD = re.compile(r"[A-Za-z_]\w*$")


class Text:
    """The text of a file after the preprocessor."""

    def __init__(self, text: str):
        reader = _Rewriter(text, {})
        self.tokens, self.partner, self.token = reader.tokens, reader.partner, reader.token
        self.skip, self.commas = reader.after_template_arguments, reader.commas
        self.reader = reader
        reader._attributes()
        self.found: list[Problem] = []
        self.doubtful: list[Problem] = []  # what not every one of Apple's compilers refuses
        self.functions: set[str] = set()

    def problems(self, strict: bool) -> list[Problem]:
        """What is found; what is doubtful only if that is asked for."""
        self._scope(0, len(self.tokens))
        self._words()
        return [*self.found, *(self.doubtful if strict else [])]

    def report(self, i: int, what: str, doubtful: bool = False) -> None:
        file, line = self.reader.lines.at(self.reader.spans[i][0])
        (self.doubtful if doubtful else self.found).append(Problem(file, line, what))

    # Namespaces and classes: declarations and definitions, one after the other.

    def _scope(self, first: int, last: int, in_class: bool = False) -> None:
        i = start = first
        while i < last:
            token = self.tokens[i]
            if token == "template" and i == start and self.token(i + 1) == "<":
                i = start = self.skip(i + 1)
            elif token in "([":
                i = self.partner[i] + 1
            elif token == "{":
                i, start = self._block(start, i, in_class)
            elif token == ";":
                self._declaration(start, i, in_class)
                i = start = i + 1
            elif token == ":" and self.token(i - 1) in ("public", "private", "protected"):
                i = start = i + 1
            else:
                i += 1

    def _block(self, start: int, i: int, in_class: bool) -> tuple[int, int]:
        """What a brace opens, and where to go on: the next token, and where its declaration starts."""
        end = self.partner[i] + 1
        opening = self._parameters(start, i)
        words = self.tokens[start : opening or i]
        if "namespace" in words or "extern" in words:
            self._scope(i + 1, end - 1)
        elif opening is None and {"struct", "class", "union"} & set(words):
            self._scope(i + 1, end - 1, in_class=True)
            return end, start
        elif opening is not None:
            closing = self.partner[opening]
            if ":" in self.tokens[closing + 1 : i] and (_WORD.match(self.token(i - 1)) or self.token(i - 1) == ">"):
                return end, start  # of a member, before the body
            self._signature(start, opening)
            self._body(start, opening, i)
        else:
            return end, start
        return end, end

    def _parameters(self, start: int, end: int) -> int | None:
        """Where the parameters of a function open, if start..end-1 declares one."""
        j = start
        while j < end:
            token = self.tokens[j]
            if token == "operator":
                j += 3 if self.tokens[j + 1 : j + 3] == ["(", ")"] else 1
                while self.token(j) != "(":
                    j += 1
                return j
            if token == "<" and _WORD.match(self.token(j - 1)):
                j = max(j + 1, self.skip(j))
            elif token == "(":
                before = self.token(j - 1)
                if _WORD.match(before) and before not in ("decltype", "alignas", "__attribute__"):
                    return j
                j = self.partner[j] + 1
            elif token in "[{":
                j = self.partner[j] + 1
            elif token == "=" or token in ("using", "typedef", "static_assert"):
                return None
            else:
                j += 1
        return None

    def _declaration(self, start: int, end: int, in_class: bool) -> None:
        words = self.tokens[start:end]
        if not words or words[0] in ("using", "typedef", "template", "static_assert", "friend", "enum", "concept"):
            return
        opening = self._parameters(start, end)
        if opening is not None:
            if not in_class or "=" not in words:
                self._signature(start, opening)
        elif self._needs_space(start, end):
            self.report(start, f"pointer or reference {self._named(start, end)[-1]!r} names no address space")
        elif not in_class and len(words) > 1 and not {"constant", "struct", "class", "union", "sampler"} & set(words):
            name = self._named(start, end)[-1]
            self.report(start, f"{name!r} is a variable outside of a function: it has to be 'constant'")
        elif in_class and "static" in words and "constant" not in words:
            self.report(start, f"{self._named(start, end)[-1]!r} is a static member: it has to be 'constant'")

    def _signature(self, start: int, opening: int) -> None:
        words = self.tokens[start:opening]
        at = words.index("operator") if "operator" in words else len(words) - 1
        name = "".join(words[at:])
        self.functions.add(name)
        if self._needs_space(start, start + at):
            self.report(start, f"what {name!r} returns names no address space")
        for first, last in self.commas(opening + 1, self.partner[opening]):
            if self._needs_space(first, last):
                argument = next((t for t in reversed(self._named(first, last)) if _WORD.match(t)), "?")
                self.report(first, f"argument {argument!r} of {name!r} names no address space")

    def _named(self, first: int, last: int) -> list[str]:
        """Tokens of a declaration that are outside of brackets and before its default value."""
        tokens, i = [], first
        while i < last and self.tokens[i] != "=":
            if self.tokens[i] == "<" and self.skip(i) > i:
                i = self.skip(i)
            elif self.tokens[i] in "([{":
                i = self.partner[i] + 1
            else:
                tokens.append(self.tokens[i])
                i += 1
        return tokens

    def _needs_space(self, first: int, last: int) -> bool:
        tokens = self._named(first, last)
        return bool({"*", "&"} & set(tokens)) and not _SPACES & set(tokens)

    # Functions.

    def _body(self, start: int, opening: int, brace: int) -> None:
        kernel = "kernel" in self.tokens[start:opening]
        name, end = self.tokens[opening - 1], self.partner[brace]
        if kernel and self.token(opening - 2) != "void":
            self.report(opening - 1, f"kernel {name!r} returns something: a kernel is void")
        depth = 0
        for i in range(brace + 1, end):
            token, before = self.tokens[i], self.tokens[i - 1]
            depth += {"{": 1, "}": -1}.get(token, 0)
            if token == "static":
                if self.token(i + 1) not in ("constexpr", "const", "constant"):
                    self.report(
                        i,
                        f"{name!r} has a static variable: keep it in a buffer, "
                        "or write 'constant' outside of a function",
                    )
            elif token == "[" and self.token(i + 1) != "[" and self._starts_expression(before):
                if self.token(self.partner[i] + 1) in ("(", "{", "<"):
                    self.report(i, "Metal has no lambda expressions: write a function")
            elif token == "threadgroup" and before in (";", "{", "}", ":"):
                self._threadgroup(i, name, kernel, depth)
            elif is_type(token) and self.token(i + 1) in ("*", "&"):
                self._pointer(i)

    def _pointer(self, i: int) -> None:
        """A pointer or reference to one of Metal's types: a local variable, in a cast, as a template argument."""
        before = self.token(i - 2 if self.token(i - 1) == "const" else i - 1)
        name, after = self.token(i + 2), self.token(i + 3)
        if before in (";", "{", "}", "(") and _WORD.match(name) and after in ("=", ";", ":", ",", "{"):
            self.report(i, f"pointer or reference {name!r} names no address space")
        elif (before, name) in (("(", ")"), ("<", ">")):
            self.report(i, f"'{self.tokens[i]}{self.tokens[i + 1]}' names no address space")

    @staticmethod
    def _starts_expression(before: str) -> bool:
        return before in ("=", "(", ",", "{", ";", "return", "&", "|", "!", "?", ":", "}")

    def _threadgroup(self, i: int, name: str, kernel: bool, depth: int) -> None:
        end, initialised = i, False
        while self.token(end) not in (";", ""):
            initialised = initialised or self.token(end) in ("=", "{")
            end = self.partner[end] + 1 if self.token(end) in ("(", "[", "{") else end + 1
        if {"*", "&"} & set(self._named(i, end)):
            return
        if not kernel:
            self.report(i, f"threadgroup memory stands in {name!r}, which is not a kernel")
        elif depth > 0:
            what = f"threadgroup memory stands in a block of {name!r}: it belongs at the kernel's top"
            self.report(i, what, doubtful=True)
        if initialised:
            self.report(i, "threadgroup memory has an initial value", doubtful=True)

    # Words, wherever they stand.

    def _words(self) -> None:
        declared = self._declared()
        for i, token in enumerate(self.tokens):
            before, after = self.token(i - 1), self.token(i + 1)
            if not _WORD.match(token) or before in (".", "->") or (token == "delete" and before == "="):
                continue
            if self.reader.in_attribute[i]:
                if before in ("[", ",") and not is_attribute(token) and self.reader.in_attribute[i - 1]:
                    self.report(i, f"Metal has no attribute {token!r}", doubtful=True)
                continue
            if token in _FORBIDDEN:
                self.report(i, _FORBIDDEN[token])
            elif token == "std" and after == "::":
                self.report(i, "Metal has no std::, write metal::")
            elif token.startswith(("__builtin_", "__nvvm", "__sanitizer", "MITTENS_")):
                self.report(i, f"{token!r} is not Metal's", doubtful=True)
            elif token not in declared and token not in _NOT_A_CALL and not is_type(token):
                end = self.skip(i + 1)
                if self.token(end) == "(" and not is_builtin(token) and not token.startswith("__is_"):
                    self.report(i, f"Metal has no function {token!r}", doubtful=True)

    def _declared(self) -> set[str]:
        """Names that the text itself declares: functions, types, template parameters, variables."""
        names = set(self.functions)
        for i, token in enumerate(self.tokens):
            before = self.token(i - 1)
            after_a_type = (_WORD.match(before) and before not in _NOT_A_TYPE) or before in (">", "...")
            if _WORD.match(token) and (
                after_a_type or (before in ("*", "&") and self.token(i + 1) in (";", ",", ")", "=", "["))
            ):
                names.add(token)
        return names
