"""Generates many tokens with a model of random weights in a process of its own, as a user's does: the time of each new
length counts too.

Usage: python3 generation.py MODEL mx|patched|converted [TOKENS]
"""

import statistics
import sys
import time

import mlx.core as mx
from mlx_lm.generate import generate_step

import mlx_mittens as mm
from mlx_mittens.bench import architectures

WARM_UP = 8


def main() -> None:
    name, how = sys.argv[1:3]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
    model = architectures.build(name, mx.bfloat16, 4)
    if how == "converted":
        mm.nn.convert(model)
    elif how == "patched":
        mm.patch()
    prompt = mx.random.randint(0, model.args.vocab_size, (128,))
    seconds = []
    before = time.perf_counter()
    for _ in generate_step(prompt, model, max_tokens=WARM_UP + count):
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    seconds = seconds[WARM_UP:]
    mean, median = statistics.mean(seconds), statistics.median(seconds)
    print(
        f"{name} {how}: {count} tokens after {len(prompt)}, {1 / mean:.0f} tokens/s, {1 / median:.0f} by the median, "
        f"slowest token {max(seconds):.3f} s"
    )


if __name__ == "__main__":
    main()
