"""Checks that memory stays flat over many generated tokens; exits with 1 if not.

python bench/memory.py [--tokens 10000]
"""

from __future__ import annotations

import argparse
import os
import sys

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache

import mlx_mittens as mm
from mlx_mittens.bench import architectures

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}


def resident() -> int:
    """Bytes that the process holds, where the system tells."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000)
    arguments = parser.parse_args()
    model = architectures.build("llama-3.2-1b", mx.float16, 4, **SMALL)
    caches = [RotatingKVCache(max_size=256, keep=4) for _ in model.layers]
    seen = []
    with mm.patched():
        steps = generate_step(mx.array([1, 2, 3]), model, max_tokens=arguments.tokens, prompt_cache=caches)
        for i, _ in enumerate(steps, 1):
            if i % (arguments.tokens // 10) == 0:
                seen.append((mx.get_active_memory(), resident()))
                print(f"{i} tokens: MLX {seen[-1][0] / 1e6:.2f} MB, process {seen[-1][1] / 1e6:.1f} MB", flush=True)
    (early, process_early), (late, process_late) = seen[1], seen[-1]
    grown = late - early > 1 << 16 or process_late - process_early > 4 << 20
    print("memory has grown" if grown else "memory is flat")
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
