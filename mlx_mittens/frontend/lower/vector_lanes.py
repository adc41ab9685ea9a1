"""Which components of a vector an access is to, in LLVM's text of a kernel for the simulator.

Clang loads a vector whole to read one component, and loads and stores it whole to write one: `v.x = 1` reads elements
that may never have been written. And it reports no access to a vector of three, whose size is no power of two. Here
every call that reports the load or the store of a vector gets the components that the kernel reads or writes.

A store writes the components that differ from a load of the same place, followed back through insertions, shuffles,
choices and the values that meet where branches do; where they depend on the branch, so does the mask. A load whose
vector goes back to its place serves a part of it: it reads the components that its own block uses. Components that
other blocks use are read there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_BYTES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8}
_NAME = r'%[\w.$-]+|%"[^"]*"'
_PLACE = rf"(?P<pointer>ptr(?: addrspace\(\d+\))? (?:{_NAME})), align (?P<align>\d+)"
_LOAD = re.compile(rf"^  (?P<name>{_NAME}) = load <(?P<count>\d) x (?P<type>\w+)>, {_PLACE}")
_STORE = re.compile(rf"^  store <(?P<count>\d) x (?P<type>\w+)> (?P<value>.+), {_PLACE}")
_EXTRACT = re.compile(rf"^  (?:{_NAME}) = extractelement <[^>]*> (?P<vector>[^,]+), (?P<type>i\d+) (?P<lane>[^,\s]+)")
_INSERT = re.compile(
    rf"^  (?P<name>{_NAME}) = insertelement <[^>]*> (?P<vector>[^,]+), .+, (?P<type>i\d+) (?P<lane>[^,\s]+)(?:, !.*)?$"
)
_SHUFFLE = re.compile(
    rf"^  (?P<name>{_NAME}) = shufflevector <(?P<count>\d+) x [^>]*> (?P<first>.+), <[^>]*> (?P<second>.+), "
    r"<(?P<lanes>\d+) x i32> (?P<mask><[^>]*>|\w+(?: \(i32 \d+\))?)"
)
_PHI = re.compile(rf"^  (?P<name>{_NAME}) = phi <\d+ x \w+> (?P<ways>\[.*\])")
_WAY = re.compile(rf"\[ (?P<value>.+?), (?P<block>{_NAME}) \]")
_SELECT = re.compile(
    rf"^  (?P<name>{_NAME}) = select (?:[a-z]+ )*i1 (?P<truth>[^,]+), "
    r"<\d+ x \w+> (?P<yes>.+), <\d+ x \w+> (?P<no>[^,]+)"
)
_SAME = re.compile(
    rf"^  (?P<name>{_NAME}) = (?:freeze <\d+ x \w+> (?P<frozen>[^,]+)"
    r"|bitcast <(?P<count>\d+) x \w+> (?P<cast>\S+) to <(?P=count) x \w+>)"
)
_ADDRESS = re.compile(rf"^  (?P<name>{_NAME}) = (?P<computed>(?:getelementptr|addrspacecast) [^!]*?)(?:, !.*)?$")
_LABEL = re.compile(r'^(?P<name>[\w.$-]+|"[^"]*"):')
_USED = re.compile(_NAME)
_REPORT = re.compile(r"^  call void @__sanitizer_cov_(?:load|store)\d+\(")
_CALL = re.compile(
    r'^  (?:\S+ = )?(?:(?:tail|musttail|notail) )?call [^@]*?(?:@(?P<callee>[\w.$]+|"[^"]*")|%[\w.$-]+)\('
)
_DEFINED = re.compile(r'^define [^@]*@(?P<name>[\w.$]+|"[^"]*")\(')
_OWN_CALL = re.compile(r"__sanitizer_cov|__ubsan|llvm\.|mittens_(?:load|store)_")
_DEBUG = re.compile(r", !dbg !\d+")
_PRIVATE = "ptr %"  # a pointer of no address space: to the thread's own memory

Lanes = tuple[int | None, ...]  # of a value, which component of the load each is; None of something else
Mask = int | str  # a bit for each component: known, or the name of a value


@dataclass
class _Access:
    """A load or a store of a vector."""

    line: int
    count: int
    bytes: int
    pointer: str
    align: int
    value: str  # that is loaded or stored
    place: str  # the pointer as it is computed

    @property
    def all(self) -> int:
        return (1 << self.count) - 1


@dataclass
class _Use:
    """The components of a loaded vector that an instruction reads."""

    line: int
    lanes: set[int]
    is_sure: bool  # whether it reads them whenever it runs
    lane: str | None = None  # the one that it reads, with its type, where that is computed


@dataclass
class _Reads:
    """The uses of a loaded vector in a function."""

    uses: list[_Use] = field(default_factory=list)
    is_kept: bool = False  # whether it goes back to where it came from


class _Function:
    """The lines of a function."""

    def __init__(self, lines: list[str], operations: set[str]):
        self.lines = lines
        self.uses: dict[str, list[int]] = {}
        self.made: dict[str, int] = {}  # the line of each value
        self.block: list[int] = []  # of each line
        self.operations: list[int] = []  # lines that may be an operation between threads
        self.stores: dict[int, _Access] = {}
        self.loads: dict[int, _Access] = {}
        self.before: dict[int, list[str]] = {}  # insertions in front of lines
        self.masks = 0
        blocks = 0
        for i, line in enumerate(lines):
            blocks += _LABEL.match(line) is not None
            self.block.append(blocks)
            if "#dbg_" in line:
                continue
            head, equals, tail = line.partition(" = ")
            if equals and head.startswith("  %"):
                self.made[head.strip()] = i
            for name in set(_USED.findall(tail if equals else line)):
                self.uses.setdefault(name, []).append(i)
            if (call := _CALL.match(line)) and (call["callee"] is None or call["callee"] in operations):
                self.operations.append(i)
        for i, line in enumerate(lines):
            for pattern, found, value in ((_LOAD, self.loads, "name"), (_STORE, self.stores, "value")):
                match = pattern.match(line)
                if match and match["type"] in _BYTES:
                    pointer = match["pointer"]
                    found[i] = _Access(
                        i,
                        int(match["count"]),
                        _BYTES[match["type"]],
                        pointer,
                        int(match["align"]),
                        match[value],
                        self._place(pointer),
                    )

    def edited(self) -> list[str]:
        """The lines, with the components in the calls that report accesses."""
        masks: dict[int, Mask] = {at: self._changed(store) for at, store in self.stores.items()}
        for at, load in self.loads.items():
            masks[at] = self._read_at(load)
        result: list[str] = []
        for i, line in enumerate(self.lines):
            access = self.loads.get(i) or self.stores.get(i)
            if access is not None:
                self._report(access, "load" if i in self.loads else "store", masks[i], result)
            result += [*self.before.get(i, ()), line]
        return result

    def _place(self, pointer: str, depth: int = 0) -> str:
        """A pointer as it is computed: the same text is the same place."""

        def computed(name: re.Match[str]) -> str:
            line = self.made.get(name[0])
            match = _ADDRESS.match(self.lines[line]) if line is not None and depth < 4 else None
            return f"({self._place(match['computed'], depth + 1)})" if match else name[0]

        return _USED.sub(computed, pointer)

    def _has_operation(self, one: int, other: int) -> bool:
        return any(min(one, other) < line < max(one, other) for line in self.operations)

    def _is_part_of(self, load: _Access, store: _Access) -> bool:
        """Whether a load and a store are of one place, with no operation between threads between.

        None of these changes the thread's own memory.
        """
        if load.place != store.place or load.count != store.count:
            return False
        return load.pointer.startswith(_PRIVATE) or not self._has_operation(load.line, store.line)

    # Finds the components a store changes: back from the stored value to the loads of its place.

    def _changed(self, store: _Access) -> Mask:
        loads = [load for load in self.loads.values() if self._is_part_of(load, store)]
        if not loads:
            return store.all
        return self._differs(store.value, {load.value for load in loads}, store.all, {})

    def _differs(self, value: str, same: set[str], every: int, known: dict[str, Mask]) -> Mask:
        """The components of a value that differ from the load."""
        if value in same:
            return 0
        if value in known:
            return known[value]
        line = self.made.get(value)
        if line is None:
            return every
        text = self.lines[line]
        known[value] = every
        if match := _PHI.match(text):
            known[value] = self._differs_by_way(match, line, same, every, known)
        elif match := _SELECT.match(text):
            yes = self._differs(match["yes"], same, every, known)
            no = self._differs(match["no"], same, every, known)
            known[value] = (
                yes if yes == no else self._computed(line, f"select i1 {match['truth']}, i32 {yes}, i32 {no}")
            )
        elif match := _INSERT.match(text):
            rest = self._differs(match["vector"], same, every, known)
            lane = match["lane"]
            bit = 1 << int(lane) if lane.isdigit() else self._bit(line, f"{match['type']} {lane}", every.bit_length())
            known[value] = self._or(line, rest, bit)
        elif match := _SHUFFLE.match(text):
            known[value] = self._differs_shuffled(match, line, same, every, known)
        elif match := _SAME.match(text):
            known[value] = self._differs(match["frozen"] or match["cast"], same, every, known)
        return known[value]

    def _differs_by_way(
        self, phi: re.Match[str], line: int, same: set[str], every: int, known: dict[str, Mask]
    ) -> Mask:
        self.masks += 1
        name = known[phi["name"]] = f"%mittens.mask.{self.masks}"
        ways = [(self._differs(way["value"], same, every, known), way["block"]) for way in _WAY.finditer(phi["ways"])]
        written = ", ".join(f"[ {mask}, {block} ]" for mask, block in ways)
        self.before.setdefault(line, []).append(f"  {name} = phi i32 {written}")
        return name

    def _differs_shuffled(
        self, shuffle: re.Match[str], line: int, same: set[str], every: int, known: dict[str, Mask]
    ) -> Mask:
        picked, count = _picked(shuffle), int(shuffle["count"])
        kept = [0, 0]  # the components of each operand that stay in their place
        for place, lane in enumerate(picked):
            if lane is not None and lane % count == place:
                kept[lane // count] |= 1 << place
        mask: Mask = ((1 << len(picked)) - 1) & ~(kept[0] | kept[1])
        for operand, bits in zip((shuffle["first"], shuffle["second"]), kept, strict=True):
            if bits:
                mask = self._or(line, mask, self._and(line, self._differs(operand, same, every, known), bits))
        return mask

    def _bit(self, line: int, lane: str, count: int) -> str:
        """The bit of a component that is computed, given with its type, in front of a line."""
        kind, name = lane.split()
        is_within = self._computed(line, f"icmp ult {kind} {name}, {count}")
        near = self._computed(line, f"select i1 {is_within}, {kind} {name}, {kind} 0")
        if kind != "i32":
            near = self._computed(line, f"{'trunc' if int(kind[1:]) > 32 else 'zext'} {kind} {near} to i32")
        bit = self._computed(line, f"shl i32 1, {near}")
        return self._computed(line, f"select i1 {is_within}, i32 {bit}, i32 0")

    def _or(self, line: int, a: Mask, b: Mask) -> Mask:
        if isinstance(a, int) and isinstance(b, int):
            return a | b
        return b if a == 0 else a if b == 0 else self._computed(line, f"or i32 {a}, {b}")

    def _and(self, line: int, a: Mask, bits: int) -> Mask:
        return a & bits if isinstance(a, int) else self._computed(line, f"and i32 {a}, {bits}")

    def _computed(self, line: int, what: str) -> str:
        """A value that is computed in front of a line."""
        self.masks += 1
        self.before.setdefault(line, []).append(f"  %mittens.mask.{self.masks} = {what}")
        return f"%mittens.mask.{self.masks}"

    # Finds the components read of a load: on to the uses of its value.

    def _read_at(self, load: _Access) -> int:
        """The components that a load reads; components read at their use are reported at the use."""
        reads = _Reads()
        self._follow(load.value, tuple(range(load.count)), load, reads, True, set())
        computed = {use.lane for use in reads.uses}
        if len(computed) == 1 and None not in computed:  # the kernel's `v[i][lane]`
            use = reads.uses[0]
            if self.block[use.line] == self.block[load.line] and not self._has_operation(load.line, use.line):
                bit = self._bit(use.line, str(use.lane), load.count)
                self.before[use.line].append(self._call(load, "load", bit, use.line))
                return 0
        read = 0
        for use in reads.uses:
            bits = sum(1 << lane for lane in use.lanes)
            is_here = self.block[use.line] == self.block[load.line]
            crosses = not load.pointer.startswith(_PRIVATE) and self._has_operation(load.line, use.line)
            if not reads.is_kept or (use.is_sure and (is_here or crosses)):
                read |= bits
            elif use.is_sure and bits:
                self.before.setdefault(use.line, []).append(self._call(load, "load", bits, use.line))
        return read if reads.uses or reads.is_kept else load.all

    def _follow(
        self,
        name: str,
        lanes: Lanes,
        load: _Access,
        reads: _Reads,
        is_sure: bool,
        seen: set[tuple[str, Lanes, bool]],
    ) -> None:
        """Adds the components of a load that the uses of a value read, where lanes of the value are the load's."""
        if (name, lanes, is_sure) in seen or not any(lane is not None for lane in lanes):
            reads.is_kept = reads.is_kept or any(i in self.stores for i in self.uses.get(name, ()))
            return
        seen.add((name, lanes, is_sure))
        for i in self.uses.get(name, ()):
            line = self.lines[i]
            store = self.stores.get(i)
            if store is not None and store.value == name and self._is_part_of(load, store):
                reads.is_kept = True
                moved = {lane for k, lane in enumerate(lanes) if lane is not None and lane != k}
                if moved:
                    reads.uses.append(_Use(i, moved, is_sure))
            elif (match := _INSERT.match(line)) and match["vector"] == name:
                if match["lane"].isdigit():
                    rest = tuple(None if k == int(match["lane"]) else lane for k, lane in enumerate(lanes))
                    self._follow(match["name"], rest, load, reads, is_sure, seen)
                else:  # one of the lanes is written, no one knows which
                    self._follow(match["name"], lanes, load, reads, False, seen)
            elif match := _PHI.match(line) or _SELECT.match(line):
                self._follow(match["name"], lanes, load, reads, False, seen)
            elif match := _SAME.match(line):
                self._follow(match["name"], lanes, load, reads, is_sure, seen)
            elif match := _SHUFFLE.match(line):
                none = (None,) * int(match["count"])
                both = (*(lanes if match["first"] == name else none), *(lanes if match["second"] == name else none))
                rest = tuple(None if k is None else both[k] for k in _picked(match))
                self._follow(match["name"], rest, load, reads, is_sure, seen)
            elif (match := _EXTRACT.match(line)) and match["lane"].isdigit() and int(match["lane"]) < len(lanes):
                lane = lanes[int(match["lane"])]
                reads.uses.append(_Use(i, set() if lane is None else {lane}, is_sure))
            elif match and match["lane"][0] == "%" and lanes == tuple(range(load.count)):
                reads.uses.append(_Use(i, set(lanes), is_sure, f"{match['type']} {match['lane']}"))  # type: ignore[arg-type]
            else:
                reads.uses.append(_Use(i, {lane for lane in lanes if lane is not None}, is_sure))

    # Reports.

    def _report(self, access: _Access, kind: str, mask: Mask, result: list[str]) -> None:
        """Replaces the call that reports an access, or adds one."""
        reported = bool(result) and _REPORT.match(result[-1]) is not None and f"({access.pointer})" in result[-1]
        if reported and mask == access.all and access.align >= access.count * access.bytes:
            return
        if reported:
            result.pop()
        if mask != 0:
            result.append(self._call(access, kind, mask, access.line))

    def _call(self, access: _Access, kind: str, mask: Mask, line: int) -> str:
        debug = _DEBUG.search(self.lines[line])
        return (
            f"  call void @mittens_{kind}_mask({access.pointer}, i32 {access.align}, i32 {access.count}, "
            f"i32 {access.bytes}, i32 {mask}){debug[0] if debug else ''}"
        )


