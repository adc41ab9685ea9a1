"""The verification levels, and the kernel variants that pass each.

PYTHONPATH=tests python -m verification.levels            each variant and the levels that it passes
PYTHONPATH=tests python -m verification.levels --write    the table in docs/verification.md
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from helpers.variants import planned_launches

import mlx_mittens as mm
from mlx_mittens import _ext, frontend, specs
from mlx_mittens.apple import kernels
from mlx_mittens.frontend.check import dialect
from mlx_mittens.frontend.errors import NOTE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verification.md"
SPILLS = Path(__file__).parent / "agx_spills.txt"
TABLE = PAGE.parents[1] / "bench" / "results" / "agx.md"
REGISTERS = TABLE.with_name("registers.md")
_LINK_TO_REGISTERS = "[`bench/results/registers.md`](../bench/results/registers.md)"


def variants(files: Iterable[str] | None = None) -> list[str]:
    """Every variant there is, or that files have, as ``file:kernel``."""
    files = frontend.files() if files is None else files
    return [f"{file}:{variant.name}" for file in files for variant in frontend.variants(file)]


@dataclass(frozen=True)
class Level:
    """One kind of proof.

    Attributes:
        name: As the documentation has it.
        shows: The property that it proves of a variant.
        verified: Runs the check; returns the variants that pass.
        missing: The reason that it cannot be done here, or an empty string.
        concerned: The variants that are to pass: all, only the ones that NVIDIA's plans launch, or that Mesa compiles.
    """

    name: str
    shows: str
    verified: Callable[[], set[str]]
    missing: Callable[[], str] = lambda: ""
    concerned: Callable[[], list[str]] = variants


def _compiled() -> set[str]:
    names = set()
    for file in frontend.files():
        frontend.simulator_library(file)  # raises if one variant does not compile
        names |= {f"{file}:{variant.name}" for variant in frontend.variants(file)}
    return names


def _options(file: str) -> dialect.Options:
    return dialect.Options(standard="metal4.0" if frontend.is_for_matrix_units(file) else "metal3.1")


def _in_dialect() -> set[str]:
    problems = {file: dialect.check(file, _options(file)) for file in frontend.files()}
    print(*itertools.chain(*problems.values()), sep="\n")  # pytest shows it where variants are left behind
    sound = [file for file, found in problems.items() if all(problem.severity == NOTE for problem in found)]
    return {name for name in variants() if name.partition(":")[0] in sound}


def _simulated() -> set[str]:
    """Launched in this process, by an op, with the watcher on."""
    _recorded()  # simulates a run for each
    return set(_ext.launched_kernels()) & set(variants())


def _with_most_threads(op: specs.Op, dtype: mx.Dtype) -> Iterator[specs.Case]:
    """Cases for which plans of an op launch as many threads as they ever do: rows that just fit a kernel."""
    pack = 16 // dtype.size
    if op.name == "gather_sum":
        for options in {str(case.options): case.options for case in op.tests}.values():
            yield specs.Case("test", (1, 16, 16, 64, 6), options)  # a simdgroup for each expert
    elif op.name == "mixture":
        for options in {str(case.options): case.options for case in op.tests}.values():
            chosen = 16 - (options.get("parts", op.options["parts"]) == "shared")
            yield specs.Case("test", (1, chosen, 16, 64, 64), {**options, "k": chosen})  # a simdgroup for each
    elif op.name == "gated_delta_token":
        yield specs.Case("test", (1, 4, 2, 4, 128, 128))
        yield specs.Case("test", (1, 4, 2, 2, 128, 128), {"per_column": True, "gate": "sigmoid"})
    elif op.name == "ssm_token":
        yield specs.Case("test", (1, 4, 1, 4, 128, 128))
    elif op.name == "qk_norm":
        yield specs.Case("test", (1, 2048 * pack))
    elif isinstance(op, specs.RowOp):
        for packs, vjp in itertools.product((512, 1024, 2048), (False, True)):
            yield specs.Case("test", (1, packs * pack), vjp=vjp)
            if op.name == "norm_add_norm" and not vjp:
                yield specs.Case("test", (1, packs * pack), {"clip_sum": True})


def _most_threads() -> dict[str, int]:
    """For each variant of ops on rows, the threads of the largest threadgroup in the launches of cases, as planned."""
    rng = np.random.default_rng(0)
    most: dict[str, int] = {}
    others = [specs.get(name) for name in ("sample", "gather_sum", "mixture", "gated_delta_token", "ssm_token")]
    for op, dtype in itertools.product((*specs.ROW_OPS, *others), specs.DTYPES.values()):
        for case in (*op.checks(), *_with_most_threads(op, dtype)):
            arrays, cotangents = op.draw(rng, case, dtype), op.cotangents(rng, case, dtype)
            with mm.strict():
                launches = planned_launches(lambda: specs.run(op, op.ours, case, arrays, cotangents), case.gpu)
            for launch in launches:
                name = f"{launch['file']}:{launch['kernel']}"
                most[name] = max(most.get(name, 0), math.prod(launch["threads"]))
    return most


def idle_threads() -> dict[str, str]:
    """Variants of Apple's plans that declare more than 256 threads, and more than they are ever launched with.

    The declaration costs each thread registers on Apple's GPUs, but up to 256 threads, which leave a thread all that it
    can have. A launch with more threads than declared is a fault.
    """
    _simulated()
    most, files = _most_threads(), [*kernels.for_apple(), *filter(frontend.is_for_matrix_units, frontend.files())]
    launched = {
        name: (max(threads, most.get(name, 0)), declared)
        for name, (threads, declared) in _ext.launched_kernels().items()
        if name.partition(":")[0] in files
    }
    return {
        name: f"{threads} launched, {declared} declared"
        for name, (threads, declared) in launched.items()
        if declared > 256 and threads < declared
    }


@dataclass(frozen=True)
class Usage:
    """Resources of a kernel on an NVIDIA GPU, by bench/results/registers.md: registers of a thread, others in bytes."""

    registers: int
    spills: int
    stack: int
    shared: int


@functools.cache
def usages(arch: str) -> dict[str, Usage]:
    """Of every variant, by the name of its entry; test_ptx holds the file to the kernels as they are."""
    lines = [line for line in REGISTERS.read_text().splitlines() if line.startswith("| ")]
    headings, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    found = {}
    for cells in rows:
        row = dict(zip(headings, cells, strict=True))
        spills = sum(map(int, row[f"{arch} spills"].split(" + ")))
        registers, stack = (int(row[f"{arch} {figure}"]) for figure in ("registers", "stack"))
        found[row["kernel"]] = Usage(registers, spills, stack, int(row["shared"]))
    return found


def _assembled(arch: str) -> set[str]:
    return {name for name in _for_nvidia() if frontend.entry_name(name.partition(":")[2]) in usages(arch)}


def _for_nvidia() -> list[str]:
    return variants(kernels.for_nvidia())


@functools.cache
def machine_code_rows() -> dict[str, dict[str, str]]:
    """The rows of bench/results/agx.md for our kernels; its test holds the file to the kernels as they are."""
    files = {name.partition(":")[2]: name for name in variants()}
    text = TABLE.read_text()
    lines = text[text.index("## Ours") : text.index("## MLX's")].splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {files.get(row[0], row[0]): dict(zip(cells[0], row)) for row in cells[1:]}


def spilling() -> set[str]:
    """The variants that spill registers, among the ones that Apple's plans launch."""
    files = kernels.for_apple()
    return {
        name for name, row in machine_code_rows().items() if row["spills"] != "0" and name.partition(":")[0] in files
    }


