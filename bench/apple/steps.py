"""Predicted time on Apple GPUs of parts of a layer for one token, beside what mx and mlx-lm launch for them.

python bench/apple/steps.py            prints the table
python bench/apple/steps.py --write    writes bench/results/apple-steps.md
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))

from tokens import CHIPS, recorded, works_of

import mlx_mittens as mm
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import chain
from mlx_mittens.simulator import EstimatedLaunch

FILE = Path(__file__).parents[1] / "results" / "apple-steps.md"
DTYPE = mx.float16
# Heads of values, groups of B and C, numbers of a head and of a row of its state.
STATE_SPACES = {
    "Mamba 2 2.7B": (80, 1, 64, 128),
    "Nemotron-H 8B": (128, 8, 64, 128),
    "Falcon-H1 1.5B": (48, 1, 64, 256),
}
# Heads of queries and of keys, numbers of a head.
ATTENTIONS = {"Llama 3.2 1B": (32, 8, 64), "Llama 3.1 8B": (32, 8, 128)}
CACHED = (1024, 4096)
BITS = (4, 8)

HEAD = """# Parts of a layer for one token, predicted beside what mx and mlx-lm launch

Predictions, not measurements: no Mac was at hand. `python bench/apple/steps.py --write`, float16, plans for the first
chip; [docs/apple.md](../../docs/apple.md) says how far such predictions are off. Speed is their time by ours.

- ssm_update: `mm.ssm_update` beside mlx-lm's `ssm_update_kernel`, whose Metal kernel runs in the simulator. The results
  agree, which the script checks. Ours is one launch; mlx-lm's kernel has its time steps from one compiled operation of
  mx, which is estimated from bytes.
- quantized cache: rotary embedding of queries and keys, the append to mlx-lm's `QuantizedKVCache` and attention over
  it, with the patch and without.
"""


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(DTYPE)


def state_space(heads: int, groups: int, rows: int, columns: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A token of it, ours and mlx-lm's."""
    from mlx_lm.models import ssm

    x, d, dt, bias = normal(1, 1, heads, rows), normal(heads), normal(1, 1, heads), normal(heads)
    a, b, c = mx.abs(normal(heads)), normal(1, 1, groups, columns), normal(1, 1, groups, columns)
    state, limits = normal(1, heads, rows, columns).astype(mx.float32), (0.001, 100.0)
    mx.eval(x, a, b, c, d, dt, bias, state)
    return (
        lambda: mm.ssm_update(x, a, b, c, d, dt, bias, state, limits),
        lambda: ssm.ssm_update_kernel(x, a, b, c, d, dt, bias, state, limits),
    )


def quantized_attention(heads: int, key_heads: int, width: int, cached: int, bits: int) -> Callable[[], Any]:
    """A token's attention with a quantized cache of so many tokens, by mlx-lm's functions."""
    from mlx_lm.models import base
    from mlx_lm.models.cache import QuantizedKVCache

    cache = QuantizedKVCache(64, bits)
    mx.eval(cache.update_and_fetch(normal(1, key_heads, cached - 1, width), normal(1, key_heads, cached - 1, width)))
    flat = [normal(1, 1, count * width) for count in (heads, key_heads, key_heads)]
    mx.eval(flat)

    def run() -> mx.array:
        q, k, v = (a.reshape(1, 1, -1, width).transpose(0, 2, 1, 3) for a in flat)
        q, k = (mx.fast.rope(a, width, traditional=False, base=1e4, scale=1.0, offset=cache.offset) for a in (q, k))
        keys, values = cache.update_and_fetch(k, v)
        return base.scaled_dot_product_attention(q, keys, values, cache=cache, scale=width**-0.5, mask=None)

    return run


def recorded_with_result(step: Callable[[], Any]) -> tuple[list[Any], Any]:
    """What is launched for a step, and what it gives."""
    results = []

    def run() -> Any:
        results.append(step())
        return results[-1]

    return recorded(run), results[0]


def row(name: str, ours: list[Any], theirs: list[Any]) -> str:
    cells = [name, str(len(ours)), str(len(theirs))]
    for chip in map(find_chip, CHIPS):
        times = [chain(works_of(side, chip), chip).microseconds for side in (ours, theirs)]
        cells += [f"{times[0]:.1f}", f"{times[1]:.1f}", f"{times[1] / times[0]:.2f}"]
    return f"| {' | '.join(cells)} |"


def rows() -> Iterator[str]:
    for name, shape in STATE_SPACES.items():
        sides, results = zip(*map(recorded_with_result, state_space(*shape)))
        for a, b in zip(*results, strict=True):
            if not (mx.abs(a - b).max() <= 2e-3 * mx.abs(b).max()).item():
                raise RuntimeError(f"{name}: the results differ")
        yield row(f"ssm_update, {name}", *sides)
        alone = [[one for one in side if not isinstance(one, EstimatedLaunch)] for side in sides]
        yield row(f"ssm_update, {name}, the kernel alone", *alone)
    for name, (heads, key_heads, width) in ATTENTIONS.items():
        for cached in CACHED:
            for bits in BITS:
                both = []
                for context in (mm.patched(), contextlib.nullcontext()):
                    with context:
                        both.append(recorded(quantized_attention(heads, key_heads, width, cached, bits)))
                yield row(f"quantized cache, {name}, {cached} tokens, {bits} bits", *both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    columns = "".join(f" {chip}: us | theirs | speed |" for chip in CHIPS)
    lines = [HEAD, "| step | launches | theirs |" + columns, "|---|--:|--:|" + "--:|--:|--:|" * len(CHIPS)]
    print("\n".join(lines))
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    if arguments.write:
        FILE.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