def _picked(shuffle: re.Match[str]) -> list[int | None]:
    """Which component of the two operands, one behind the other, each of a shuffle's result is; None of neither."""
    mask = shuffle["mask"]
    if mask == "zeroinitializer":
        return [0] * int(shuffle["lanes"])
    if mask[0] == "<":
        picked = [part.split()[-1] for part in mask[1:-1].split(",")]
    else:
        number = re.search(r"i32 (\d+)\)", mask)
        picked = [number[1] if number else "poison"] * int(shuffle["lanes"])
    return [int(lane) if lane.isdigit() else None for lane in picked]


def _functions(text: str) -> Iterator[list[str]]:
    """The lines of a text: each function's together, the others one by one."""
    function: list[str] | None = None
    for line in text.split("\n"):
        if line.startswith("define "):
            function = []
        if function is None:
            yield [line]
            continue
        function.append(line)
        if line == "}":
            yield function
            function = None


def _operations(text: str) -> set[str]:
    """The functions of a text that may be operations between threads.

    These call the simulator by a pointer, themselves or through others. Functions only declared are the C library's.
    """
    calls: dict[str, set[str]] = {}
    found: set[str] = set()
    for lines in _functions(text):
        if not (head := _DEFINED.match(lines[0])) or _OWN_CALL.match(head["name"]):
            continue
        made = [call["callee"] for line in lines if (call := _CALL.match(line))]
        calls[head["name"]] = {name for name in made if name is not None}
        if None in made:
            found.add(head["name"])
    while True:
        more = {name for name, called in calls.items() if name not in found and called & found}
        if not more:
            return found
        found |= more


def with_lanes(text: str) -> str:
    """LLVM's text of a library for the simulator, in which accesses to vectors are reported by their components."""
    operations = _operations(text)
    result: list[str] = []
    for lines in _functions(text):
        watched = any("@__sanitizer_cov_trace_pc_guard(" in line for line in lines[1:])
        result += _Function(lines, operations).edited() if watched else lines
    return "\n".join(result)
