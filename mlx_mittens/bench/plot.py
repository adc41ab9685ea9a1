"""The benchmark's pictures: speedup over mx and bandwidth against the copy's, a point for each row; and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .measure import FLOOR, Row

_COLORS = {"float32": "#4c6a92", "float16": "#d98c3f", "bfloat16": "#6fa287"}


_LINE = 0.17  # inches of a case


def draw(info: dict[str, Any], rows: Sequence[Row], path: str, note: str = "") -> None:
    """Draws the rows, one at least, to a .png or .svg file: a line for each case under its op, a point for each type.

    Args:
        info: The machine.
        rows: The rows.
        path: The file.
        note: Text for its title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    place: dict[tuple[str, str], int] = {}
    heads: dict[str, int] = {}
    for row in rows:
        if row.op not in heads:
            heads[row.op] = len(heads) + len(place)
        place.setdefault((row.op, row.case), len(heads) + len(place))
    lines = len(heads) + len(place)
    figure = Figure(figsize=(12, 1.2 + _LINE * lines), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)

    for group, y in place.items():
        speedups = [row.speedup for row in rows if (row.op, row.case) == group]
        left.plot([min(1, *speedups), max(1, *speedups)], [y, y], color="#cccccc", linewidth=1, zorder=1)
        left.annotate(
            f"{min(speedups):.2f}", (1, y), xycoords=("axes fraction", "data"), va="center", fontsize=6, xytext=(2, 0),
            textcoords="offset points",
        )  # fmt: skip
    for dtype in dict.fromkeys(row.dtype for row in rows):
        mine = [row for row in rows if row.dtype == dtype]
        places = [place[row.op, row.case] for row in mine]
        style = {"markersize": 4.5, "color": _COLORS[dtype], "label": dtype}
        left.plot([row.speedup for row in mine], places, "o", **style)
        right.plot([row.gb_s for row in mine], places, "o", **style)

    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("speedup over mx (the least at the right)")
    speedups = [row.speedup for row in rows]
    left.set_xlim(min(0.5, min(speedups) / 1.3), max(2.0, max(speedups) * 1.5))
    floor = FLOOR[info["device"]]
    right.axvline(info["copy_gb_s"], color="black", linewidth=0.8, label=f"copy, {info['copy_gb_s']:.3g} GB/s")
    right.axvline(floor * info["copy_gb_s"], color="black", linewidth=0.8, linestyle=":", label=f"{floor:.0%} of it")
    right.set_xlabel("GB/s")
    right.set_xlim(left=0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)

    ticks = sorted([*((y, case, False) for (_, case), y in place.items()), *((y, op, True) for op, y in heads.items())])
    left.set_yticks([y for y, *_ in ticks], [text for _, text, _ in ticks], fontsize=7)
    for label, (_, _, is_head) in zip(left.get_yticklabels(), ticks, strict=True):
        label.set_fontweight("bold" if is_head else "normal")
    left.set_ylim(lines - 0.4, -0.6)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        for y in heads.values():
            axes.axhline(y - 0.5, color="#cccccc", linewidth=0.6)
    name = info["gpu"] if info["device"] == "gpu" else info["processor"]
    versions = f"mlx-mittens {info['versions']['mlx_mittens']} beside mlx {info['versions']['mlx']}"
    figure.suptitle(f"{versions} on {name} ({info['executor']}){note}", fontsize=10)
    figure.savefig(path, dpi=150)


def draw_predictions(rows: Sequence[tuple[str, str, str, str, float]], path: str, note: str = "") -> None:
    """Draws predicted speedups over MLX's kernels to a .png or .svg file: a line for each case, a point for each chip.

    Args:
        rows: Op, case, dtype, chip and speedup of each.
        path: The file.
        note: Text for its title.
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
