"""Kernels of mx.fast.metal_kernel in the simulator: their results, caught faults, and refused calls."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import SUMS

import mlx_mittens as mm
from mlx_mittens.frontend import CompileError
from mlx_mittens.frontend.check import dialect
from mlx_mittens.simulator import Fault
from mlx_mittens.simulator.metal_kernel import _mlx_metal_kernel as mlx_metal_kernel

DOUBLED = """
    uint i = thread_position_in_grid.x;
    out[i] = 2 * a[i];
"""

held_by_module = mx.fast.metal_kernel(name="held", input_names=["a"], output_names=["out"], source=DOUBLED)


def run(source, inputs, *, shape=None, dtype=None, grid=None, threadgroup=64, names=None, more=(), **options):
    """One call of a kernel with inputs a, b, c and the output `out`, on as many threads as it has elements."""
    names = names or ["a", "b", "c"][: len(inputs)]
    call = {key: options.pop(key) for key in ("template", "init_value", "verbose") if key in options}
    kernel = mm.simulator.metal_kernel("test", names, ["out"], source, **options)
    shape = inputs[0].shape if shape is None else shape
    return kernel(
        inputs=inputs,
        output_shapes=[shape],
        output_dtypes=[dtype or inputs[0].dtype],
        grid=grid or (max(1, int(np.prod(shape))), 1, 1),
        threadgroup=threadgroup if isinstance(threadgroup, tuple) else (threadgroup, 1, 1),
        **call,
    )[0]


def equal(a, b):
    return mx.array_equal(a, b, equal_nan=True).item()


@pytest.mark.parametrize(
    "dtype",
    [
        *(mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.int16, mx.int32, mx.int64),
        *(mx.uint8, mx.uint16, mx.uint32, mx.uint64),
    ],
    ids=str,
)
def test_every_dtype_is_read_and_written(dtype):
    a = mx.arange(50).reshape(5, 10).astype(dtype)
    assert equal(run(DOUBLED, [a]), 2 * a)


def test_simd_functions_in_both_branches():
    source = """uint i = thread_position_in_grid.x;
    if (i % 32 < 8) { out[i] = simd_sum(a[i]); } else { out[i] = simd_max(a[i]); }"""
    out = run(source + " out[i] += simd_sum(1.0f);", [mx.arange(64).astype(mx.float32)])
    assert out.tolist() == [60.0] * 8 + [63.0] * 24 + [316.0] * 8 + [95.0] * 24


def test_bool():
    a = mx.array([True, False] * 20)
    assert equal(run("uint i = thread_position_in_grid.x; out[i] = !a[i];", [a]), mx.logical_not(a))


def test_parts_of_complex_numbers():
    z = mx.arange(12).astype(mx.complex64) * (1 + 2j)
    source = "uint i = thread_position_in_grid.x; out[i] = a[i].real + 10 * a[i].imag;"
    assert equal(run(source, [z], dtype=mx.float32), mx.real(z) + 10 * mx.imag(z))


def test_small_arrays_are_constant_and_scalars_are_references(capfd):
    a, b, c = mx.arange(32.0), mx.array([1.0, 10.0]), 3
    source = "uint i = thread_position_in_grid.x; out[i] = a[i] * b[1] + c;"
    assert equal(run(source, [a, b, c], verbose=True), a * 10 + 3)
    text = capfd.readouterr().out
    for argument in ("const device float* a", "const constant float* b", "const constant int32_t& c"):
        assert argument in text


@pytest.mark.parametrize("by_rows", [True, False])
def test_views(by_rows):
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)];
    """
    base = mx.random.normal((6, 10, 4))
    repeated = mx.broadcast_to(base[0], (3, 10, 4))
    for view in (base, base[::2], base[:, 3:7], base.transpose(2, 0, 1), base[:, ::-1], repeated):
        assert equal(run(source, [view], ensure_row_contiguous=by_rows), view)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("stride", [1, 2, -1])
