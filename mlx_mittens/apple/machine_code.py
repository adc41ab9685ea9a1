"""The machine code of kernels for Apple GPUs, by Mesa's compiler: registers, spills, and instructions by basic block.

A kernel goes through the front end's clang to SPIR-V, and through Mesa's `asahi_clc` to the machine code of the M1 and
M2 (G13, G14). Apple's own compiler makes other code of it. What both agree on, about, is how many registers a kernel
needs and its instructions by kind; comparisons are of kernels that went through the same compiler.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .. import frontend
from ..frontend import CompileError, cache
from ..frontend.lower import spirv_module
from . import agx_compiler, shipped

NOT_COMPILED = "not compiled"  # the mark of a kernel without machine code in tables and texts
KINDS = ("float", "integer", "complex", "simd", "matrix", "load", "store", "control")

_OPCODES = {
    "float": "fadd ffma fmul hadd hfma hmul fcmpsel fcmp",
    # The scheduler's own unit of 32-bit integers, and moves.
    "integer": "iadd icmp icmpsel bitop and andn1 andn2 nand nor not or orn1 orn2 xor xnor mov mov_imm get_sr "
    "get_sr_barrier get_sr_coverage signext swap",
    # One unit of a core, which its four schedulers share.
    "complex": "imad bfi bfeil extr asr intl convert floor ceil trunc roundeven rcp rsqrt srsqrt sin_pt_1 sin_pt_2 "
    "log2 exp2 popcount ffs",
    "simd": "simd_reduce simd_prefix quad_reduce quad_prefix shuffle shuffle_xor shuffle_up shuffle_down quad_shuffle "
    "quad_shuffle_xor quad_shuffle_up quad_shuffle_down ballot quad_ballot icmp_ballot fcmp_ballot icmp_quad_ballot "
    "fcmp_quad_ballot",
    # Bits are reversed in products of matrices alone: see metal/spirv.h.
    "matrix": "bitrev",
    "load": "device_load local_load stack_load texture_load image_load",
    "store": "device_store local_store stack_store uniform_store atomic local_atomic",
    "control": "wait stop trap pop_exec begin_cf break break_if_icmp break_if_fcmp jmp_exec_any jmp_exec_none "
    "jmp_exec_none_after if_icmp if_fcmp else_icmp else_fcmp while_icmp while_fcmp threadgroup_barrier stack_adjust",
}
_KIND = {opcode: kind for kind, opcodes in _OPCODES.items() for opcode in opcodes.split()}
_BARRIER = re.compile(r"\w*(memory|image|device|unknown)_barrier\w*|flush_memory_to_texture")
_MULTIPLIES = 2  # float instructions beside each reversal of bits that stands for a product of matrices

_STATISTICS = re.compile(
    r"shader: \d+ inst, \d+ alu, \d+ fscib, \d+ ic, (?P<code_bytes>\d+) bytes, (?P<registers>\d+) regs, "
    r"(?P<uniforms>\d+) uniforms, (?P<scratch>\d+) scratch, (?P<threads>\d+) threads, \d+ loops, "
    r"(?P<spills>\d+):(?P<fills>\d+) spills:fills"
)
_SHARED = re.compile(r"^shared: (\d+)$", re.M)
_BLOCK = re.compile(r"^block(\d+) \{\n(.*?)^\}([^\n]*)$", re.M | re.S)
_INSTRUCTION = re.compile(r"^ +(?:(?P<results>[^=\n]+?) = )?(?P<opcode>[a-z]\w*)", re.M)
_ADDRESS = re.compile(r"#[0-9a-f]{10,}\b")  # of a branch's target in the compiler's own memory
_FAILED_PARSE = re.compile(r"SPIR-V parsing FAILED:\n(.*)", re.S)


class MesaError(CompileError):
    """A kernel that Mesa's compiler refused, with its words."""


