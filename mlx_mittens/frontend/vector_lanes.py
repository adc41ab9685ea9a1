"""Which components of a vector an access is to, in LLVM's text of a kernel for the simulator.

Clang loads a vector whole to read one component, and loads and stores it whole to write one: `v.x = 1` reads what may
never have been written. And it reports no access to a vector of three, whose size is no power of two. Here every call
that reports the load or the store of a vector gets the components that the kernel reads or writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BYTES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8}
_NAME = r'%[\w.$-]+|%"[^"]*"'
_PLACE = rf"(?P<pointer>ptr(?: addrspace\(\d+\))? (?:{_NAME})), align (?P<align>\d+)"
_LOAD = re.compile(rf"^  (?P<name>{_NAME}) = load <(?P<count>\d) x (?P<type>\w+)>, {_PLACE}")
_STORE = re.compile(rf"^  store <(?P<count>\d) x (?P<type>\w+)> .+, {_PLACE}")
_EXTRACT = re.compile(rf"^  (?:{_NAME}) = extractelement <[^>]*> (?P<vector>[^,]+), i\d+ (?P<lane>[^,\s]+)")
_INSERT = re.compile(
    rf"^  (?P<name>{_NAME}) = insertelement <[^>]*> (?P<vector>[^,]+), .+, (?P<type>i\d+) (?P<lane>[^,\s]+)(?:, !.*)?$"
)
_SHUFFLE = re.compile(
    rf"^  (?P<name>{_NAME}) = shufflevector <(?P<count>\d+) x [^>]*> (?P<first>.+), <[^>]*> (?P<second>.+), "
    r"<(?P<lanes>\d+) x i32> (?P<mask><[^>]*>|\w+(?: \(i32 \d+\))?)"
)
_USED = re.compile(_NAME)
_REPORT = re.compile(r"^  call void @__sanitizer_cov_(?:load|store)\d+\(")
_OPERATION = re.compile(r" call (?!void @(?:__sanitizer_cov|__ubsan|llvm\.))")  # perhaps one between threads
_DEBUG = re.compile(r", !dbg !\d+")

Lanes = tuple[int | None, ...]  # of a value, which component of the load each is; None of something else


@dataclass
class _Access:
    """A load or a store of a vector."""

    line: int
    kind: str
    count: int
    bytes: int
    pointer: str
    align: int
    lanes: set[int] | None = None  # of a load those that are read, of a store those that change; None: all
    lane: str | None = None  # of a store the one that changes, where it is computed


class _Function:
    """The lines of a function."""

    def __init__(self, lines: list[str]):
        self.lines = lines
        self.uses: dict[str, list[int]] = {}
        for i, line in enumerate(lines):
            if "#dbg_" not in line:
                for name in set(_USED.findall(line.split(" = ", 1)[-1])):
                    self.uses.setdefault(name, []).append(i)
        self.stores: dict[int, _Access] = {}
        self.loads: dict[int, _Access] = {}
        for i, line in enumerate(lines):
            for pattern, kind, found in ((_LOAD, "load", self.loads), (_STORE, "store", self.stores)):
                match = pattern.match(line)
                if match and match["type"] in _BYTES:
                    size, align = _BYTES[match["type"]], int(match["align"])
                    found[i] = _Access(i, kind, int(match["count"]), size, match["pointer"], align)

    def edited(self) -> list[str]:
        """The lines, with the components in the calls that report accesses."""
        for load in self.loads.values():
            name = _LOAD.match(self.lines[load.line])["name"]  # type: ignore[index]
            self.read: set[int] = set()
            self.kept = False
            self._follow(name, tuple(range(load.count)), load)
            load.lanes = self.read if self.read or self.kept else None
        result: list[str] = []
        for i, line in enumerate(self.lines):
            access = self.loads.get(i) or self.stores.get(i)
            if access is not None:
                self._report(access, result)
            result.append(line)
        return result

    def _follow(self, name: str, lanes: Lanes, load: _Access, computed: str | None = None) -> None:
        """Adds what is read of a load by the uses of a value, some lanes of which are the load's.

        Behind the store of a lane that is computed nothing is known to be read.
        """
        for i in self.uses.get(name, ()):
            line = self.lines[i]
            if i in self.stores and self._is_part_of(load, self.stores[i]) and f"> {name}, ptr" in line:
                self._stored(self.stores[i], lanes, computed)
            elif (match := _INSERT.match(line)) and match["vector"] == name and computed is None:
                if match["lane"].isdigit():
                    rest = tuple(None if k == int(match["lane"]) else lane for k, lane in enumerate(lanes))
                    self._follow(match["name"], rest, load)
                else:
                    self._follow(match["name"], lanes, load, f"{match['type']} {match['lane']}")
            elif computed is not None:
                continue
            elif (match := _EXTRACT.match(line)) and match["lane"].isdigit() and int(match["lane"]) < len(lanes):
                self._add((lanes[int(match["lane"])],))
            elif match := _SHUFFLE.match(line):
                self._follow(match["name"], self._shuffled(match, name, lanes), load)
            else:
                self._add(lanes)

    def _add(self, lanes: Lanes) -> None:
        self.read |= {lane for lane in lanes if lane is not None}

    def _stored(self, store: _Access, lanes: Lanes, computed: str | None) -> None:
        """Components that go back to where they came from are neither read nor written."""
        same = {k for k, lane in enumerate(lanes) if lane == k}
        self._add(tuple(lane for k, lane in enumerate(lanes) if lane != k))
        store.lanes = (set(range(store.count)) if store.lanes is None else store.lanes) - same
        store.lane = computed if not store.lanes else None
        if computed and store.lanes:
            store.lanes = None
        self.kept = True

    def _is_part_of(self, load: _Access, store: _Access) -> bool:
        """Whether a load and a store are of one place, with no operation between threads between."""
        if load.pointer != store.pointer or load.count != store.count or load.line > store.line:
            return False
        return not any(_OPERATION.search(line) for line in self.lines[load.line : store.line])

    @staticmethod
    def _shuffled(match: re.Match[str], name: str, lanes: Lanes) -> Lanes:
        count, mask = int(match["count"]), match["mask"]
        if mask == "zeroinitializer":
            picked: list[str] = ["0"] * int(match["lanes"])
        elif mask[0] == "<":
            picked = [part.split()[-1] for part in mask[1:-1].split(",")]
        else:
            number = re.search(r"i32 (\d+)\)", mask)
            picked = [number[1] if number else "poison"] * int(match["lanes"])
        first = lanes if match["first"] == name else (None,) * count
        second = lanes if match["second"] == name else (None,) * count
        both = (*first, *second)
        return tuple(both[int(k)] if k.isdigit() else None for k in picked)

    def _report(self, access: _Access, result: list[str]) -> None:
        """Replaces the call that reports an access, or adds one."""
        reported = bool(result) and _REPORT.match(result[-1]) is not None and f"({access.pointer})" in result[-1]
        whole = access.lanes is None or access.lanes == set(range(access.count))
        if reported and whole and access.align >= access.count * access.bytes:
            return
        if reported:
            result.pop()
        mask = sum(1 << lane for lane in (range(access.count) if access.lanes is None else access.lanes))
        function, argument = ("mask", f"i32 {mask}") if mask else ("lane", access.lane)
        if argument:
            debug = _DEBUG.search(self.lines[access.line])
            result.append(
                f"  call void @mittens_{access.kind}_{function}({access.pointer}, i32 {access.align}, "
                f"i32 {access.count}, i32 {access.bytes}, {argument}){debug[0] if debug else ''}"
            )


def with_lanes(text: str) -> str:
    """LLVM's text of a library for the simulator, in which accesses to vectors are reported by their components."""
    result: list[str] = []
    function: list[str] | None = None
    for line in text.split("\n"):
        if line.startswith("define "):
            function = []
        if function is None:
            result.append(line)
            continue
        function.append(line)
        if line == "}":
            watched = any("@__sanitizer_cov_trace_pc_guard(" in line for line in function[1:])
            result += _Function(function).edited() if watched else function
            function = None
    return "\n".join(result)
