"""Writes bench/results/registers.md: what every kernel takes on NVIDIA GPUs, as ptxas says it. Needs no GPU."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

from mlx_mittens.frontend import compiler, ptxas

TABLE = Path(__file__).parent / "results" / "registers.md"
ARCHITECTURES = ("sm_80", "sm_90")


def table() -> str:
    """The table, and what it was made with."""
    texts = ptxas.all_ptx()
    usages = {arch: ptxas.assemble(texts, arch) for arch in ARCHITECTURES}
    version = subprocess.run([ptxas.find(), "--version"], capture_output=True, text=True).stdout
    release = re.search(r"V([\d.]+)", version)
    lines = [
        "# Registers and memory of every kernel on NVIDIA GPUs",
        "",
        f"Made by `python bench/registers.py` with {compiler.find_compiler().identity},",
        f"ptxas {release[1] if release else '?'}.",
        "Registers of a thread; spills (bytes stored, bytes loaded) and shared memory in bytes.",
        "",
        "| kernel | " + " | ".join(f"{arch} registers | spills" for arch in ARCHITECTURES) + " | shared |",
        "|---|" + "--:|--:|" * len(ARCHITECTURES) + "--:|",
    ]
    for name in sorted(texts):
        here = [usages[arch][name] for arch in ARCHITECTURES]
        cells = [f"{usage.registers} | {usage.spill_stores} + {usage.spill_loads}" for usage in here]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {here[-1].shared} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table())
    print(f"{TABLE}: written")


if __name__ == "__main__":
    main()
