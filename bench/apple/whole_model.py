"""Predicts a published time of a token of a whole model, with `mm.simulator.predicted` of a model of mlx-lm's class.

python bench/apple/whole_model.py     prints a Markdown table; bench/results/apple-token.md has a run

The model has random weights and two layers, which launch the same; one of them is then taken as often as the published
model has layers. It is the second token of a context. It takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))

from works import Point, predict_point, read_points

import mlx_mittens as mm
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import Prediction
from mlx_mittens.bench import architectures
from mlx_mittens.simulator import EstimatedLaunch, PredictedLaunches
from mlx_mittens.simulator.prediction import total

MODEL, SHAPE, DTYPE = "llama-3.1-8b", "Llama-3.1-8B decode", "4-bit gs64"
_NORMS = 2  # of a layer, the first of which it begins with


def launches(**changes: Any) -> PredictedLaunches[Any]:
    """What MLX launches for a token of the model with two layers."""
    from mlx_lm.models.cache import make_prompt_cache

    model = architectures.build(MODEL, mx.bfloat16, bits=4, **{**changes, "num_hidden_layers": 2})
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache=cache))  # makes the cache and the frequencies of the rotation
    with mm.simulator.predicted("m2-pro", peer="metal") as found:
        mx.eval(model(mx.array([[1]]), cache=cache))
    if found.left_out:
        raise RuntimeError(f"no launch is known for {dict(found.left_out)}: the prediction would lack them")
    return found


def repeated(found: PredictedLaunches[Any], layers: int) -> list[Any]:
    """The launches of a model with so many layers."""
    norms = [i for i, one in enumerate(found) if isinstance(one, EstimatedLaunch) and one.name == "mx.fast.rms_norm"]
    first, second, last = norms[0], norms[_NORMS], norms[2 * _NORMS]
    return [*found[:first], *found[first:second] * layers, *found[last:]]


def predicted(found: PredictedLaunches[Any], point: Point) -> tuple[int, Prediction]:
    """Launches of a token, and its time on a point's chip."""
    layers = architectures.ARCHITECTURES[MODEL]["num_hidden_layers"]
    whole = repeated(found.on(find_chip(point.chip)), layers)
    time = total(whole)
    if time is None:
        raise RuntimeError("a kernel does not compile")
    return len(whole), time


def main() -> None:
    found = launches()
    print("| model | weights | chip | launches | published, us | predicted, us | error, % | from sources, % |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for point in read_points():
        if (point.shape, point.dtype) == (SHAPE, DTYPE):
            number, time = predicted(found, point)
            errors = [100 * (p.microseconds / point.time_us - 1) for p in (time, predict_point(point))]
            cells = [SHAPE.removesuffix(" decode"), DTYPE, point.chip, str(number), f"{point.time_us:.0f}"]
            cells += [f"{time.microseconds:.0f}", *(f"{error:+.0f}" for error in errors)]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
