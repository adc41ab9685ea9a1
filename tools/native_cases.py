"""Small cases of every op in native code, compared with float64, for a machine that is too slow for `doctor`.

python tools/native_cases.py --seconds 8

It prints a row of a Markdown table for each op, and all errors. The exit status is 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator

os.environ["MLX_MITTENS_CALIBRATION"] = "off"  # the choices of the tables, not of someone's calibration

import mlx.core as mx
import numpy as np

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.cli import doctor

_LARGEST = 65536


def todo(op: specs.Op) -> Iterator[tuple[specs.Case, str]]:
    """The cases of an op that are small enough, each with the name of a type."""
    for case in (*op.checks(), *op.cases):
        if case.runs_on("cpu") and math.prod(case.shape) <= _LARGEST:
            yield from ((case, dtype) for dtype in op.dtypes(case))


def examine(op: specs.Op, seconds: float) -> list[doctor.Finding]:
    """As many cases as start within the time, the first one always."""
    start, rng, found = time.monotonic(), np.random.default_rng(0), []
    for case, dtype in todo(op):
        found.append(doctor.examine(op, case, dtype, rng))
        if time.monotonic() - start > seconds:
            break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8, help="in which cases of an op start (8)")
    seconds = parser.parse_args().seconds
    mx.set_default_device(mx.cpu)
    print(f"native: {mm.executors()['native']}\n\n| op | cases | wrong |\n|---|--:|--:|", flush=True)
    wrong, count = [], 0
    with mm.strict():
        for op in specs.OPS:
            findings = examine(op, seconds)
            failed = [finding for finding in findings if not finding.passed]
            print(f"| `{op.name}` | {len(findings)} | {len(failed)} |", flush=True)
            count, wrong = count + len(findings), wrong + failed
    print(f"\n{count} cases, {len(wrong)} wrong")
    for finding in wrong:
        print(f"{finding.op} {finding.case} {finding.dtype}: {finding.detail}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
