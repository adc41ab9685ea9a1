"""The time a prediction adds to a simulated case, as Markdown: `simulate OP CASE` without and with `--chip all`.

python bench/apple/cost.py            prints it; bench/results/prediction-cost.md has a run

Times are of whole processes with warm caches, the least of some runs. Processor time says more than the time that
passes where other programs run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

CASES = (
    ("softmax", "large 512x4096"),
    ("rms_norm", "Llama-3.1-8B decode 1x4096"),
    ("scaled_dot_product_attention", "decode 1x32x8x1x1024x64"),
    ("quantized_matmul", "Llama-3.2-1B 1x2048x2048 bits=4"),
)
ROUNDS = 4


def used(arguments: list[str]) -> tuple[float, float]:
    """Processor time and time of a command."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "mlx_mittens", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    passed = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"mlx-mittens {' '.join(arguments)} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, passed


def main() -> None:
    print("| case | `simulate`, s of processors | with `--chip all` | ratio | s | with `--chip all` | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for op, case in CASES:
        plain = ["simulate", op, case]
        best = []
        for arguments in (plain, [*plain, "--chip", "all"]):
            runs = [used(arguments) for _ in range(ROUNDS + 1)][1:]  # the first compiles
            best.append([min(column) for column in zip(*runs)])
        pairs = list(zip(*best))
        cells = [cell for a, b in pairs for cell in (f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}")]
        print(f"| {op} {case} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
