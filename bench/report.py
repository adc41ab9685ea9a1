"""Renders a bench result as Markdown: `python bench/report.py bench/results/FILE.json [--dtype bfloat16] [--ops a,b]`."""

from __future__ import annotations

import argparse
import json


def report(result: dict, dtypes: set[str], ops: set[str] | None = None) -> str:
    """A table of the rows of these types, under a line that names machine and date."""
    machine = result["machine"]
    unit, scale = ("us", 1e3) if machine["device"] == "gpu" else ("ms", 1)
    name = machine["gpu"] if machine["device"] == "gpu" else f"{machine['processor']}, {machine['cores']} cores"
    rows = [row for row in result["rows"] if row["dtype"] in dtypes and (ops is None or row["op"] in ops)]
    peer = any(row.get("peer_ms") for row in rows)
    header = ["op", "case", "dtype", f"ours, {unit}", f"mx, {unit}", "mx / ours", "GB/s", "of copy", "error", "mx error"]
    lines = []
    if not result.get("complete", True):
        lines += [f"Incomplete: {result['measured']} of {result['planned']} rows were measured.", ""]
    version, copy = machine["versions"]["mlx"], machine["copy_gb_s"]
    lines += [f"{name}, mlx {version}, {machine['date']}; a copy reaches {copy:.0f} GB/s.", ""]
    lines.append("| " + " | ".join(header + [f"MLX's Metal kernel, {unit}"] * peer) + " |")
    lines.append("|" + "---|" * 3 + "--:|" * (len(header) - 3 + peer))
    for row in rows:
        cells = [row["op"], row["case"], row["dtype"], f"{row['mittens_ms'] * scale:.3g}", f"{row['mx_ms'] * scale:.3g}"]
        copy = row.get("copy_gb_s") or machine["copy_gb_s"]
        cells += [f"{row['speedup']:.2f}", f"{row['gb_s']:.3g}", f"{row['gb_s'] / copy:.0%}"]
        cells += [f"{row['error']:.1e}", f"{row['mx_error']:.1e}"]
        if peer:
            cells.append(f"{row['peer_ms'] * scale:.3g}" if row.get("peer_ms") else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--dtype", default="float32,float16,bfloat16")
    parser.add_argument("--ops")
    arguments = parser.parse_args()
    with open(arguments.file) as file:
        result = json.load(file)
    print(report(result, set(arguments.dtype.split(",")), set(arguments.ops.split(",")) if arguments.ops else None))


if __name__ == "__main__":
    main()
