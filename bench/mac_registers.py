"""Compares a Mac's figures of every pipeline with the registers that Mesa's compiler gives: doctor.json and agx.md.

``maxTotalThreadsPerThreadgroup`` follows from a kernel's registers: a core of an M1 or M2 has a fixed number of them,
and the more a thread takes the fewer threads fit. So each of the two says a range of the other.

The table is Markdown with the columns ``kernel``, ``half registers`` and ``threads a core``. It may have a column
``declared threads``: the limit that the kernel's source declares, which Metal never exceeds. Others are ignored. A row
of a kernel that Mesa does not compile says so in place of its numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mittens.apple.chips import THREADS_BY_HALF_REGISTERS
from mlx_mittens.apple.machine_code import NOT_COMPILED

TABLE = Path(__file__).parent / "results" / "agx.md"
COLUMNS = ("kernel", "half registers", "threads a core")

THREADS = [threads for _, threads in THREADS_BY_HALF_REGISTERS]
NEWEST_FIXED = 14  # the generation of the M2; later GPUs share registers out as kernels run


@dataclass(frozen=True)
class Code:
    """A kernel as Mesa compiles it: a row of the table."""

    half_registers: int
    threads: int
    declared: int | None = None


@dataclass(frozen=True)
class Comparison:
    """A kernel on both sides.

    Attributes:
        steps: By how many steps of registers the Mac's compiler takes more; None where only the declared limit shows.
    """

    kernel: str
    code: Code
    mac_threads: int
    memory: int
    steps: int | None


def read_table(text: str) -> dict[str, Code | None]:
    """The rows of the first table that has the columns; None of a kernel that is not compiled.

    Raises:
        ValueError: There is none, or a cell is no number.
    """
    columns: list[str] | None = None
    found: dict[str, Code | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if columns is None:
            columns = cells if set(COLUMNS) <= set(cells) else None
        elif not line.lstrip().startswith("|"):
            break
        elif not set("".join(cells)) <= set("-: "):
            row = dict(zip(columns, cells))
            if NOT_COMPILED in cells:
                found[row["kernel"].rpartition(":")[2]] = None
                continue
            try:
                declared = row.get("declared threads", "").replace(",", "")
                code = Code(int(row["half registers"]), int(row["threads a core"]), int(declared) if declared else None)
            except (KeyError, ValueError):
                raise ValueError(f"line {number}: {line.strip()!r}: expected numbers under {COLUMNS[1:]}") from None
            found[row["kernel"].rpartition(":")[2]] = code
    if columns is None:
        raise ValueError(f"no table with the columns {', '.join(COLUMNS)}")
    return found


def registers_of(threads: int) -> str:
    """The half registers with which as many threads fit a core: ``113 to 128``."""
    if threads not in THREADS:
        return ""
    at = THREADS.index(threads)
    first = THREADS_BY_HALF_REGISTERS[at - 1][0] + 1 if at else 1
    return f"{first} to {THREADS_BY_HALF_REGISTERS[at][0]}"


def _step(threads: int) -> int:
    """The step of registers at which at least as many threads fit."""
    return max((at for at, fit in enumerate(THREADS) if fit >= threads), default=0)


def compare(code: Code, mac_threads: int) -> int | None:
    """By how many steps the Mac's compiler takes more registers than Mesa's; None if both reach the declared limit."""
    if code.declared is None or mac_threads < code.declared:
        return _step(mac_threads) - _step(code.threads)
    if code.threads >= code.declared:
        return None
    return _step(mac_threads) - _step(code.threads)  # the Mac reaches the limit, Mesa's code does not


def compare_all(pipelines: list[dict[str, Any]], table: dict[str, Code | None]) -> list[Comparison]:
    """The kernels that both sides have, the largest differences first."""
    found = []
    for pipeline in pipelines:
        code = table.get(pipeline["kernel"] or "")
        threads = pipeline.get("maxTotalThreadsPerThreadgroup")
        if code is None or threads is None:
            continue
        memory = pipeline["staticThreadgroupMemoryLength"]
        found.append(Comparison(pipeline["kernel"], code, threads, memory, compare(code, threads)))
    return sorted(found, key=lambda c: (-abs(c.steps or 0), c.kernel))


def report(doctor: dict[str, Any], table: dict[str, Code | None]) -> str:
    """The comparison as Markdown.

    Raises:
        ValueError: The file has no pipelines, or none that is in the table.
    """
    pipelines = doctor.get("pipelines")
    if not pipelines:
        raise ValueError("no pipelines in it: expected a file that `mlx-mittens doctor --json` wrote on a Mac")
    compared = compare_all(pipelines, table)
    if not compared:
        raise ValueError(f"none of its {len(pipelines)} pipelines is in the table: are both of the same version?")
    steps = Counter(c.steps for c in compared)
    comparable = len(compared) - steps[None]
    near = sum(steps[n] for n in (-1, 0, 1))
    architecture = doctor.get("gpu_architecture") or "unknown"
    lines = [
        "# Registers as a Mac's compiler and as Mesa's give them",
        "",
        f"{doctor.get('gpu')}, {architecture}, {doctor.get('gpu_cores')} cores; {doctor.get('system')}.",
        "",
        f"{len(compared)} kernels are on both sides, of {len(pipelines)} pipelines and {len(table)} rows.",
        f"{comparable} can be compared: {steps[0]} take the same step of registers, {near} the same or the next.",
        f"{sum(n for s, n in steps.items() if s is not None and s > 0)} take more on the Mac, "
        f"{sum(n for s, n in steps.items() if s is not None and s < 0)} take less.",
        f"The other {steps[None]} reach the declared limit on both sides.",
    ]
    missing = sorted({p["kernel"] for p in pipelines if p["kernel"] in table and table[p["kernel"]] is None})
    if missing:
        lines += ["", f"Mesa's compiler has no code of {len(missing)}: {', '.join(f'`{name}`' for name in missing)}."]
    digits = "".join(c for c in architecture.partition("_g")[2] if c.isdigit())
    if digits and int(digits) > NEWEST_FIXED:
        lines += [
            "",
            "This GPU shares registers out as kernels run: its threads say less of them than an M1's or M2's.",
        ]
    lines += [
        "",
        "| kernel | half registers, Mesa | half registers, Mac | threads, Mesa | threads, Mac | steps | memory, Mac |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for c in compared:
        difference = "" if c.steps is None else f"{c.steps:+d}" if c.steps else "0"
        mac = "" if c.steps is None else registers_of(c.mac_threads)
        lines.append(
            f"| `{c.kernel}` | {c.code.half_registers} | {mac} | {c.code.threads} | {c.mac_threads} | "
            f"{difference} | {c.memory} |"
        )
    refused = [pipeline for pipeline in pipelines if "error" in pipeline]
    lines += [""] * bool(refused) + [f"Refused: `{p['kernel'] or p['file']}`: {p['error']}" for p in refused]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("doctor", type=Path, help="what `mlx-mittens doctor --json` wrote on a Mac")
    parser.add_argument("--table", type=Path, default=TABLE, help="registers of every kernel (bench/results/agx.md)")
    arguments = parser.parse_args(argv)
    path = arguments.table
    try:
        table = read_table(path.read_text())
        path = arguments.doctor
        print(report(json.loads(path.read_text()), table), end="")
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {path}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
