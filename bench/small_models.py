"""Small models of mlx-lm's architectures, random weights, float32: the patched model's tokens and logits beside mx's.

On a GPU a fault of a whole model shows here, such as of memory that a recorded kernel has yet to write.

Usage: python3 small_models.py [MODEL ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # else mx's products of float32 numbers have 10 bits on some GPUs
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import mlx.core as mx  # noqa: E402
from helpers import tiny  # noqa: E402

from mlx_mittens.bench import architectures  # noqa: E402
from mlx_mittens.bench.validation import OurFailure, Validation, validate  # noqa: E402

TOKENS = 40
WEIGHTS = {"dense": None, "4-bit": 4}


def line(found: Validation) -> str:
    tokens = f"{found.same} of {found.tokens} tokens the same"
    errors = f"{found.typical_error:.2g} from float32, mx {found.typical_mx_error:.2g}"
    return f"{'right' if found.passed else 'WRONG'}: {tokens}; logits typically {errors}"


def main() -> int:
    names = sys.argv[1:] or list(architectures.ARCHITECTURES)
    right = True
    print(mx.default_device())
    for name in names:
        for weights, bits in WEIGHTS.items():
            mx.random.seed(0)
            prompt = mx.random.randint(1, 300, (19,)).tolist()
            try:
                found = validate(tiny.build(name, mx.float32, bits), prompt, TOKENS)
                right &= found.passed
                print(f"{name}, {weights}: {line(found)}", flush=True)
            except OurFailure as failure:
                right = False
                print(f"{name}, {weights}: WRONG: {failure}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
