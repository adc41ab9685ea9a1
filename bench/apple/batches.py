"""Predicted times of a token of eight requests at once, beside MLX's own Metal kernels.

python bench/apple/batches.py [--case NAME] [--chip m2-max,m4-max]     prints a table

The heads are Llama 3.1 8B's, in float16: 32, and 8 of keys, 128 wide. MLX gets what mlx-lm's batches give it, keys and
values padded on the left, without the mask of bool: its kernel loads hidden keys too, and the loads of the
mask itself are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_mittens as mm
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.prediction.launches import PredictedLaunches

BATCH, HEADS, KEY_HEADS, WIDTH = 8, 32, 8, 128
SCALE = WIDTH**-0.5
Calls = tuple[Callable[[], mx.array], Callable[[], mx.array]]  # ours and the one beside it


def draw(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array((rng.standard_normal(shape, np.float32) / 2).astype(np.float16))


def rows(rng: np.random.Generator, batch: int, keys: int) -> list[mx.array]:
    return [draw(rng, batch, KEY_HEADS, keys, WIDTH) for _ in range(2)]


def lengths(rng: np.random.Generator, shortest: int, longest: int) -> Calls:
    """Rows of different lengths, beside MLX's padded batch."""
    q, (k, v) = draw(rng, BATCH, HEADS, 1, WIDTH), rows(rng, BATCH, longest)
    starts = mx.array(longest - np.linspace(shortest, longest, BATCH).astype(np.int32))
    return (
        lambda: mm.scaled_dot_product_attention(q, k, v, scale=SCALE, mask="causal", starts=starts),
        lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE),
    )


def blocks(rng: np.random.Generator, keys: int, bits: int = 0, block: int = 16) -> Calls:
    """Keys in shuffled blocks, beside our attention over the same number one after the other."""
    q, entries = draw(rng, BATCH, HEADS, 1, WIDTH), keys // block
    pools: list[Any] = [draw(rng, BATCH * entries, KEY_HEADS, block, WIDTH) for _ in range(2)]
    table = mx.array(rng.permutation(BATCH * entries).reshape(BATCH, entries).astype(np.int32))
    counts = mx.array([keys] * BATCH)
    whole: list[Any] = rows(rng, BATCH, keys)
    if bits:
        pools, whole = ([mx.quantize(a, 64, bits) for a in arrays] for arrays in (pools, whole))

    def paged() -> mx.array:
        return mm.paged_attention(q, pools[0], pools[1], table, counts, scale=SCALE, bits=bits or 8)

    def dense() -> mx.array:
        if bits:
            return mm.quantized_scaled_dot_product_attention(q, whole[0], whole[1], SCALE, bits=bits)
        return mm.scaled_dot_product_attention(q, whole[0], whole[1], scale=SCALE)

    return paged, dense


CASES: dict[str, Callable[[np.random.Generator], Calls]] = {
    "512 to 2,048 keys, beside MLX": lambda rng: lengths(rng, 512, 2048),
    "512 to 8,192 keys, beside MLX": lambda rng: lengths(rng, 512, 8192),
    "1,024 keys in blocks, beside dense": lambda rng: blocks(rng, 1024),
    "4,096 keys in blocks, beside dense": lambda rng: blocks(rng, 4096),
    "1,024 keys in blocks of 8 bits, beside dense": lambda rng: blocks(rng, 1024, 8),
    "4,096 keys in blocks of 8 bits, beside dense": lambda rng: blocks(rng, 4096, 8),
}


def of_ours(call: Callable[[], mx.array], chip: str) -> PredictedLaunches[Any]:
    with mm.simulator.enabled(gpu=chip), mm.simulator.predicted(chip) as launches:
        mx.eval(call())
    return launches


def of_mlx(call: Callable[[], mx.array], chip: str) -> PredictedLaunches[Any]:
    with mm.simulator.predicted(chip, peer="metal") as launches:
        mx.eval(call())
    return launches


def shown(launches: PredictedLaunches[Any]) -> tuple[float, str]:
    """The time of launches one after the other, and a description of them."""
    names = [f"{launch.launch.kernel} {launch.prediction.microseconds:.1f}" for launch in launches]
    return sum(launch.prediction.microseconds for launch in launches), ", ".join(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, metavar="NAME", help="one case alone")
    parser.add_argument("--chip", default="m2-max,m4-max", help="chips, with commas")
    arguments = parser.parse_args()
    chips = arguments.chip.split(",")
    mx.set_default_device(mx.cpu)
    print("| case | chip | ours, us | beside, us | beside by ours | launches |\n|---|---|--:|--:|--:|---|")
    for name in [arguments.case] if arguments.case else CASES:
        ours, beside = CASES[name](np.random.default_rng(0))
        mlx = of_mlx(beside, chips[0]) if name.endswith("MLX") else None  # launches the same on every Max
        for chip in chips:
            own, kernels = shown(of_ours(ours, chip))
            other, others = shown(mlx.on(find_chip(chip)) if mlx is not None else of_ours(beside, chip))
            print(
                f"| {name} | {chip} | {own:.1f} | {other:.1f} | {other / own:.2f} | {kernels}; {others} |", flush=True
            )


if __name__ == "__main__":
    main()
