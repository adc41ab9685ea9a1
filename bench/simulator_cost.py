"""Prints what watching, counting and profiling cost the simulator, as a Markdown table. Needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

import mlx_mittens as mm
from mlx_mittens import _ext, specs

CASES = (
    ("softmax", "512x4096"),
    ("rms_norm", "2x200"),
    ("gemv", "1x4104x9"),
    ("quantized_matmul", "7x192x18"),
    ("scaled_dot_product_attention", "1x2x2x1x300x64"),
)
MODES = ("unwatched", "watched", "counted", "counted, profiled")
ROUNDS = 7


def seconds(run: Callable[[], list[mx.array]], mode: str) -> float:
    """CPU time of a call in the simulator."""
    with mm.simulator.enabled(watch=mode != "unwatched"):
        if "counted" in mode:
            _ext.simulator_record(True, **({"profile": True} if "profiled" in mode else {}))
        start = time.process_time()
        mx.eval(run())
        used = time.process_time() - start
        _ext.simulator_record(False)
    return used


def main() -> None:
    print("| case | " + " | ".join(f"{mode}, ms" for mode in MODES) + " |\n|---|" + "--:|" * len(MODES))
    mx.set_default_device(mx.cpu)
    for name, words in CASES:
        op = specs.get(name)
        case = next(case for case in [*op.cases, *op.tests] if words in case.name)
        arrays = op.draw(np.random.default_rng(0), case, mx.float16)
        run = lambda op=op, case=case, arrays=arrays: specs.run(op, op.ours, case, arrays, [])
        best = dict.fromkeys(MODES, float("inf"))
        for number in range(ROUNDS + 1):
            for mode in MODES:
                used = seconds(run, mode)
                if number:  # the first compiles
                    best[mode] = min(best[mode], used)
        print(f"| {name} {case.name} | " + " | ".join(f"{1e3 * best[mode]:.3g}" for mode in MODES) + " |", flush=True)


if __name__ == "__main__":
    main()
