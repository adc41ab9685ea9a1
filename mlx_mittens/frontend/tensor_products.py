"""Products of 8x8 matrices on tensor cores: as many at a time as an instruction takes.

metal/nvptx.h writes each product as an instruction of its own, which PTX does not have:

    mittens.multiply.TYPE {d0, d1}, a, b, {c0, c1};

The smallest product of a tensor core has a left matrix of 16 rows. So two products of a basic block that share their
right matrix become one, and of two that follow each other in a sum the matrices are put side by side. Where no partner
is found, the lower rows are zeros, and nobody reads what comes of them.

Of two products that become one the first waits for the second. Registers are rewritten in PTX, so what the first reads
must stay until then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

_REGISTER = re.compile(r"%\w+")
_PRODUCT = re.compile(r"\s*mittens\.multiply\.(\w+) \{(%\w+), (%\w+)\}, (%\w+), (%\w+), \{(%\w+), (%\w+)\};\s*")
# An instruction on a line of its own, and its first operand: it writes to no other. Whatever looks different ends a
# basic block: labels, branches, barriers, calls, directives, braces, instructions with a predicate or on several lines.
_INSTRUCTION = re.compile(r"\s*(?!br|bar|call)[a-z][\w.]*\s+((?:\{[^{}]*\})?[^{},;]*)[^;]*;\s*")
_ZERO = "%mittens_zero"
_UNREAD = "%mittens_unread"


@dataclass(eq=False)
class _Line:
    text: str
    named: set[str]
    written: set[str]


@dataclass(eq=False)
class _Product:
    """8x8 matrices above each other times one, perhaps with others beside them, added to c."""

    dtype: str
    results: list[str]  # a pair for each of the rows
    left: list[list[str]]  # by depth, by rows
    right: list[str]  # by depth
    sums: list[str]

    @cached_property
    def read(self) -> set[str]:
        return {*(register for step in self.left for register in step), *self.right, *self.sums}

    @cached_property
    def written(self) -> set[str]:
        return {*self.results}

    @cached_property
    def named(self) -> set[str]:
        return self.read | self.written

    @property
    def text(self) -> str:
        def filled(registers: list[str], count: int, rest: str) -> str:
            return ", ".join([*registers, *[rest] * (count - len(registers))])

        left = ", ".join(filled(step, 2, _ZERO) for step in self.left)
        instruction = (
            f"mma.sync.aligned.m16n8k{8 * len(self.right)}.row.col.f32.{self.dtype}.{self.dtype}.f32 "
            f"{{{filled(self.results, 4, _UNREAD)}}}, {{{left}}}, {{{', '.join(self.right)}}}, "
            f"{{{filled(self.sums, 4, _ZERO)}}};"
        )
        if len(self.results) == 4:
            return f"\t{instruction}"
        return f"\t{{ .reg .b32 {_ZERO}, {_UNREAD}; mov.b32 {_ZERO}, 0; {instruction} }}"


_Block = list[_Line | _Product]


def _partners(block: _Block, first: _Product) -> Iterator[_Product]:
    """The products that it can wait for: what it reads stays until there, and its results are not asked for."""
    for other in block[block.index(first) + 1 :]:
        if isinstance(other, _Product):
            yield other
        if other.named & first.written or other.written & first.read:
            return


def _above(first: _Product, second: _Product) -> _Product | None:
    """Both with the first's rows above the second's, if they share the right matrix."""
    if (first.dtype, first.right) != (second.dtype, second.right) or first.written & second.named:
        return None
    if len(first.results) + len(second.results) > 4:
        return None
    left = [upper + lower for upper, lower in zip(first.left, second.left, strict=True)]
    return _Product(first.dtype, first.results + second.results, left, first.right, first.sums + second.sums)


def _beside(first: _Product, second: _Product, uses: Counter[str]) -> _Product | None:
    """Both with their matrices side by side, if the second adds to the first and nobody else asks for that."""
    if first.dtype != second.dtype or first.results != second.sums or len(first.right) + len(second.right) > 2:
        return None
    if first.written & {*second.left[0], *second.right}:
        return None
    # One use is where the first writes, one where the second reads.
    if first.results != second.results and any(uses[register] > 2 for register in first.results):
        return None
    return _Product(first.dtype, second.results, first.left + second.left, first.right + second.right, first.sums)


def _join(block: _Block, joined: Callable[[_Product, _Product], _Product | None]) -> None:
    for first in list(block):
        if not isinstance(first, _Product) or first not in block:
            continue
        for second in _partners(block, first):
            both = joined(first, second)
            if both:
                block[block.index(second)] = both
                block.remove(first)
                break


def joined_products(text: str) -> str:
    """PTX with all products as instructions of tensor cores."""
    if "mittens.multiply." not in text:
        return text
    uses = Counter(_REGISTER.findall(text))
    done: list[str] = []
    block: _Block = []

    def finish() -> None:
        _join(block, _above)
        _join(block, lambda first, second: _beside(first, second, uses))
        done.extend(line.text for line in block)
        block.clear()

    for line in re.sub(r"\t// (begin|end) inline asm\n", "", text).splitlines():
        code = line.split("//")[0]
        product = _PRODUCT.fullmatch(code)
        instruction = _INSTRUCTION.fullmatch(code)
        if product:
            dtype, d0, d1, a, b, c0, c1 = product.groups()
            block.append(_Product(dtype, [d0, d1], [[a]], [b], [c0, c1]))
        elif instruction or not code.strip():
            written = instruction[1] if instruction else ""
            block.append(_Line(line, {*_REGISTER.findall(code)}, {*_REGISTER.findall(written)}))
        else:
            finish()
            done.append(line)
    finish()
    return "\n".join(done) + "\n"