def listed(file: Path) -> set[str]:
    """The lines of a list, without its comments."""
    return {line for line in file.read_text().splitlines() if line and not line.startswith("#")}


def known_to_spill() -> set[str]:
    """Variants that are known to spill, and are to be mended."""
    return listed(SPILLS)


def _with_machine_code() -> list[str]:
    return variants(kernels.with_machine_code())


def _machine_code() -> set[str]:
    compiled = {name for name, row in machine_code_rows().items() if row["half registers"].isdecimal()}
    return compiled - (spilling() - known_to_spill())


def _recorded() -> set[str]:
    from helpers.macos_recording import recorded_kernels

    return set(recorded_kernels())


LEVELS = (
    Level("front end", "clang with Metal's address spaces accepts and compiles it", _compiled),
    Level("dialect", "it uses nothing that Apple's compiler would refuse", _in_dialect),
    Level("simulator", "launched by an op, it is right against float64, and the watcher sees no fault", _simulated),
    *(
        Level(
            f"PTX {arch}",
            f"its PTX assembles for {arch}: registers and spills in {_LINK_TO_REGISTERS}",
            lambda arch=arch: _assembled(arch),
            concerned=_for_nvidia,
        )
        for arch in ("sm_80", "sm_90")
    ),
    Level(
        "Apple machine code",
        "Mesa's compiler makes machine code of it; only the variants in `agx_spills.txt` spill registers",
        _machine_code,
        concerned=_with_machine_code,
    ),
    Level(
        "macOS host",
        "the macOS code launches it on a recording device, and the simulator runs what was recorded",
        _recorded,
    ),
)

# Levels that need a machine that is not here; bench/results has their results.
ELSEWHERE = (
    ("GPU", "on an NVIDIA GPU it is right, and clean under compute-sanitizer", "`bench/results`"),
    ("Mac", "`mlx-mittens doctor` passes on an Apple GPU", "**no: no Mac has run this yet**"),
)


def verify() -> Iterator[tuple[Level, set[str]]]:
    """Each level that can be run here, and the variants that pass."""
    for level in LEVELS:
        if not level.missing():
            yield level, level.verified()


def markdown(verified: dict[str, set[str]]) -> str:
    """The table of the documentation."""
    every = len(variants())
    lines = ["| level | what it shows of a variant | variants |", "|---|---|---|"]
    for level in LEVELS:
        have, count = len(verified.get(level.name, ())), len(level.concerned())
        those = {every: "", len(_with_machine_code()): " without tensors of Metal 4"}.get(
            count, " that NVIDIA's plans may launch"
        )
        passed = f"all {count}" if have == count else f"{have} of {count}"
        lines.append(f"| {level.name} | {level.shows} | {passed}{those} |")
    lines += [f"| {name} | {shows} | {where} |" for name, shows, where in ELSEWHERE]
    return "\n".join(lines)


def in_docs() -> str | None:
    """The table as docs/verification.md has it."""
    found = re.search(r"<!-- levels -->\n(.*?)\n<!-- /levels -->", PAGE.read_text(), re.S)
    return found[1] if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into docs/verification.md")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    verified = {level.name: have for level, have in verify()}
    for name in variants():
        print(name + ": " + ", ".join(level for level, have in verified.items() if name in have))
    for level in LEVELS:
        if level.missing():
            print(f"{level.name}: not run here: {level.missing()}")
    if arguments.write:
        old = in_docs()
        PAGE.write_text(PAGE.read_text().replace(old, markdown(verified)))
    return 0 if all(verified[level.name] >= set(level.concerned()) for level in LEVELS if level.name in verified) else 1


if __name__ == "__main__":
    sys.exit(main())
