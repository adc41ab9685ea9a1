"""Renders a bench result as Markdown, or draws the speed of each op.

python bench/report.py bench/results/FILE.json [--dtype bfloat16] [--ops a,b] [--summary] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence


def report(result: dict, dtypes: set[str], ops: set[str] | None = None) -> str:
    """A table of the rows of these types, under a line that names machine and date."""
    machine = result["machine"]
    unit, scale = ("us", 1e3) if machine["device"] == "gpu" else ("ms", 1)
    name = machine["gpu"] if machine["device"] == "gpu" else f"{machine['processor']}, {machine['cores']} cores"
    rows = [row for row in result["rows"] if row["dtype"] in dtypes and (ops is None or row["op"] in ops)]
    peer = any(row.get("peer_ms") for row in rows)
    header = [
        "op",
        "case",
        "dtype",
        f"ours, {unit}",
        f"mx, {unit}",
        "mx / ours",
        "GB/s",
        "of copy",
        "error",
        "mx error",
    ]
    lines = []
    if not result.get("complete", True):
        lines += [f"Incomplete: {result['measured']} of {result['planned']} rows were measured.", ""]
    version, copy = machine["versions"]["mlx"], machine["copy_gb_s"]
    lines += [f"{name}, mlx {version}, {machine['date']}; a copy reaches {copy:.0f} GB/s.", ""]
    lines.append("| " + " | ".join(header + [f"MLX's Metal kernel, {unit}"] * peer) + " |")
    lines.append("|" + "---|" * 3 + "--:|" * (len(header) - 3 + peer))
    for row in rows:
        cells = [
            row["op"],
            row["case"],
            row["dtype"],
            f"{row['mittens_ms'] * scale:.3g}",
            f"{row['mx_ms'] * scale:.3g}",
        ]
        copy = row.get("copy_gb_s") or machine["copy_gb_s"]
        cells += [f"{row['speedup']:.2f}", f"{row['gb_s']:.3g}", f"{row['gb_s'] / copy:.0%}"]
        cells += [f"{row['error']:.1e}", f"{row['mx_error']:.1e}"]
        if peer:
            cells.append(f"{row['peer_ms'] * scale:.3g}" if row.get("peer_ms") else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def of_op(row: dict) -> str:
    """The op of a row; prompts and decoding are two, since a rule may send the one to mx and not the other."""
    if row["op"] != "scaled_dot_product_attention":
        return row["op"]
    return f"{row['op']}, {'decode' if row['case'].startswith('decode') else 'prompts'}"


def _mean_and_least(speedups: Sequence[float]) -> str:
    if not speedups:
        return " | |"
    numbers = [statistics.geometric_mean(speedups), min(speedups)]
    return "".join(f" {number:.3g} |" if number >= 10 else f" {number:.2f} |" for number in numbers)


def summary(result: dict) -> str:
    """A row for each op, prompts and decoding apart: the geometric mean and the least of its speeds relative to mx and
    to MLX's own Metal kernel.

    Args:
        result: Output of `mlx-mittens bench --json`.
    """
    rows: dict[str, list[dict]] = {}
    for row in result["rows"]:
        rows.setdefault(of_op(row), []).append(row)
    lines = ["| op | rows | mx: mean | mx: least | MLX's Metal: mean | MLX's Metal: least |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, its in rows.items():
        peers = [row["peer_ms"] / row["mittens_ms"] for row in its if row.get("peer_ms")]
        speeds = _mean_and_least([row["speedup"] for row in its])
        lines.append(f"| {name} | {len(its)} |{speeds}{_mean_and_least(peers)}")
    return "\n".join(lines)


def draw(result: dict, path: str) -> None:
    """Draws each op's speed relative to mx: the geometric mean of its rows, and each row as a dot."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    speedups: dict[str, list[float]] = {}
    for row in result["rows"]:
        speedups.setdefault(of_op(row).removeprefix("scaled_dot_product_"), []).append(row["speedup"])
    names = sorted(speedups, key=lambda name: statistics.geometric_mean(speedups[name]))
    figure = Figure(figsize=(8, 0.5 + 0.35 * len(names)), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        mean = statistics.geometric_mean(speedups[name])
        axes.barh(i, mean - 1, left=1, color="#4c6a92" if mean >= 1 else "#d98c3f", height=0.6)
        axes.plot(speedups[name], [i] * len(speedups[name]), "|", color="#222222", alpha=0.35, markersize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    most = math.ceil(max(map(max, speedups.values())))
    ticks = [tick for tick in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32) if tick <= most]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="#222222", linewidth=0.8)
    machine = result["machine"]
    axes.set_xlabel(f"times as fast as mx {machine['versions']['mlx']} on {machine['gpu'] or machine['processor']}")
    axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mlx-mittens"}):
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--dtype", default="float32,float16,bfloat16")
    parser.add_argument("--ops")
    parser.add_argument("--summary", action="store_true", help="print a row for each op")
    parser.add_argument("--plot", metavar="FILE", help="draw the speed of each op to FILE instead")
    arguments = parser.parse_args()
    with open(arguments.file) as file:
        result = json.load(file)
    if arguments.plot:
        draw(result, arguments.plot)
        return
    if arguments.summary:
        print(summary(result))
        return
    print(report(result, set(arguments.dtype.split(",")), set(arguments.ops.split(",")) if arguments.ops else None))


if __name__ == "__main__":
    main()
