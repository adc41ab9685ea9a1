"""Predicted time of a token of whole models on Apple GPUs, with the patch and without.

python bench/apple/tokens.py FILE                 predicts what FILE does not have yet, and prints the table
python bench/apple/tokens.py FILE --models A,B    of these models
python bench/apple/tokens.py FILE --write         writes bench/results/apple-tokens.md of what FILE has

FILE is JSON. `mlx-mittens bench --predict --model` predicts one model as these are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import kept
import mlx.core as mx

from mlx_mittens.apple.chips import find_chip
from mlx_mittens.cli import predicted_models
from mlx_mittens.cli.predicted_models import CONTEXT, VOCABULARY

CHIPS = ("m2-max", "m4-max")
MODELS = (
    *(("qwen2.5-0.5b", "4-bit"), ("qwen3-0.6b", "4-bit"), ("llama-3.2-1b", "4-bit"), ("gemma-3-1b", "4-bit")),
    *(("qwen3-30b-a3b", "4-bit"), ("gpt-oss-20b", "mxfp4"), ("qwen3-next-80b-a3b", "4-bit"), ("llama-3.1-8b", "4-bit")),
)
DTYPES = {"mxfp4": mx.bfloat16}  # else float16: mxfp4 weights of an embedding give bfloat16, and both float32
FILE = Path(__file__).parents[1] / "results" / "apple-tokens.md"

HEAD = f"""# A token of whole models, predicted beside mx's

Predictions, not measurements: no Mac was at hand. `python bench/apple/tokens.py FILE --write`, float16 (with mxfp4
bfloat16), random weights of the published shapes, one sequence with {CONTEXT} tokens before. Ours is `mm.patch()`,
planned for the first chip. mx's products of 4-bit weights, its attention and mlx-lm's own kernels are their Metal
kernels in the simulator; its small operations are estimated from their bytes, and count as one launch.
[docs/apple.md](../../docs/apple.md) says how far such predictions are off. The time of the GPU alone: what Python and
MLX take for a launch on the CPU is not in it.

Few layers are simulated, as many as the kinds of a model's layers take to repeat, and {VOCABULARY} rows of its head.
The launches of these layers are taken as often as the published model has layers, and the work of the head is
multiplied. Speed is mx's time by ours.
"""


def predicted(name: str, weights: str) -> dict[str, Any]:
    """By chip the launches and times of both sides."""
    dtype = DTYPES.get(weights, mx.float16)
    return predicted_models.predicted(name, weights, dtype, [find_chip(chip) for chip in CHIPS])


def document(found: dict[str, dict[str, Any]]) -> str:
    columns = "".join(f" {chip}: us | mx's | speed |" for chip in CHIPS)
    lines = [HEAD, "| model | weights | launches | mx's |" + columns, "|---|---|--:|--:|" + "--:|--:|--:|" * len(CHIPS)]
    for name, weights in MODELS:
        if name in found:
            first = found[name][CHIPS[0]]
            cells = [name, weights, str(first[0]), str(first[2])]
            for chip in CHIPS:
                _, ours, _, theirs = found[name][chip]
                cells += [f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON of what was predicted, kept and continued")
    parser.add_argument("--models", default=",".join(name for name, _ in MODELS), help="names, with commas")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} of what the file has")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    found = kept.read(arguments.file)
    for name, weights in MODELS:
        if name in arguments.models.split(",") and name not in found and not arguments.write:
            kept.add(arguments.file, found, name, predicted(name, weights))
    kept.show(document(found), FILE if arguments.write else None)


if __name__ == "__main__":
    main()
