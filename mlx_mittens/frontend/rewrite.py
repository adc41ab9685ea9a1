"""From Metal's dialect to what clang takes as C++, and what kernels a text holds.

The text has been through the preprocessor, so macros are out of the way and line markers say where each line is from.
Words that are types or address spaces in Metal need no rewriting: the standard library defines them. The rest:

- attributes (``[[...]]``) go, read first on kernels, parameters, instantiations and function constants;
- explicit instantiations of kernels go, and become variants;
- ``threadgroup float x[32];`` becomes a call of the target's MITTENS_THREADGROUP_ARRAY;
- arrays as parameters (``constant int strides[2]``) become pointers;
- function constants get their values;
- ``1.0`` is a float, ``1.0h`` and ``1.0bf`` become ``half(1.0f)`` and ``bfloat(1.0f)``;
- ``vec<T, 4>(a, b, c, d)`` becomes ``mittens::construct<vec<T, 4>>(a, b, c, d)``, and the ``uint4`` of
  ``uint4 (&name)[2]``, where it is no constructor, ``vec<uint, 4>``;
- a loop in whose rounds lanes part around functions of their SIMD-group gets a ``mittens::Round``, for the simulator;
- member functions in the address spaces of device, constant and threadgroup memory go, which clang does not know;
- ``*(device A*)p = *q`` between address spaces becomes ``mittens::assign``.
"""

from __future__ import annotations

import bisect
import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from .builtins import POSITIONS as _POSITIONS
from .builtins import is_type

