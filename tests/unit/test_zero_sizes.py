"""Sizes of zero: a result as mathematics has it, or a ValueError, and never a signal.

The cases run in a child process, which prints the number of each before it runs it. A case that ends in a signal, or
does not end, fails alone: another child goes on behind it.
"""

import contextlib
import faulthandler
import itertools
import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers.calls import CALLS
from helpers.support import child_environment
from helpers.tolerances import LAYERS

import mlx_mittens as mm
from mlx_mittens.specs import OPS, widen

SECONDS = 240  # that a case may take, which may have to compile a kernel
EXECUTORS = {
    "native": contextlib.nullcontext,
    "simulator": lambda: mm.simulator.enabled(seed=1),
    "simulator of NVIDIA": lambda: mm.simulator.enabled(seed=1, gpu="nvidia"),
}


APPLES = ("block_masked_mm",)  # whose kernels are for Apple GPUs alone


def zeros_of(call):
    """Every one and every two of the sizes."""
    return [*((d,) for d in call.sizes), *itertools.combinations(call.sizes, 2)]


CASES = [(call, zeros) for call in CALLS for zeros in zeros_of(call)]


def as_numpy(a: mx.array) -> np.ndarray:
    return widen(a) if a.dtype in (mx.float32, mx.float16, mx.bfloat16) else np.array(a)


def assert_close(a: mx.array, b: np.ndarray, what: str):
    assert a.shape == b.shape, f"{what} has shape {a.shape}, expected {b.shape}"
    np.testing.assert_allclose(as_numpy(a), b, rtol=LAYERS, atol=LAYERS, err_msg=what)


def slope(call, arrays, tangents, names):
    """How the exact outputs change along the tangents."""
    exact = {name: as_numpy(a) for name, a in arrays.items()}
    step = 1e-4
    ends = []
    for sign in (1, -1):
        moved = {name: exact[name] + sign * step * widen(tangents[name]) for name in names}
        ends.append(call.exact(**{**exact, **moved}))
    return [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]


def check(call, zeros, covered):
    """One call: its outputs, their derivatives in both directions; if it is covered, vmap and mx.compile as well."""
    rng = np.random.default_rng(0)
    sizes = dict.fromkeys(zeros, 0)
    arrays = call.arrays(rng, **sizes)
    try:
        outputs = call.run(*arrays.values())
    except ValueError as error:
        assert str(error).startswith(f"[{call.op}] "), f"an error of another's: {error}"
        return
    mx.eval(outputs)
    expected = call.exact(**{name: as_numpy(a) for name, a in arrays.items()})
    for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(a, b, f"output {i}")

    names = call.differentiable()
    if names:

        def of(*these):
            return call.run(*{**arrays, **dict(zip(names, these))}.values())

        primals = [arrays[name] for name in names]
        tangents = {name: mx.array(rng.standard_normal(arrays[name].shape).astype(np.float32)) for name in names}
        cotangents = [mx.array(rng.standard_normal(a.shape).astype(np.float32)) for a in outputs]
        slopes = slope(call, arrays, tangents, names)
        for i, (a, b) in enumerate(zip(mx.jvp(of, primals, list(tangents.values()))[1], slopes, strict=True)):
            assert_close(a, b, f"derivative of output {i}")
        gradients = mx.vjp(of, primals, cotangents)[1]
        for name, a, gradient in zip(names, primals, gradients, strict=True):
            assert gradient.shape == a.shape, f"gradient of {name} has shape {gradient.shape}, expected {a.shape}"
        along = sum(float((widen(g) * widen(t)).sum()) for g, t in zip(gradients, tangents.values()))
        exact = sum(float((widen(c) * s).sum()) for c, s in zip(cotangents, slopes))
        assert abs(along - exact) <= LAYERS * max(abs(exact), 1), f"gradients: {along} along the tangents, not {exact}"

    if not covered:
        return
    mapped = mx.vmap(lambda *a: call.run(*a))(*(mx.stack([a, a]) for a in arrays.values()))
    for i, (a, b) in enumerate(zip(mapped, expected, strict=True)):
        assert_close(a, np.stack([b, b]), f"vmap's output {i}")
    mx.eval(mx.vmap(lambda *a: call.run(*a))(*(mx.zeros((0, *a.shape), a.dtype) for a in arrays.values())))

    compiled = mx.compile(lambda *a: call.run(*a), shapeless=True)
    compiled(*call.arrays(rng).values())  # makes the graph; that it computes is for other tests
    for i, (a, b) in enumerate(zip(compiled(*arrays.values()), expected, strict=True)):
        assert_close(a, b, f"output {i}, compiled for other sizes,")


def child(executor: str, first: int):
    """Prints the number of each case before it runs, and after it its mistakes, if any."""
    mx.set_default_device(mx.cpu)
    for number, (call, zeros) in enumerate(CASES[first:], first):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(json.dumps({"number": number}), flush=True)
        try:
            # Attention has no kernels for heads of width 0.
            covered = call.covered and (executor == "native" or "width" not in zeros)
            covered = covered and not (executor == "simulator of NVIDIA" and call.op in APPLES)
            with EXECUTORS[executor](), mm.strict(covered):
                check(call, zeros, covered)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            print(json.dumps({"number": number, "error": text}), flush=True)


def test_every_op_has_a_call():
    """But sample, which draws from no empty row: test_sample.py has its zero rows and its error."""
    ops = {op.name for op in OPS} - {"sample"}
    assert {call.op for call in CALLS} >= ops | {"block_quantize", "block_dequantize"}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_zero_sizes(executor):
    wrong = {}
    first = 0
    while first < len(CASES):
        command = [sys.executable, __file__, executor, str(first)]
        run = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
        lines = [json.loads(line) for line in run.stdout.splitlines()]
        wrong |= {line["number"]: line["error"] for line in lines if "error" in line}
        assert lines, run.stderr
        first = lines[-1]["number"] + 1
        if run.returncode < 0:
            wrong[first - 1] = f"signal {-run.returncode}"
        elif run.returncode > 0 and "Timeout" in run.stderr:
            wrong[first - 1] = f"has not ended after {SECONDS} seconds"
        else:
            assert run.returncode == 0 and first == len(CASES), run.stderr
    text = [f"{CASES[i][0].name} without {' and '.join(CASES[i][1])}: {error}" for i, error in sorted(wrong.items())]
    assert not text, f"{len(text)} of {len(CASES)} calls:\n" + "\n".join(text)


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
