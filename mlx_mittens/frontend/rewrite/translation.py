"""The result of a rewrite: the text for clang, its kernels, and where each place was before."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    edits: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, length of the new text

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