_TOKEN = re.compile(
    r"""^\#[^\n]*$|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.])*|::|->|[^\s\w]""",
    re.M,
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*$")
_FLOAT_LITERAL = re.compile(
    r"((?:\d+\.\d*|\.\d+|\d+(?=[eE]|[hHbB]))(?:[eE][+-]?\d+)?|0[xX][\da-fA-F.]+[pP][+-]?\d+)(h|H|bf|BF)?$"
)
_INTEGER = re.compile(r"(?:0[xX][\da-fA-F]+|\d+)[uUlL]*$")
_VECTOR = re.compile(r"(bool|u?char|u?short|u?int|u?long|half|bfloat|float)([234])$")
_BOOLS = ["vec", "<", "bool"]
_SPACES = ("device", "constant", "threadgroup", "thread")
_OF_STRINGS = ("static_assert", "_Pragma", "extern", "asm", "__asm__", "__attribute__", "diagnose_if")
_NO_DECLARATION = frozenset(
    "return else case goto delete new throw typedef using struct class union enum template constexpr const static "
    "extern threadgroup device constant if for while do switch break continue default".split()
)
_HEADS = frozenset("if for while switch catch constexpr decltype alignas __attribute__ sizeof".split())
_PARTING = frozenset("if for while do switch continue break return ?".split())
_STORAGE = ("static", "constexpr", "const", "inline", "extern")
_SPACED = re.compile(r"\b(?:device|constant|threadgroup|thread)\b")
_OPEN = {"(": ")", "[": "]", "{": "}"}
_CLOSE = {close: open for open, close in _OPEN.items()}


@dataclass(frozen=True)
class Argument:
    """A parameter of a kernel."""

    name: str
    kind: str  # "buffer", "threadgroup", or the name of a thread attribute
    index: int | None  # of a buffer or of threadgroup memory
    type: str

    @property
    def by_reference(self) -> bool:
        return self.type.rstrip().endswith("&")


@dataclass(frozen=True)
class Variant:
    """One instantiation of a kernel, under the name by which a host asks for it."""

    name: str
    function: str
    template_args: str | None
    site: tuple[str, int]  # the file and the line where it is instantiated

    @property
    def expression(self) -> str:
        return self.function if self.template_args is None else f"{self.function}<{self.template_args}>"


@dataclass
class Kernel:
    """A kernel function or function template."""

    name: str
    template: str | None  # its template parameters, as written
    arguments: list[Argument]
    max_threads: str | None  # an expression of the template parameters
    site: tuple[str, int]


@dataclass
class Translation:
    """A text for clang, and the kernels in it."""

    text: str
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    function_constants: dict[str, tuple[int, str]] = field(default_factory=dict)  # name: index, type
    methods: set[str] = field(default_factory=set)  # of objects in other memory than the thread's own
    edits: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, length of what stands there now

    def original(self, offset: int) -> int:
        """Where a place of the text was before it was rewritten."""
        shift = 0
        for begin, end, length in self.edits:
            if begin + shift >= offset:
                break
            if offset < begin + shift + length:
                return begin
            shift += length - (end - begin)
        return offset - shift


class RewriteError(Exception):
    """A mistake in a text, as a compiler reports it: file, line, error."""


_ARITHMETIC = re.compile(r"(?:\d[\dxXa-fA-F]*[uUlL]*|[-+*/%()|&^~]|<<|>>|\s)+$")


def _integer(text: str) -> int | None:
    """The value of an expression of numbers; None if it is another."""
    if not _ARITHMETIC.match(text) or "**" in text:
        return None
    try:
        return int(eval(re.sub(r"(?<=[\dA-Fa-f])[uUlL]+\b", "", text).replace("/", "//"), {"__builtins__": {}}))
    except (SyntaxError, ArithmeticError, ValueError, TypeError):
        return None


def _inexact(literal: str) -> str:
    """A float next to this one that no bfloat holds, so that clang warns where it becomes one."""
    try:
        value = float.fromhex(literal) if literal[:2].lower() == "0x" else float(literal)
        bits = struct.unpack("<I", struct.pack("<f", value))[0] | 1
    except (ValueError, OverflowError):
        return literal + "f"
    return (
        struct.unpack("<f", struct.pack("<I", bits))[0].hex() + "f"
        if bits & 0x7F800000 != 0x7F800000
        else literal + "f"
    )


class _Tokens:
    """The tokens of a text, which nobody changes.

    Attributes:
        tokens: Each as it is written.
        spans: Where each stands.
        partner: Of each bracket the one that belongs to it; -1 of other tokens.
        outer: Of each token the bracket within which it stands, or -1.
    """

    def __init__(self, text: str):
        matches = [m for m in _TOKEN.finditer(text) if not m[0].startswith("#")]
        self.tokens = [m[0] for m in matches]
        self.spans = [m.span() for m in matches]
        self.partner = [-1] * len(self.tokens)
        self.outer: list[int] = []
        stack: list[int] = []
        for i, token in enumerate(self.tokens):
            self.outer.append(stack[-1] if stack else -1)
            if token in _OPEN:
                stack.append(i)
            elif token in _CLOSE:
                if not stack or self.tokens[stack[-1]] != _CLOSE[token]:
                    raise self._error(text, f"{token!r} closes nothing", i)
                self.partner[i] = stack.pop()
                self.partner[self.partner[i]] = i
        if stack:
            raise self._error(text, f"{self.tokens[stack[-1]]!r} is never closed", stack[-1])

    def _error(self, text: str, what: str, i: int) -> RewriteError:
        file, line = LineMap(text).at(self.spans[i][0])
        return RewriteError(f"{file}:{line}: error: {what}")


# A check reads a text twice, and rewrites it once.
_tokens_of = functools.lru_cache(maxsize=1)(_Tokens)


class _Rewriter:
    def __init__(
        self,
        text: str,
        constants: dict[int, str],
        dialect: bool = False,
        private: bool = False,
        rounds: bool = False,
        casts: bool = False,
    ):
        self.text = text
        self.casts = casts
        self.private = private
        self.rounds = rounds
        self.dialect = dialect
        self.constants = constants
        found = _tokens_of(text)
        self.tokens, self.spans, self.partner, self._outer = found.tokens, found.spans, found.partner, found.outer
        self.edits: list[tuple[int, int, str]] = []
        self.dropped = [False] * len(self.tokens)
        self.in_attribute = [False] * len(self.tokens)
        self.result = Translation("")
        self.lines = LineMap(text)
        self._list_ends: dict[int, int] = {}
        self._marked: set[int] = set()  # the braces of classes that say more of themselves

    def error(self, message: str, i: int) -> RewriteError:
        file, line = self.lines.at(self.spans[i][0])
        return RewriteError(f"{file}:{line}: {message}")

    def integer(self, text: str, i: int) -> int:
        """The value of a constant expression: of an index."""
        expression = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: str(self._named_integers.get(m[0], m[0])), text)
        value = _integer(expression)
        if value is None:
            raise self.error(f"error: {text!r} is no constant expression: write a number", i)
        return value

    @functools.cached_property
    def _named_integers(self) -> dict[str, int]:
        """Integers that the text names: `constant int N = 4;`, `enum { N = 4 };`."""
        names: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if token == "=" and _IDENTIFIER.match(self.token(i - 1)):
                end = i + 1
                while self.token(end) not in (";", ",", "}", ""):
                    end += 1
                text = re.sub(
                    r"\b[A-Za-z_]\w*\b", lambda m: str(names.get(m[0], m[0])), "".join(self.tokens[i + 1 : end])
                )
                value = _integer(text) if end - i < 12 else None
                if value is not None:
                    names.setdefault(self.tokens[i - 1], value)
        return names

    # Tokens first..last-1, as text and as edits of it.

    def source(self, first: int, last: int) -> str:
        """The text of live tokens, on one line."""
        parts, end = [], None
        for i in range(first, last):
            if not self.dropped[i]:
                parts += [" " if end is not None and end < self.spans[i][0] else "", self.tokens[i]]
                end = self.spans[i][1]
        return "".join(parts)

    def replace(self, first: int, last: int, new: str) -> None:
        """Puts new text in place of tokens; the lines stay as many as they were."""
        begin, end = self.spans[first][0], self.spans[last - 1][1]
        old = self.text[begin:end]
        kept = "\n".join([""] + [line if line.startswith("#") else "" for line in old.split("\n")[1:]])
        self.edits.append((begin, end, new + kept))
        self.dropped[first:last] = [True] * (last - first)

    def token(self, i: int) -> str:
        return self.tokens[i] if 0 <= i < len(self.tokens) else ""

    def after_template_arguments(self, i: int) -> int:
        """The token after the template argument list that opens at i, or i if none does."""
        if self.token(i) != "<" or self._is_operator(i):
            return i
        return self._list_end(i + 1) + 1 or i

    def _is_operator(self, i: int) -> bool:
        """Whether an angle bracket is part of `<<`, `<=`, `>=`; of `>>` each closes a list."""
        second = ("<", "=") if self.tokens[i] == "<" else ("=",)
        return self.token(i + 1) in second and self.spans[i][1] == self.spans[i + 1][0]

    def _list_end(self, j: int) -> int:
        """The `>` that closes the template argument list within which token j stands; -1 if none does.

        Where a `<` may open a list or be a comparison, it opens one if the rest can then be closed.
        """
        if j in self._list_ends:
            return self._list_ends[j]
        start, found = j, -1
        while j < len(self.tokens):
            token = self.tokens[j]
            if token in _OPEN:
                j = self.partner[j] + 1
            elif token in (";", ")", "]", "}"):
                break
            elif token in ("<", ">") and self._is_operator(j):
                j += 2
            elif token == ">":
                found = j
                break
            elif token == "<" and _IDENTIFIER.match(self.token(j - 1)):
                inner = self._list_end(j + 1)
                found = self._list_end(inner + 1) if inner >= 0 else -1
                if found < 0:
                    found = self._list_end(j + 1)
                break
            else:
                j += 1
        self._list_ends[start] = found
        return found

    def commas(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The parts between the top-level commas of first..last-1."""
        start, i = first, first
        while i < last:
            token = self.tokens[i]
            if token in _OPEN:
                i = self.partner[i]
            elif token == "<" and _IDENTIFIER.match(self.token(i - 1)):
                end = self.after_template_arguments(i)
                i = end - 1 if i < end <= last else i
            elif token == ",":
                yield start, i
                start = i + 1
            i += 1
        if start < last:
            yield start, last

    def run(self) -> Translation:
        self._refuse_truths_in_memory()
        self._attributes()
        self._member_functions()
        if self.rounds:
            self._count_rounds()
        i = 0
        while i < len(self.tokens):
            if not self.dropped[i]:
                i = self._statement(i) or i
            i += 1
        self.result.text = self._apply()
        instantiated = {variant.function for variant in self.result.variants}
        for kernel in self.result.kernels.values():
            if kernel.template is None and kernel.name not in instantiated:
                self.result.variants.append(Variant(kernel.name, kernel.name, None, kernel.site))
        return self.result

    def _apply(self) -> str:
        parts, done = [], 0
        for begin, end, new in sorted(self.edits, key=lambda edit: (edit[0], -edit[1])):
            if begin >= done:  # else within a larger edit
                parts += [self.text[done:begin], new]
                self.result.edits.append((begin, end, len(new)))
                done = end
        return "".join(parts) + self.text[done:]

    def _refuse_truths_in_memory(self) -> None:
        """Vectors of bool have a byte for each component in Metal's memory, and a bit in clang's."""
        names: set[str] = set()  # aliases of such vectors, and structs that have some

        def is_truths(i: int) -> bool:
            token = self.token(i)
            return token in names or re.match(r"bool[234]$", token) is not None or self.tokens[i : i + 3] == _BOOLS

        def unqualified(i: int) -> int:
            while self.token(i) in ("const", "volatile", "::", "metal"):
                i += 1
            return i

        for i, token in enumerate(self.tokens):
            if token == "using" and self.token(i + 2) == "=" and is_truths(unqualified(i + 3)):
                names.add(self.tokens[i + 1])
            elif token == "typedef" and is_truths(at := unqualified(i + 1)):
                names.add(self.token(self.after_template_arguments(at + 1)))
            elif token in ("struct", "class") and self.token(i + 2) in ("{", ":"):
                start = i + 2
                while self.token(start) not in ("{", ";", ""):
                    start += 1
                if self.token(start) != "{":
                    continue
                bases = range(i + 3, start)
                body = (k for k in range(start + 1, self.partner[start]) if self._enclosing(k) == start)
                if any(map(is_truths, bases)) or any(is_truths(k) and self._is_member(k) for k in body):
                    names.add(self.tokens[i + 1])
        for i in range(len(self.tokens)):
            if not is_truths(i):
                continue
            before, after = i - 1, self.after_template_arguments(i + 1)
            while self.token(before) in ("const", "volatile", "::", "metal"):
                before -= 1
            while self.token(after) in ("const", "volatile"):
                after += 1
            in_memory = self.token(before) in ("device", "constant") or self.token(before - 1) == "sizeof"
            if in_memory and (self.token(after) in ("*", "&") or self.token(before - 1) == "sizeof"):
                what = "a vector of bool in memory, which is a byte a component in Metal, is not supported"
                raise self.error(f"error: {what}: write uchar4, and uchar4(v) or v != 0 to convert", i)

    def _is_member(self, i: int) -> bool:
        """Whether a type declares a variable in a class: `bool4 a, b[2];`."""
        name = self.after_template_arguments(i + 1)
        return _IDENTIFIER.match(self.token(name)) is not None and self.token(name + 1) in (";", ",", "[", "=", "{")

    # Attributes: cut out first, kept by the token that follows them.

    def _attributes(self) -> None:
        self.attributes: dict[int, list[tuple[str, str]]] = {}  # by the first token: names and their arguments
        i = 0
        while i < len(self.tokens):
            if self.tokens[i] == "[" and self.token(i + 1) == "[" and self.partner[i] == self.partner[i + 1] + 1:
                end = self.partner[i] + 1
                found = []
                for first, last in self.commas(i + 2, end - 2):
                    inner = self.source(first + 2, last - 1) if self.token(first + 1) == "(" else ""
                    found.append((self.tokens[first], inner))
                self.attributes[i] = found
                self.replace(i, end, "")
                self.in_attribute[i:end] = [True] * (end - i)
                i = end
            else:
                i += 1

    def attributes_between(self, first: int, last: int) -> dict[str, str]:
        return dict(a for i in range(first, last) for a in self.attributes.get(i, ()))

    # Member functions: `void f() const device { ... }`.

    def _member_functions(self) -> None:
        kept: set[tuple[int, str]] = set()
        self._members: dict[int, set[tuple[int, str]]] = {}
        for i, token in enumerate(self.tokens):
            if token not in _SPACES or self.dropped[i]:
                continue
            before = i - 1
            while self.token(before) in ("const", "volatile", "noexcept"):
                before -= 1
            after = i + 1
            while self.token(after) in ("const", "volatile", "noexcept"):
                after += 1
            follows = self.token(after)
            if self.token(before) != ")" or follows not in ("{", ":", ";", "=", "->"):
                continue
            if token == "thread":
                self.replace(i, i + 1, "")
                continue
            start = self._member_start(before)
            name = self.tokens[self.partner[before] - 1]
            head = (start and self._enclosing(start), " ".join(self.tokens[start:i]))
            self.result.methods.add(name)
            defaulted = follows == "=" and self.token(after + 1) == "default"  # clang makes one of its own
            if token == "threadgroup" and self.dialect:
                self._mark_threadgroup_constructor(start, name)
            if defaulted or head in self._plain_members(head[0]) or head in kept:
                self.replace(start, self._member_end(after), "")
            else:
                kept.add(head)
                self.replace(i, i + 1, "")

    def _mark_threadgroup_constructor(self, start: int, name: str) -> None:
        """Says in a class that it has a constructor for threadgroup memory, which goes from the text."""
        brace = self._enclosing(start)
        head = brace - 1
        while head >= 0 and self.tokens[head] not in (";", "{", "}", ">"):
            head -= 1
        words = self.tokens[head + 1 : brace]
        if brace in self._marked or name not in words or not {"struct", "class", "union"} & set(words):
            return
        self._marked.add(brace)
        self._insert(brace, " public: using mittens_in_threadgroup = void; " + "private: " * ("class" in words))

    def _enclosing(self, i: int) -> int:
        """The bracket within which a token stands; -1 if none."""
        return self._outer[i]

    def _plain_members(self, brace: int) -> set[tuple[int, str]]:
        """The heads of the member functions of a class that work on objects of the thread's own memory."""
        if brace not in self._members:
            heads = set()
            start, i = brace + 1, brace + 1
            while 0 <= i < self.partner[brace]:
                token = self.tokens[i]
                if token in ";}" or (token == ":" and self.token(i - 1) in ("public", "private", "protected")):
                    start = i + 1
                if token == "(" and self.token(self.partner[i] + 1) in ("const", "thread", "{", ";", ":", "noexcept"):
                    end = self.partner[i] + 1
                    while self.token(end) in ("const", "volatile", "noexcept"):
                        end += 1
                    if self.token(end) not in _SPACES or self.token(end) == "thread":
                        heads.add((brace, " ".join(self.tokens[start:end])))
                if token in _OPEN:
                    i = self.partner[i]
                    if token == "{":
                        start = i + 1
                i += 1
            self._members[brace] = heads
        return self._members[brace]

    def _member_start(self, closing: int) -> int:
        i = self.partner[closing] - 1
        while i >= 0:
            if self.tokens[i] in (";", "{"):
                break
            if self.tokens[i] == "}":
                break
            if self.tokens[i] == ":" and self.token(i - 1) in ("public", "private", "protected"):
                break
            i = self.partner[i] if self.tokens[i] in ")]" else i
            i -= 1
        return i + 1

    def _member_end(self, i: int) -> int:
        if self.tokens[i] == ":":  # initialisers, each a name and a pair of brackets
            i += 1
            while True:
                while self.token(i) not in "({":
                    i = max(i + 1, self.after_template_arguments(i))
                i = self.partner[i] + 1
                if self.token(i) != ",":
                    break
                i += 1
        while self.token(i) not in (";", "{"):
            i += 1
        end = i + 1 if self.tokens[i] == ";" else self.partner[i] + 1
        return end + 1 if self.token(end) == ";" else end

    # Everything else, at the token where it starts. Returns the last token that it consumed.

    def _statement(self, i: int) -> int | None:
        token = self.tokens[i]
        if token == "template" and i + 1 in self.attributes:
            return self._instantiation(i)
        if token == "void" and self._is_kernel(i):
            return self._kernel(i)
        if token == "kernel" and self.token(i + 1) == "void":
            self.replace(i, i + 1, "")
            return self._kernel(i + 1)
        if token == "threadgroup" and self.token(i - 1) in (";", "{", "}", ")", ":"):
            return self._threadgroup_array(i)
        if self.private and self.token(i - 1) in (";", "{", "}"):
            self._private_arrays(i)
        if token == "constant" and self.token(i - 1) in (";", "}", "{", "", *_STORAGE):
            return self._constant(i)
        if token in _SPACES and self.token(i - 1) in ("(", ",", "const"):
            return self._parameter(i)
        if token == "is_function_constant_defined":
            return self._function_constant_test(i)
        if token == "vec" and self.token(i + 1) == "<":
            return self._vector_constructor(i)
        if token == "(":
            self._vector_cast(i)
        if self.casts:
            self._named_cast(i)
        if self.token(i + 1) == "(" and (vector := _VECTOR.match(token)):
            if self._is_conversion(i):  # `operator float2()`, which is no constructor
                qualified = "" if self.token(i - 1) == "::" else "::metal::"
                self.replace(i, i + 1, f"{qualified}vec<{vector[1]}, {vector[2]}>")
                return None
            self._vector_array(i, vector)
            if self.token(i - 1) == "::":  # metal::float4(x): the macro brings its own
                self.replace(i - 2 if _IDENTIFIER.match(self.token(i - 2)) else i - 1, i, "")
            return None
        if token[0] == '"' and self.token(i - 1) in ("(", ",", "{") and self.token(i - 2) not in _OF_STRINGS:
            return self._string(i)
        if token[0].isdigit() or token[0] == ".":
            return self._number(i)
        if token == "float" and self.dialect:
            self._exact_float(i)
        if token == "*" and self._begins_statement(i):
            return self._assignment(i)
        return None

    def _is_conversion(self, i: int) -> bool:
        """Whether a type names a conversion function: `operator metal::float2() const`."""
        i -= 1
        while self.token(i) in ("::", "metal", "const", "volatile"):
            i -= 1
        return self.token(i) == "operator"

    def _attributes_before(self, i: int) -> dict[str, str]:
        """The attributes of the declaration whose type is token i."""
        found: dict[str, str] = {}
        i -= 1
        while self.token(i) in ("inline", "static", "kernel") or (i >= 0 and self.in_attribute[i]):
            found.update(self.attributes.get(i, ()))
            i -= 1
        return found

    def _is_kernel(self, i: int) -> bool:
        return "kernel" in self._attributes_before(i)

    def _instantiation(self, i: int) -> int | None:
        end = i
        while self.token(end) != ";":
            end = self.partner[end] + 1 if self.tokens[end] in _OPEN else end + 1
            if end >= len(self.tokens):
                raise self.error("error: an instantiation without an end", i)
        attributes = self.attributes_between(i, end)
        if "host_name" not in attributes and "kernel" not in attributes:
            return None
        j = i + 1
        while self.dropped[j] or self.tokens[j] in ("kernel", "void"):
            j += 1
        if self.tokens[j] == "decltype":
            j = self.partner[j + 1] + 1
        while self.token(j) not in ("<", "(", ";") or (self.token(j) == "<" and self._is_type_argument(j)):
            j = self.after_template_arguments(j) if self.token(j) == "<" else j + 1
        first = j - 1
        while self.token(first - 1) == "::":
            first -= 2
        function = "".join(self.tokens[first:j]).removeprefix("::")
        spaces = self._namespaces(i)
        names = ["::".join([*spaces[:n], function]) for n in range(len(spaces), 0, -1)]
        function = next((name for name in names if name in self.result.kernels), function)
        after = self.after_template_arguments(j)
        arguments = self.source(j + 1, after - 1) if after > j else None
        # Names are put together from pieces: "a" "b".
        name = "".join(re.findall(r'"([^"]*)"', attributes.get("host_name", f'"{function}"')))
        self.result.variants.append(Variant(name, function, arguments, self.lines.at(self.spans[i][0])))
        self.replace(i, end + 1, "")
        return end

    def _is_type_argument(self, i: int) -> bool:
        """Whether a template argument list belongs to the type of an instantiated kernel, whose name follows."""
        return _IDENTIFIER.match(self.token(self.after_template_arguments(i))) is not None

    def _kernel(self, i: int) -> int | None:
        name, opening = self.token(i + 1), i + 2
        if self.token(opening) != "(":
            return None
        closing = self.partner[opening]
        attributes = self._attributes_before(i)
        attributes.update(self.attributes_between(closing, closing + 2))
        name = "::".join([*self._namespaces(i), name])
        kernel = Kernel(
            name,
            self._template_before(i),
            self._arguments(opening + 1, closing),
            attributes.get("max_total_threads_per_threadgroup"),
            self.lines.at(self.spans[i][0]),
        )
        self.result.kernels[name] = kernel
        for j in range(opening + 1, closing):
            if self.tokens[j] in _SPACES and not self.dropped[j] and self.token(j - 1) in ("(", ",", "const"):
                self._parameter(j)
        return closing

    def _namespaces(self, i: int) -> list[str]:
        """The namespaces in which token i stands, the outermost first, without inline ones."""
        names: list[str] = []
        brace = self._enclosing(i)
        while brace >= 0:
            first = brace
            while first > 0 and (self.tokens[first - 1] == "::" or _IDENTIFIER.match(self.tokens[first - 1])):
                first -= 1
            head = self.tokens[first:brace]
            if "namespace" in head and "inline" not in head:
                names[:0] = [token for token in head[head.index("namespace") + 1 :] if token != "::"]
            brace = self._enclosing(brace)
        return names

    def _template_before(self, i: int) -> str | None:
        i -= 1
        while self.token(i) in ("inline", "static", "kernel") or (i >= 0 and self.in_attribute[i]):
            i -= 1
        if self.token(i) != ">":
            return None
        end = i
        while i >= 0 and self.tokens[i] not in (";", "{", "}"):
            if self.tokens[i] == "template" and self.after_template_arguments(i + 1) == end + 1:
                return self.source(i + 2, end)
            i = self.partner[i] - 1 if self.tokens[i] in ")]" else i - 1
        return None

    def _arguments(self, first: int, last: int) -> list[Argument]:
        arguments, used = [], set()
        parts = list(self.commas(first, last))
        for start, end in parts:
            attributes = self.attributes_between(start, end)
            if "buffer" in attributes:
                used.add(self.integer(attributes["buffer"], start))
        for start, end in parts:
            attributes = self.attributes_between(start, end)
            live = [j for j in range(start, end) if not self.dropped[j]]
            array = next((j for j in live if self.tokens[j] == "["), None)
            at = (live.index(array) if array is not None else len(live)) - 1
            if at < 0:
                raise self.error("error: a kernel has an argument without a name: write one, or drop the comma", start)
            name = self.tokens[live[at]]
            kind_of = " ".join(self.tokens[j] for j in live[:at])
            kind: str | None
            index: int | None = None
            if array is not None and _SPACED.search(kind_of):
                kind_of += " *"
            if "buffer" in attributes:
                kind, index = "buffer", self.integer(attributes["buffer"], start)
            elif "threadgroup" in attributes:
                kind, index = "threadgroup", self.integer(attributes["threadgroup"], start)
            else:
                kind = next((a for a in attributes if a in _POSITIONS), None)
                unknown = [a for a in attributes if a != "function_constant"]
                if kind is None and unknown:
                    what = f"error: argument {name!r} of a kernel has no attribute of Metal's but {unknown[0]!r}"
                    raise self.error(what, start)
            if kind is None:
                if not re.search(r"[*&]\s*(const|restrict|__restrict)?$", kind_of):
                    raise self.error(f"error: argument {name!r} of a kernel has no attribute", start)
                index = next(k for k in range(len(used) + 1) if k not in used)
                used.add(index)
                kind = "buffer"
            arguments.append(Argument(name, kind, index, kind_of))
        return arguments

    def _private_arrays(self, i: int) -> None:
        """`float x[4];` in a function: the watcher sees reads of it before writes."""
        first = i + 1 if self.tokens[i] == "thread" else i
        if self.tokens[first] in _NO_DECLARATION or not _IDENTIFIER.match(self.tokens[first]):
            return
        found = self._declarators(first)
        brace = self._enclosing(i)
        if found is None or brace < 0 or not self._is_block(brace):
            return
        if self.token(self.partner[brace - 1] - 1) == "switch":
            return  # a label may follow, which passes by no initial value
        watched = [name for name, extents, has_value in found[1] if extents and not has_value]
        for j in range(first, found[2]):
            if self.tokens[j] in watched and self.token(j + 1) == "[":
                self._insert(j, "_memory")
        end = self.spans[found[2]][1]
        self.edits += [(end, end, f" MITTENS_PRIVATE_ARRAY({name})") for name in watched]

    def _count_rounds(self) -> None:
        """Counts the rounds of loops in which lanes part around functions of their SIMD-group."""
        collective = self._collective()
        tails: set[int] = set()  # the `while` of `do ... while`
        for i, token in enumerate(self.tokens):
            if token not in ("for", "while", "do") or i in tails or self.in_attribute[i]:
                continue
            body = i + 1 if token == "do" else self.partner[i + 1] + 1
            end = self._statement_end(body)
            if token == "do":
                tails.add(end)
            region = range(i + 1, self.partner[end + 1] if token == "do" else end)
            parts = any(self._may_part(k) for k in range(body, end))
            if not any(self._is_collective(k, collective) for k in region):
                continue
            if not parts and not any(self.tokens[k] in collective for k in region):
                continue
            self._insert(body - 1, " { const ::mittens::Round mittens_round; ")
            self._insert(end - 1, " }")

    def _insert(self, i: int, text: str) -> None:
        """Puts text behind token i."""
        self.edits.append((self.spans[i][1], self.spans[i][1], text))

    def _function_of(self, brace: int) -> str | None:
        """The name of the function whose body a brace opens."""
        i = brace - 1
        while self.token(i) in ("const", "volatile", "noexcept", "mutable", *_SPACES):
            i -= 1
        name = self.token(self.partner[i] - 1) if self.token(i) == ")" else ""
        return name if _IDENTIFIER.match(name) and name not in _HEADS else None

    def _collective(self) -> set[str]:
        """The functions of the text that call a function of SIMD-groups, themselves or through others."""
        names: set[str] = set()
        waiting = {i: name for i, token in enumerate(self.tokens) if token == "{" and (name := self._function_of(i))}
        while True:
            found = [
                brace
                for brace in waiting
                if any(self._is_collective(k, names) for k in range(brace + 1, self.partner[brace]))
            ]
            if not found:
                return names
            names |= {waiting.pop(brace) for brace in found}

    def _may_part(self, i: int) -> bool:
        token = self.tokens[i]
        is_lazy = token in "&|" and token == self.token(i + 1) and self.spans[i][1] == self.spans[i + 1][0]
        return is_lazy or token in _PARTING

    def _is_collective(self, i: int, names: set[str]) -> bool:
        token = self.tokens[i]
        return (token in names or token.startswith(("simd_", "quad_"))) and self.token(i + 1) in ("(", "<")

    def _statement_end(self, i: int) -> int:
        """The token behind the statement that starts at i."""
        while self.token(i) == "[" and self.token(i + 1) == "[":
            i = self.partner[i] + 1
        token = self.token(i)
        if token == "{":
            return self.partner[i] + 1
        if token in ("if", "for", "while", "switch"):
            opening = i + 1
            while self.token(opening) not in ("(", ""):
                opening += 1
            end = self._statement_end(self.partner[opening] + 1)
            return self._statement_end(end + 1) if token == "if" and self.token(end) == "else" else end
        if token == "do":
            end = self._statement_end(i + 1)  # `while`, a pair of brackets and a semicolon
            return self.partner[end + 1] + 2
        while self.token(i) not in (";", "", "}"):
            i = self.partner[i] + 1 if self.tokens[i] in _OPEN else i + 1
        return i + 1

    def _is_block(self, brace: int) -> bool:
        """Whether a brace opens statements, not a class, a namespace or a list of values."""
        start = brace - 1
        while start >= 0 and self.tokens[start] not in (";", "{", "}"):
            start = self.partner[start] - 1 if self.tokens[start] in ")]" else start - 1
        head = self.tokens[start + 1 : brace]
        classes = {"struct", "class", "union", "enum", "namespace", "extern"}
        return self.tokens[brace] == "{" and head[-1:] != ["="] and not (classes & set(head) and ")" not in head)

    def _declarators(self, i: int) -> tuple[str, list[tuple[str, str, bool]], int] | None:
        """A type and its variables, from token i to the semicolon; None if it has pointers.

        Of each variable its name, its `[extents]` and whether it has an initial value.
        """
        while self.token(i) in ("alignas", "__attribute__") and self.token(i + 1) == "(":
            i = self.partner[i + 1] + 1
        j = i
        while self.token(j) in ("const", "volatile", "typename", "static"):
            j += 1
        while self.token(j) in ("unsigned", "signed"):
            j += 1
        while _IDENTIFIER.match(self.token(j)):
            j = self.after_template_arguments(j + 1)
            if self.token(j) != "::":
                break
            j += 1
        while self.token(j) in ("const", "volatile"):
            j += 1
        type_text = self.source(i, j)
        variables = []
        while _IDENTIFIER.match(self.token(j)):
            name, k = self.tokens[j], j + 1
            while self.token(k) == "[":
                k = self.partner[k] + 1
            variables.append((name, self.source(j + 1, k), self.token(k) in ("=", "{")))
            if self.token(k) in ("=", "{"):  # an initial value, which Metal does not store
                while self.token(k) not in (",", ";", ""):
                    k = self.partner[k] + 1 if self.tokens[k] in _OPEN else k + 1
            if self.token(k) == ";":
                return type_text, variables, k
            if self.token(k) != ",":
                return None
            j = k + 1
        return None

    def _threadgroup_array(self, i: int) -> int | None:
        found = self._declarators(i + 1)
        if found is None:
            return None
        type_text, variables, end = found
        calls = [f"MITTENS_THREADGROUP_ARRAY({name}, {type_text} {extents})" for name, extents, _ in variables]
        self.replace(i, end, "; ".join(calls))
        return end

    def _parameter(self, i: int) -> int | None:
        """``constant const int64_t strides[2]`` is a pointer; the number of ``constant int& n`` is const."""
        j = i + 1
        while _IDENTIFIER.match(self.token(j)):
            j = self.after_template_arguments(j + 1)
        if self.token(i - 1) != "const" and self.tokens[i] == "constant" and self.tokens[i + 2 : i + 3] == ["&"]:
            if is_type(self.tokens[i + 1]):  # members of a struct may be handed on as pointers that are not const
                self._insert(i, " const")
            return None
        after = self.partner[j] + 1 if self.token(j) == "[" else len(self.tokens)
        while after < len(self.tokens) and self.in_attribute[after]:
            after += 1
        if self.token(after) not in (",", ")"):
            return None
        name = self.tokens[j - 1]
        self.replace(j - 1, self.partner[j] + 1, f"* {name}")
        return j

    def _constant(self, i: int) -> int | None:
        j = i + 1
        while self.token(j) not in (";", "=", "(", "{", "") or (j < len(self.tokens) and self.in_attribute[j]):
            j += 1
        attributes = self.attributes_between(i, j)
        if "function_constant" not in attributes:
            words = self.tokens[i:j]
            number = self.token(j) == "=" and not {"*", "&", "[", "const", "constexpr"} & set(words)
            if number and len(words) < 5 and self.token(i - 1) not in ("const", "constexpr"):
                self._insert(i, " const")
            return None
        while self.token(i - 1) in _STORAGE:
            i -= 1
        live = [k for k in range(i, j) if not self.dropped[k] and self.tokens[k] not in (*_STORAGE, "constant")]
        name = self.tokens[live[-1]]
        type_text = "".join(f"{self.tokens[k]} " for k in live[:-1]).replace(" :: ", "::").strip()
        index = self.integer(attributes["function_constant"], i)
        self.result.function_constants[name] = (index, type_text)
        if self.dialect:  # its value is not known before a pipeline is made
            self.replace(i, j, f"static const {type_text} {name} = ::mittens::function_constant<{type_text}>()")
            return j
        value = self.constants.get(index)
        value = f"{type_text}({value})" if value is not None else f"{type_text}()"
        self.replace(i, j, f"static constexpr {type_text} {name} = {value}")
        return j

    def _function_constant_test(self, i: int) -> int | None:
        name = self.token(i + 2)
        if name not in self.result.function_constants:
            return None
        index, _ = self.result.function_constants[name]
        known = "::mittens::function_constant<bool>()" if self.dialect else str(index in self.constants).lower()
        self.replace(i, i + 4, known)
        return i + 3

    def _vector_constructor(self, i: int) -> int | None:
        end = self.after_template_arguments(i + 1)
        first = i
        while self.token(first - 1) == "::":
            first -= 2 if _IDENTIFIER.match(self.token(first - 2)) else 1
        if self.token(end) != "(" or end == i + 1 or self.token(first - 1) == "operator":
            return None
        if self.token(end + 1) in ("&", "*") and self.token(self.partner[end] + 1) == "[":
            return None  # a reference or a pointer to an array: vec<T, 2> (&name)[4]
        self.edits.append((self.spans[first][0], self.spans[first][0], "::mittens::construct<"))
        self._insert(end - 1, ">")
        return i

    def _vector_cast(self, i: int) -> None:
        """`(float4)x`: clang takes the bits of a vector of the same size, Metal converts its elements."""
        closing = self.partner[i]
        kind = self.tokens[i + 1 : closing]
        named = len(kind) == 1 and (_VECTOR.match(kind[0]) is not None or kind[0] in self._named_types)
        if not named and not (kind[:2] == ["vec", "<"] and self.after_template_arguments(i + 2) == closing):
            return
        before = self.token(i - 1)
        if before in (")", "]", ">") or (_IDENTIFIER.match(before) and before not in ("return", "case", "else", "do")):
            return  # the parameters of a function, of sizeof
        end = self._operand_end(closing + 1)
        if end > closing + 1:
            self.edits.append((*self.spans[closing], f")::mittens::convert<{''.join(kind)}>("))
            self._insert(end - 1, ")")

    @functools.cached_property
    def _named_types(self) -> set[str]:
        """Aliases and template parameters, which may be vectors, if casts to them are to be written out."""
        names: set[str] = set()
        for i, token in enumerate(self.tokens if self.casts else ()):
            if token == "using" and self.token(i + 2) == "=":
                names.add(self.tokens[i + 1])
            elif token in ("typename", "class") and self.token(i + 2) in (",", ">", "="):
                names.add(self.tokens[i + 1])
            elif token == "typedef":
                end = i
                while self.token(end) not in (";", ""):
                    end += 1
                names.add(self.tokens[end - 1])
        return names

    def _named_cast(self, i: int) -> None:
        """`V(x)` and `static_cast<V>(x)`, of an alias or a template parameter."""
        is_static = self.tokens[i] == "static_cast" and self.token(i + 2) in self._named_types
        if not is_static and (self.tokens[i] not in self._named_types or self.token(i + 1) != "("):
            return
        if self.lines.at(self.spans[i][0])[0].startswith("mlx/"):
            return  # MLX's own headers have none of vectors
        if is_static and self.token(i + 3) == ">":
            self.edits.append((*self.spans[i], "::mittens::convert"))
            return
        follows, closing = self.token(i + 2), self.partner[i + 1]
        is_declarator = follows in ("&", "*") and self.token(closing + 1) in ("(", "[")
        if not is_declarator and follows not in (")", "{") and self.token(i - 1) not in (".", "->", "::", "operator"):
            self.edits.append((*self.spans[i], f"::mittens::convert<{self.tokens[i]}>"))

    def _operand_end(self, i: int) -> int:
        """The token behind the operand of a cast that starts at i; i if none does."""
        start = i
        while self.token(i) in ("-", "+", "!", "~", "*", "&"):
            i += 1
        if self.token(i) == "(":
            inner, i = self.tokens[i + 1 : self.partner[i]], self.partner[i] + 1
            if len(inner) == 1 and is_type(inner[0]):
                return self._operand_end(i)
        elif _IDENTIFIER.match(self.token(i)):
            i = self.after_template_arguments(i + 1)
            while self.token(i) == "::":
                i = self.after_template_arguments(i + 2)
        elif self.token(i)[:1].isdigit() or self.token(i)[:1] == ".":
            i += 1
        else:
            return start
        while True:
            token = self.token(i)
            if token in ("(", "["):
                i = self.partner[i] + 1
            elif token in (".", "->") and _IDENTIFIER.match(self.token(i + 1)):
                i += 2
            else:
                return i

    def _vector_array(self, i: int, vector: re.Match[str]) -> None:
        """`uint4 (&name)[2]`: here the type is no constructor, as which it is a macro."""
        declarator = self.tokens[i + 2 : i + 6]
        if len(declarator) == 4 and _IDENTIFIER.match(declarator[1]) and declarator[2:] == [")", "["]:
            qualified = self.token(i - 1) in (*_SPACES, "const")  # else `uint4(*p)[0]` may be an element
            if declarator[0] == "&" or (declarator[0] == "*" and qualified):
                self.replace(i, i + 1, f"vec<{vector[1]}, {vector[2]}>")

    def _string(self, i: int) -> int:
        """A string, which only logs take, is in constant memory."""
        end = i
        while self.token(end + 1)[:1] == '"':
            end += 1
        before = i - 1
        while self.token(before) not in ("(", ";", "{", "}", ""):
            before = self.partner[before] - 1 if self.tokens[before] in _CLOSE else before - 1
        if self.token(before - 1) not in _OF_STRINGS and not self.dropped[i]:
            self.edits.append((self.spans[i][0], self.spans[i][0], "(constant const char*)("))
            self._insert(end, ")")
        return end

    def _is_float(self, i: int) -> bool:
        """Whether a number that is to be checked ends in the f of a float."""
        token = self.tokens[i]
        return (
            self.dialect and token[-1] in "fF" and token[-2:].lower() != "bf" and ("." in token or "e" in token.lower())
        )

    def _number(self, i: int) -> int:
        literal = _FLOAT_LITERAL.match(self.tokens[i].rstrip("fF") if self._is_float(i) else self.tokens[i])
        if literal:
            type_text = {None: None, "h": "half", "b": "bfloat"}[literal[2] and literal[2][0].lower()]
            value = literal[1] + "f"
            if self.dialect and not literal[2]:
                value = _inexact(literal[1])
            self.edits.append((*self.spans[i], f"{type_text}({value})" if type_text else value))
        elif self.dialect and self.tokens[i].isdigit() and self._becomes_float(i):
            self.edits.append((*self.spans[i], _inexact(self.tokens[i])))
        return i

    def _becomes_float(self, i: int) -> bool:
        """Whether an integer is cast to float where it stands, or is the initial value of one: `const float x = 1;`."""
        before = i - 2 if self.token(i - 1) in ("+", "-") else i - 1
        opened = self.token(before) in ("(", "{") and self.token(i + 1) in (")", "}")
        cast = self.tokens[max(before - 4, 0) : before]
        if opened and (cast[-1:] == ["float"] or cast == ["static_cast", "<", "float", ">"]):
            return True
        if self.tokens[max(before - 2, 0) : before + 1] == ["(", "float", ")"]:
            return self.token(before - 3) not in ("sizeof", "alignof")
        initial = opened or (self.token(before) == "=" and self.token(i + 1) in (",", ";"))
        return initial and self.token(before - 2) == "float" and _IDENTIFIER.match(self.token(before - 1)) is not None

    def _exact_float(self, i: int) -> None:
        """`constant float x = 2 * n;`, `float(n)`: what clang computes of integers becomes one that no bfloat holds."""
        if self.token(i + 1) == "(":
            first, last = i + 2, self.partner[i + 1]
        elif self.token(i + 2) == "=" and {"const", "constexpr", "constant"} & {self.token(i - 1), self.token(i - 2)}:
            first = last = i + 3
            while self.token(last) not in (";", ",", "{", ""):
                last = self.partner[last] + 1 if self.tokens[last] in _OPEN else last + 1
        else:
            return
        named = last > first and _IDENTIFIER.match(self.tokens[first]) is not None
        if (named or last > first + 1) and self._is_arithmetic(first, last):
            self.edits.append((self.spans[first][0], self.spans[first][0], "::mittens::inexact("))
            self._insert(last - 1, ")")

    def _is_arithmetic(self, first: int, last: int) -> bool:
        """Whether tokens are integers, names and operators, with no call but casts to Metal's types."""
        k = first
        while k < last:
            token, called = self.tokens[k], self.token(k + 1) == "("
            if token == "sizeof" and called:
                k = self.partner[k + 1]
            elif _IDENTIFIER.match(token):
                if called != is_type(token):
                    return False
            elif not _INTEGER.match(token) and (token not in "()+-*/%|^~:?::" or (k == first and token == "*")):
                return False
            k += 1
        return True

    def _begins_statement(self, i: int) -> bool:
        before = self.token(i - 1)
        if before == ")":
            return self.token(self.partner[i - 1] - 1) in ("if", "for", "while")
        return before in (";", "{", "}", "else", "do")

    def _outside(self, first: int, last: int) -> Iterator[int]:
        """Tokens of first..last-1 outside of brackets, and opening brackets."""
        while first < last:
            yield first
            first = self.partner[first] + 1 if self.tokens[first] in _OPEN else first + 1

    def _assignment(self, i: int) -> int | None:
        """``*((threadgroup A*)(x)) = *((const device A*)(y));``: structs cross address spaces by a function."""
        equals = i + 1
        while self.token(equals) not in ("=", ";", ""):
            equals = self.partner[equals] + 1 if self.tokens[equals] in _OPEN else equals + 1
        if self.token(equals) != "=" or self.token(equals + 1) != "*" or self.token(equals - 1) != ")":
            return None
        end = equals + 1
        while self.token(end) not in (";", ""):
            end = self.partner[end] + 1 if self.tokens[end] in _OPEN else end + 1
        if not any(self.tokens[k] in _SPACES for k in range(i, end)):
            return None
        if self.tokens[end - 1] != ")" or any(self.tokens[k] not in _OPEN for k in self._outside(equals + 2, end)):
            return None  # an expression of the loaded value: `*(device float*)p + 1`
        self.edits.append((self.spans[i][0], self.spans[i][1], "::mittens::assign("))
        self.edits.append((self.spans[equals][0], self.spans[equals + 1][1], ","))
        self.edits.append((self.spans[end][0], self.spans[end][0], ")"))
        return i


def rewrite(
    text: str,
    constants: dict[int, str],
    dialect: bool = False,
    private: bool = False,
    rounds: bool = False,
    casts: bool = False,
) -> Translation:
    """Rewrites preprocessed Metal for clang.

    Args:
        text: A .metal file, preprocessed, line markers included.
        constants: Values of function constants by index, as they are written in C++.
        dialect: Whether the text is to be checked, not run: then its floats are none that a bfloat holds.
        private: Whether the watcher is to see arrays of a thread's own.
        rounds: Whether the simulator is to tell apart the rounds of loops in which lanes part.
        casts: Whether casts to aliases and template parameters are to be written out, as those to vectors by name are.
    """
    return _Rewriter(text, constants, dialect, private, rounds, casts).run()


class LineMap:
    """Where positions in preprocessed text are from, by its line markers."""

    _MARKER = re.compile(r'^#(?:line)? (\d+) "([^"\n]*)"[^\n]*\n', re.M)

    def __init__(self, text: str):
        self._text = text
        self._marks = [(0, "", 1), *((m.end(), m[2], int(m[1])) for m in self._MARKER.finditer(text))]
        self._starts = [start for start, _, _ in self._marks]
        self._ends = [m.start() for m in re.finditer("\n", text)]  # of lines

    def at(self, position: int) -> tuple[str, int]:
        """The file and the line of a position."""
        start, file, line = self._marks[bisect.bisect_right(self._starts, position) - 1]
        return file, line + bisect.bisect_left(self._ends, position) - bisect.bisect_left(self._ends, start)

    def column(self, position: int) -> int:
        """The column of a position, from 1."""
        return position - self._text.rfind("\n", 0, position)