@dataclass(frozen=True)
class Block:
    """Instructions that run one after another, without a branch between.

    Attributes:
        label: As in the text of the machine code, such as ``block7``.
        loop: The innermost loop that it is in, as an index of `MachineCode.loops`; None outside of loops.
        depth: How many loops it is in.
        opcodes: How many instructions there are of each opcode. A product of 8x8 matrices is one ``matrix``.
        successors: Labels of the blocks that may follow.
    """

    label: str
    loop: int | None
    depth: int
    opcodes: Mapping[str, int]
    successors: tuple[str, ...] = ()

    @cached_property
    def kinds(self) -> dict[str, int]:
        """How many instructions there are of each of `KINDS`."""
        counts = dict.fromkeys(KINDS, 0)
        for opcode, count in self.opcodes.items():
            counts[kind_of(opcode)] += count
        return counts


@dataclass(frozen=True)
class Loop:
    """A loop of the machine code.

    Attributes:
        header: Label of the block that it begins with.
        parent: The loop around it, as an index of `MachineCode.loops`; None if there is none.
        depth: How many loops its blocks are in at least: 1 of an outermost loop.
        blocks: Labels of all of its blocks, inner loops included.
    """

    header: str
    parent: int | None
    depth: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class MachineCode:
    """Mesa's machine code for one variant.

    Attributes:
        file: The .metal file.
        kernel: The variant.
        half_registers: 16-bit registers of a thread; 256 is all there are.
        threads_a_core: Threads that fit a core's registers: 1024 up to 104 half registers, 384 from 233 on.
        spills: Instructions that write a thread's own memory: registers that there is no room for, and arrays that an
            index chooses from.
        fills: Instructions that read it.
        scratch_bytes: How much of its own memory a thread takes, at most: Mesa may count an array more than once.
        threadgroup_bytes: Threadgroup memory of a threadgroup; memory that a host adds is taken as 32 KB.
        uniform_registers: 16-bit registers that all threads share.
        threads: Threads of the threadgroup that it was compiled for.
        code_bytes: Length of the code; the instruction cache of a core has 12 KB.
        blocks: Its basic blocks in order, without the preamble.
        loops: Its loops in the order of their first blocks: an outer one comes before those in it.
        preamble: Opcodes of the code that runs once for a launch, ahead of all threads.
        text: The machine code, disassembled; empty where it is the package's own record of a kernel.
    """

    file: str
    kernel: str
    half_registers: int
    threads_a_core: int
    spills: int
    fills: int
    scratch_bytes: int
    threadgroup_bytes: int
    uniform_registers: int
    threads: int
    code_bytes: int
    blocks: tuple[Block, ...]
    loops: tuple[Loop, ...]
    preamble: Mapping[str, int]
    text: str = field(repr=False)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Instructions of the text by kind; a loop counts once."""
        return {kind: sum(block.kinds[kind] for block in self.blocks) for kind in KINDS}

    @property
    def instructions(self) -> int:
        """Instructions of the text; a loop counts once."""
        return sum(self.kinds.values())

    def executed(self, trips: Mapping[int, float]) -> dict[str, float]:
        """Opcodes that a thread executes.

        Args:
            trips: How often each loop runs, by its index, each time that it is come to. 1 where it is not given.
        """
        counts: dict[str, float] = {}
        for block in self.blocks:
            times, loop = 1.0, block.loop
            while loop is not None:
                times *= trips.get(loop, 1)
                loop = self.loops[loop].parent
            for opcode, count in block.opcodes.items():
                counts[opcode] = counts.get(opcode, 0) + times * count
        return counts


_NUMBERS = (
    *("half_registers", "threads_a_core", "spills", "fills", "scratch_bytes", "threadgroup_bytes"),
    *("uniform_registers", "threads", "code_bytes"),
)


def packed(code: MachineCode, opcodes: dict[str, int]) -> shipped.Packed:
    """Machine code as plain lists, without its text. Opcodes become numbers, and new ones get the next."""
    number = lambda opcode: opcodes.setdefault(opcode, len(opcodes))
    flat = lambda counts: [n for opcode, count in counts.items() for n in (number(opcode), count)]
    places = {block.label: i for i, block in enumerate(code.blocks)}
    blocks = [
        [block.loop, block.depth, flat(block.opcodes), [places[label] for label in block.successors]]
        for block in code.blocks
    ]
    loops = [
        [places[loop.header], loop.parent, loop.depth, [places[label] for label in loop.blocks]] for loop in code.loops
    ]
    return [[getattr(code, name) for name in _NUMBERS], blocks, loops, flat(code.preamble)]


def unpacked(file: str, kernel: str, packed: shipped.Packed, opcodes: list[str]) -> MachineCode:
    """The machine code that was packed."""
    numbers, blocks, loops, preamble = packed
    counts = lambda flat: {opcodes[number]: count for number, count in zip(flat[::2], flat[1::2])}
    label = "block{}".format
    return MachineCode(
        file=file,
        kernel=kernel,
        **dict(zip(_NUMBERS, numbers, strict=True)),
        blocks=tuple(
            Block(label(i), loop, depth, counts(flat), tuple(map(label, successors)))
            for i, (loop, depth, flat, successors) in enumerate(blocks)
        ),
        loops=tuple(
            Loop(label(header), parent, depth, tuple(map(label, inside))) for header, parent, depth, inside in loops
        ),
        preamble=counts(preamble),
        text="",
    )


def kind_of(opcode: str) -> str:
    """The kind of an opcode, one of `KINDS`.

    Raises:
        KeyError: It is not known.
    """
    if opcode == "matrix":
        return "matrix"
    if opcode not in _KIND and _BARRIER.fullmatch(opcode):
        return "control"
    return _KIND[opcode]


def compile(
    file: str, kernel: str, threads: int | None = None, constants: dict[int, object] | None = None
) -> MachineCode:
    """Compiles one variant, or takes it from the cache; without Mesa's compiler from the package, if it has it.

    The package has kernels of its own, compiled for as many threads as they declare.

    Args:
        file: One of `mlx_mittens.frontend.files()`, or a registered source.
        kernel: The name of a variant.
        threads: Of a threadgroup. All must fit a core at once, which bounds the registers of each. None: as
            many as the kernel declares; where it declares none, so few that they bound nothing.
        constants: Values of function constants, by index.

    Raises:
        CompileError: clang refuses the kernel.
        MesaError: Mesa refuses it.
        RuntimeError: There is no clang, or no Mesa compiler; the message says how to get it.
        KeyError: The file has no such kernel.
    """
    if agx_compiler.problem() and not constants and (packed := shipped.find(file, kernel)):
        return unpacked(file, kernel, packed, shipped.opcodes())
    program = agx_compiler.find()
    module = frontend.spirv(file, kernel, threads, constants)

    def make(path: Path) -> None:
        text = _run(program, module, file, kernel)
        path.write_bytes(gzip.compress(text.encode(), 6, mtime=0))

    name = cache.key(module.name, agx_compiler.identity(program))
    done = cache.cached(f"{module.name[:60]}-{name}.agx.gz", make)
    threads_compiled = spirv_module.threads_of(module.read_bytes())
    return _parsed(gzip.decompress(done.read_bytes()).decode(), file, kernel, threads_compiled)


@dataclass(frozen=True)
class Request:
    """The kernel that `compile` is to compile; the constants as pairs."""

    file: str
    kernel: str
    threads: int | None = None
    constants: tuple[tuple[int, object], ...] = ()


def compile_all(requests: Iterable[Request]) -> Iterator[tuple[Request, MachineCode | CompileError]]:
    """Compiles variants on all processors; yields each with its machine code, or with why there is none."""

    def one(request: Request) -> tuple[Request, MachineCode | CompileError]:
        try:
            return request, compile(request.file, request.kernel, request.threads, dict(request.constants))
        except CompileError as error:
            return request, error

    agx_compiler.find()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(one, requests)


def _run(program: Path, module: Path, file: str, kernel: str) -> str:
    """Statistics and machine code, as the compiler prints them."""
    settings = {
        "AGX_MESA_DEBUG": "shaders,shaderdb,internal,novalidate",
        "NIR_DEBUG": "novalidate",
        "MESA_SHADER_CACHE_DISABLE": "true",
    }
    done = subprocess.run(
        [program, module, os.devnull, os.devnull], env=os.environ | settings, capture_output=True, text=True
    )
    if done.returncode or not _STATISTICS.search(done.stderr):
        raise MesaError(file, kernel, _message(done))
    return f"{done.stderr}\n{_ADDRESS.sub('#', done.stdout)}"


def _message(done: subprocess.CompletedProcess[str]) -> str:
    """Mesa's words for a kernel that it does not compile."""
    failed = _FAILED_PARSE.search(done.stderr)
    words = failed[1] if failed else done.stderr
    lines = [line.strip() for line in words.splitlines() if line.strip() and "SHADER-DB" not in line]
    if done.returncode < 0:
        lines.append(f"asahi_clc ended by {signal.Signals(-done.returncode).name}")
    elif not lines:
        lines.append(f"asahi_clc printed no machine code (status {done.returncode})")
    return "error: Mesa refuses it: " + "\n".join(lines[:8])


