"""Registers: what kernels take of an Apple GPU: registers, threads a core, spills, instructions and loops."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .. import frontend, table
from ..apple import agx_compiler, kernels, machine_code
from ..apple.machine_code import MachineCode, Request
from ..frontend import CompileError
from ..nearest import suggestion
from .completion import offer
from .options import UsageError, listed, registered
from .runs import quiet_steps

_NEAREST = 3  # kernels that are suggested for a name that none has

COLUMNS = (
    *(table.Column("file", left=True), table.Column("kernel", left=True), table.Column("regs")),
    *(table.Column("threads"), table.Column("spills"), table.Column("fills", rank=2), table.Column("total", rank=1)),
    *(table.Column(kind, rank=4 + i) for i, kind in enumerate(machine_code.KINDS)),
    table.Column("loops", rank=3),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of = parser.add_argument(
        "of", nargs="?", metavar="FILE|OP", help="a .metal file, or an op (all of the package's kernels)"
    )
    offer(of, lambda _: [*kernels.FILES, *frontend.files()])
    parser.add_argument("--kernel", metavar="NAME", help="only kernels with NAME in their name")
    parser.add_argument("--peer", choices=("metal",), help="MLX's own Metal kernels instead")
    parser.add_argument(
        "--constant", action="append", metavar="NAME=VALUE", help="value of a function constant; once for each"
    )
    parser.add_argument("--disassemble", action="store_true", help="print the machine code")


@dataclass(frozen=True)
class Row:
    """A line of the table: a kernel, and its machine code or why there is none."""

    file: str
    kernel: str
    code: MachineCode | CompileError

    @property
    def cells(self) -> list[str]:
        code = self.code
        if isinstance(code, CompileError):
            return [self.file, self.kernel, machine_code.NOT_COMPILED, *[""] * (len(COLUMNS) - 3)]
        counts = [code.half_registers, code.threads_a_core, code.spills, code.fills, code.instructions]
        counts += [code.kinds[kind] for kind in machine_code.KINDS]
        return [self.file, self.kernel, *map(str, counts), str(len(code.loops))]


def rows(requests: Iterable[Request]) -> list[Row]:
    """Compiles kernels, on all processors."""
    asked = list(requests)
    found = []
    with quiet_steps(len(asked)) as step:
        for request, code in machine_code.compile_all(asked):
            found.append(Row(request.file, request.kernel, code))
            step(request.kernel)
    return found


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; 0 if all kernels are compiled, else 1."""
    _check_name(arguments.of, arguments.peer is not None)
    if problem := frontend.compiler_problem():
        raise UsageError(problem)
    requests = _of_mlx(arguments.of) if arguments.peer else _ours(arguments.of)
    if not requests:
        raise UsageError(
            f"{arguments.of} has no kernel: expected functions marked kernel, or [[host_name]]s of templates"
        )
    if problem := agx_compiler.problem():
        raise UsageError(problem)
    if arguments.kernel:
        requests = _named(arguments.kernel, requests)
    requests = _with_constants(requests, arguments.constant or [])
    unknown = {id(request): missing for request in requests if (missing := _missing_constants(request))}
    done = rows(request for request in requests if id(request) not in unknown)
    done = [
        Row(request.file, request.kernel, unknown[id(request)]) if id(request) in unknown else done.pop(0)
        for request in requests
    ]
    if arguments.disassemble:
        for row in done:
            if isinstance(row.code, MachineCode):
                print(f"{row.file}: {row.kernel}\n{row.code.text}")
    table.show(COLUMNS, [row.cells for row in done], [_style(row) for row in done])
    if len(done) == 1 and isinstance(done[0].code, MachineCode):
        _print_loops(done[0].code)
    failed = [row.code for row in done if isinstance(row.code, CompileError)]
    for error in failed:
        print(f"\n{error}", file=sys.stderr)
    return 1 if failed else 0


def _style(row: Row) -> str:
    """Red where nothing was compiled, yellow where registers are spilled."""
    if isinstance(row.code, CompileError):
        return "31"
    return "33" if row.code.spills else ""


def _print_loops(code: MachineCode) -> None:
    """The instructions of each loop, without the loops in it."""
    lines = [["", "begins at", "in loop", "depth", *machine_code.KINDS]]
    for number, loop in enumerate(code.loops):
        own = [block for block in code.blocks if block.loop == number]
        counts = [str(sum(block.kinds[kind] for block in own)) for kind in machine_code.KINDS]
        lines.append(
            [f"loop {number}", loop.header, "" if loop.parent is None else str(loop.parent), str(loop.depth), *counts]
        )
    outside = [block for block in code.blocks if block.loop is None]
    counts = [str(sum(block.kinds[kind] for block in outside)) for kind in machine_code.KINDS]
    lines.append(["no loop", "", "", "0", *counts])
    print(f"\n{table.aligned(lines, left=2)}")
    print(
        f"\n{code.scratch_bytes} bytes of scratch memory a thread, {code.threadgroup_bytes} of threadgroup memory, "
        f"{code.uniform_registers} uniform half registers, {code.code_bytes} bytes of code"
    )