def test_a_view_that_claims_more_than_its_memory_is_a_fault(stride, by_rows):
    """Before any of it is copied: the process would read memory that is not its own."""
    a = mx.arange(10.0)
    mx.eval(a)
    for size in (1000, 40_000_000):
        with pytest.raises(Fault, match=r"argument 0 'a' is bound to \d+ bytes, its buffer has \d+ from there on"):
            mx.eval(run(DOUBLED, [mx.as_strided(a, (size,), (stride,))], shape=(10,), ensure_row_contiguous=by_rows))
    if by_rows:
        inside = mx.as_strided(a, (5,), (stride,), 4 if stride < 0 else 0)
        assert equal(run(DOUBLED, [inside]), 2 * inside)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_of_several_inputs_may_be_a_view(count):
    """Their copies are larger than the memory allocator's cache: freed, they would not be the same."""
    names = [f"in{i}" for i in range(count)]
    source = "uint i = thread_position_in_grid.x; out[i] = " + " + ".join(f"{name}[i]" for name in names) + ";"
    for which in range(count):
        inputs = [mx.full((64, 64), float(10**i)) for i in range(count)]
        inputs[which] = mx.arange(4096.0).reshape(64, 64).T
        assert equal(run(source, inputs, names=names), sum(inputs))


def test_strides_of_a_view_are_those_of_mlx():
    view = mx.arange(64).reshape(8, 8)[::2, ::4]
    source = "out[0] = a_strides[0]; out[1] = a_strides[1]; out[2] = a_shape[0]; out[3] = a_ndim;"
    one = {"shape": (4,), "dtype": mx.int32, "grid": (1, 1, 1), "threadgroup": 1}
    assert run(source, [view], ensure_row_contiguous=False, **one).tolist() == [16, 4, 4, 2]
    assert run(source, [view], **one).tolist() == [2, 1, 4, 2]


def test_template_arguments_of_each_kind():
    source = "uint i = thread_position_in_grid.x; T x = a[i]; out[i] = NEGATE ? -x * N : x * N;"
    a = mx.arange(40).astype(mx.float16)
    assert equal(run(source, [a], template=[("T", mx.float32), ("N", 3), ("NEGATE", True)]), -3 * a)
    assert equal(run(source, [a], template=[("T", mx.float16), ("N", -2), ("NEGATE", False)]), -2 * a)


def test_header_and_what_mlx_puts_before_a_kernel():
    header = "template <typename T> T half_of(T x) { return x / 2; }\n"
    source = """
        uint i = thread_position_in_grid.x;
        float16_t h = 1;
        bfloat16_t b = 2;
        out[i] = half_of(a[i]) + float(h) + float(b) + (Limits<float>::max > 0) + ceildiv(5, 2) + precise::exp(0.0f);
    """
    a = mx.arange(40.0)
    assert equal(run(source, [a], header=header), a / 2 + 8)


def test_a_reduction_through_threadgroup_memory():
    source = """
        threadgroup float partial[32];
        float sum = 0;
        for (int i = thread_position_in_threadgroup.x; i < a_shape[1]; i += threads_per_threadgroup.x) {
            sum += a[threadgroup_position_in_grid.x * a_shape[1] + i];
        }
        sum = simd_sum(sum);
        if (thread_index_in_simdgroup == 0) {
            partial[simdgroup_index_in_threadgroup] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_position_in_threadgroup.x == 0) {
            for (uint i = 1; i < simdgroups_per_threadgroup; ++i) {
                sum += partial[i];
            }
            out[threadgroup_position_in_grid.x] = sum;
        }
    """
    a = mx.random.normal((7, 300))
    result = run(source, [a], shape=(7,), grid=(7 * 128, 1, 1), threadgroup=128)
    assert mx.allclose(result, a.sum(1), atol=SUMS).item()


def test_atomic_outputs_and_init_value():
    source = "atomic_fetch_add_explicit(&out[a[thread_position_in_grid.x] % 4], 1, memory_order_relaxed);"
    a = mx.arange(100).astype(mx.uint32)
    result = run(source, [a], shape=(4,), dtype=mx.int32, grid=(100, 1, 1), atomic_outputs=True, init_value=5)
    assert result.tolist() == [30] * 4
    half = run("if (thread_position_in_grid.x % 2) out[thread_position_in_grid.x] = 0;", [a], init_value=7)
    assert half.tolist() == [7, 0] * 50


def test_the_last_threadgroups_are_cut_short():
    source = """
        uint3 at = thread_position_in_grid;
        out[(at.z * threads_per_grid.y + at.y) * threads_per_grid.x + at.x] = threads_per_threadgroup.x;
    """
    result = run(source, [], shape=(2, 3, 10), dtype=mx.int32, grid=(10, 3, 2), threadgroup=(4, 2, 2))
    assert result[0, 0].tolist() == [4] * 8 + [2] * 2


