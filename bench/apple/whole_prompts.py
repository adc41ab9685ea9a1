"""Predicted time of a whole prompt on Macs, by mx and under mm.patch(): the README's table of prompts.

python bench/apple/whole_prompts.py            prints the table
python bench/apple/whole_prompts.py --write    writes bench/results/whole-prompts.md, and the table into README and docs
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from prompts import GROUP, Tile, is_ours, our_quantized, quantized, simulated, their_quantized
from tiles import TYPES, extended

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.apple.chips import Chip, find_chip
from mlx_mittens.apple.estimates import elementwise, norm
from mlx_mittens.apple.model import Work, chain
from mlx_mittens.bench.architectures import ARCHITECTURES
from mlx_mittens.cli.predicted_models import times
from mlx_mittens.cli.predictions import Side
from mlx_mittens.cli.simulate import own_launches, peer_side
from mlx_mittens.specs import Case

CHIPS = ("m1", "m2-pro", "m2-max", "m3-max", "m4-max")
TOKENS = 512
MODELS = ("llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b", "qwen3-8b")
HEADS = 8, 2  # of queries and of keys that are simulated
BYTES = 2  # of a value
WEIGHT_BYTES = (4 + 32 / GROUP) / 8
ROOT = Path(__file__).parents[2]
FILE = ROOT / "bench" / "results" / "whole-prompts.md"
COPIES = (ROOT / "README.md", ROOT / "docs" / "apple.md")
MARKS = "<!-- prompts -->\n", "<!-- /prompts -->\n"

HEAD = f"""# Whole prompts on Macs, predicted by mx and under mm.patch()

Predictions, not measurements: no Mac was at hand. `python bench/apple/whole_prompts.py --write`. A prompt of {TOKENS}
tokens, weights of 4 bits in groups of {GROUP}, an empty cache, logits of the last token, as mlx-lm computes them.
Quantized products and attention are simulated, ours and MLX 0.32.4's kernels (`affine_qmm_t`, steel attention): a
threadgroup at two numbers of columns, and {HEADS[0]} heads over {HEADS[1]}, extended to the whole. The launches are
those that mlx-lm's layer evaluates. Norms, rotary embedding, the append, residual sums and activations are estimated
from their bytes on both sides, the head from its weights. A launch that waits for another starts in 7.2 us.
[docs/apple.md](../../docs/apple.md) says how far such predictions are off: MLX's products on M1 are predicted a third
too slow, so that our speed there is overstated.
"""


@dataclass(frozen=True)
class Layer:
    """The shapes of a model's layers, all alike."""

    hidden: int
    between: int
    heads: int
    key_heads: int
    width: int
    has_norms_of_heads: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Layer:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        normed = config["model_type"] == "qwen3"
        return cls(hidden, config["intermediate_size"], heads, config["num_key_value_heads"], width, normed)

    def products(self) -> list[tuple[int, int]]:
        """Columns and outputs of each but gate and up."""
        queries, cached = self.heads * self.width, self.key_heads * self.width
        return [
            (self.hidden, queries),
            *[(self.hidden, cached)] * 2,
            (queries, self.hidden),
            (self.between, self.hidden),
        ]

    def values(self) -> tuple[int, int]:
        """Of all tokens' queries, and of their keys."""
        return TOKENS * self.heads * self.width, TOKENS * self.key_heads * self.width


@dataclass(frozen=True)
class Kernels:
    """The simulated launches of one type."""

    ours: Tile
    gated: Tile  # gate, up and the activation
    theirs: Tile
    attention: Mapping[int, tuple[Side, Side]]  # by width, ours and MLX's

    @classmethod
    def of(cls, name: str) -> Kernels:
        dtype, text = TYPES[name]
        chips = [find_chip(chip) for chip in CHIPS]
        op = specs.get("scaled_dot_product_attention")
        attention = {}
        for width in (64, 128):
            case = Case("prompt", (1, *HEADS, TOKENS, TOKENS, width), {"mask": "causal"})
            peer = peer_side(op, case, dtype, chips)
            if peer is None:
                raise RuntimeError("MLX's attention is not there")
            attention[width] = Side.of(own_launches(op, case, dtype, chips)), peer
        return cls(
            our_quantized(64, dtype, 4, True), our_gated(dtype), their_quantized(dtype, text, 4, True), attention
        )


def our_gated(dtype: mx.Dtype) -> Tile:
    outputs = 32

    def call(columns: int) -> mx.array:
        x = mx.random.normal((64, columns)).astype(dtype)
        gate, up = (quantized(outputs, columns, dtype, 4, True) for _ in range(2))
        return mm.quantized_swiglu(x, gate, up, group_size=GROUP, bits=4)

    return Tile(simulated(call), 64, outputs)


