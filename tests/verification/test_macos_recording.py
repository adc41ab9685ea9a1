"""The macOS dispatch code, run on Linux over a recording device: the simulator executes what it recorded."""

import ctypes
import pathlib
import tempfile

import mlx.core as mx
import pytest
from helpers.macos_recording import METAL, build, recorded_kernels

import mlx_mittens as mm
from mlx_mittens import _ext


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


def test_without_metal_there_are_no_pipelines():
    for call in (lambda: _ext.metal_kernels("norm/softmax.metal"), lambda: _ext.metal_pipeline("f.metal", "k")):
        with pytest.raises(RuntimeError, match="this build of mlx_mittens has no Metal"):
            call()