def test_a_grid_smaller_than_its_threadgroup():
    assert equal(run(DOUBLED, [mx.arange(3)], threadgroup=1024), 2 * mx.arange(3))


def test_sizes_may_be_numpys():
    a = mx.arange(3)
    assert equal(run(DOUBLED, [a], shape=(np.int64(3),), grid=(np.prod(a.shape), 1, np.int32(1))), 2 * a)


def test_math_mode_is_what_the_kernel_sees():
    source = """
        #ifdef __FAST_MATH__
        out[0] = 1;
        #else
        out[0] = 0;
        #endif
    """
    for mode, expected in (("safe", 0), ("fast", 1)):
        one = {"shape": (1,), "dtype": mx.int32, "compile_options": {"math_mode": mode}}
        assert run(source, [], **one).item() == expected
    with pytest.raises(ValueError, match="math_mode"):
        run(source, [], shape=(1,), dtype=mx.int32, compile_options={"math_mode": "quick"})


def test_several_outputs_no_dimensions_and_no_elements():
    source = "uint i = thread_position_in_grid.x; sum[i] = a[0] + a[1]; count[i] = a_shape[0];"
    kernel = mm.simulator.metal_kernel("pair", ["a"], ["sum", "count"], source)
    options = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_dtypes": [mx.float32, mx.int32]}
    total, count = kernel(inputs=[mx.array([1.5, 2.0])], output_shapes=[(), (1,)], **options)
    assert (total.item(), count.tolist()) == (3.5, [2])
    nothing = run("if (a_shape[0] > 0) out[0] = a[0];", [mx.zeros((0,))], shape=(0,), grid=(1, 1, 1))
    assert nothing.shape == (0,)


def test_lazily_under_compile_and_with_a_gradient_of_its_own():
    a = mx.arange(64.0)
    assert equal(mx.compile(lambda x: run(DOUBLED, [x + 1]) * 3)(a), 6 * (a + 1))

    @mx.custom_function
    def doubled(x):
        return run(DOUBLED, [x])

    @doubled.vjp
    def doubled_vjp(x, cotangent, _):
        return run(DOUBLED, [cotangent])

    assert equal(mx.grad(lambda x: doubled(x).sum())(a), mx.full(a.shape, 2.0))


