"""Asks a Mac's GPU compiler about every kernel: most threads, from which its registers follow, and memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _ext, frontend
from ..bench import machine

# Ended processes after which the rest is left out.
_MOST_DEATHS = 3

# The kernel that `probe` compiles.
_PROBE = ("norm/rms_norm.metal", "rms_norm_simd32_float16")

# Code of the child process, which uses the parent's sys.path.
_CHILD = "from mlx_mittens.cli.pipelines import child; child()"

Row = dict[str, Any]


def child() -> None:
    """Compiles kernels for this GPU: its input names files and kernels to leave out, its answers are lines of JSON.

    It may name the only kernels that are wanted. A line ``{"file", "kernel"}`` names the kernel begun, the next
    one has the result, and ``{"done": true}`` ends them.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a library is no answer
    order = json.load(sys.stdin)
    seen = set(order["seen"])
    say = lambda row: print(json.dumps(row), file=answers, flush=True)
    for file in order["files"]:
        say({"file": file, "kernel": None})
        try:
            kernels = order["kernels"] or sorted(_ext.metal_kernels(file))
        except Exception as error:  # a file that Metal refuses hides no other
            say({"file": file, "kernel": None, "error": str(error)})
            continue
        for kernel in kernels:
            if kernel in seen:  # a metallib names the kernels of all files
                continue
            seen.add(kernel)
            say({"file": file, "kernel": kernel})
            try:
                start = time.perf_counter()
                made = _ext.metal_pipeline(file, kernel)
                seconds = round(time.perf_counter() - start, 4)
                say({"file": file, "kernel": kernel, **made, "seconds": seconds})
            except Exception as error:
                say({"file": file, "kernel": kernel, "error": str(error)})
    say({"done": True})


def probe() -> Row:
    """How long a kernel of middle size takes, compiled in a process of its own.

    Returns:
        Row: ``file``, ``kernel``, ``executor``, and the ``seconds`` or the ``error`` of its compiler; neither where
        there is none to wait for.
    """
    row: Row = {"file": _PROBE[0], "kernel": _PROBE[1], "executor": machine.executor()}
    if row["executor"] == "native":
        return row
    if row["executor"] == "metal":
        return {**row, **next(measured([_PROBE[0]], [_PROBE[1]]))}
    start = time.perf_counter()
    try:
        if row["executor"] == "cuda":
            frontend.ptx(*_PROBE)
        else:
            frontend.simulator_library(_PROBE[0])
    except Exception as error:  # the cases say the same, and more
        return {**row, "error": str(error)}
    return {**row, "seconds": round(time.perf_counter() - start, 4)}


def told(row: Row) -> str:
    """Findings of a `probe`, in words."""
    if "error" in row:
        return f"{row['kernel']} does not compile: {row['error']}"
    if "seconds" not in row:
        return "nothing: native code was compiled with the package"
    return f"{row['kernel']} took {row['seconds']:.2f} s; less where a cache has it"


def measured(files: Sequence[str] | None = None, kernels: Sequence[str] | None = None) -> Iterator[Row]:
    """Every pipeline of the files, compiled in a process of its own; after a crash the others go on in a new one.

    Args:
        files: .metal files; by default all of them, except files that need matrix units where there are none.
        kernels: Only these of each file.

    Yields:
        ``file``, ``kernel`` and Metal's numbers: ``maxTotalThreadsPerThreadgroup``, ``staticThreadgroupMemoryLength``
        and ``threadExecutionWidth``, with the ``seconds`` that it took, or an ``error``. The file of a kernel is the
        one that it was found through: with a metallib that is the first.
    """
    left = list(_of_this_gpu() if files is None else files)
    seen: list[str] = []
    for _ in range(_MOST_DEATHS):
        begun: Row | None = None
        process = _start({"files": left, "kernels": kernels, "seen": seen})
        assert process.stdout is not None  # it is a pipe
        try:
            for line in process.stdout:
                if not line.endswith("\n"):  # the process ended in the middle of it
                    break
                row: Row = json.loads(line)
                if row.get("done"):
                    return
                if len(row) == 2:
                    begun = row
                    continue
                begun = None
                seen += [row["kernel"]] if row["kernel"] else []
                yield row
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if begun is None:
            begun = {"file": left[0], "kernel": None}
        yield {**begun, "error": f"the process was ended by {'signal' if status < 0 else 'exit status'} {abs(status)}"}
        at = left.index(begun["file"])
        seen += [begun["kernel"]] if begun["kernel"] else []
        left = left[at:] if begun["kernel"] else left[at + 1 :]
    for file in left:
        yield {"file": file, "kernel": None, "error": f"left out after {_MOST_DEATHS} processes had ended"}


def _of_this_gpu() -> list[str]:
    has_units = _ext.gpu()["matrix_units"]
    return [file for file in frontend.files() if has_units or not frontend.is_for_matrix_units(file)]


def _start(order: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys\nsys.path[:] = {sys.path!r}\n{_CHILD}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MLX_MITTENS_QUIET": "1", "MLX_MITTENS_CALIBRATION": "off"},
        start_new_session=True,  # Ctrl-C and a time limit are the parent's to handle
    )
    assert process.stdin is not None  # it is a pipe
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # a process that has ended says so by its status
        json.dump(order, pipe)
    return process
