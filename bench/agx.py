"""Writes registers and instructions of kernels on Apple GPUs, by Mesa's compiler: a table and a file of the package.

Needs no GPU.
bench/results/agx.md has every kernel of ours and MLX's. mlx_mittens/apple/machine_code.json.xz has the blocks of ours
that Apple's plans launch, for predictions on machines without the compiler.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from mlx_mittens.apple import agx_compiler, kernels, machine_code, shipped
from mlx_mittens.apple.machine_code import MachineCode, Request
from mlx_mittens.bench import kernel_digest
from mlx_mittens.cli import registers
from mlx_mittens.frontend import compiler
from mlx_mittens.peer import mlx_instances

TABLE = Path(__file__).parent / "results" / "agx.md"


def sources() -> str:
    """A digest of our kernels and of the code that translates them."""
    return kernel_digest.digest(agx_compiler.PATCH.read_text())


def made_with() -> str:
    """The line of the file that names the compilers."""
    return f"{compiler.find_compiler().identity}, asahi_clc of Mesa {agx_compiler.version()}."


def ours() -> list[Request]:
    """All variants, those for NVIDIA GPUs alone last."""
    files = kernels.for_apple()
    files += [file for file in kernels.with_machine_code() if file not in files]
    return kernels.requests(files)


def rows(requests: Iterable[Request]) -> list[str]:
    """Lines of a table, one a kernel."""
    headings = ["kernel", "declared threads", "half registers", "threads a core", "spills", "fills"]
    headings += [*machine_code.KINDS, "loops"]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "--:|" * (len(headings) - 1)]
    for row in registers.rows(requests):
        if isinstance(row.code, MachineCode):
            code = row.code
            figures = [code.threads, code.half_registers, code.threads_a_core, code.spills, code.fills]
            figures += [*(code.kinds[kind] for kind in machine_code.KINDS), len(code.loops)]
            lines.append(f"| `{row.kernel}` | {' | '.join(map(str, figures))} |")
        else:
            lines.append(f"| `{row.kernel}` | {machine_code.NOT_COMPILED} |{' |' * (len(headings) - 2)}")
    return lines


def table() -> str:
    """The tables, and the versions that made them."""
    lines = [
        "# Registers and instructions of every kernel on Apple GPUs",
        "",
        f"Made by `python bench/agx.py` with {made_with()} Of sources `{sources()}`.",
        "Mesa's compiler is not Apple's: compare kernels with each other. docs/apple.md says what the columns mean.",
        "Instructions are those of the text, each loop once. For MLX's kernels, which declare no threads, it has those",
        "that MLX launches. Kernels for matrix units, of `matmul/apple/m5/`, are left out: Mesa has no tensors of",
        "Metal 4.",
        "",
        "## Ours",
        "",
        *rows(ours()),
        "",
        "## MLX's",
        "",
        *rows(mlx_instances.requests()),
    ]
    return "\n".join(lines) + "\n"


def shipped_file() -> bytes:
    """The file of the package."""
    opcodes: dict[str, int] = {}
    variants = [
        (request.file, request.kernel, machine_code.packed(code, opcodes))
        for request, code in machine_code.compile_all(kernels.requests(kernels.for_apple()))
        if isinstance(code, MachineCode)
    ]
    return shipped.text_of(variants, list(opcodes), made_with())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table())
    shipped.path().write_bytes(shipped_file())
    print(f"{TABLE} and {shipped.path()}: written")
