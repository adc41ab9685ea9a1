"""Helpers that the op tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
from verification.sanitize import INSTRUCTION_SETS

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.simulator import EstimatedLaunch

TESTS = Path(__file__).resolve().parents[1]

# GPU tests run where mx has a GPU; the simulator and the native code run everywhere.
EXECUTORS = ["native", "simulator"] + ["gpu"] * mx.is_available(mx.gpu)
DEVICES = ["cpu"] + ["gpu"] * mx.is_available(mx.gpu)


def absences(op: specs.Op, arrays: Sequence[mx.array], case: specs.Case) -> list[list[mx.array | None]]:
    """The arguments with every choice of weight and bias left out; an offset is one of a weight that is there."""
    whole = any(name.endswith("weight_offset") and value for name, value in case.options.items())
    choices = [(a,) if kind == "rows" or whole else (a, None) for (_, kind), a in zip(op.parameters, arrays)]
    return [list(choice) for choice in product(*choices)]


def as_list(gradients) -> list[mx.array]:
    """mx.grad gives one array for one argument and a tuple for several."""
    return [gradients] if isinstance(gradients, mx.array) else list(gradients)


def bits(a: mx.array) -> bytes:
    flat = mx.view(mx.contiguous(a).reshape(-1), mx.uint8)
    mx.eval(flat)
    return np.array(flat).tobytes()


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes that a call takes at most, beside the memory before it."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function())
    mx.synchronize()
    return mx.get_peak_memory() - before


def assert_same_bits(a: mx.array, b: mx.array, what: str = "arrays"):
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
    assert bits(a) == bits(b), f"{what}: the results differ"


def assert_state_in_place(op, arrays: list[mx.array]):
    """The last result of an op stands where its last argument did, and is right."""
    expected = op(*arrays)
    mx.eval(expected)
    state = arrays.pop() + 0
    mx.eval(state)
    where = np.asarray(memoryview(state)).ctypes.data
    held = [*arrays, state]
    del state
    y, _, last = op(*held)
    del held
    mx.eval(y, last)
    assert np.asarray(memoryview(last)).ctypes.data == where
    assert_same_bits(last, expected[2], "state")


def launched_on_apple(run: Callable[[], object]) -> list[str]:
    """The names of all that the results of a call are launched with on an M2 Max: kernels, and operations of mx."""
    with mm.simulator.enabled(gpu="m2-max"), mm.simulator.predicted("m2-max", peer="metal") as launches:
        mx.eval(run())
    names = [one.name if isinstance(one, EstimatedLaunch) else one.launch.kernel for one in launches]
    return [*names, *launches.left_out]


def child_environment() -> dict[str, str]:
    """The environment of a child process that imports the tests' helpers."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))}


def check_instruction_sets(file: str, words: str) -> None:
    """Runs tests of a file, chosen as by pytest's `-k`, with each set of instructions of this machine but its best."""
    if os.environ.get("MLX_MITTENS_CPU"):
        return  # a set was chosen from outside: this is that run
    others = [name for name in INSTRUCTION_SETS if name != mm._ext.cpu_instructions]
    refused = 0
    for name in others:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", words],
            env={**child_environment(), "MLX_MITTENS_CPU": name},
            capture_output=True,
            text=True,
        )
        if f"MLX_MITTENS_CPU is '{name}', this machine runs" in done.stdout + done.stderr:
            refused += 1
        else:
            assert done.returncode == 0, done.stdout[-3000:]
    assert refused < len(others)
