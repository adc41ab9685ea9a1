"""Machine code in the package: it equals the compiler's output for our kernels, and predictions need no other."""

import dataclasses

import mlx.core as mx
import pytest
from helpers import scripts

import mlx_mittens as mm
from mlx_mittens import frontend
from mlx_mittens.apple import agx_compiler, kernels, machine_code, shipped

STALE = "run python bench/agx.py"
problem = frontend.compiler_problem() or agx_compiler.problem()
needs_compiler = pytest.mark.skipif(bool(problem), reason=problem)
needs_clang = pytest.mark.skipif(bool(frontend.compiler_problem()), reason=frontend.compiler_problem())


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("MLX_MITTENS_ASAHI_CLC", "no-such-program")


def test_the_package_has_the_kernels_as_they_are():
    table = shipped._table()["files"]
    assert sorted(table) == sorted(kernels.for_apple()), STALE
    for file, known in table.items():
        assert known["text"] == shipped.digest(file), f"{file}: {STALE}"
        assert set(known["kernels"]) == {variant.name for variant in frontend.variants(file)}, STALE


def test_the_file_is_small():
    assert shipped.path().stat().st_size < 1 << 20


@needs_compiler
@pytest.mark.parametrize(
    "file, kernel", [("norm/softmax.metal", "softmax_block2_float16"), ("matmul/qmv.metal", None)], ids=str
)
def test_what_is_packed_comes_back(file, kernel):
    code = machine_code.compile(file, kernel or frontend.variants(file)[0].name)
    opcodes = {}
    packed = machine_code.packed(code, opcodes)
    back = machine_code.unpacked(code.file, code.kernel, packed, list(opcodes))
    labels = {block.label: f"block{i}" for i, block in enumerate(code.blocks)}
    assert [block.opcodes for block in back.blocks] == [block.opcodes for block in code.blocks]
    assert [block.successors for block in back.blocks] == [
        tuple(labels[label] for label in block.successors) for block in code.blocks
    ]
    assert [(loop.parent, loop.depth) for loop in back.loops] == [(loop.parent, loop.depth) for loop in code.loops]
    plain = {field.name for field in dataclasses.fields(code)} - {"blocks", "loops", "text"}
    assert {name: getattr(back, name) for name in plain} == {name: getattr(code, name) for name in plain}


def test_another_text_is_not_known(no_compiler, monkeypatch):
    assert shipped.find("norm/softmax.metal", "softmax_block2_float16")
    assert shipped.find("norm/softmax.metal", "softmax_block9_float16") is None
    monkeypatch.setattr(shipped, "digest", lambda file: "another")
    assert shipped.find("norm/softmax.metal", "softmax_block2_float16") is None
    with pytest.raises(RuntimeError, match="no-such-program"):
        machine_code.compile("norm/softmax.metal", "softmax_block2_float16")


def norms():
    x = mx.ones((4, 1024), mx.float16)
    with mm.simulator.enabled(gpu="m2-max"), mm.simulator.predicted("m2-max") as launches:
        mx.eval(mm.softmax(x, axis=-1, stream=mx.cpu), mm.rms_norm(x, mx.ones(1024, mx.float16), 1e-5, stream=mx.cpu))
    return [launch.prediction.microseconds for launch in launches]


@needs_clang
def test_predictions_without_the_compiler(native, no_compiler):
    assert all(time > 0 for time in norms())


@needs_compiler
def test_predictions_are_those_of_the_compiler(native, monkeypatch):
    by_compiler = norms()
    monkeypatch.setenv("MLX_MITTENS_ASAHI_CLC", "no-such-program")
    assert norms() == pytest.approx(by_compiler, rel=0.02)


@needs_clang
def test_a_user_s_kernel_needs_the_compiler(native, no_compiler):
    with mm.simulator.enabled():
        kernel = mx.fast.metal_kernel("one", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i] + 1;")
        sizes = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(32,)]}
        with pytest.raises(RuntimeError, match="MLX_MITTENS_ASAHI_CLC is 'no-such-program'"):
            with mm.simulator.predicted("m2-max") as launches:
                mx.eval(kernel(inputs=[mx.zeros(32)], output_dtypes=[mx.float32], **sizes))
            list(launches)


def test_what_the_script_writes(monkeypatch):
    """By two files, whose machine code the package has."""
    agx = scripts.load("agx")
    codes = [
        (request, machine_code.unpacked(request.file, request.kernel, packed, shipped.opcodes()))
        for request in kernels.requests(["norm/softcap.metal"])
        if (packed := shipped.find(request.file, request.kernel))
    ]
    assert codes
    monkeypatch.setattr(agx.machine_code, "compile_all", lambda requests: codes)
    monkeypatch.setattr(agx, "made_with", lambda: "a test")
    import json
    import lzma

    table = json.loads(lzma.decompress(agx.shipped_file()))
    assert table["files"]["norm/softcap.metal"]["text"] == shipped.digest("norm/softcap.metal")
    assert set(table["files"]["norm/softcap.metal"]["kernels"]) == {request.kernel for request, _ in codes}
