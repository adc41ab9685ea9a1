"""Predicted time of a token of whole models on Apple GPUs, with the patch and without.

python bench/apple/tokens.py FILE                 predicts what FILE does not have yet, and prints the table
python bench/apple/tokens.py FILE --models A,B    of these models
python bench/apple/tokens.py FILE --write         writes bench/results/apple-tokens.md of what FILE has

FILE is JSON. `mlx-mittens bench --predict --model` predicts one model as these are.
"""

from __future__ import annotations

import argparse
import datetime
from dataclasses import replace
from pathlib import Path

import kept
import mlx.core as mx
from works import predict_point, read_points

from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import CONSTANTS
from mlx_mittens.cli import predicted_models
from mlx_mittens.cli.predicted_models import CONTEXT, VOCABULARY

CHIPS = ("m2-max", "m4-max")
MODELS = (
    *(("qwen2.5-0.5b", "4-bit"), ("qwen3-0.6b", "4-bit"), ("llama-3.2-1b", "4-bit"), ("gemma-3-1b", "4-bit")),
    *(("qwen3-30b-a3b", "4-bit"), ("gpt-oss-20b", "mxfp4"), ("qwen3-next-80b-a3b", "4-bit"), ("llama-3.1-8b", "4-bit")),
)
DTYPES = {"mxfp4": mx.bfloat16}  # else float16: mxfp4 weights of an embedding give bfloat16, and both float32
# A token of mlx-lm whose time was published: the model, and its point.
PUBLISHED, POINT = "llama-3.1-8b", ("Llama-3.1-8B decode", "4-bit gs64", "m2-pro")
SHORT_LAUNCH_US = 3.0
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
multiplied. A cell has our time in microseconds, mx's, and mx's by ours. A launch that waits for another starts in
{CONSTANTS.dependent_us:.1f} us, a constant that is fitted to whole models. Tiny dependent kernels were measured at 2.4
to 5.2 us elsewhere: the columns "{SHORT_LAUNCH_US:.0f} us" take that for it.
"""

# By chip launches and microseconds, ours and mx's, with the fitted start of a launch and with the short one.
Entry = dict[str, list[list[float]]]


def predicted(name: str, weights: str) -> Entry:
    both = predicted_models.sides(name, weights, DTYPES.get(weights, mx.float16), find_chip(CHIPS[0]))
    constants = (CONSTANTS, replace(CONSTANTS, dependent_us=SHORT_LAUNCH_US))
    times = lambda chip: [[n for side in both for n in side.of_published(name, chip, c)] for c in constants]
    chips = (*CHIPS, POINT[2]) if name == PUBLISHED else CHIPS
    return {chip: times(find_chip(chip)) for chip in chips}


def held(entry: Entry) -> str:
    """What the prediction of mx's token is beside a published time."""
    point = next(point for point in read_points() if (point.shape, point.dtype, point.chip) == POINT)
    launches, time = entry[POINT[2]][0][2:]
    errors = [100 * (us / point.time_us - 1) for us in (time, predict_point(point).microseconds)]
    return (
        f"\nA token of {PUBLISHED}, 4 bits, took mlx-lm {point.time_us:,.0f} us on {POINT[2]}, its host's share "
        f"included\n({point.source}). mx's {launches} launches are predicted at {time:,.0f} us, "
        f"{errors[0]:+.0f} %; the model with work from sources has {errors[1]:+.0f} %."
    )


def document(found: dict[str, Entry]) -> str:
    columns = "".join(f" {chip} | {chip}, {SHORT_LAUNCH_US:.0f} us |" for chip in CHIPS)
    lines = [HEAD, "| model | weights | launches | mx's |" + columns, "|---|---|--:|--:|" + "--:|--:|" * len(CHIPS)]
    for name, weights in MODELS:
        if name in found:
            ours, _, theirs, _ = found[name][CHIPS[0]][0]
            cells = [name, weights, f"{ours}", f"{theirs}"]
            for chip in CHIPS:
                cells += [f"{us:.0f}, {other:.0f}, {other / us:.2f}" for _, us, _, other in found[name][chip]]
            lines.append(f"| {' | '.join(cells)} |")
    if PUBLISHED in found:
        lines.append(held(found[PUBLISHED]))
    lines.append(f"\nOf {datetime.date.today()}.")
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
