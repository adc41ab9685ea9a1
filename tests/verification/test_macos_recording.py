"""The macOS dispatch code, run on Linux over a recording device: the simulator executes the recording."""

import ctypes
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import mlx.core as mx
import pytest
from helpers.macos_recording import METAL, ROOT, build, recorded_kernels

import mlx_mittens as mm
from mlx_mittens import _ext, gpus


def test_every_op_is_right_through_the_macos_code():
    kernels = recorded_kernels()
    assert {kernel.partition(":")[0] for kernel in kernels} >= {
        "norm/rms_norm.metal",
        "norm/softmax.metal",
        "runtime/copy.metal",
    }


def test_what_the_macos_code_gets_wrong_shows():
    """A recorder that shifts every buffer index by one, as a wrong index in the macOS code would."""
    source = METAL.read_text()
    assert "set_input_array(input.array, index," in source, "the planted fault has lost its place"
    broken = source.replace("set_input_array(input.array, index,", "set_input_array(input.array, index + 1,")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mlx-mittens-"))
    (folder / "metal.cpp").write_text(broken)
    with pytest.raises(RuntimeError, match="is set twice|is not set"):
        _ext.simulator_host(build(folder / "metal.cpp"))
        try:
            with mm.simulator.enabled():
                mx.eval(mm.softmax(mx.ones((2, 8)), axis=-1))
        finally:
            _ext.simulator_host("")


# Runs a tiny Llama in a process of its own, through the macOS code: prints compilations and launches.
TINY_LLAMA = """
import json, sys
import mlx.core as mx
import mlx_mittens as mm
from helpers import tiny
from helpers.macos_recording import one_by_one
from mlx_mittens import _ext, frontend
model = tiny.build("llama-3.2-1b", mx.float16, 4)
with one_by_one(sys.argv[1]) as recorder, mm.simulator.enabled(), mm.patched():
    _ext.simulator_record(True)
    tiny.tokens(model, list(range(1, 21)), 3)
    runs = {run["file"] for run in _ext.simulator_record(False)}
    libraries = recorder.mittens_libraries().decode().splitlines()
    compiled = recorder.mittens_compiled().decode().splitlines()
variants = {name: [variant.name for variant in frontend.variants(name)] for name in runs}
print(json.dumps({"variants": variants, "libraries": libraries, "compiled": compiled}))
"""


def test_a_tiny_llama_compiles_the_kernels_that_it_uses_and_no_other():
    done = subprocess.run(
        [sys.executable, "-c", TINY_LLAMA, build()], cwd=ROOT / "tests", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    used = [tuple(name.split(":")) for name in found["variants"]]
    assert len(used) >= 8, "a norm, products, attention, the cache"
    assert list(found["variants"].values()) == [[kernel] for _, kernel in used], "each text holds one kernel"
    assert sorted(found["compiled"]) == sorted(" ".join(pair) for pair in used)
    named = [name.rpartition("_")[0] for name in found["libraries"]]  # without the hash
    assert sorted(named) == sorted(f"mlx_mittens_{file}_{kernel}" for file, kernel in used)


# Runs an op through the macOS code over a compiler that takes seconds for each library.
SLOW = """
import ctypes, sys
import mlx.core as mx
import mlx_mittens as mm
from helpers.macos_recording import through_macos_code
recorder = ctypes.CDLL(sys.argv[1])
recorder.mittens_compile_takes.argtypes = [ctypes.c_double]
recorder.mittens_compile_takes(float(sys.argv[2]))
with through_macos_code(sys.argv[1]), mm.simulator.enabled():
    mx.eval(mm.softmax(mx.ones((2, 8)), axis=-1), mm.rms_norm(mx.ones((2, 8)), None, 1e-5))  # of two files
"""


@pytest.mark.parametrize(
    ("seconds", "variables", "lines"),
    [(0.3, {}, 1), (0.3, {"MLX_MITTENS_QUIET": "1"}, 0), (0.15, {}, 1), (0.0, {}, 0)],
)
def test_a_line_says_that_metal_compiles(seconds, variables, lines):
    done = subprocess.run(
        [sys.executable, "-c", SLOW, build(), str(seconds)],
        cwd=ROOT / "tests",
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("mlx-mittens: Metal compiles each kernel at its first use") == lines
    assert done.stderr.count("\n") == lines


def test_pipelines_through_the_macos_code():
    """Each value is another, so that none can stand in another's place; a kernel that Metal refuses is an error."""
    library = ctypes.CDLL(build())
    library.mittens_compile.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    library.mittens_pipelines.restype = ctypes.c_char_p
    for kernel, threads, memory in ((b"few_registers", 1024, 0), (b"many_registers", 384, 8192), (b"refused", 0, 0)):
        library.mittens_compile(kernel, threads, memory)
    lines = library.mittens_pipelines(b"norm/planted.metal").decode().splitlines()
    assert lines[:2] == ["few_registers 1024 0 32", "many_registers 384 8192 32"]
    assert lines[2:] == ["refused: [metal::Device] Unable to load kernel refused"]


@pytest.mark.parametrize("architecture, chip", [("applegpu_g17s", "m5"), ("applegpu_g16s", "m4-max")])
@pytest.mark.parametrize("macos", [(15, 7), (26, 0), (26, 1), (26, 2), (26, 10), (27, 0)], ids=str)
def test_matrix_units_need_their_gpu_and_their_macos(native, lenient, monkeypatch, architecture, chip, macos):
    """Only then MLX's kernels use them, and products of many rows go to mx."""
    library = ctypes.CDLL(build())
    library.mittens_has_matrix_units.restype = ctypes.c_bool
    found = library.mittens_has_matrix_units(architecture.encode(), *macos)
    assert found == (chip == "m5" and macos >= (26, 2))
    # The plans for the Mac that the macOS code reports.
    name = f"{chip}-{'with' if found else 'without'}-matrix-units"
    gpu = dataclasses.replace(gpus.named(chip), name=name, matrix_units=found)
    monkeypatch.setattr(gpus, "named", lambda _: gpu)
    mm.stats(reset=True)
    with mm.simulator.enabled(gpu=name):
        mx.eval(mm.gemv(mx.ones((8, 64), mx.float16), mx.ones((16, 64), mx.float16)))
    assert sum(mm.stats()["gemv"]["mx"].values()) == found


def test_without_metal_there_are_no_pipelines():
    for call in (lambda: _ext.metal_kernels("norm/softmax.metal"), lambda: _ext.metal_pipeline("f.metal", "k")):
        with pytest.raises(RuntimeError, match="this build of mlx_mittens has no Metal"):
            call()