FAULTS = {
    "race": (
        "threadgroup float s[64]; uint i = thread_position_in_grid.x; s[i] = a[i];"
        " threadgroup_barrier(mem_flags::mem_threadgroup); s[i] += s[63 - i]; out[i] = s[i];",
        "race",
    ),
    "outside an input": ("uint i = thread_position_in_grid.x; out[i] = a[i + 1];", "a"),
    "outside the output": ("uint i = thread_position_in_grid.x; out[i + 1000000] = a[i];", "out"),
    "nothing wrote it": ("threadgroup float s[64]; uint i = thread_position_in_grid.x; out[i] = s[i];", "s"),
    "unwritten output": ("uint i = thread_position_in_grid.x; if (i > 3) out[i] = a[i];", "not written"),
    "missed barrier": (
        "uint i = thread_position_in_grid.x; out[i] = a[i];"
        " if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);",
        "barrier",
    ),
    "too much threadgroup memory": (
        "threadgroup float s[8193]; uint i = thread_position_in_grid.x; s[i] = a[i]; out[i] = s[i];",
        "32",
    ),
    "output too small": ("out[2 * thread_position_in_grid.x] = a[0];", "out"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_an_exception_and_the_process_lives_on(what):
    source, message = FAULTS[what]
    with pytest.raises(Fault, match=message) as caught:
        mx.eval(run("\n\n" + source, [mx.arange(64.0)]))
    assert "custom_kernel_test" in str(caught.value)
    assert "unwritten" in what or "test.metal:3" in str(caught.value), caught.value
    assert equal(run(DOUBLED, [mx.arange(64.0)]), 2 * mx.arange(64.0))


def test_a_loop_without_end_meets_the_limit_on_steps():
    with mm.simulator.enabled(step_limit=100_000):
        result = run("while (a[0] == 0) {}\n out[thread_position_in_grid.x] = 1;", [mx.zeros(64)])
    with pytest.raises(Fault, match="(?s)100000|100,000.*step"):
        mx.eval(result)


# The line of the loop, by its source.
ENDLESS = {
    "a loop in a line": ("uint i = thread_position_in_grid.x;\nfor (;;) {}\nout[i] = 1;", 2),
    "a loop of many lines": ("float s = 0;\n\nwhile (s >= 0) {\n  s += a[0];\n  s *= 2;\n}\nout[0] = s;", 3),
    "a loop around another": (
        "float s = 0;\nwhile (s >= 0) {\n  for (int k = 0; k < 5; ++k) {\n    s += a[k];\n  }\n}\nout[0] = s;",
        2,
    ),
    "a loop with a barrier": (
        "int n = 0;\nif (a[0] == 0)\n  do {\n    ++n;\n    threadgroup_barrier(mem_flags::mem_none);\n"
        "  } while (n > 0);\nout[0] = n;",
        3,
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_loop_without_end_is_named_by_its_line(name):
    source, line = ENDLESS[name]
    text = source.split("\n")[line - 1].strip()
    with mm.simulator.enabled(step_limit=100_000), pytest.raises(Fault) as caught:
        mx.eval(run(source, [mx.zeros(64)]))
    message = str(caught.value)
    assert f"was running (test.metal:{line})" in message and message.endswith(f"\n  test.metal:{line}: {text}")


class Signal(Exception):
    pass


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, Signal])
def test_a_signal_ends_a_launch(watch, raised):
    """The next time that the launch looks for signals, as it does regularly."""
    before = mm._ext.simulator_polls()
    sent = []

    def send():
        while mm._ext.simulator_polls() == before:
            time.sleep(0.001)
        sent.append(mm._ext.simulator_polls())
        os.kill(os.getpid(), signal.SIGINT)

    def handle(*_):
        raise raised

    with mm.simulator.enabled(step_limit=10**9, watch=watch):
        result = run("while (a[0] == 0) {}\n out[thread_position_in_grid.x] = 1;", [mx.zeros(64)])
        thread = threading.Thread(target=send)
        handler = signal.signal(signal.SIGINT, handle)
        try:
            thread.start()
            with pytest.raises(raised):
                mx.eval(result)
        finally:
            signal.signal(signal.SIGINT, handler)
            thread.join()
    assert mm._ext.simulator_polls() - sent[0] <= 2
    assert equal(run(DOUBLED, [mx.arange(9.0)]), 2 * mx.arange(9.0))


def test_a_fault_names_the_element_and_prints_the_line():
    source = "uint i = thread_position_in_grid.x;\nout[i + 2] = 2 * a[i];"
    with pytest.raises(Fault) as caught:
        mx.eval(run(source, [mx.arange(64).astype(mx.float16)]))
    lines = str(caught.value).split("\n  ")
    assert re.search(r'test\.metal:2\) at byte 128 of buffer "out"', lines[0])
    assert lines[1:] == ['element 64 of "out", of 2 bytes', "test.metal:2: out[i + 2] = 2 * a[i];"]


def test_a_divergence_prints_its_line():
    source = (
        "uint i = thread_position_in_grid.x;\nif (i < 9) {\n  threadgroup_barrier(mem_flags::mem_none);\n}\nout[i] = 1;"
    )
    with pytest.raises(
        Fault, match=r"(?s)divergence: .*\n  test\.metal:3: threadgroup_barrier\(mem_flags::mem_none\);$"
    ):
        mx.eval(run(source, [mx.arange(64.0)]))


def test_a_race_prints_both_lines():
    source = "threadgroup float s[64]; uint i = thread_position_in_grid.x;\ns[i] = a[i];\n\nout[i] = s[i ? i - 1 : 0];"
    with pytest.raises(Fault) as caught:
        mx.eval(run(source, [mx.arange(64.0)]))
    lines = str(caught.value).split("\n  ")
    assert lines[1].startswith("element ") and lines[1].endswith(' of "s", of 4 bytes')
    assert sorted(lines[2:]) == ["test.metal:2: s[i] = a[i];", "test.metal:4: out[i] = s[i ? i - 1 : 0];"]


def test_lines_of_a_compile_error_are_the_users():
    with pytest.raises(CompileError, match=r"test\.metal:3:\d+: error: use of undeclared identifier 'unknown'"):
        mx.eval(run("\n\n  out[0] = unknown;\n", [mx.zeros(9)]))
    with pytest.raises(CompileError, match=r"header of test\.metal:2:\d*:? error"):
        mx.eval(run("out[0] = 1;", [mx.zeros(9)], header="// a header\nfloat f( { }\n"))
    with pytest.raises(CompileError, match=r"test\.metal:2: error: .*quoted include"):
        mx.eval(run('\n#include "mine.h"\n', [mx.zeros(9)]))
    with pytest.raises(CompileError, match="test\\.metal:2: error: '\u00e9' is not ASCII"):
        mx.eval(run("// caf\u00e9\n float caf\u00e9 = 1; out[0] = 1;", [mx.zeros(9)]))


# Code that clang takes in plain C++: the message, and header and source of a kernel.
A_MAC_REFUSES = {
    "double": (r"test\.metal:2: error: Metal has no double: write float", "", "\ndouble x = a[0]; out[0] = x;"),
    "double in the header": (
        r"header of test\.metal:2: error: Metal has no double",
        "\nfloat twice(double x) { return 2 * x; }\n",
        "out[0] = twice(a[0]);",
    ),
    "recursion": (
        r"header of test\.metal:1: error: 'count' calls itself: Metal has no recursion, write a loop",
        "int count(int n) { return n > 0 ? 1 + count(n - 1) : 0; }\n",
        "out[0] = count(3);",
    ),
    "static variable": (
        r"test\.metal:1: error: .* has a static variable: .*constant",
        "",
        "static int n = 0; out[0] = n;",
    ),
    "lambda": (r"test\.metal:1: error: .*lambda", "", "auto f = [](float x) { return x; }; out[0] = f(a[0]);"),
    "variable outside of constant memory": (
        r"header of test\.metal:1: error: 'scale' .*'constant'",
        "constexpr float scale = 2;\n",
        "out[0] = scale;",
    ),
}


@pytest.mark.parametrize("what", A_MAC_REFUSES)
def test_what_a_mac_refuses_is_refused_here(what, monkeypatch):
    message, header, source = A_MAC_REFUSES[what]
    with pytest.raises(CompileError, match=message):
        mx.eval(run(source, [mx.zeros(9)], header=header, shape=(1,)))
    with mm.simulator.enabled(), pytest.raises(CompileError, match=message):
        kernel = mx.fast.metal_kernel("test", ["a"], ["out"], source, header)
        sizes = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        mx.eval(kernel(inputs=[mx.zeros(9)], output_shapes=[(1,)], output_dtypes=[mx.float32], **sizes))


def test_a_kernel_is_compiled_where_it_is_evaluated():
    result = run("out[0] = unknown;", [mx.zeros(9)])
    with pytest.raises(CompileError, match="unknown"):
        mx.eval(result)
    assert equal(run(DOUBLED, [mx.arange(9.0)]), 2 * mx.arange(9.0))


@pytest.mark.parametrize(
    "head",
    [
        "kernel void f(device float* out [[buffer(0)]]) {",
        "[[kernel]] void f(device float* out) {",
        "template <typename T>\nkernel [[max_total_threads_per_threadgroup(32)]] void f(device T* out) {",
    ],
)
def test_a_whole_kernel_as_the_source_is_said(head):
    with pytest.raises(CompileError, match=r"test\.metal:\d: error: source is the body of the kernel alone.*void f"):
        mx.eval(run(f"// kernel void\n{head}\n  out[0] = 1;\n}}\n", [mx.zeros(9)]))


# Code that a Mac takes, however newer than C++14 or unlike this package's own style it is.
A_MAC_TAKES = {
    "a comment that is not ASCII": ("// caf\u00e9\n", "out[0] = 7;  /* \u2192 */"),
    "a constant as the size of an array": ("constant int N = 4;\n", "float x[N]; x[3] = 7; out[0] = x[3];"),
    "a reference to constant memory, which is const whether it says so or not": (
        "float once(constant float& v) { return v; } float again(const constant float& v) { return once(v); }\n"
        "constant float seven = 7;\n",
        "out[0] = again(seven);",
    ),
    "a conversion to a vector": (
        "struct P { float a; operator float2() const { return float2(a, 7); } };\n",
        "P p = {1}; float2 v = p; out[0] = v.y;",
    ),
    "an explicit conversion to a vector of thread memory": (
        "struct P { half a; explicit operator half4() thread { return half4(a); } };\n",
        "P p = {3}; half4 v = half4(p); out[0] = v.x + static_cast<half4>(p).y + ((half4)p).z - 2;",
    ),
    "a conversion of two": (
        "struct P { float a; operator uint2() const { return uint2(uint(a), 1); }\n"
        "  operator float() const { return a; } };\n",
        "P p = {6}; uint2 v = p; out[0] = float(v.x) + v.y + 0 * float(p);",
    ),
    "functions of an object that is a vector, or a number": (
        "struct P { float a; operator float2() const { return float2(a, 7); } };\n"
        "struct S { float v; operator float() const { return v; } };\n",
        "P p = {24}; S s = {2}; out[0] = dot(p, float2(0, 1)) + length(p) - 25 + max(float2(3), p).y - 7\n"
        "  + isnan(p).x + fma(s, 2.0f, -4.0f) + mix(p, float2(2), 1.0f).y - 2 + metal::precise::sqrt(s) * 0;",
    ),
    "functions of packed vectors": (
        "",
        "packed_float3 p = {2, 3, 6}; float3 n = normalize(p); out[0] = dot(p, n) + distance(p, float3(2, 3, 6))\n"
        "  + cross(p, p).z + abs(packed_int3(-1, 2, 3)).x - clamp(packed_int3(4, 2, 3), int3(0), int3(1)).x;",
    ),
    "a structured binding": ("struct P { float a, b; };\n", "P p = {3, 7}; auto [x, y] = p; out[0] = y;"),
    "a nested namespace": ("namespace x::y { constant float z = 7; }\n", "out[0] = x::y::z;"),
    "an if with an initial statement": ("", "if (int n = 7; n > 3) { out[0] = n; }"),
    "a fold": (
        "template <typename... T> float sum(T... x) { return (x + ...); }\n",
        "out[0] = sum(1.0f, 2.0f, 4.0f);",
    ),
    "a threadgroup array in a block": ("", "{ threadgroup float s[4]; s[0] = 7; out[0] = s[0]; }"),
    "a shuffle of bfloat, as MLX's own headers have it": ("", "out[0] = float(simd_shuffle(bfloat(7.0f), ushort(0)));"),
}


@pytest.mark.parametrize("what", A_MAC_TAKES)
def test_what_a_mac_takes_is_taken_here(what):
    header, source = A_MAC_TAKES[what]
    result = run(source, [], header=header, shape=(1,), dtype=mx.float32)
    assert result.item() == 7


def test_a_kernel_is_checked_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    checked = []
    check = dialect._problems
    monkeypatch.setattr(dialect, "_problems", lambda *args, **more: checked.append(args) or check(*args, **more))
    for _ in range(2):
        assert run("out[0] = 7;", [], shape=(1,), dtype=mx.float32).item() == 7
        with pytest.raises(CompileError, match="double"):
            mx.eval(run("double x = 7; out[0] = x;", [], shape=(1,), dtype=mx.float32))
    assert len(checked) == 2


def test_a_template_argument_used_as_another_kind():
    with pytest.raises(CompileError, match=r"test\.metal:1"):
        mx.eval(run("T x = a[0]; out[0] = x;", [mx.zeros(9)], template=[("T", 3)]))


REFUSED = {
    "template argument 'T' is 1.5": {"template": [("T", 1.5)]},
    "template argument 'T' is 'float'": {"template": [("T", "float")]},
    f"template argument 'N' is {2**40}": {"template": [("N", 2**40)]},
    r"grid is \(0, 1, 1\)": {"grid": (0, 1, 1)},
    r"grid is \(4, 4\)": {"grid": (4, 4)},
    r"threadgroup is \(1, -1, 1\)": {"threadgroup": (1, -1, 1)},
    "has 2048 threads: expected at most 1024": {"threadgroup": (64, 32, 1), "grid": (64, 32, 1)},
    r"threadgroup \(1024, 2, 1\) has 2048 threads": {"threadgroup": (1024, 2, 1), "grid": (9, 1, 1)},
    r"output_shapes\[0\] is \(-2,\)": {"shape": (-2,), "grid": (1, 1, 1)},
    "inputs": {"names": ["a", "b"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_say_which(message):
    with pytest.raises(ValueError, match=message):
        run(DOUBLED, [mx.zeros(9)], **REFUSED[message])


def test_as_many_outputs_as_names():
    kernel = mm.simulator.metal_kernel("test", ["a"], ["out"], DOUBLED)
    with pytest.raises(ValueError, match="output_shapes"):
        two = {"output_shapes": [(9,), (9,)], "output_dtypes": [mx.float32]}
        kernel(inputs=[mx.zeros(9)], grid=(9, 1, 1), threadgroup=(9, 1, 1), **two)


def call(kernel):
    a = mx.arange(40.0)
    outputs = {"output_shapes": [a.shape], "output_dtypes": [a.dtype]}
    return equal(kernel(inputs=[a], grid=(40, 1, 1), threadgroup=(8, 1, 1), **outputs)[0], 2 * a)


def make():
    return mx.fast.metal_kernel(name="made", input_names=["a"], output_names=["out"], source=DOUBLED)


needs_no_metal = pytest.mark.skipif(mx.metal.is_available(), reason="here MLX runs its kernels itself")


def test_enabled_redirects_kernels_that_are_made_in_it():
    with mm.simulator.enabled():
        kernel = make()
        assert call(kernel)
        with mm.simulator.enabled(seed=3):
            assert call(kernel)
        assert call(make())


# In a process of its own, in which no block was before.
HELD_BEFORE = """
import functools, sys
import mlx.core as mx
import mlx_mittens as mm

def make():
    return mx.fast.metal_kernel(name="k", input_names=["a"], output_names=["out"],
                                source="uint i = thread_position_in_grid.x; out[i] = 2 * a[i];")

def call(kernel):
    y, = kernel(inputs=[mx.arange(8.0)], output_shapes=[(8,)], output_dtypes=[mx.float32], grid=(8, 1, 1),
                threadgroup=(8, 1, 1))
    return y.tolist() == [2.0 * i for i in range(8)]

class Attribute:
    def __init__(self):
        self.kernel = make()

class Slot:
    __slots__ = "kernel"
    def __init__(self):
        self.kernel = make()

class OfClass:
    kernel = make()

def closure():
    kernel = make()
    return lambda: kernel

def default(kernel=make()):
    return kernel

attribute, slot, closed, lists, deep = Attribute(), Slot(), closure(), [make()], ({"a": (1, make())},)
simulated = mm.simulator.metal_kernel("k", ["a"], ["out"], "uint i = thread_position_in_grid.x; out[i] = 2 * a[i];")
bound, inner, maker = functools.partial(call, make()), functools.partial(make()), mx.fast.metal_kernel
make = functools.partial(maker, name="k", input_names=["a"], output_names=["out"],
                         source="uint i = thread_position_in_grid.x; out[i] = 2 * a[i];")
"""
HELD = (
    "call(attribute.kernel)",
    "call(slot.kernel)",
    "call(OfClass.kernel)",
    "call(OfClass().kernel)",
    "call(closed())",
    "call(default())",
    "call(lists[0])",
    'call(deep[0]["a"][1])',
    "bound()",
    "call(inner)",
    "call(simulated)",
    "call(make())",
)


# As Python 3.14's, it finds the tuple of the call's arguments: a function in Python has a tuple of its own.
LIKE_PYTHON_3_14 = "import gc; found = gc.get_referrers; gc.get_referrers = lambda *objects: found(*objects)"


@pytest.mark.parametrize("before", ["", LIKE_PYTHON_3_14], ids=["this Python", "like 3.14"])
def test_enabled_reaches_kernels_that_were_made_before(before):
    calls = "".join(f"    assert {held}, {held!r}\n" for held in HELD)
    text = f"{before}\n{HELD_BEFORE}\nfor _ in range(2):\n  with mm.simulator.enabled():\n{calls}"
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


MADE_BEFORE = """
import mlx.core as mx
source = "\\nuint i = thread_position_in_grid.x;\\nout[i] = at(a, i + 1);\\n"
header = "#define ONE 1\\ntemplate <typename P> float at(P p, uint i) {\\n  return p[i] * ONE;\\n}\\n"
shifty = mx.fast.metal_kernel("shif_ty_", ["a", "n"], ["out"], source + "// { ]]) {\\n", header)
typed = mx.fast.metal_kernel("typed", ["a"], ["out"], source.replace("at(a, i + 1)", "T(a[i + N])"))
import mlx_mittens as mm
sizes = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)], "output_dtypes": [mx.float32]}
def told(kernel, *inputs, **more):
    try:
        mx.eval(kernel(inputs=list(inputs), **sizes, **more))
    except mm.simulator.Fault as fault:
        print(fault)
with mm.simulator.enabled():
    told(shifty, mx.zeros(8), mx.array(2))
    told(typed, mx.zeros(8), template=[("T", mx.float16), ("N", 3)])
    with mm.simulator.profiled() as launches:
        told(typed, mx.zeros(9), template=[("T", mx.float16), ("N", 1)])
print(launches[0].file, *sorted({(line.file, line.line) for line in launches[0].lines}))
"""


def test_kernels_that_were_made_before_have_their_names_and_lines():
    ran = subprocess.run([sys.executable, "-c", MADE_BEFORE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "(header of shif_ty_.metal:3)" in ran.stdout and "(typed.metal:3)" in ran.stdout, ran.stdout
    assert "header of shif_ty_.metal:3: return p[i] * ONE;" in ran.stdout
    assert "\ntyped.metal ('typed.metal', 3)\n" in ran.stdout


@needs_no_metal
def test_a_kernel_out_of_reach_is_an_error_that_says_how():
    text = f"{HELD_BEFORE}\ndef run():\n  kernel = make()\n  with mm.simulator.enabled():\n    call(kernel)\nrun()\n"
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ran.returncode == 1 and "Make it within the block" in ran.stderr, ran.stderr


@needs_no_metal
def test_outside_of_enabled_kernels_are_mlxs():
    with mm.simulator.enabled():
        kernel = make()
    for mlx_kernel in (kernel, make(), held_by_module):
        with pytest.raises(RuntimeError, match="No Metal back-end"):
            call(mlx_kernel)


def message_of(function, *args, **arguments):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*args, **arguments)
    return type(caught.value), str(caught.value)


def test_outside_of_enabled_errors_are_mlxs():
    with mm.simulator.enabled():
        pass
    names = {"name": "made", "input_names": ["a"], "output_names": ["out"], "source": DOUBLED}
    for args, arguments in ((("made",), {}), ((), {**names, "more": 1}), ((), {**names, "source": ""})):
        try:
            mlx_metal_kernel(*args, **arguments)
        except TypeError:
            assert message_of(mx.fast.metal_kernel, *args, **arguments) == message_of(
                mlx_metal_kernel, *args, **arguments
            )
        else:
            mx.fast.metal_kernel(*args, **arguments)
    theirs, switched = mlx_metal_kernel(**names), mx.fast.metal_kernel(**names)
    assert message_of(switched, [mx.zeros(1)]) == message_of(theirs, [mx.zeros(1)])
    assert message_of(switched, inputs=[mx.zeros(1)]) == message_of(theirs, inputs=[mx.zeros(1)])
    assert mx.fast.metal_kernel.__doc__ == mlx_metal_kernel.__doc__


def test_a_kernel_made_between_blocks_has_the_users_lines():
    with mm.simulator.enabled():
        pass
    kernel = mx.fast.metal_kernel(name="mine", input_names=["a"], output_names=["out"], source="out[0] = 1;\nnone();")
    named = mx.fast.metal_kernel(name="not mine", input_names=["a"], output_names=["out"], source=DOUBLED)
    with mm.simulator.enabled():
        with pytest.raises(CompileError, match=r"(?m)^mine\.metal:2:"):
            call(kernel)
        with pytest.raises(ValueError, match="name is 'not mine'"):
            call(named)


def test_a_fault_inside_enabled_leaves_all_as_it_was():
    before = mm._ext.simulator_state()
    with pytest.raises(Fault), mm.simulator.enabled(seed=9):
        mx.eval(run(FAULTS["race"][0], [mx.arange(64.0)]))
    assert mm._ext.simulator_state() == before


def test_overlapping_blocks_in_threads():
    before = mm._ext.simulator_state()
    entered, leave, results = threading.Event(), threading.Event(), []

    def other():
        with mm.simulator.enabled(seed=5):
            entered.set()
            leave.wait(60)
            results.append(call(make()))

    thread = threading.Thread(target=other)
    with mm.simulator.enabled(seed=4):
        thread.start()
        assert entered.wait(60)
        assert mm._ext.simulator_state()[1] == 5
    assert mm._ext.simulator_state()[:2] == (True, 5)
    leave.set()
    thread.join(60)
    assert results == [True]
    assert mm._ext.simulator_state() == before


def test_kernels_in_many_threads_at_once():
    results = []

    def work(n):
        a = mx.arange(100.0) + n
        results.append(equal(run(f"uint i = thread_position_in_grid.x; out[i] = a[i] + {n};", [a]), a + n))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [True] * 4
