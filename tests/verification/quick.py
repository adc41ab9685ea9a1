"""The least of the table of ops that reaches every kernel variant: `pytest -m quick` simulates it.

PYTHONPATH=tests python -m verification.quick            prints it: the runs, and the variants that each is there for
PYTHONPATH=tests python -m verification.quick --write    writes quick.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
from helpers.support import absences
from helpers.variants import simulate

import mlx_mittens as mm
from mlx_mittens import _ext, specs

FILE = Path(__file__).with_name("quick.json")
SEED = 1  # of the thread order

Key = tuple[str, str, str, int]  # op, case, dtype, and which choice of absent arguments


def chosen() -> dict[Key, set[str]]:
    """The runs that were chosen, and the variants that each is there for, as ``file:kernel``."""
    return {tuple(run["run"]): set(run["variants"]) for run in json.loads(FILE.read_text())}


def every_key() -> set[Key]:
    """The runs of the table."""
    return {
        (op.name, case.name, dtype, i)
        for op in specs.OPS
        for case in op.checks()
        for dtype in specs.DTYPES
        for i in range(len(absences(op, op.parameters, case)))
    }


def run(
    op: specs.Op, dtype: str, rng: np.random.Generator, keys: Collection[Key] | None = None
) -> Iterator[tuple[Key, specs.Check, set[str]]]:
    """Simulates an op's runs of a type, all by default; yields how each went and the variants that it launched."""
    wanted = lambda case, i: keys is None or (op.name, case.name, dtype, i) in keys
    _ext.simulator_record(True)
    try:
        for case, i, check in simulate(op, specs.DTYPES[dtype], SEED, rng, wanted):
            launches = _ext.simulator_record(True)
            yield (op.name, case.name, dtype, i), check, {f"{one['file']}:{one['kernel']}" for one in launches}
    finally:
        _ext.simulator_record(False)


def cover(reached: Mapping[Key, Collection[str]], seconds: Mapping[Key, float]) -> dict[Key, set[str]]:
    """Chooses runs that reach all that any of them reaches, in the least time, about."""
    missing = set().union(*reached.values())
    best: dict[Key, set[str]] = {}
    while missing:
        key = max(reached, key=lambda key: len(missing.intersection(reached[key])) / seconds[key])
        best[key] = missing.intersection(reached[key])
        missing -= best[key]
    return dict(sorted(best.items()))


def find() -> dict[Key, set[str]]:
    """Simulates all of the table, and chooses of it."""
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(0)
    reached, seconds = {}, {}
    with mm.strict():  # as in the tests: a plan that prefers mx for small shapes launches nothing
        for op in specs.OPS:
            for dtype in specs.DTYPES:
                start = time.perf_counter()
                for key, check, variants in run(op, dtype, rng):
                    assert check.passed, f"{key}: {check.detail}"
                    reached[key] = variants
                    seconds[key] = time.perf_counter() - start
                    start = time.perf_counter()
    return cover(reached, seconds)


def text(best: Mapping[Key, Collection[str]]) -> str:
    """The contents of quick.json, a run a line."""
    runs = [json.dumps({"run": key, "variants": sorted(variants)}) for key, variants in best.items()]
    return "[\n" + ",\n".join(runs) + "\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write quick.json")
    arguments = parser.parse_args()
    best = find()
    if arguments.write:
        FILE.write_text(text(best))
        print(f"{len(best)} runs")
    else:
        print(text(best), end="")


if __name__ == "__main__":
    main()
