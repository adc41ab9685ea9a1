"""The least of the table of ops that reaches every kernel variant: `pytest -m quick` simulates it.

PYTHONPATH=tests python -m verification.quick --write    finds it anew, and writes quick.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from helpers.support import absences
from helpers.variants import simulate

from mlx_mittens import _ext, frontend, specs

FILE = Path(__file__).with_name("quick.json")

Key = tuple[str, str, str, int]  # op, case, dtype, and which choice of absent arguments


def chosen() -> set[Key]:
    """The runs that were chosen."""
    return {tuple(key) for key in json.loads(FILE.read_text())}


def is_wanted(key: Key) -> bool:
    """Whether a run was chosen, or is of an op that is newer than the choice."""
    runs = chosen()
    return key in runs or all(key[0] != op for op, *_ in runs)


def every_key() -> set[Key]:
    return {
        (op.name, case.name, dtype, i)
        for op in specs.OPS
        for case in op.checks()
        for dtype in specs.DTYPES
        for i in range(len(absences(op, op.parameters)))
    }


def find() -> list[Key]:
    """Runs all of the table; the runs that reach every variant in the least time, about."""
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(0)
    reached, seconds = {}, {}
    for op in specs.OPS:
        for dtype in specs.DTYPES:
            _ext.simulator_record(True)
            start = time.perf_counter()
            for case, i, check in simulate(op, specs.DTYPES[dtype], 1, rng):
                key = (op.name, case.name, dtype, i)
                assert check.passed, f"{key}: {check.detail}"
                reached[key] = {f"{run['file']}:{run['kernel']}" for run in _ext.simulator_record(True)}
                seconds[key] = time.perf_counter() - start
                start = time.perf_counter()
    missing = {f"{file}:{variant.name}" for file in frontend.files() for variant in frontend.variants(file)}
    missing &= set().union(*reached.values())
    best: list[Key] = []
    while missing:
        best.append(max(reached, key=lambda key: len(reached[key] & missing) / seconds[key]))
        missing -= reached[best[-1]]
    return sorted(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write quick.json")
    arguments = parser.parse_args()
    keys = find()
    text = "[\n" + ",\n".join(json.dumps(key) for key in keys) + "\n]\n"
    if arguments.write:
        FILE.write_text(text)
    print(text if not arguments.write else f"{len(keys)} runs")


if __name__ == "__main__":
    main()