def product(tile: Tile, chip: Chip, columns: int, outputs: int, matrices: int = 1) -> Work:
    """A product of all tokens, or two that share their tokens."""
    moved = BYTES * TOKENS * (columns + outputs) + matrices * columns * outputs * WEIGHT_BYTES
    threadgroups = -(-TOKENS // tile.rows) * -(-outputs // tile.outputs)
    return extended(tile.found, chip, columns, threadgroups, moved / 128)


def attention(side: Side, chip: Chip, layer: Layer) -> list[Work]:
    works = [launch.work for launch in side.launches[chip.name]]
    return [times(work, layer.heads / HEADS[0]) for work in works if work is not None]


def maps(values: int, arrays: int) -> Work:
    """A kernel that reads and writes arrays of equal size."""
    return elementwise(values, arrays * BYTES * values)


def our_layer(layer: Layer, kernels: Kernels, chip: Chip) -> list[Work]:
    """The launches of a layer under the patch."""
    states = TOKENS * layer.hidden
    queries, keys = layer.values()
    works = [norm(TOKENS, layer.hidden, 4 * BYTES * states)] * 2  # each with its residual sum
    works += [maps(queries + 2 * keys, 2), *attention(kernels.attention[layer.width][0], chip, layer)]
    works.append(maps(queries, 2))  # heads side by side
    for columns, outputs in layer.products():
        tile = kernels.ours if is_ours(kernels.ours, chip, TOKENS, outputs) else kernels.theirs
        works.append(product(tile, chip, columns, outputs))
    return [*works, product(kernels.gated, chip, layer.hidden, layer.between, 2)]


def their_layer(layer: Layer, kernels: Kernels, chip: Chip) -> list[Work]:
    """The launches of a layer of mlx-lm."""
    states = TOKENS * layer.hidden
    queries, keys = layer.values()
    works = [norm(TOKENS, layer.hidden, 2 * BYTES * states), maps(states, 3)] * 2
    if layer.has_norms_of_heads:
        works += [norm(values // layer.width, layer.width, 2 * BYTES * values) for values in (queries, keys)]
    works += [maps(queries, 2), maps(keys, 2), *[maps(keys, 2)] * 2]  # rotary embedding, and the cache's updates
    works += [*attention(kernels.attention[layer.width][1], chip, layer), maps(queries, 2)]
    works += [product(kernels.theirs, chip, *size) for size in layer.products()]
    works += [product(kernels.theirs, chip, layer.hidden, layer.between)] * 2
    return [*works, maps(TOKENS * layer.between, 3)]


def milliseconds(model: str, kernels: Kernels, chip: Chip) -> tuple[float, float]:
    """Of mx, and under the patch."""
    config = ARCHITECTURES[model]
    layer = Layer.of(config)
    head = config["vocab_size"] * layer.hidden * WEIGHT_BYTES / chip.nominal_GBps / 1e3
    both = []
    for works in (their_layer(layer, kernels, chip), our_layer(layer, kernels, chip)):
        counts = [config["num_hidden_layers"]] * len(works)
        both.append((chain(works, chip, times=counts).microseconds + head) / 1e3)
    return both[0], both[1]


def tables() -> tuple[list[str], list[str]]:
    """The lines of the README's table, in tokens a second, and of the page's, in milliseconds."""
    titles = [find_chip(chip).title.removeprefix("Apple ") for chip in CHIPS]
    short = [f"| model | {' | '.join(titles)} |", f"|---|{'--:|' * len(CHIPS)}"]
    columns = " | ".join(f"{chip}: ms | mx's | speed" for chip in CHIPS)
    full = [f"| model, type | {columns} |", f"|---|{'--:|--:|--:|' * len(CHIPS)}"]
    for name in TYPES:
        kernels = Kernels.of(name)
        for model in MODELS:
            both = [milliseconds(model, kernels, find_chip(chip)) for chip in CHIPS]
            cells = [f"{1e3 * TOKENS / theirs:,.0f} → **{1e3 * TOKENS / ours:,.0f}**" for theirs, ours in both]
            short.append(f"| {model}, {name} | {' | '.join(cells)} |")
            cells = [f"{ours:,.0f} | {theirs:,.0f} | {theirs / ours:.2f}" for theirs, ours in both]
            full.append(f"| {model}, {name} | {' | '.join(cells)} |")
    return short, full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}, and the table into README and docs")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    short, full = tables()
    print(*short, *full, sep="\n")
    if arguments.write:
        FILE.write_text("\n".join([HEAD, "## Tokens a second", "", *short, "", "## Milliseconds", "", *full, ""]))
        for path in COPIES:
            before, rest = path.read_text().split(MARKS[0])
            rows = "\n".join(short)
            path.write_text(f"{before}{MARKS[0]}{rows}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
