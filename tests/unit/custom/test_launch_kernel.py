"""Launching any kernel on mx arrays, in the simulator and, if there is one, on a CUDA GPU."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.simulate import register

from mlx_mittens import _ext
from mlx_mittens.frontend import CompileError, register_source
from mlx_mittens.ops.custom import Output, float32, int32, int64, launch
from mlx_mittens.simulator import Fault

TEXT = """
constant bool negate [[function_constant(3)]];
constant int shift [[function_constant(5)]];
[[kernel]] void affine(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
    const constant int& n [[buffer(2)]], const constant long* offsets [[buffer(4)]],
    const constant float& bias [[buffer(5)]], const device float* more [[buffer(6), function_constant(negate)]],
    device int* indices [[buffer(7)]], uint i [[thread_position_in_grid]]) {
  if (int(i) < n) {
    float value = in[i] * offsets[1] + bias;
    if (negate) {
      value = -value - more[i];
    }
    out[i] = value;
    indices[i] = int(i) + shift + int(offsets[0]);
  }
}
[[kernel]] void scratch(const device int* in [[buffer(0)]], device int* out [[buffer(1)]],
    threadgroup int* memory [[threadgroup(0)]], uint3 i [[thread_position_in_threadgroup]],
    uint3 group [[threadgroup_position_in_grid]]) {
  memory[i.x] = in[group.y * 32 + i.x];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[group.y * 32 + i.x] = memory[31 - i.x];
}
[[kernel]] void beyond(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i + 1] = 1; }
"""


@pytest.fixture(params=[mx.cpu] + [mx.gpu] * (mx.is_available(mx.gpu) and _ext.cuda_available()), ids=str)
def stream(request):
    return mx.default_stream(request.param)


@pytest.fixture(scope="module")
def file():
    return register(TEXT)


def affine(file, x, stream, constants, more):
    arguments = {0: x, 1: Output(x.shape, mx.float32), 2: int32(x.size), 4: int64(7, 3), 7: Output([x.size], mx.int32)}
    return launch(file, "affine", arguments | more, [2], [32], constants=constants, stream=stream)


def test_inputs_outputs_and_constants(file, stream):
    """There is no buffer 3, buffer 6 is not bound, and offsets are a pointer whose bytes are handed over."""
    x = mx.arange(40).astype(mx.float32).reshape(8, 5)
    out, indices = affine(file, x, stream, {3: False, 5: 100}, {5: float32(0.5)})
    assert out.shape == (8, 5) and mx.array_equal(out, 3 * x + 0.5).item()
    assert indices.dtype == mx.int32 and mx.array_equal(indices, mx.arange(40) + 107).item()


def test_function_constants_make_other_kernels(file, stream):
    x = mx.arange(40).astype(mx.float32)
    out, indices = affine(file, x, stream, {3: True, 5: -7}, {5: float32(0), 6: x})
    assert mx.array_equal(out, -4 * x).item() and mx.array_equal(indices, mx.arange(40)).item()


def test_threadgroup_memory_and_dimensions(file, stream):
    x = mx.arange(96).astype(mx.int32)
    (out,) = launch(
        file, "scratch", {0: x, 1: Output([3, 32], mx.int32)}, [1, 3], [32, 1], threadgroup_bytes=128, stream=stream
    )
    assert mx.array_equal(out, x.reshape(3, 32)[:, ::-1]).item()


def test_views_and_lazy_inputs(file, stream):
    """A kernel starts at the first element of a view, and waits for the work that computes its inputs."""
    x = (mx.arange(128).astype(mx.int32) * 2 + 1)[32:64]
    (out,) = launch(file, "scratch", {0: x, 1: Output([32], mx.int32)}, [1], [32], threadgroup_bytes=128, stream=stream)
    assert mx.array_equal(out + 0, (mx.arange(32, 64) * 2 + 1)[::-1]).item()


def test_faults_are_exceptions(file):
    (out,) = launch(file, "beyond", {0: Output([32], mx.int32)}, [1], [32], stream=mx.cpu)
    with pytest.raises(Fault, match="beyond"):
        mx.eval(out)
    (again,) = launch(file, "scratch", {0: mx.arange(32), 1: Output([32], mx.int32)}, [1], [32], threadgroup_bytes=128)
    assert np.array(again)[0] == 31


@pytest.mark.parametrize(
    "kernel, arguments, error, message",
    [
        ("affine", {3: b"1234"}, ValueError, r"affine has no buffer 3; it has 0, 1, 2, 4, 5, 6, 7"),
        ("affine", {0: 1.5}, TypeError, "buffer 0 of affine is float: expected array, bytes or Output"),
        ("affin", {}, KeyError, "no kernel 'affin'; it has affine"),
    ],
)
def test_bad_arguments(file, kernel, arguments, error, message):
    with pytest.raises(error, match=message):
        launch(file, kernel, arguments, [1], [32])


VALUES = """
struct Params { int first; long second; float4 rest[5]; int last; };
[[kernel]] void values(device float* out [[buffer(0)]], constant float3& vector [[buffer(1)]],
    constant Params& params [[buffer(3)]], constant half& one [[buffer(5)]], constant int* some [[buffer(6)]],
    constant bool& flag [[buffer(7)]], constant packed_float3& packed [[buffer(8)]],
    constant bfloat& brain [[buffer(9)]], constant ulong& wide [[buffer(10)]], device const int& read [[buffer(11)]],
    device atomic<int>& sum [[buffer(12)]], uint i [[thread_position_in_grid]]) {
  out[i] = params.last + vector.x + one + some[1] + flag + packed.y + float(brain) + wide + read;
  atomic_fetch_add_explicit(&sum, 1, memory_order_relaxed);
}
"""
SIZES = {1: 16, 3: 112, 5: 2, 7: 1, 8: 12, 9: 2, 10: 8, 11: 4, 12: 4}


@pytest.fixture
def launched(monkeypatch):
    """Launches on a CUDA GPU that this machine pretends to have."""
    found = []
    monkeypatch.setattr(_ext, "cuda_available", lambda: True)
    monkeypatch.setattr(_ext, "launch", lambda *arguments: found.append(arguments))
    return found


def test_constants_are_as_large_as_cuda_takes_them(launched):
    file = register(VALUES)
    right = {0: Output([32], mx.float32), 6: int32(1, 2, 3)} | {index: bytes(size) for index, size in SIZES.items()}
    launch(file, "values", right, [1], [32], stream=mx.gpu)
    launch(file, "values", right | {3: bytes(200)}, [1], [32], stream=mx.gpu)
    launch(file, "values", {0: right[0]}, [1], [32], stream=mx.gpu)
    assert len(launched) == 3
    for index, size in SIZES.items():
        wrong = right | {index: bytes(size - 1)}
        with pytest.raises(ValueError, match=f"buffer {index} of values has {size - 1} bytes: expected {size}$"):
            launch(file, "values", wrong, [1], [32], stream=mx.gpu)
        launch(file, "values", wrong, [1], [32], stream=mx.cpu)  # where the simulator watches accesses
    for array in (mx.zeros(32), Output([1], mx.int32)):
        with pytest.raises(ValueError, match=r"buffer 12 of values is \w+: on a CUDA GPU a reference takes bytes"):
            launch(file, "values", right | {12: array}, [1], [32], stream=mx.gpu)


def test_constants_that_a_kernel_reads_beyond_are_a_fault_in_the_simulator():
    file = register(VALUES)
    arguments = {0: Output([32], mx.float32), 6: int32(1, 2, 3)} | {index: bytes(size) for index, size in SIZES.items()}
    (out,) = launch(file, "values", arguments | {3: int32(5)}, [1], [32], stream=mx.cpu)
    with pytest.raises(Fault, match="values"):
        mx.eval(out)


def test_views_as_they_lie_in_memory(file, stream):
    """Arrays that are not row contiguous are copied, unless the kernel wants them as they are."""
    x = mx.arange(64).astype(mx.int32).reshape(32, 2)
    mx.eval(x)
    for copied, expected in ((True, x[:, 0]), (False, mx.arange(32))):
        (out,) = launch(
            file,
            "scratch",
            {0: x[:, 0], 1: Output([32], mx.int32)},
            [1],
            [32],
            threadgroup_bytes=128,
            ensure_row_contiguous=copied,
            stream=stream,
        )
        assert mx.array_equal(out, expected[::-1]).item()


@pytest.mark.parametrize("copied", [True, False])
def test_views_start_at_their_first_element(file, stream, copied):
    """Also views that run backwards, and views of a part of their memory: a kernel sees no more of it."""
    x = mx.arange(64).astype(mx.int32)
    mx.eval(x)
    for view in (x[::-1], x[31::-1], mx.as_strided(x, (32,), (1,), 32), mx.as_strided(x, (2, 32), (32, -1), 31)):
        (out,) = launch(
            file,
            "scratch",
            {0: view, 1: Output([32], mx.int32)},
            [1],
            [32],
            threadgroup_bytes=128,
            ensure_row_contiguous=copied,
            stream=stream,
        )
        assert mx.array_equal(out, view.reshape(-1)[:32][::-1]).item()


@pytest.mark.parametrize("copied", [True, False])
def test_a_view_of_many_dimensions_that_runs_backwards(file, stream, copied):
    view = mx.arange(1024).reshape([2] * 10)[(slice(None, None, -1),) * 10][(0,) * 5]
    view = mx.broadcast_to(mx.expand_dims(view, (1, 3, 5, 7, 9)), (2, 1) * 5)
    arguments, options = {0: view, 1: Output([32], mx.int32)}, {"ensure_row_contiguous": copied, "stream": stream}
    (out,) = launch(file, "scratch", arguments, [1], [32], threadgroup_bytes=128, **options)
    assert mx.array_equal(out, view.reshape(-1)[::-1]).item()


LONG = """
[[kernel]] void doubled(const device long* in [[buffer(0)]], device long* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = 2 * in[i];
}
"""


@pytest.mark.parametrize("step, by_rows", [(2, True), (-1, True), (-1, False)])
def test_views_of_eight_bytes_an_element(stream, step, by_rows):
    view = (mx.arange(32, dtype=mx.int64) + 2**40)[::step]
    arguments = {0: view, 1: Output([view.size], mx.int64)}
    (out,) = launch(
        register(LONG), "doubled", arguments, [1], [view.size], ensure_row_contiguous=by_rows, stream=stream
    )
    assert mx.array_equal(out, 2 * view).item()


def test_a_text_that_does_not_compile_is_named_where_its_result_is_evaluated(stream):
    file = register("[[kernel]] void broken(device int* out [[buffer(0)]]) { out[0] = unknown; }")
    (out,) = launch(file, "broken", {0: Output((1,), mx.int32)}, [1], [1], stream=stream)
    with pytest.raises(CompileError, match="undeclared identifier 'unknown'") as caught:
        mx.eval(out)
    assert caught.value.file == file and caught.value.log.startswith(f"{file}:")


def test_another_text_under_the_same_name_runs(stream):
    """As in a notebook whose cell is edited, and back to the first text, on whatever runs it."""
    text = "[[kernel]] void count(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ out[i] = {}; }}"
    for number in (1, 2, 1, 3):
        register_source("edited.metal", text.format(number))
        (out,) = launch("edited.metal", "count", {0: Output([32], mx.int32)}, [1], [32], stream=stream)
        assert mx.array_equal(out, mx.full((32,), number)).item()
    longer = "[[kernel]] void count(device int* out [[buffer(0)]], const constant int& n [[buffer(1)]]) { *out = n; }"
    register_source("edited.metal", longer)
    (out,) = launch("edited.metal", "count", {0: Output([1], mx.int32), 1: int32(9)}, [1], [1], stream=stream)
    assert out.item() == 9