def _opcodes(text: str) -> dict[str, int]:
    counts = Counter(match["opcode"] for match in _INSTRUCTION.finditer(text))
    products = counts.pop("bitrev", 0)
    if products:
        counts["matrix"] = products
        rest = _MULTIPLIES * products
        for opcode in ("ffma", "fmul", "fadd"):  # fmul where the product is added to zero
            taken = min(rest, counts[opcode])
            counts[opcode] -= taken
            rest -= taken
    return {opcode: count for opcode, count in sorted(counts.items()) if count}


def _parsed(text: str, file: str, kernel: str, threads: int) -> MachineCode:
    statistics = _STATISTICS.search(text)
    shared = _SHARED.search(text)
    assert statistics is not None, f"no statistics of {kernel}"
    parts = re.split(r"^(preamble|main):\n", text, flags=re.M)
    codes = dict(zip(parts[1::2], parts[2::2]))
    found = [(int(number), body, after) for number, body, after in _BLOCK.findall(codes["main"])]
    position = {number: i for i, (number, _, _) in enumerate(found)}
    # A branch back to a block is the end of a loop; blocks stand in the order of the source, so a loop is a range.
    last: dict[int, int] = {}
    for i, (_, _, after) in enumerate(found):
        for target in re.findall(r"block(\d+)", after.partition(" from")[0]):
            first = position[int(target)]
            if first <= i:
                last[first] = max(last.get(first, 0), i)
    ranges = sorted(last.items(), key=lambda ends: (ends[0], -ends[1]))

    def innermost(first: int, end: int, among: list[tuple[int, int]]) -> int | None:
        around = [i for i, (begin, close) in enumerate(among) if begin <= first and end <= close]
        return around[-1] if around else None

    loops: list[Loop] = []
    for i, (first, end) in enumerate(ranges):
        parent = innermost(first, end, ranges[:i])
        labels = tuple(f"block{found[j][0]}" for j in range(first, end + 1))
        loops.append(Loop(labels[0], parent, 1 if parent is None else loops[parent].depth + 1, labels))
    blocks = []
    for i, (number, body, after) in enumerate(found):
        loop = innermost(i, i, ranges)
        depth = 0 if loop is None else loops[loop].depth
        successors = tuple(re.findall(r"block\d+", after.partition(" from")[0]))
        blocks.append(Block(f"block{number}", loop, depth, _opcodes(body), successors))
    return MachineCode(
        file=file,
        kernel=kernel,
        half_registers=int(statistics["registers"]),
        threads_a_core=int(statistics["threads"]),
        spills=int(statistics["spills"]),
        fills=int(statistics["fills"]),
        scratch_bytes=int(statistics["scratch"]),
        threadgroup_bytes=int(shared[1]) if shared else 0,
        uniform_registers=int(statistics["uniforms"]),
        threads=threads,
        code_bytes=int(statistics["code_bytes"]),
        blocks=tuple(blocks),
        loops=tuple(loops),
        preamble=_opcodes(codes.get("preamble", "")),
        text=codes["main"].strip() + "\n",
    )
