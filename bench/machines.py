"""Renders measurements of many machines: a table and a plot, by op, of the speed relative to mx.

python bench/machines.py [FILE.json ...] [--write]

Files come from `mlx-mittens bench --json`; without any, all in bench/results/machines/ and files of ops beside that
folder. A file's name is the machine's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mittens.bench.measure import UNCLEAR

RESULTS = Path(__file__).resolve().parent / "results"
TABLE, PLOT = RESULTS / "machines.md", RESULTS / "machines.svg"

_HEAD = """# Machines

Speed relative to mx on each machine: the geometric mean of an op's rows, prompts and decoding of attention apart. A
dash stands for an op that was not measured there. `python bench/machines.py --write` renders this page;
[docs/adding-a-mac.md](../../docs/adding-a-mac.md) says how to add a machine.
"""


@dataclass(frozen=True)
class Machine:
    """The measurements of one machine.

    Attributes:
        name: The name of the file.
        of: The machine, as its file has it.
        rows: The rows that are right and clear.
        wrong: How many are not.
        complete: Whether everything was measured.
    """

    name: str
    of: dict[str, Any]
    rows: list[dict[str, Any]]
    wrong: int
    complete: bool

    @property
    def title(self) -> str:
        """The processor that ran the ops."""
        return self.of["gpu"] if self.of["device"] == "gpu" else f"{self.of['processor']}, {self.of['cores']} cores"

    def speeds(self) -> dict[str, float]:
        """By op: the geometric mean of the speeds relative to mx."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            found.setdefault(_op(row), []).append(row["speedup"])
        return {op: statistics.geometric_mean(speedups) for op, speedups in found.items()}


def _op(row: dict[str, Any]) -> str:
    if row["op"] != "scaled_dot_product_attention":
        return row["op"]
    return f"{row['op']}, {'decode' if row['case'].startswith('decode') else 'prompts'}"


def read(path: Path) -> Machine | None:
    """The machine of a file; None where it is of predictions, of whole models or of something else.

    Raises:
        ValueError: It is not JSON.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or "machine" not in found or "shares" in found:
        return None
    rows = found.get("rows", [])
    if not rows or any("mittens_ms" not in row for row in rows):
        return None
    right = [row for row in rows if "wrong" not in row and row["error"] is not None]
    clear = [row for row in right if (row.get("spread") or 0) < UNCLEAR]
    return Machine(path.stem, found["machine"], clear, len(rows) - len(right), found.get("complete", True))


def all_machines() -> list[Machine]:
    """The machines of the repository, by name."""
    paths = [*RESULTS.glob("machines/*.json"), *RESULTS.glob("*.json")]
    found = [machine for path in paths if (machine := read(path))]
    return sorted(found, key=lambda machine: machine.name)


def table(machines: Sequence[Machine]) -> str:
    """Two tables in Markdown: the machines, and by op the speed on each."""
    lines = ["| machine | processor | executor | copy, GB/s | rows | wrong | mlx | mlx-mittens | date |"]
    lines.append("|---|---|---|--:|--:|--:|---|---|---|")
    for machine in machines:
        versions = machine.of["versions"]
        rows = f"{len(machine.rows) + machine.wrong}" + " (incomplete)" * (not machine.complete)
        cells = [machine.name, machine.title, machine.of["executor"], f"{machine.of['copy_gb_s']:.0f}", rows]
        cells += [str(machine.wrong), versions["mlx"], versions["mlx_mittens"], machine.of["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    speeds = {machine.name: machine.speeds() for machine in machines}
    lines += ["", "| op | " + " | ".join(speeds) + " |", "|---|" + "--:|" * len(speeds)]
    for op in _ops(machines):
        cells = [f"{of[op]:.3g}" if op in of else "-" for of in speeds.values()]
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ops(machines: Sequence[Machine]) -> list[str]:
    return list(dict.fromkeys(op for machine in machines for op in machine.speeds()))


def page(machines: Sequence[Machine]) -> str:
    """The whole page."""
    return f"{_HEAD}\n{table(machines)}\n\n![Speed of each op relative to mx, by machine]({PLOT.name})\n"


def draw(machines: Sequence[Machine], path: Path) -> None:
    """Draws a line for each op, and on it a point for each machine."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ops = _ops(machines)
    figure = Figure(figsize=(9, 1.2 + 0.28 * len(ops)), layout="constrained")
    axes = figure.subplots()
    for machine, marker in zip(machines, _markers(len(machines)), strict=True):
        speeds = machine.speeds()
        places = [ops.index(op) for op in speeds]
        axes.plot(list(speeds.values()), places, marker, markersize=6, label=f"{machine.name}: {machine.title}")
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_yticks(range(len(ops)), ops, fontsize=8)
    axes.set_ylim(len(ops) - 0.5, -0.5)
    axes.set_xlabel("times as fast as mx, geometric mean of the op's rows")
    axes.grid(axis="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mlx-mittens"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _markers(count: int) -> list[str]:
    return [("o", "s", "^", "D", "v", "P", "X", "*")[i % 8] for i in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} and {PLOT.name}, of all machines")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw to a file")
    arguments = parser.parse_args()
    if arguments.write and arguments.files:
        parser.error("--write is of all machines of the repository: name no files")
    machines = [machine for path in arguments.files if (machine := read(path))] if arguments.files else all_machines()
    if not machines:
        print("bench/machines.py: no file of mlx-mittens bench --json with rows of ops", file=sys.stderr)
        return 1
    if arguments.write:
        TABLE.write_text(page(machines))
        draw(machines, PLOT)
    if arguments.plot:
        draw(machines, arguments.plot)
    if not arguments.write:
        print(table(machines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
