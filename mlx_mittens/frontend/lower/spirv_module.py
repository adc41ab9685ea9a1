"""LLVM's text of one kernel, made fit for LLVM's SPIR-V backend and for Mesa's compiler behind it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from . import bfloat_lowering

_LIMIT = re.compile(r"^@mittens_max_threads = .*? i32 (\d+),.*\n", re.M)
_USED = re.compile(r"^@llvm\.(compiler\.)?used = .*\n", re.M)
_ENTRY = re.compile(r"^(define .*@mittens_entry\(.*?)( \{)$", re.M)
_FUNCTION = re.compile(r"^define .*?^\}$", re.M | re.S)
_CAST = re.compile(r"^  (%[\w.$-]+) = addrspacecast ptr addrspace\((\d+)\) (%[\w.$-]+) to ptr$", re.M)
_COPY = re.compile(r"@llvm\.memcpy\.p0\.p0\.i64\(ptr ([^,]*?)(%[\w.$-]+), ptr ([^,]*?)(%[\w.$-]+),")

_UNBOUNDED = 32  # threads, with which each may have all the registers that there are


def prepared(text: str, threads: int | None) -> str:
    """The text with the threads of a threadgroup, without bfloat, and with sums of products that may be fused.

    Args:
        text: Of an entry `mittens_entry` and, in `mittens_max_threads`, the most threads that it declares; 0 for none.
        threads: Of a threadgroup, which bound the registers of each. None: as many as it declares.

    Raises:
        UnknownOperation: It has an operation of bfloat that cannot be lowered.
    """
    limit = _LIMIT.search(text)
    if threads is None:
        threads = int(limit[1]) if limit else 0
    text = _USED.sub("", _LIMIT.sub("", text))
    size = f"!reqd_work_group_size !{{i32 {threads or _UNBOUNDED}, i32 1, i32 1}}"
    text = _ENTRY.sub(rf"\1 {size}\2", text)
    text = text.replace("addrspace(4)", "addrspace(2)")  # see MITTENS_CONSTANT
    text = _FUNCTION.sub(lambda match: _in_their_spaces(match[0]), text)
    # Without this the backend forbids Mesa to fuse a multiplication and an addition.
    return bfloat_lowering.lowered(text) + "\n!opencl.enable.FP_CONTRACT = !{}\n"


def _in_their_spaces(function: str) -> str:
    """Copies of whole structs from and to the address spaces that they are in.

    C++ copies a struct through a reference, which has no address space. Pointers without one are to a thread's own
    memory in SPIR-V, so that device memory would not be found.
    """
    origins = {name: (space, origin) for name, space, origin in _CAST.findall(function)}
    if not origins:
        return function

    def copy(match: re.Match[str]) -> str:
        spaces, operands = [], []
        for attributes, name in ((match[1], match[2]), (match[3], match[4])):
            space, origin = origins.get(name, ("0", name))
            spaces.append(space)
            operands.append(f"ptr{f' addrspace({space})' if space != '0' else ''} {attributes}{origin}")
        return f"@llvm.memcpy.p{spaces[0]}.p{spaces[1]}.i64({operands[0]}, {operands[1]},"

    return _COPY.sub(copy, function)


_FIRST_INSTRUCTION = 5  # in words, after the header
_CAST_TO_GENERIC = 121  # OpPtrCastToGeneric
_EXECUTION_MODE, _LOCAL_SIZE = 16, 17  # OpExecutionMode with LocalSize


def _instructions(module: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The opcodes of a SPIR-V module, with their operands."""
    words = struct.unpack(f"<{len(module) // 4}I", module)
    at = _FIRST_INSTRUCTION
    while at < len(words):
        length = words[at] >> 16
        yield words[at] & 0xFFFF, words[at + 1 : at + length]
        at += length


def loses_address_spaces(module: bytes) -> bool:
    """Whether a SPIR-V module reads or writes memory through a pointer whose address space is not known."""
    return any(opcode == _CAST_TO_GENERIC for opcode, _ in _instructions(module))


def threads_of(module: bytes) -> int:
    """The threads of a threadgroup that a SPIR-V module is for."""
    for opcode, operands in _instructions(module):
        if opcode == _EXECUTION_MODE and operands[1] == _LOCAL_SIZE:
            return operands[2]
    raise ValueError("the module does not say its threads")
