"""The macOS dispatch code, run on Linux over a recording device: the simulator executes what it recorded."""

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
