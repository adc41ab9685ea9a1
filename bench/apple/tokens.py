"""Predicted time of a token of whole models on Apple GPUs, with the patch and without.

python bench/apple/tokens.py FILE                 predicts what FILE does not have yet, and prints the table
python bench/apple/tokens.py FILE --models A,B    of these models
python bench/apple/tokens.py FILE --write         writes bench/results/apple-tokens.md of what FILE has

FILE is JSON. A model has as few layers as its kinds of layers take to repeat, and a short vocabulary. Their launches
are then taken as often as the published model has layers, and the head has its length.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kept
import mlx.core as mx

import mlx_mittens as mm
from mlx_mittens.apple.chips import Chip, find_chip
from mlx_mittens.apple.model import Work, chain
from mlx_mittens.bench import architectures, models

CHIPS = ("m2-max", "m4-max")
MODELS = (
    *(("qwen2.5-0.5b", "4-bit"), ("qwen3-0.6b", "4-bit"), ("llama-3.2-1b", "4-bit"), ("gemma-3-1b", "4-bit")),
    *(("qwen3-30b-a3b", "4-bit"), ("gpt-oss-20b", "mxfp4"), ("qwen3-next-80b-a3b", "4-bit"), ("llama-3.1-8b", "4-bit")),
)
DTYPES = {"mxfp4": mx.bfloat16}  # else float16: mxfp4 weights of an embedding give bfloat16, and both float32
CONTEXT = 64  # tokens before the one that is predicted
VOCABULARY = 16384  # rows of the head that are simulated
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


def recorded(step: Callable[[], Any]) -> list[Any]:
    """What is launched for the arrays that a step gives, for the first chip.

    Raises:
        RuntimeError: An operation has no launch that is known.
    """
    with (
        mm.simulator.enabled(gpu=CHIPS[0], pretend_metal=True),
        mm.simulator.predicted(CHIPS[0], peer="metal") as found,
    ):
        mx.eval(step())
    if found.left_out:
        raise RuntimeError(f"no launch is known for {dict(found.left_out)}: the prediction would lack them")
    return list(found)


def side(model: Any, layers: list[Any]) -> dict[str, Any]:
    """Launches of a token of the short model and of it without layers, with the works that the time follows from."""
    from mlx_lm.models.cache import make_prompt_cache

    inner = model.model
    cache = make_prompt_cache(model)
    with mm.patched():  # on a CPU mx takes minutes
        for tokens in (CONTEXT - 1, 1):  # after the first token no rotating cache grows
            mx.eval(model(mx.array([[1] * tokens]), cache=cache))
    found = {}
    for name, some in (("ends", []), ("all", layers)):
        inner.layers = some
        found[name] = recorded(lambda: model(mx.array([[1]]), cache=cache))
    return found


def whole(found: dict[str, Any], chip: Chip, repeats: float, vocabulary: int) -> tuple[int, float]:
    """Launches of a token of the published model, and its time in microseconds."""
    every, ends = (works_of(found[name], chip) for name in ("all", "ends"))
    inner = chain(every, chip).microseconds - chain(ends, chip).microseconds
    longest = max(range(len(ends)), key=lambda i: ends[i].lines)  # the head
    ends[longest] = _times(ends[longest], vocabulary / VOCABULARY)
    number = len(ends) + repeats * (len(every) - len(ends))
    return round(number), chain(ends, chip).microseconds + repeats * inner


def works_of(launches: Sequence[Any], chip: Chip) -> list[Work]:
    works = [launch.on(chip).work for launch in launches]
    if None in works:
        raise RuntimeError("a kernel does not compile")
    return works


def _times(work: Work, factor: float) -> Work:
    """So many times the threadgroups, which do the same."""
    names = ("threadgroups", "lines", "fragment_lines", "summed_lines")
    return replace(
        work, instructions=factor * work.instructions, **{name: factor * getattr(work, name) for name in names}
    )


def predicted(name: str, weights: str) -> dict[str, Any]:
    """By chip the launches and times of both sides."""
    config = architectures.ARCHITECTURES[name]
    few = architectures.period(name)
    model: Any = architectures.build(
        name, DTYPES.get(weights, mx.float16), **models.FORMATS[weights], num_hidden_layers=few, vocab_size=VOCABULARY
    )
    layers = model.model.layers
    rows: dict[str, Any] = {chip: [] for chip in CHIPS}
    for context in (mm.patched(), contextlib.nullcontext()):
        with context:
            found = side(model, layers)
        for chip in CHIPS:
            rows[chip] += whole(found, find_chip(chip), config["num_hidden_layers"] / few, config["vocab_size"])
    return rows


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
