"""Writes bench/results/registers.md: what every kernel takes on NVIDIA GPUs, as ptxas says it. Needs no GPU."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from mlx_mittens import frontend
from mlx_mittens.apple import kernels as files
from mlx_mittens.bench import kernel_digest
from mlx_mittens.frontend import compiler, ptxas

TABLE = Path(__file__).parent / "results" / "registers.md"
ARCHITECTURES = ("sm_80", "sm_90")


def sources() -> str:
    """A digest of our kernels and of the code that translates them."""
    return kernel_digest.digest()


def made_with() -> str:
    """The line of the file that names the compilers."""
    version = subprocess.run([str(ptxas.find()), "--version"], capture_output=True, text=True).stdout
    release = re.search(r"V([\d.]+)", version)
    return f"{compiler.find_compiler().identity}, ptxas {release[1] if release else '?'}."


def kernels() -> list[tuple[str, str]]:
    """The file and the name of every variant that is compiled to PTX, by name."""
    found = [(file, variant.name) for file in files.for_nvidia() for variant in frontend.variants(file)]
    return sorted(found, key=lambda kernel: kernel[1])


def rows(kernels: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of a table, one a kernel. Pass whole files: clang's code depends a little on its neighbours in a file."""
    kernels = list(kernels)
    texts = {frontend.entry_name(name): text for (_, name), text in frontend.all_ptx(kernels).items()}
    usages = {arch: ptxas.assemble(texts, arch) for arch in ARCHITECTURES}
    headings = [f"{arch} {figure}" for arch in ARCHITECTURES for figure in ("registers", "spills", "stack")]
    lines = [f"| kernel | {' | '.join(headings)} | shared |", "|---|" + "--:|" * (len(headings) + 1)]
    for name in (frontend.entry_name(name) for _, name in kernels):
        here = [usages[arch][name] for arch in ARCHITECTURES]
        cells = [f"{usage.registers} | {usage.spill_stores} + {usage.spill_loads} | {usage.stack}" for usage in here]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {here[-1].shared} |")
    return lines


def table() -> str:
    """The table, and the versions that made it."""
    lines = [
        "# Registers and memory of every kernel on NVIDIA GPUs",
        "",
        f"Made by `python bench/registers.py` with {made_with()} Of sources `{sources()}`.",
        "Registers of a thread; spills (bytes stored + bytes loaded), the stack and shared memory in bytes.",
        "",
        *rows(kernels()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table())
    print(f"{TABLE}: written")


if __name__ == "__main__":
    main()