def _check_name(of: str | None, peer: bool) -> None:
    """Refuses a name that nothing has, before anything is compiled.

    Raises:
        UsageError: There is no such op or file; the message suggests the nearest.
    """
    if peer:
        from ..peer import mlx_instances

        if of is not None and of not in mlx_instances.ops():
            raise UsageError(f"--peer metal knows no kernel of MLX's for {of!r}; {listed(of, mlx_instances.ops())}")
    elif of is not None and not kernels.files_of(of) and of not in frontend.files() and not os.path.exists(of):
        if of.endswith(".metal"):
            raise UsageError(f"there is no file {of}{suggestion(of, frontend.files())}")
        raise UsageError(f"{of} is neither a .metal file nor an op; {listed(of, kernels.FILES)}")


# The form of a function constant's value, by the beginning of its type's name.
_VALUES = {
    "bool": r"true|false|0|1",
    "float": r"-?\d+(\.\d*)?(e[+-]?\d+)?f?",
    "half": r"-?\d+(\.\d*)?(e[+-]?\d+)?h?",
    "bfloat": r"-?\d+(\.\d*)?(e[+-]?\d+)?",
    "u": r"\d+u?",
}
_INTEGER = r"-?\d+"


def _with_constants(requests: Sequence[Request], given: Sequence[str]) -> list[Request]:
    """Kernels with the values of function constants that the command line gives.

    Raises:
        UsageError: There is no such constant, or its type has no such value.
    """
    if not given:
        return list(requests)
    values: dict[str, str] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"--constant {text}: expected NAME=VALUE, such as width=64")
        values[name] = value
    declared: dict[str, str] = {}
    found = []
    for request in requests:
        constants = dict(request.constants)
        for name, (index, kind) in frontend.translate(request.file).function_constants.items():
            declared[name] = kind
            if name in values:
                constants[index] = values[name]
        found.append(replace(request, constants=tuple(sorted(constants.items()))))
    for name, value in values.items():
        if name not in declared:
            raise UsageError(f"--constant {name}: no kernel has such a function constant; {listed(name, [*declared])}")
        kind = declared[name].rpartition("::")[2]
        pattern = next((text for start, text in _VALUES.items() if kind.startswith(start)), _INTEGER)
        if not re.fullmatch(pattern, value):
            raise UsageError(f"--constant {name}={value}: {value} is no {kind}")
    return found


def _missing_constants(request: Request) -> CompileError | None:
    """Why a kernel cannot be compiled as its function constants have no values; None where it can.

    Metal makes no pipeline of a kernel that uses a constant without a value. One is used if the kernel is another with
    other values. A constant that the source tests with is_function_constant_defined needs none.
    """
    constants = dict(request.constants)
    translation = frontend.translate(request.file)
    free = {
        name: index
        for name, (index, _) in translation.function_constants.items()
        if index not in constants and not re.search(_ASKED.format(re.escape(name)), frontend.flatten(request.file))
    }
    if not free:
        return None

    def module(values: dict[int, object]) -> bytes | None:
        try:
            return frontend.spirv(request.file, request.kernel, request.threads, constants | values).read_bytes()
        except CompileError:
            return None

    alike = module(dict.fromkeys(free.values(), 1))
    used = [
        name
        for name, index in free.items()
        if alike is None or any(module({**dict.fromkeys(free.values(), 1), index: n}) != alike for n in _OTHERS)
    ]
    if not used:
        return None
    options = " ".join(f"--constant {name}=VALUE" for name in used)
    message = f"error: without values of {', '.join(used)} Metal makes no pipeline of it: give {options}"
    return CompileError(request.file, request.kernel, message)


_ASKED = r"\bis_function_constant_defined\s*\(\s*{}\s*\)"
_OTHERS = (0, 2)  # values beside 1: a loop or an array may allow one and not the other


def _named(part: str, requests: Sequence[Request]) -> list[Request]:
    """Rows of kernels with this in their name.

    Raises:
        UsageError: There are none; the message has the names that are like it.
    """
    found = [request for request in requests if part in request.kernel]
    if not found:
        names = [request.kernel for request in requests]
        near = difflib.get_close_matches(part, names, n=_NEAREST, cutoff=0) or names[:_NEAREST]
        lines = "\n  ".join(near)
        raise UsageError(f"--kernel: none of {len(names)} has {part!r} in its name; the nearest are\n  {lines}")
    return found


def _ours(of: str | None) -> list[Request]:
    try:
        return kernels.requests(_files(of))
    except CompileError as error:
        raise UsageError(str(error)) from None


def _files(of: str | None) -> Sequence[str]:
    """The front end's names of the kernels that an argument asks for."""
    if of is None:
        return frontend.files()
    if files := kernels.files_of(of):
        return files
    if of in frontend.files():
        return [of]
    return [registered(of)]


def _of_mlx(of: str | None) -> list[Request]:
    from ..peer import mlx_instances

    return mlx_instances.requests(of)
