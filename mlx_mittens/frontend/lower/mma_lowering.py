"""Products of 8x8 matrices on tensor cores: as many at a time as an instruction takes.

metal/nvptx.h writes each product as an instruction of its own, which PTX does not have:

    mittens.multiply.TYPE {d0, d1}, {a}, {b}, {c0, c1};

The smallest product of a tensor core has a left matrix of 16 rows. So two products of a basic block that share their
right matrix become one, and of two that follow each other in a sum the matrices are put side by side. Where no partner
is found, the lower rows are zeros, and nobody reads their results.

Of two products that become one the first waits for the second. Registers are rewritten in PTX, so the first one's
operands must stay until then. Products in float32 become three of TF32 each (`_in_parts`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

_REGISTER = re.compile(r"%\w+")
_PRODUCT = re.compile(r"\s*mittens\.multiply\.(\w+) \{([^{}]*)\}, \{([^{}]*)\}, \{([^{}]*)\}, \{([^{}]*)\};\s*")
_COLUMNS = 8  # of a left matrix of halfs, one register a lane
# An instruction on a line of its own, and its first operand: it writes to no other. Whatever looks different ends a
# basic block: labels, branches, barriers, calls, directives, braces, instructions with a predicate or on several lines.
_INSTRUCTION = re.compile(r"\s*(?!br|bar|call)[a-z][\w.]*\s+((?:\{[^{}]*\})?[^{},;]*)[^;]*;\s*")
_ZERO = "%mittens_zero"
_UNREAD = "%mittens_unread"
_ABOUT_HALF_A_UNIT = "0f39B40000"  # 1.40625 * 2^-12: of a float, 0.35 to 0.7 of the 11th bit's unit
_LONE_AT_ONCE = 4  # products of 8 rows in float32; one of 16 takes the registers of two and has work enough


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

    @property
    def operands(self) -> list[str]:
        return [*(register for step in self.left for register in step), *self.right]

    @cached_property
    def read(self) -> set[str]:
        return {*self.operands, *self.sums}

    @cached_property
    def written(self) -> set[str]:
        return {*self.results}

    @cached_property
    def named(self) -> set[str]:
        return self.read | self.written

    @property
    def text(self) -> str:
        instruction = _instruction(
            self.dtype, _COLUMNS * len(self.right), self.results, self.left, self.right, self.sums
        )
        if len(self.results) == 4:
            return f"\t{instruction}"
        return f"\t{{ .reg .b32 {_ZERO}, {_UNREAD}; mov.b32 {_ZERO}, 0; {instruction} }}"


def _instruction(
    dtype: str, columns: int, results: list[str], left: list[list[str]], right: list[str], sums: list[str]
) -> str:
    def filled(registers: list[str], count: int, rest: str) -> str:
        return ", ".join([*registers, *[rest] * (count - len(registers))])

    lefts = ", ".join(filled(step, 2, _ZERO) for step in left)
    return (
        f"mma.sync.aligned.m16n8k{columns}.row.col.f32.{dtype}.{dtype}.f32 {{{filled(results, 4, _UNREAD)}}}, "
        f"{{{lefts}}}, {{{', '.join(right)}}}, {{{filled(sums, 4, _ZERO)}}};"
    )


def _in_parts(products: list[_Product]) -> str:
    """Products in float32, of an upper and a lower part of each number.

    The cores read 11 bits of a float: these are the upper part, and the rest of the number is the lower part. The upper
    part is rounded, by adding about half a unit of its last bit before the other bits are cut off. So lower parts are
    small and of either sign, and their own rounding errors do not add up. Half a unit is rounded towards zero, so that
    the largest floats stay finite.

    A product is the sum of three products of parts. The product of both lower parts is left out: it is 2^-21 of the
    whole at most. Where an operand is inf or NaN, the product of the upper parts is right. The others may be NaN where
    it is inf: max replaces NaN by a finite number. The cores cut their sums instead of rounding them, so a long sum
    would drift: each of their results is added to a sum outside of the cores.
    """
    uppers: dict[str, str] = {}
    lowers: dict[str, str] = {}
    steps = [f"mov.b32 {_ZERO}, 0;"]
    for i, register in enumerate(dict.fromkeys(register for product in products for register in product.operands)):
        upper, lower = uppers[register], lowers[register] = f"%mittens_upper{i}", f"%mittens_lower{i}"
        steps.append(f"fma.rz.f32 {upper}, {register}, {_ABOUT_HALF_A_UNIT}, {register};")
        steps.append(f"and.b32 {upper}, {upper}, 0xffffe000;")
        steps.append(f"sub.rn.f32 {lower}, {register}, {upper};")

    def named(name: str) -> list[list[str]]:
        return [[f"%mittens_{name}{n}_{i}" for i in range(len(product.results))] for n, product in enumerate(products)]

    def multiply(results: list[list[str]], left: dict[str, str], right: dict[str, str], sums: list[list[str]]) -> None:
        for product, result, added in zip(products, results, sums, strict=True):
            operands = [[left[r] for r in step] for step in product.left], [right[r] for r in product.right]
            steps.append(_instruction("tf32", 4 * len(product.right), result, *operands, added))

    zeros = [[_ZERO] * len(product.results) for product in products]
    totals, rests = named("total"), named("rest")
    multiply(totals, uppers, uppers, zeros)
    multiply(rests, lowers, uppers, zeros)
    multiply(rests, uppers, lowers, rests)
    for product, total, rest in zip(products, totals, rests, strict=True):
        for d, c, t, r in zip(product.results, product.sums, total, rest, strict=True):
            steps.append(f"max.f32 {r}, {r}, 0fFF000000; add.rn.f32 {t}, {t}, {r}; add.rn.f32 {d}, {c}, {t};")
    own = [*uppers.values(), *lowers.values(), *sum(totals, []), *sum(rests, [])]
    return f"\t{{ .reg .b32 {', '.join([_ZERO, _UNREAD, *own])}; {' '.join(steps)} }}"


_Block = list[_Line | _Product]


def _partners(block: _Block, first: _Product) -> Iterator[_Product]:
    """The products that it can wait for: its operands keep until there, and nothing reads its results."""
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


def _texts(block: _Block) -> Iterator[str]:
    """The lines of a block. Products in float32 wait for others, so that several are on their way at once."""
    waiting: list[_Product] = []

    def done() -> Iterator[str]:
        if waiting:
            yield _in_parts(waiting)
            waiting.clear()

    for line in block:
        written = {register for product in waiting for register in product.written}
        if isinstance(line, _Product) and line.dtype == "f32":
            most = _LONE_AT_ONCE if len(line.results) == 2 else 1
            if written & {*line.operands} or len(waiting) >= most:
                yield from done()
            waiting.append(line)
        else:
            if line.named & written or any(line.written & product.read for product in waiting):
                yield from done()
            yield line.text
    yield from done()


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
        done.extend(_texts(block))
        block.clear()

    for line in re.sub(r"\t// (begin|end) inline asm\n", "", text).splitlines():
        code = line.split("//")[0]
        product = _PRODUCT.fullmatch(code)
        instruction = _INSTRUCTION.fullmatch(code)
        if product:
            dtype, *operands = product.groups()
            results, left, right, sums = (operand.split(", ") for operand in operands)
            block.append(_Product(dtype, results, [[a] for a in left], right, sums))
        elif instruction or not code.strip():
            written = instruction[1] if instruction else ""
            block.append(_Line(line, {*_REGISTER.findall(code)}, {*_REGISTER.findall(written)}))
        else:
            finish()
            done.append(line)
    finish()
    return "\n".join(done) + "\n"
