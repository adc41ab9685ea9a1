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

import mlx_mittens as mm
from mlx_mittens import _ext, frontend, specs

FILE = Path(__file__).with_name("quick.json")

Key = tuple[str, str, str, int]  # op, case, dtype, and which choice of absent arguments


def chosen() -> set[Key]:
    """The runs that were chosen."""
    return {tuple(key) for key in json.loads(FILE.read_text())}


def simulate(op: specs.Op, dtype: str, keys: set[Key], rng: np.random.Generator):
    """Simulates those of an op's runs in one type that are among the keys; yields each key, and how it went."""
    for case in op.checks():
        wanted = [key for key in keys if key[:3] == (op.name, case.name, dtype)]
        if not wanted:
            continue
        drawn = op.draw(rng, case, specs.DTYPES[dtype])
        cotangents = op.cotangents(rng, case, specs.DTYPES[dtype])
        choices = absences(op, drawn)
        for key in sorted(wanted):
            with mm.simulator.enabled(seed=1, gpu=case.gpu):
                yield key, specs.check(op, case, choices[key[3]], cotangents)


def every_key() -> set[Key]:
    rng = np.random.default_rng(0)
    return {
        (op.name, case.name, dtype, i)
        for op in specs.OPS
        for case in op.checks()
        for dtype in specs.DTYPES
        for i in range(len(absences(op, op.draw(rng, case, specs.DTYPES[dtype]))))
    }


def find() -> list[Key]:
    """Runs all of the table; the runs that reach every variant in the least time, about."""
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(0)
    keys, reached, seconds = every_key(), {}, {}
    for op in specs.OPS:
        for dtype in specs.DTYPES:
            _ext.simulator_record(True)
            start = time.perf_counter()
            for key, check in simulate(op, dtype, keys, rng):
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
