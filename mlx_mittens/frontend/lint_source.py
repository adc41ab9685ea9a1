"""Finds mistakes in a text by itself: words and shapes that Metal does not have, address spaces left out."""

from __future__ import annotations

import functools
import re

from .builtins import ALLOWED_INTERNALS, is_attribute, is_type
from .errors import NOTE, UNCOVERED, Problem
from .lint_kernels import Signatures
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
_SPACE_ADVICE = "write device, constant, threadgroup or thread before it"
_NOT_A_TYPE = {"return", "else", "case", "goto", "do", "operator", "new", "throw", "and", "or", "not"}
_WORD = re.compile(r"[A-Za-z_]\w*$")


class Text:
    """The text of a file after the preprocessor."""

    def __init__(self, text: str, lambdas: bool = False, fences: bool = True, eights: bool = False):
        reader = _Rewriter(text, {})
        self.tokens, self.partner, self.token = reader.tokens, reader.partner, reader.token
        self.skip, self.commas = reader.after_template_arguments, reader.commas
        self.reader = reader
        reader._attributes()
        reader._members = {}
        self.lambdas = lambdas
        self.fences = fences
        self.eights = eights  # vectors of eight, in which MLX's kernels of Metal 4 hold fragments
        self.found: list[Problem] = []
        self.doubtful: list[Problem] = []  # what not every one of Apple's compilers refuses
        self.functions: set[str] = set()
        self.pointers: set[str] = set()  # aliases of pointers and references that name no address space

    def problems(self, strict: bool) -> list[Problem]:
        """All finds; doubtful ones only if asked for."""
        self._scope(0, len(self.tokens))
        self._words()
        for finding in Signatures(self.reader).findings():
            self.report(finding.token, finding.what, severity="error" if finding.covered else UNCOVERED)
        return [*self.found, *(self.doubtful if strict else [])]

    def report(self, i: int, what: str, doubtful: bool = False, severity: str = "error") -> None:
        position = self.reader.spans[i][0]
        file, line = self.reader.lines.at(position)
        problem = Problem(file, line, what, self.reader.lines.column(position), severity)
        (self.doubtful if doubtful else self.found).append(problem)

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
        """The kind of a brace, and where to go on: the next token, and where its declaration starts."""
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
                if before == ">" and self._name_at(start, j) > start:  # of a specialization: `float f<int>(int x)`
                    return j
                j = self.partner[j] + 1
            elif token in "[{":
                j = self.partner[j] + 1
            elif token == "=" or token in ("using", "typedef", "static_assert"):
                return None
            else:
                j += 1
        return None

    def _name_at(self, start: int, opening: int) -> int:
        """Where the name of a function stands whose parameters open, before its template arguments; -1 if none does."""
        j = opening - 1
        if self.token(j) != ">":
            return j
        return next((k - 1 for k in range(j, start, -1) if self.tokens[k] == "<" and self.skip(k) == opening), -1)

    def _declaration(self, start: int, end: int, in_class: bool) -> None:
        words = self.tokens[start:end]
        if not words or words[0] in ("template", "static_assert", "friend", "enum", "concept"):
            return
        if words[0] in ("using", "typedef"):
            self._alias(start, end)
            return
        opening = self._parameters(start, end)
        if opening is not None:
            if not in_class or "=" not in words:
                self._signature(start, opening)
        elif self._needs_space(start, end):
            self.report(
                start, f"pointer or reference {self._named(start, end)[-1]!r} names no address space: {_SPACE_ADVICE}"
            )
        elif not in_class and len(words) > 1 and not {"constant", "struct", "class", "union", "sampler"} & set(words):
            name = self._named(start, end)[-1]
            self.report(
                start, f"{name!r} is a variable outside of a function: it has to be 'constant', write that before it"
            )
        elif in_class and "static" in words and "constant" not in words:
            self.report(
                start,
                f"{self._named(start, end)[-1]!r} is a static member: it has to be 'constant', write that before it",
            )

    def _alias(self, start: int, end: int) -> None:
        """Keeps the name of an alias whose pointer or reference names no address space: it is refused where it is used.

        An alias of a pointer to a template's argument is left out, since Metal takes such a pointer to be of thread
        memory.
        """
        is_using = self.tokens[start] == "using"
        if is_using and self.token(start + 2) != "=":
            return
        first = start + 3 if is_using else start + 1
        if self._needs_space(first, end, named=not is_using) and not self.parameters & set(self.tokens[first:end]):
            self.pointers.add(self.token(start + 1 if is_using else end - 1))

    def _signature(self, start: int, opening: int) -> None:
        words = self.tokens[start:opening]
        at = words.index("operator") if "operator" in words else self._name_at(start, opening) - start
        name = "".join(words[at:])
        self.functions.add(name)
        if self._needs_space(start, start + at, named=False):
            self.report(start, f"what {name!r} returns names no address space: {_SPACE_ADVICE}")
        for first, last in self.commas(opening + 1, self.partner[opening]):
            if "auto" in self._named(first, last):
                self.report(first, f"an argument of {name!r} is auto: write a template, with a name for its type")
            if self._needs_space(first, last):
                argument = next((t for t in reversed(self._named(first, last)) if _WORD.match(t)), "?")
                self.report(first, f"argument {argument!r} of {name!r} names no address space: {_SPACE_ADVICE}")
            elif self._is_array(first, last):
                argument = self._named(first, last)[-1]
                what = (
                    f"array argument {argument!r} of {name!r} is a pointer and names no address space: {_SPACE_ADVICE}"
                )
                self.report(first, what)

    def _named(self, first: int, last: int) -> list[str]:
        """Tokens of a declaration that are outside of brackets and before its default value, at least one."""
        tokens, i = [], first
        while i < last and self.tokens[i] != "=":
            if self.tokens[i] == "<" and self.skip(i) > i:
                i = self.skip(i)
            elif self.tokens[i] in "([{":
                i = self.partner[i] + 1
            else:
                tokens.append(self.tokens[i])
                i += 1
        return tokens or [self.token(first)]

    def _is_array(self, first: int, last: int) -> bool:
        """Whether a parameter is an array without an address space."""
        words = self.tokens[first:last]
        end = words.index("=") if "=" in words else len(words)
        brackets = [j for j in range(first, first + end) if self.tokens[j] == "[" and not self.reader.in_attribute[j]]
        plain = bool(brackets) and brackets[0] > first + 1 and not _SPACES & set(words) and "(" not in words[:end]
        # Where the type is a template's argument, Metal takes it to be in the thread's memory.
        return plain and not self.parameters & set(words)

    def _needs_space(self, first: int, last: int, named: bool = True) -> bool:
        """Whether a declaration, whose last token is a name if it has one, is of a pointer without an address space."""
        tokens = self._named(first, last)
        types = set(tokens[:-1] if named else tokens)
        return bool({"*", "&"} & set(tokens) or self.pointers & types) and not _SPACES & set(tokens)

    # Functions.

    def _body(self, start: int, opening: int, brace: int) -> None:
        kernel = "kernel" in self.tokens[start:opening]
        at = self._name_at(start, opening)
        name, end = self.tokens[at], self.partner[brace]
        if kernel and self.token(at - 1) != "void":
            self.report(opening - 1, f"kernel {name!r} returns something: a kernel is void")
        depth = 0
        for i in range(brace + 1, end):
            token, before = self.tokens[i], self.tokens[i - 1]
            depth += {"{": 1, "}": -1}.get(token, 0)
            if token == "static" and self.token(i + 1) not in ("constexpr", "const", "constant"):
                self.report(
                    i,
                    f"{name!r} has a static variable: keep it in a buffer, or write 'constant' outside of a function",
                )
            elif token == "[" and self.token(i + 1) != "[" and self._starts_expression(before):
                if not self.lambdas and self.token(self.partner[i] + 1) in ("(", "{", "<"):
                    self.report(i, "Metal 3.1 has no lambda expressions: write a function, or check --std metal3.2")
            elif token == "threadgroup" and before in (";", "{", "}", ":"):
                self._threadgroup(i, name, kernel, depth)
            elif (is_type(token) or token in self.types) and self.token(i + 1) in ("*", "&"):
                self._pointer(i)
            if token in ("using", "typedef") and before in (";", "{", "}"):
                last = i
                while self.token(last) not in (";", ""):
                    last = self.partner[last] + 1 if self.tokens[last] in ("(", "[", "{") else last + 1
                self._alias(i, last)
            elif token in self.pointers:
                self._hidden_pointer(i)

    def _pointer(self, i: int) -> None:
        """A pointer or reference to one of Metal's types: a local variable, in a cast, as a template argument."""
        before = self.token(i - 2 if self.token(i - 1) == "const" else i - 1)
        name, after = self.token(i + 2), self.token(i + 3)
        if before in (";", "{", "}", "(") and _WORD.match(name) and after in ("=", ";", ":", ",", "{"):
            self.report(i, f"pointer or reference {name!r} names no address space: {_SPACE_ADVICE}")
        elif (before, name) in (("(", ")"), ("<", ">")):
            self.report(i, f"'{self.tokens[i]}{self.tokens[i + 1]}' names no address space: {_SPACE_ADVICE}")

    def _hidden_pointer(self, i: int) -> None:
        """A local variable whose type is an alias of a pointer that names no address space: `P p = values;`."""
        first = i
        while self.token(first - 1) in ("const", "volatile", "constexpr") or self.token(first - 1) == "::":
            first -= 2 if self.token(first - 1) == "::" and _WORD.match(self.token(first - 2)) else 1
        name = i + 1
        while self.token(name) in ("const", "volatile", "&", "*"):
            name += 1
        declared = _WORD.match(self.token(name)) and self.token(name + 1) in ("=", ";", ":", ",", "{", "[", "(")
        if self.token(first - 1) in (";", "{", "}", "(") and declared:
            what = f"pointer or reference {self.token(name)!r} names no address space: {_SPACE_ADVICE}"
            self.report(i, f"{what}, in the alias {self.tokens[i]!r}")

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
            what = f"threadgroup memory stands in {name!r}, which is not a kernel: declare it in one, pass a pointer"
            self.report(i, what)
        if initialised:
            what = "threadgroup memory has an initial value, which is not stored: write it, then threadgroup_barrier"
            self.report(i, what, doubtful=True, severity=NOTE)

    # Words, wherever they stand.

    def _words(self) -> None:
        declared = self._declared()
        for i, token in enumerate(self.tokens):
            before, after = self.token(i - 1), self.token(i + 1)
            if token[0] == '"' and not self.reader.in_attribute[i]:
                self._string(i)
            elif _LONG_DOUBLE.match(token):
                self.report(i, f"Metal has no long double: write {token[:-1]}f")
            if not _WORD.match(token) or before in (".", "->") or (token == "delete" and before == "="):
                continue
            if self.reader.in_attribute[i]:
                if token == "function_constant":
                    self._function_constant(i)
                named = before in ("[", ",") and self.reader.in_attribute[i - 1]
                if named and token in _STAGE_ATTRIBUTES:
                    self.report(i, f"{token} functions are not covered by this check", severity=UNCOVERED)
                elif named and not is_attribute(token):
                    self.report(i, f"Metal has no attribute {token!r}: leave it out", doubtful=True)
                continue
            if token == "vec" and after == "<":
                self._vector_size(i)
            if token in _FORBIDDEN:
                self.report(i, _FORBIDDEN[token])
            elif token in _STAGES | _RESERVED:
                self._stage(i)
            elif token == "long" and after in ("long", "double"):
                self.report(i, f"Metal has no long {after}: write {'long' if after == 'long' else 'float'}")
            elif token == "noexcept" and after == "(" and before not in (")", "const", *_SPACES):
                self.report(i, "Metal has no operator noexcept: write what it would say, true or false")
            elif token == "noexcept" and not self._in_internals(i):
                self.report(i, "Metal has no noexcept: leave the word out", doubtful=True)
            elif self._is_uncovered(i):
                self.report(i, f"{token!r} is not covered by this check", severity=UNCOVERED)
            elif token in ("struct", "class") and before != "enum":
                self._base(i)
            elif token.startswith("atomic_") and after == "(":
                self._memory_order(i)
            elif token == "std" and after == "::":
                self.report(i, "Metal has no std::, write metal::")
            elif token.startswith(("__builtin_", "__nvvm", "__sanitizer", "MITTENS_")):
                if token not in ALLOWED_INTERNALS:
                    self.report(i, f"{token!r} is not Metal's: call a function of metal_stdlib", doubtful=True)
            elif before == "::" and self.token(i - 2) == "mittens" and token not in declared:
                self.report(i, f"Metal has no function {token!r}: call one of metal_stdlib", doubtful=True)

    def _vector_size(self, i: int) -> None:
        """A vector has 2, 3 or 4 components: `vec<float, 5>`."""
        parts = list(self.commas(i + 2, self.skip(i + 1) - 1))
        size = self.tokens[slice(*parts[1])] if len(parts) == 2 else []
        known = ("2", "3", "4", "8") if self.eights else ("2", "3", "4")
        if len(size) == 1 and size[0].isdigit() and size[0] not in known:  # lint_ir sees sizes with names
            self.report(i, f"a vector has 2 to 4 components, not {size[0]}: write an array")

    def _is_uncovered(self, i: int) -> bool:
        """Whether token i is a type of textures, ray tracing or mesh functions, not a name."""
        token, before = self.tokens[i], self.token(i - 1)
        if token in self.types or before in ("struct", "class", "enum", "union", "typename"):
            return False
        if _UNCOVERED_TEMPLATE.match(token):
            return self.skip(i + 1) > i + 1
        if token == "raytracing":
            return before == "::" or self.token(i + 1) == "::"
        return _UNCOVERED_TYPE.match(token) is not None and _WORD.match(self.token(i + 1)) is not None

    def _memory_order(self, i: int) -> None:
        """Atomic operations are relaxed; others are the orders of a fence, which Metal 3.2 brought."""
        token = self.tokens[i]
        if token == "atomic_thread_fence":
            if not self.fences:
                what = "Metal 3.1 has no atomic_thread_fence: write threadgroup_barrier, or check --std metal3.2"
                self.report(i, what, doubtful=True)
        elif token.endswith("_explicit"):
            for j in range(i + 2, self.partner[i + 1]):
                if self.tokens[j].startswith("memory_order_") and self.tokens[j] != "memory_order_relaxed":
                    what = (
                        f"{token} with {self.tokens[j]}: atomic operations are relaxed, write memory_order_relaxed, "
                        "and atomic_thread_fence of Metal 3.2 before or behind it"
                    )
                    self.report(j, what)

    def _function_constant(self, i: int) -> None:
        """One is of a number or a vector, and has no value in the text."""
        first = i
        while self.token(first - 1) not in (";", "}", "{", "", "(", ","):
            first -= 1
        declared = [j for j in range(first, i) if not self.reader.in_attribute[j] and _WORD.match(self.tokens[j])]
        classes = [j for j in declared[:-1] if self.tokens[j] in self.classes]
        if classes and "constant" in (self.tokens[j] for j in declared):
            what = f"{self.tokens[declared[-1]]!r} is a function constant of a struct: write one for each number in it"
            self.report(classes[0], what)

    @functools.cached_property
    def classes(self) -> set[str]:
        """Classes that the text declares."""
        words = ("struct", "class", "union")
        return {
            self.token(i + 1)
            for i, token in enumerate(self.tokens)
            if token in words and _WORD.match(self.token(i + 1))
        }

    def _string(self, i: int) -> None:
        j = i - 1
        while j >= 0 and self.tokens[j] not in (";", "{", "}"):
            if self.tokens[j] in _STRINGS_BEHIND or self.tokens[j].startswith("os_log"):
                return
            j -= 1
        self.report(i, "Metal has no strings: write numbers, in an array of char")

    def _stage(self, i: int) -> None:
        """A function of a graphics pipeline, or a word that is no name."""
        token, before, after = self.tokens[i], self.token(i - 1), self.token(i + 1)
        starts = before in ("", ";", "}", "{", ">", "]", "inline", "static", "extern")
        if token == "kernel" and (starts or before in ("template", ")")) and _WORD.match(after):
            return
        if starts and _WORD.match(after):
            j = i + 1
            while self.token(j) not in ("(", ";", "{", "}", "=", ""):
                j = max(j + 1, self.skip(j))
            if self.token(j) == "(" and token in _STAGES:
                self.report(i, f"{token} functions are not covered by this check", severity=UNCOVERED)
                return
        if token in _RESERVED:
            self.report(i, f"{token!r} is a word of Metal's language: choose another name")

    def _base(self, i: int) -> None:
        """Metal derives no classes, but where a pragma switches its internals on, as its own headers and MLX's do."""
        j = i + 1
        while self.token(j) not in (":", "{", ";", "(", ")", ",", ">", "=", "") or self.token(j - 1) == "alignas":
            j = self.partner[j] + 1 if self.token(j) in ("(", "[") else max(j + 1, self.skip(j))
        if self.token(j) != ":":
            return
        bases, after = [], ":"
        while self.token(j) not in ("{", ";", "(", ")", ""):
            if _WORD.match(self.token(j)) and after in (":", ",", "::", "public", "private", "protected", "typename"):
                bases.append(self.tokens[j])
            after = self.tokens[j]
            j = max(j + 1, self.skip(j))
        own = all(base.startswith("_") for base in bases)  # of Metal's library, as numeric limits are specialized
        if self.token(j) == "{" and not own and not self._in_internals(i):
            self.report(i, f"Metal has no derived classes: make {bases[-1]!r} a member, or repeat what it declares")

    def _in_internals(self, i: int) -> bool:
        """Whether token i stands behind `#pragma METAL internals : enable`."""
        switches = [on for at, on in self.internals if at < self.reader.spans[i][0]]
        return bool(switches) and switches[-1]

    @functools.cached_property
    def internals(self) -> list[tuple[int, bool]]:
        """Where the text switches Metal's internals, and whether on."""
        pragma = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+METAL[ \t]+internals[ \t]*:[ \t]*(enable|disable)", re.M)
        return [(m.start(), m[1] == "enable") for m in pragma.finditer(self.reader.text)]

    @functools.cached_property
    def parameters(self) -> set[str]:
        """Names of types that are arguments of templates."""
        return {self.token(i + 1) for i, token in enumerate(self.tokens) if token == "typename"} | {
            self.token(i + 1) for i, token in enumerate(self.tokens) if token == "class" and self.token(i - 1) in "<,"
        }

    @functools.cached_property
    def types(self) -> set[str]:
        """Types that the text declares: classes, aliases, template parameters."""
        names = set()
        for i, token in enumerate(self.tokens):
            after = self.token(i + 1)
            if token in ("struct", "class", "union", "enum", "typename") and _WORD.match(after):
                names.add(after)
            elif token == "using" and self.token(i + 2) == "=":
                names.add(after)
            elif token == "typedef":
                end = i
                while self.token(end) not in (";", ""):
                    end = self.partner[end] + 1 if self.tokens[end] in ("(", "[", "{") else end + 1
                names.add(self.token(end - 1))
        return names

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
