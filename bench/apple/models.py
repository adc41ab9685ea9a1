"""Predicted tokens a second of whole models on Macs, by mx and under the patch: the README's first table.

python bench/apple/models.py                  predicts what bench/results/apple-models.json lacks, and prints the tables
python bench/apple/models.py --models A,B     of these models
python bench/apple/models.py --write          writes what the file has: bench/results/apple-models.md, and the tables
                                              of README.md and docs/index.md

To predict anew, delete the file. `mlx-mittens bench --predict --model` predicts one model as these are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kept
import mlx.core as mx

from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import CONSTANTS
from mlx_mittens.cli import predicted_models
from mlx_mittens.cli.predicted_models import CONTEXT, VOCABULARY

ROOT = Path(__file__).parents[2]
FILE = ROOT / "bench" / "results" / "apple-models.json"
PAGE = FILE.with_suffix(".md")
PLACES = (ROOT / "README.md", ROOT / "docs" / "index.md")
PATTERN = re.compile(r"(?<=<!-- models: begin -->\n).*?(?=<!-- models: end -->)", re.S)

PROMPT = 512
# Each chip with the GB of the largest memory that it is sold with.
CHIPS = {"m1": 16, "m2-pro": 32, "m3-max": 128, "m4-max": 128, "m5": 32}
PLANNED_FOR = "m2-pro"  # the launches are those of its plan, since simulating them takes minutes
# Prompts go to mx there: its kernels for matrix units, which are not predicted, are faster.
WITH_MATRIX_UNITS = ("m5",)
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
}
# A launch that waits for another starts in the fitted time, and in one that was measured of tiny kernels.
SHORT_LAUNCH_US = 3.0
STARTS = (CONSTANTS, replace(CONSTANTS, dependent_us=SHORT_LAUNCH_US))
DTYPES = {"mxfp4": mx.bfloat16}  # else float16: mxfp4 weights of an embedding give bfloat16, and both float32

HEAD = f"""# Whole models on Macs, predicted by mx and under mm.patch()

Predictions, not measurements: no Mac was at hand. `python bench/apple/models.py --write`. Random weights of the
published shapes in 4 bits and float16, gpt-oss in mxfp4 and bfloat16; one sequence. A token has {CONTEXT} tokens
before it. A prompt has {PROMPT} tokens, and is without the head, which mlx-lm computes of the last token alone.
Launches are those of the plan for {PLANNED_FOR}. mx's products, its attention and mlx-lm's own kernels are their
Metal kernels in the simulator; its small operations are estimated from their bytes, and count as one launch. A
model whose weights do not fit the chip's largest memory is left out. So are prompts on an M5, which go to mx's
kernels for matrix units. The time of the GPU alone: what Python and MLX take for a launch on the CPU is not in it.
[docs/apple.md](../../docs/apple.md) says how far such predictions are off.

Few layers are simulated, as many as the kinds of a model's layers take to repeat, and {VOCABULARY} rows of its
head. The launches of these layers are taken as often as the published model has layers, and the work of the head is
multiplied. Speed is mx's time by ours. A launch that waits for another starts in {CONSTANTS.dependent_us:.1f} us, a
constant that is fitted to whole models. Tiny dependent kernels were measured at 2.4 to 5.2 us elsewhere: the
columns "{SHORT_LAUNCH_US:.0f} us" take that for it.
"""

Found = dict[str, dict[str, Any]]


def key(name: str, phase: str) -> str:
    return f"{name} {phase}"


def fits(name: str, chip: str, phase: str) -> bool:
    """Whether a chip has the memory for a model, and its kernels are predicted."""
    return MODELS[name][1] <= USABLE * CHIPS[chip] and not (phase == "prompt" and chip in WITH_MATRIX_UNITS)


def predict(names: Sequence[str], found: Found) -> None:
    """Predicts what the file lacks, tokens first."""
    for phase, tokens in (("token", 0), ("prompt", PROMPT)):
        for name in names:
            if key(name, phase) not in found:
                weights, _ = MODELS[name]
                dtype = DTYPES.get(weights, mx.float16)
                both = predicted_models.sides(name, weights, dtype, find_chip(PLANNED_FOR), tokens)
                times = {
                    chip: [[n for side in both for n in side.of_published(name, find_chip(chip), c)] for c in STARTS]
                    for chip in CHIPS
                    if fits(name, chip, phase)
                }
                kept.add(FILE, found, key(name, phase), times)


def titles() -> list[str]:
    return [find_chip(chip).title.removeprefix("Apple ") for chip in CHIPS]


def cells(found: Found, phase: str, text: Callable[[float, float], str]) -> list[str]:
    """Rows of a table: a model, and a cell for each chip by mx's microseconds and ours."""
    lines = [f"| model | {' | '.join(titles())} |", f"|---|{'--:|' * len(CHIPS)}"]
    for name in MODELS:
        times = found.get(key(name, phase), {})
        row = [text(times[chip][0][3], times[chip][0][1]) if chip in times else "" for chip in CHIPS]
        if any(row):
            lines.append(f"| {name} | {' | '.join(row)} |")
    return lines


def pair(mx: float, ours: float) -> str:
    return f"{mx:.0f} → **{ours:.0f}**" if max(mx, ours) >= 10 else f"{mx:.1f} → **{ours:.1f}**"


def summary(found: Found) -> str:
    """The tables of the first pages."""
    tokens = cells(found, "token", lambda mx, ours: pair(1e6 / mx, 1e6 / ours))
    prompts = cells(found, "prompt", lambda mx, ours: pair(1e6 * PROMPT / mx, 1e6 * PROMPT / ours))
    lines = ["Tokens a second, by mx → under `mm.patch()`:", "", *tokens, ""]
    if len(prompts) > 2:
        lines += [f"Tokens of a prompt of {PROMPT} a second:", "", *prompts, ""]
    return "\n".join(lines)


def document(found: Found) -> str:
    parts = [HEAD]
    for title, phase in ((f"A token after {CONTEXT} others", "token"), (f"A prompt of {PROMPT} tokens", "prompt")):
        short = f"{SHORT_LAUNCH_US:.0f} us"
        lines = [f"## {title}", ""]
        lines.append(f"| model | weights | chip | launches | mx's | us | mx's | speed | {short}: us | mx's | speed |")
        lines.append("|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|")
        if not any(key(name, phase) in found for name in MODELS):
            continue
        for name, (weights, _) in MODELS.items():
            for chip, rows in found.get(key(name, phase), {}).items():
                numbers = [f"{rows[0][0]}", f"{rows[0][2]}"]
                for _, ours, _, theirs in rows:
                    numbers += [f"{ours:,.0f}", f"{theirs:,.0f}", f"{theirs / ours:.2f}"]
                lines.append(f"| {name} | {weights} | {chip} | {' | '.join(numbers)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas")
    parser.add_argument("--write", action="store_true", help="write the tables of what the file has")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    found = kept.read(FILE)
    if not arguments.write:
        predict(arguments.models.split(","), found)
        print(summary(found))
        return
    PAGE.write_text(document(found))
    for place in PLACES:
        place.write_text(PATTERN.sub(lambda _: f"\n{summary(found)}\n", place.read_text()))


if __name__ == "__main__":
    main()
