"""Predicted time of a mixture's feed-forward for one token on Apple GPUs, beside what mx launches.

python bench/apple/mixtures.py            prints the table
python bench/apple/mixtures.py --write    writes bench/results/mixtures.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_mittens as mm
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.bench import architectures, models
from mlx_mittens.simulator import PredictedLaunches

CHIPS = ("m2-max", "m4-max")
MODELS = (("qwen3-30b-a3b", "4-bit"), ("gpt-oss-20b", "mxfp4"), ("mixtral-8x7b", "4-bit"))
FILE = Path(__file__).parents[1] / "results" / "mixtures.md"

HEAD = """# A token through a mixture's feed-forward, predicted beside mx's

Predictions, not measurements: no Mac was at hand. float16, `python bench/apple/mixtures.py --write`. Of one layer of
the published shapes with random weights: the router, its choice, the experts and their sum. mx's `gather_qmm` is its
own Metal kernel `gather_qmv` in the simulator; its small operations are estimated from their bytes. Ours is planned for
the first chip. [docs/apple.md](../../docs/apple.md) says how far such predictions are off. Speed is mx's time by ours.

The two experts of Mixtral are 198 MB at 4 bits: there the time to read them bounds both sides.
"""


def feed_forward(name: str, weights: str) -> Callable[[mx.array], Any]:
    """The mixture of the first layer of an architecture."""
    fewest = architectures.period(name)
    changes = {"num_hidden_layers": fewest, "vocab_size": 256}
    layer: Any = architectures.build(name, mx.float16, **models.FORMATS[weights], **changes).layers[0]
    found: nn.Module = layer.block_sparse_moe if "block_sparse_moe" in layer else layer.mlp
    return found


def launches(mixture: Callable[[mx.array], Any], x: mx.array) -> PredictedLaunches[Any]:
    """What is launched for a token.

    Raises:
        RuntimeError: An operation has no launch that is known.
    """
    with mm.simulator.enabled(gpu=CHIPS[0]), mm.simulator.predicted(CHIPS[0], peer="metal") as found:
        mx.eval(mixture(x))
    if found.left_out:
        raise RuntimeError(f"no launch is known for {dict(found.left_out)}: the prediction would lack them")
    return found


def row(name: str, weights: str) -> str:
    """A line of the table."""
    mixture = feed_forward(name, weights)
    x = mx.random.normal((1, 1, architectures.ARCHITECTURES[name]["hidden_size"])).astype(mx.float16)
    mx.eval(x)
    theirs = launches(mixture, x)
    with mm.patched():
        ours = launches(mixture, x)
    cells = [name, weights, str(len(ours)), str(len(theirs))]
    for chip in map(find_chip, CHIPS):
        a, b = ours.on(chip).total, theirs.on(chip).total
        if a is None or b is None:
            raise RuntimeError("a kernel does not compile")
        cells += [f"{a.microseconds:.0f}", f"{b.microseconds:.0f}", f"{b.microseconds / a.microseconds:.2f}"]
    print(ours, theirs, sep="\n")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--models", default=",".join(name for name, _ in MODELS), help="names, with commas")
    arguments = parser.parse_args()
    lines = ["| model | weights | launches | mx's |" + "".join(f" {chip}: us | mx's | speed |" for chip in CHIPS)]
    lines.append("|---|---|--:|--:|" + "--:|--:|--:|" * len(CHIPS))
    for name, weights in MODELS:
        if name in arguments.models.split(","):
            lines.append(row(name, weights))
            print(lines[-1], flush=True)
    text = "\n".join([HEAD, *lines, ""])
    if arguments.write:
        FILE.write_text(text)


if __name__ == "__main__":
    main()
