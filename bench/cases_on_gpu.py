"""Runs the test shapes of every op once on the GPU, ours alone and with views: what compute-sanitizer is to look at.

Usage: python3 cases_on_gpu.py [OP ...]
"""

import sys

import mlx.core as mx
import numpy as np

from mlx_mittens import specs, strict


def main() -> None:
    rng = np.random.default_rng()
    names = sys.argv[1:]
    count = 0
    with strict():
        for op in [op for op in specs.OPS if not names or op.name in names]:
            for case in filter(lambda case: case.runs_on("gpu"), op.checks()):
                for dtype in specs.DTYPES.values():
                    arrays = op.draw(rng, case, dtype)
                    cotangents = op.cotangents(rng, case, dtype)
                    strided = [mx.repeat(a, 2, axis=-1)[..., ::2] if a is not None else None for a in arrays]
                    for group in (arrays, strided):
                        mx.eval(specs.run(op, op.ours, case, group, cotangents))
                        count += 1
    mx.synchronize()
    print(f"{count} runs on {mx.default_device()}")


if __name__ == "__main__":
    main()
