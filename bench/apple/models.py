"""Predicted tokens a second of whole models on Macs, by mx and under the patch: the README's first table.

python bench/apple/models.py                  predicts what bench/results/apple-models.json lacks, and prints the table
python bench/apple/models.py --models A,B     of these models
python bench/apple/models.py --write          writes what the file has: bench/results/apple-models.md, and the tables
                                              of README.md and docs/index.md

To predict a model anew, delete its key from the file. `mlx-mittens bench --predict --model` predicts one likewise.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import kept
import mlx.core as mx
from works import predict_point, read_points

from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import CONSTANTS
from mlx_mittens.bench.models import DTYPES
from mlx_mittens.cli import predicted_models
from mlx_mittens.cli.predicted_models import CONTEXT, VOCABULARY

ROOT = Path(__file__).parents[2]
FILE = ROOT / "bench" / "results" / "apple-models.json"
PAGE = FILE.with_suffix(".md")
PLACES = (ROOT / "README.md", ROOT / "docs" / "index.md")
PATTERN = re.compile(r"(?<=<!-- models: begin -->\n).*?(?=<!-- models: end -->)", re.S)

# Each chip with the GB of the largest memory that it is sold with.
CHIPS = {"m1": 16, "m2-pro": 32, "m3-max": 128, "m4-max": 128, "m5": 32}
PLANNED_FOR = "m2-pro"  # all chips have the launches of its plan, since simulating them takes minutes
USABLE = 0.75  # of a Mac's memory, by its GPU
# Each model with the format of its weights, and their GB.
MODELS = {
    "qwen2.5-0.5b": ("4-bit", 0.3),
    "qwen3-0.6b": ("4-bit", 0.3),
    "llama-3.2-1b": ("4-bit", 0.7),
    "gemma-3-1b": ("4-bit", 0.6),
    "llama-3.1-8b": ("4-bit", 4.5),
    "gpt-oss-20b": ("mxfp4", 13),
    "qwen3-30b-a3b": ("4-bit", 17),
    "qwen3-next-80b-a3b": ("4-bit", 45),
    "lfm2-1.2b": ("4-bit", 0.7),
    "mamba2-2.7b": ("4-bit", 1.5),
}
# A launch that waits for another starts in the fitted time, and in one that was measured of tiny kernels.
SHORT_LAUNCH_US = 3.0
STARTS = (CONSTANTS, replace(CONSTANTS, dependent_us=SHORT_LAUNCH_US))
# A token of mlx-lm whose time was published: the model, and its point.
PUBLISHED, POINT = "llama-3.1-8b", ("Llama-3.1-8B decode", "4-bit gs64", "m2-pro")

HEAD = f"""# Whole models on Macs, predicted by mx and under mm.patch()

Predictions, not measurements: no Mac was at hand. `python bench/apple/models.py --write`. Random weights of the
published shapes in 4 bits and float16, gpt-oss in mxfp4 and bfloat16; one sequence, and a token after {CONTEXT}
others. Launches are those of the plan for {PLANNED_FOR}. mx's products, its attention and mlx-lm's own kernels are
their Metal kernels in the simulator; its small operations are estimated from their bytes, and count as one launch. A
model whose weights do not fit the chip's largest memory is left out. The time is the GPU's alone: what Python and MLX
take for a launch on the CPU is not in it. [docs/apple.md](../../docs/apple.md) says how far such predictions are off.

Few layers are simulated, as many as the kinds of a model's layers take to repeat, and {VOCABULARY} rows of its
head. The launches of these layers are taken as often as the published model has layers, and the work of the head is
multiplied. Speed is mx's time by ours. A launch that waits for another starts in {CONSTANTS.dependent_us:.1f} us, a
constant that is fitted to whole models. Tiny dependent kernels were measured at 2.4 to 5.2 us elsewhere: the
columns "{SHORT_LAUNCH_US:.0f} us" take that for it.
"""

# By model and chip: launches and microseconds, ours and mx's, with the fitted start of a launch and with the short one.
Rows = list[list[float]]
Found = dict[str, dict[str, Rows]]


def fits(name: str, chip: str) -> bool:
    """Whether a chip has the memory for a model."""
    return MODELS[name][1] <= USABLE * CHIPS[chip]


def predicted(name: str) -> dict[str, Rows]:
    """A token of a model, by chip."""
    weights, _ = MODELS[name]
    dtype = DTYPES[predicted_models.usual_dtype(weights)]
    both = predicted_models.sides(name, weights, dtype, find_chip(PLANNED_FOR))
    return {
        chip: [[round(n, 1) for side in both for n in side.of_published(name, find_chip(chip), c)] for c in STARTS]
        for chip in CHIPS
        if fits(name, chip)
    }


def titles() -> list[str]:
    return [find_chip(chip).title.removeprefix("Apple ") for chip in CHIPS]


def pair(mx: float, ours: float) -> str:
    return f"{mx:.0f} → **{ours:.0f}**" if max(mx, ours) >= 10 else f"{mx:.1f} → **{ours:.1f}**"


def summary(found: Found) -> str:
    """The table of the first pages: tokens a second."""
    lines = ["Tokens a second, by mx → under `mm.patch()`:", ""]
    lines += [f"| model | {' | '.join(titles())} |", f"|---|{'--:|' * len(CHIPS)}"]
    for name in (name for name in MODELS if name in found):
        # The first row of a chip: our launches and microseconds, mx's launches and microseconds.
        times = {chip: (rows[0][3], rows[0][1]) for chip, rows in found[name].items()}
        cells = [pair(*(1e6 / us for us in times[chip])) if chip in times else "" for chip in CHIPS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def published(rows: Rows) -> str:
    """The predicted time of mx's token beside a published one."""
    point = next(point for point in read_points() if (point.shape, point.dtype, point.chip) == POINT)
    launches, time = rows[0][2:]
    errors = [100 * (us / point.time_us - 1) for us in (time, predict_point(point).microseconds)]
    return (
        f"\nA token of {PUBLISHED}, 4 bits, took mlx-lm {point.time_us:,.0f} us on {point.chip}, its host's share "
        f"included\n({point.source}). mx's {launches} launches are predicted at {time:,.0f} us, "
        f"{errors[0]:+.0f} %; the model with work from sources has {errors[1]:+.0f} %."
    )


def document(found: Found) -> str:
    short = f"{SHORT_LAUNCH_US:.0f} us"
    lines = [HEAD, f"| model | weights | chip | launches | mx's | us | mx's | speed | {short}: us | mx's | speed |"]
    lines.append("|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, (weights, _) in MODELS.items():
        for chip, rows in found.get(name, {}).items():
            numbers = [f"{rows[0][0]}", f"{rows[0][2]}"]
            for _, ours, _, theirs in rows:
                numbers += [f"{ours:,.0f}", f"{theirs:,.0f}", f"{theirs / ours:.2f}"]
            lines.append(f"| {name} | {weights} | {chip} | {' | '.join(numbers)} |")
    if POINT[2] in found.get(PUBLISHED, {}):
        lines.append(published(found[PUBLISHED][POINT[2]]))
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas")
    parser.add_argument("--write", action="store_true", help="write the tables of what the file has")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    found = kept.read(FILE)
    if not arguments.write:
        for name in arguments.models.split(","):
            if name not in found:
                kept.add(FILE, found, name, predicted(name))
        print(summary(found))
        return
    PAGE.write_text(document(found))
    for place in PLACES:
        place.write_text(PATTERN.sub(lambda _: f"\n{summary(found)}\n", place.read_text()))


if __name__ == "__main__":
    main()
