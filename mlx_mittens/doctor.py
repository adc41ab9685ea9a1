"""Doctor: what is installed, which executors are there, and whether every case is right on this machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import cases, executors, machine, strict
from .bench import op_names, select_device, writable

# Larger cases repeat the same kernels, and are not worth the wait.
_LARGEST = {"cpu": 2**23, "gpu": 2**27}

# Up to here mx's error, which bounds ours, is taken on the CPU, on a GPU too: in MLX 0.32.4's CUDA build the gradient
# of mx.fast.layer_norm reads out of bounds for odd columns (9x255 in float32) and takes the process down.
_LARGEST_TWIN_ON_CPU = 2**20


@dataclass(frozen=True)
class Finding:
    """One case's outcome."""

    op: str
    case: str
    dtype: str
    passed: bool
    error: float | None
    mx_error: float | None
    detail: str


def _cases(op: cases.Op, device: str) -> Iterator[cases.Case]:
    for case in (*op.checks(), *(case for case in op.cases if math.prod(case.shape) <= _LARGEST[device])):
        if case.runs_on(device):
            yield case


def examine(op: cases.Op, case: cases.Case, dtype: str, rng: np.random.Generator) -> Finding:
    """Runs one case and compares it with float64; whatever is raised is the finding."""
    try:
        arrays = op.draw(rng, case, cases.DTYPES[dtype])
        cotangents = op.cotangents(rng, case, cases.DTYPES[dtype])
        twin_device = mx.Device(mx.cpu) if math.prod(case.shape) <= _LARGEST_TWIN_ON_CPU else None
        check = cases.check(op, case, arrays, cotangents, twin_device)
    except Exception as exception:  # a kernel that does not compile or launch is what a doctor is there to find
        return Finding(op.name, case.name, dtype, False, None, None, f"{type(exception).__name__}: {exception}")
    finite = [value if math.isfinite(value) else None for value in (check.error, check.twin_error)]
    return Finding(op.name, case.name, dtype, check.passed, *finite, check.detail)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument("--ops", metavar="A,B", help="only these ops, comma separated (all)")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="where to run (mx's default device)")
    parser.add_argument("--json", metavar="FILE", help="write what was found to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Examines this machine.

    Returns:
        int: 0 if every case passed, else 1.

    Raises:
        UsageError: The arguments cannot be served.
    """
    names = op_names(arguments.ops)
    writable("--json", arguments.json)
    select_device(arguments.device)
    device = machine.device()
    print("\n".join(f"{name:12} {version}" for name, version in machine.versions().items()))
    print(f"{'system':12} {platform.platform()}")
    print(f"{'processor':12} {machine.processor()}, {machine.cores()} cores")
    print(f"{'gpu':12} {machine.gpu() or 'none that mx can use'}")
    print(f"{'device':12} {device}, executor {machine.executor()}")
    print("executors")
    for name, status in executors().items():
        print(f"  {name:10} {status}")

    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    findings = []
    for op in [op for op in cases.OPS if op.name in names]:
        with strict():
            mine = [examine(op, case, dtype, rng) for case in _cases(op, device) for dtype in op.dtypes(case)]
        mx.clear_cache()
        failed = [finding for finding in mine if not finding.passed]
        print(f"{op.name:12} {len(mine) - len(failed)} of {len(mine)} cases pass", flush=True)
        for finding in failed:
            print(f"  FAILED {finding.case} {finding.dtype}: {finding.detail}")
        findings += mine

    passed = all(finding.passed for finding in findings)
    print("All is well." if passed else f"{sum(not f.passed for f in findings)} cases failed (seed {seed}).")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(_as_json(device, seed, findings, passed), file, indent=1)
            file.write("\n")
    return 0 if passed else 1


def _as_json(device: str, seed: int, findings: list[Finding], passed: bool) -> dict[str, Any]:
    return {
        "versions": machine.versions(),
        "system": platform.platform(),
        "processor": machine.processor(),
        "gpu": machine.gpu(),
        "device": device,
        "executor": machine.executor(),
        "executors": executors(),
        "seed": seed,
        "passed": passed,
        "cases": [vars(finding) for finding in findings],
    }
