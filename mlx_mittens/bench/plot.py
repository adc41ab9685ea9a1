"""The benchmark's pictures: speedup over mx and bandwidth against the copy's, a bar for each row; and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .measure import FLOOR, Row

_COLORS = {"float32": "#4c6a92", "float16": "#d98c3f", "bfloat16": "#6fa287"}


def draw(info: dict[str, Any], rows: Sequence[Row], path: str, note: str = "") -> None:
    """Draws the rows, one at least, to a .png or .svg file; the note goes into its title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((row.op, row.case) for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    place = {group: i for i, group in enumerate(groups)}
    figure = Figure(figsize=(14, 1.8 + 0.42 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)

    height = 0.8 / len(dtypes)
    for i, dtype in enumerate(dtypes):
        mine = [row for row in rows if row.dtype == dtype]
        places = [place[row.op, row.case] + (i - (len(dtypes) - 1) / 2) * height for row in mine]
        style = {"height": height, "color": _COLORS[dtype], "label": dtype}
        bars = left.barh(places, [row.speedup - 1 for row in mine], left=1, **style)
        left.bar_label(bars, [f" {row.speedup:.2f} " for row in mine], fontsize=6)
        right.barh(places, [row.gb_s for row in mine], **style)

    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("speedup over mx")
    speedups = [row.speedup for row in rows]
    left.set_xlim(min(0.5, min(speedups) / 1.3), max(2.0, max(speedups) * 1.5))
    floor = FLOOR[info["device"]]
    right.axvline(info["copy_gb_s"], color="black", linewidth=0.8, label=f"copy, {info['copy_gb_s']:.3g} GB/s")
    right.axvline(floor * info["copy_gb_s"], color="black", linewidth=0.8, linestyle=":", label=f"{floor:.0%} of it")
    right.set_xlabel("GB/s")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)

    left.set_yticks(range(len(groups)), [f"{op}   {case}" for op, case in groups], fontsize=8)
    left.set_ylim(len(groups) - 0.4, -0.6)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    name = info["gpu"] if info["device"] == "gpu" else info["processor"]
    versions = f"mlx-mittens {info['versions']['mlx_mittens']} beside mlx {info['versions']['mlx']}"
    figure.suptitle(f"{versions} on {name} ({info['executor']}){note}")
    figure.savefig(path, dpi=150)


def draw_predictions(rows: Sequence[tuple[str, str, str, str, float]], path: str, note: str = "") -> None:
    """Draws predicted speedups over MLX's kernels to a .png or .svg file: a line for each case, a point for each chip.

    Args:
        rows: Op, case, dtype, chip and speedup of each.
        path: The file.
        note: What goes into its title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(row[:3] for row in rows))
    place = {group: i for i, group in enumerate(groups)}
    figure = Figure(figsize=(11, 1.8 + 0.22 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for chip in dict.fromkeys(row[3] for row in rows):
        mine = [row for row in rows if row[3] == chip]
        axes.plot([row[4] for row in mine], [place[row[:3]] for row in mine], "o", markersize=4, label=chip)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_yticks(range(len(groups)), ["   ".join(group) for group in groups], fontsize=7)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlabel("speedup over MLX's Metal kernels, predicted")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if groups:
        figure.legend(loc="outside lower center", ncols=8, fontsize=7, frameon=False)
    figure.suptitle(f"Predicted, not measured{note}")
    figure.savefig(path, dpi=150)
