"""Machine code for Apple GPUs: reading the output of Mesa's compiler, and messages where it refuses a kernel."""

import os
import stat

import pytest

from mlx_mittens import frontend
from mlx_mittens.apple import agx_compiler, machine_code
from mlx_mittens.apple.machine_code import KINDS, MesaError, Request, compile_all
from mlx_mittens.frontend import CompileError
from mlx_mittens.frontend.lower import bfloat_lowering, spirv_module

problem = frontend.compiler_problem() or agx_compiler.problem()
needs_compilers = pytest.mark.skipif(bool(problem), reason=problem)

KERNELS = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

kernel void scale(device float* x [[buffer(0)]], constant float& by [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  x[i] = x[i] * by + 1.0f;
}

kernel void nested(device float* x [[buffer(0)]], constant int& rows [[buffer(1)]], constant int& columns [[buffer(2)]],
                   uint i [[thread_position_in_grid]]) {
  float sum = 0.0f;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) {
      sum += exp2(x[r * columns + c]);
    }
    sum = simd_sum(sum);
  }
  x[i] = sum;
}

kernel void held(device float* x [[buffer(0)]], constant int& n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  float a[180];
#pragma clang loop unroll(full)
  for (int j = 0; j < 180; ++j) {
    a[j] = x[i + j];
  }
  for (int k = 0; k < n; ++k) {
#pragma clang loop unroll(full)
    for (int j = 0; j < 180; ++j) {
      a[j] = a[j] * a[(j + 7) % 180] + x[k];
    }
  }
#pragma clang loop unroll(full)
  for (int j = 0; j < 180; ++j) {
    x[i + j] = a[j];
  }
}

struct Pair {
  float a;
  half b;
};

kernel void copies(device Pair* pairs [[buffer(0)]], constant Pair& from [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  Pair one = from;
  Pair other;
  other = pairs[i + 1];
  one.a += other.a;
  one.b *= other.b;
  pairs[i] = one;
}

template <typename T>
kernel void products(const device T* a [[buffer(0)]], device float* c [[buffer(1)]]) {
  simdgroup_matrix<T, 8, 8> x, y;
  simdgroup_matrix<float, 8, 8> z(0.0f);
  simdgroup_load(x, a, 8);
  simdgroup_load(y, a + 64, 8);
  simdgroup_multiply_accumulate(z, x, y, z);
  simdgroup_multiply_accumulate(z, y, x, z);
  simdgroup_multiply_accumulate(z, x, x, z);
  simdgroup_store(z, c, 8);
}
template [[host_name("products_float")]] kernel void products<float>(const device float*, device float*);
template [[host_name("products_half")]] kernel void products<half>(const device half*, device float*);
template [[host_name("products_bfloat")]] kernel void products<bfloat>(const device bfloat*, device float*);

template <typename T>
T everything(T x) {
  return simd_sum(x) + simd_product(x) + simd_min(x) + simd_max(x) + simd_prefix_inclusive_sum(x) +
      simd_prefix_exclusive_product(x) + simd_shuffle_up(x, 1) + simd_shuffle_and_fill_down(x, x, 2) + quad_sum(x) +
      quad_shuffle_xor(x, 1) + simd_broadcast_first(x) + quad_prefix_exclusive_sum(x) + simd_shuffle_xor(x, 5);
}
template <typename T>
kernel void lanes(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]], uint3 threads [[threads_per_grid]],
                  uint3 groups [[threadgroups_per_grid]], uint quads [[quadgroups_per_threadgroup]]) {
  x[i] = everything(x[i]) + T(threads.x) + T(groups.y) + T(quads);
  if (simd_any(x[i] > T(3)) && simd_all(x[i] < T(9))) {
    x[i] = T(ulong(simd_ballot(x[i] > T(7))));
  }
}
template [[host_name("lanes_float")]] kernel void lanes<float>(device float*, uint, uint3, uint3, uint);
template [[host_name("lanes_half")]] kernel void lanes<half>(device half*, uint, uint3, uint3, uint);
template [[host_name("lanes_int")]] kernel void lanes<int>(device int*, uint, uint3, uint3, uint);
template [[host_name("lanes_short")]] kernel void lanes<short>(device short*, uint, uint3, uint3, uint);
template [[host_name("lanes_long")]] kernel void lanes<long>(device long*, uint, uint3, uint3, uint);
template [[host_name("lanes_uchar")]] kernel void lanes<uchar>(device uchar*, uint, uint3, uint3, uint);

kernel void atomics(device atomic_int* a [[buffer(0)]], device atomic_float* f [[buffer(1)]],
                    threadgroup float* shared [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint count;
  if (i == 0) {
    atomic_store_explicit(&count, 0u, memory_order_relaxed);
  }
  shared[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
  atomic_fetch_max_explicit(&a[i], int(shared[i + 1]), memory_order_relaxed);
  atomic_fetch_add_explicit(&f[i], shared[i + 1], memory_order_relaxed);
  int expected = 3;
  atomic_compare_exchange_weak_explicit(&a[1], &expected, 5, memory_order_relaxed, memory_order_relaxed);
}

constant float values[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
kernel void looks_up(device float* x [[buffer(0)]], const device uchar* at [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
  float own[8];
  for (int j = 0; j < 8; ++j) {
    own[j] = x[8 * i + j];
  }
  x[i] = values[at[i] & 15] * own[at[i] & 7];
}

kernel void mathematics(device float* x [[buffer(0)]], device bfloat* b [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
  float v = x[i];
  v = exp(v) + exp2(v) + exp10(v) + log(v) + log2(v) + log10(v) + sin(v) + cos(v) + tan(v) + tanh(v) + sqrt(v);
  v += rsqrt(v) + pow(v, 3.5f) + asin(v) + acos(v) + atan(v) + sinh(v) + cosh(v) + asinh(v) + acosh(v) + atanh(v);
  v += fmod(v, 2.0f) + atan2(v, 3.0f) + fast::exp(v) + fast::log(v) + fast::sin(v) + fast::divide(v, 3.0f);
  v += floor(v) + ceil(v) + trunc(v) + rint(v) + round(v) + ldexp(v, 3) + select(1.0f, v, v > 2.0f);
  x[i] = v + popcount(i) + clz(i) + ctz(i) + rotate(i, 3u) + mulhi(i, 77777u) + mulhi(long(i), 1L << 40);
  b[i] = bfloat(v) * b[i + 1] + exp(b[i]) - bfloat(i);
}
"""
FILE = "tests/machine_code.metal"


@pytest.fixture(scope="module", autouse=True)
def source():
    frontend.register_source(FILE, KERNELS)


def compiled(kernel, threads=None):
    return machine_code.compile(FILE, kernel, threads)


@needs_compilers
def test_a_kernel_of_one_line():
    code = compiled("scale")
    assert code.loops == ()
    assert code.kinds["float"] == 1  # one multiply-add
    assert (code.kinds["load"], code.kinds["store"]) == (1, 1)
    assert code.half_registers < 30
    assert (code.threads_a_core, code.spills, code.fills, code.scratch_bytes) == (1024, 0, 0, 0)
    assert "ffma" in code.text


@needs_compilers
def test_loops_are_nested_as_in_the_source():
    code = compiled("nested")
    assert [(loop.parent, loop.depth) for loop in code.loops] == [(None, 1), (0, 2)]
    outer, inner = code.loops
    assert set(inner.blocks) < set(outer.blocks)
    in_inner = [block for block in code.blocks if block.loop == 1]
    assert sum(block.opcodes.get("exp2", 0) for block in in_inner) == 1
    assert sum(block.kinds["load"] for block in in_inner) == 1
    in_outer = [block for block in code.blocks if block.loop == 0]
    assert sum(block.kinds["simd"] for block in in_outer) == 1
    assert all(block.depth == (0 if block.loop is None else code.loops[block.loop].depth) for block in code.blocks)


@needs_compilers
def test_executed_weighs_loops_by_their_trips():
    counts = compiled("nested").executed({0: 10, 1: 7})
    assert counts["exp2"] == 70
    assert counts["simd_reduce"] == 10
    assert counts["stop"] == 1


@needs_compilers
def test_too_many_values_are_spilled():
    code = compiled("held")
    assert code.spills > 0 and code.fills > 0 and code.scratch_bytes > 0
    assert code.threads_a_core == 384


@needs_compilers
def test_more_threads_leave_fewer_registers():
    few, many = compiled("held", 64), compiled("held", 1024)
    assert many.half_registers <= 104 < few.half_registers
    assert many.threads_a_core == 1024
    assert many.spills > few.spills


@needs_compilers
def test_structs_are_copied_from_where_they_are():
    code = compiled("copies")
    assert (code.spills, code.fills, code.scratch_bytes) == (0, 0, 0)
    assert (code.kinds["load"], code.kinds["store"]) == (1, 1)
    assert code.preamble["device_load"] == 1  # the constant one, once for all threads


@needs_compilers
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
def test_products_of_matrices(dtype):
    code = compiled(f"products_{dtype}")
    assert code.kinds["matrix"] == 3
    assert not {"bitrev", "ffma", "fmul"} & {opcode for block in code.blocks for opcode in block.opcodes}


@needs_compilers
@pytest.mark.parametrize("kernel", [*(f"lanes_{t}" for t in ("float", "half", "int", "short", "long", "uchar"))])
def test_lanes_of_every_type(kernel):
    assert compiled(kernel).kinds["simd"] > 10


@needs_compilers
def test_atomics_and_mathematics():
    assert sum(block.opcodes.get("atomic", 0) for block in compiled("atomics").blocks) == 3
    assert compiled("mathematics").kinds["complex"] > 20


@needs_compilers
def test_arrays_that_an_index_chooses_from():
    code = compiled("looks_up")
    assert code.half_registers < 64
    assert (code.scratch_bytes > 0) == (code.spills > 0)
    assert code.fills or code.kinds["integer"] > 16  # from memory, or by choices


@needs_compilers
def test_kinds_add_up():
    code = compiled("mathematics")
    assert code.instructions == sum(sum(block.opcodes.values()) for block in code.blocks)
    assert set(code.kinds) == set(KINDS)


@needs_compilers
def test_text_is_the_same_from_run_to_run(tmp_path, monkeypatch):
    first = compiled("nested").text
    monkeypatch.setenv("MLX_MITTENS_ASAHI_CLC", str(agx_compiler.find()))
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    assert compiled("nested").text == first


def fake_compiler(tmp_path, monkeypatch, script):
    program = tmp_path / "asahi_clc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("MLX_MITTENS_ASAHI_CLC", str(program))


needs_clang = pytest.mark.skipif(bool(frontend.compiler_problem()), reason=frontend.compiler_problem())


@needs_clang
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'agx.c:7: emit: Assertion `known` failed.' >&2; kill -ABRT $$", "Assertion `known` failed.\n.*SIGABRT"),
        ("printf 'SPIR-V parsing FAILED:\\n    Unsupported capability\\n' >&2; exit 1", "Unsupported capability"),
        ("exit 0", "printed no machine code"),
    ],
)
def test_what_mesa_refuses_is_said(tmp_path, monkeypatch, script, words):
    fake_compiler(tmp_path, monkeypatch, script)
    with pytest.raises(MesaError, match=f"(?s)kernel 'scale' of {FILE} does not compile:\n.*{words}"):
        compiled("scale")
    ((request, code),) = compile_all([Request(FILE, "scale")])
    assert request.kernel == "scale" and isinstance(code, MesaError)


@needs_clang
def test_what_clang_refuses_is_said():
    frontend.register_source("tests/wrong.metal", "kernel void wrong(device int* x [[buffer(0)]]) { x = y; }\n")
    with pytest.raises(CompileError, match="wrong.metal:1:.*undeclared identifier 'y'"):
        frontend.spirv("tests/wrong.metal", "wrong")
    with pytest.raises(KeyError, match="no kernel 'other'"):
        frontend.spirv(FILE, "other")


def test_a_missing_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("MLX_MITTENS_ASAHI_CLC", raising=False)
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="run mlx-mittens agx-compiler"):
        agx_compiler.find()
    monkeypatch.setenv("MLX_MITTENS_ASAHI_CLC", os.fspath(tmp_path / "none"))
    with pytest.raises(RuntimeError, match="MLX_MITTENS_ASAHI_CLC is .*none'"):
        agx_compiler.find()


def test_a_copy_through_a_cast_keeps_its_address_space():
    text = (
        "define void @f() {\n"
        "  %2 = addrspacecast ptr addrspace(1) %1 to ptr\n"
        "  call void @llvm.memcpy.p0.p0.i64(ptr align 4 %own, ptr align 4 %2, i64 16, i1 false)\n"
        "}\n"
    )
    prepared = spirv_module.prepared(text, 64)
    assert "@llvm.memcpy.p0.p1.i64(ptr align 4 %own, ptr addrspace(1) align 4 %1, i64 16" in prepared


def test_threads_are_given_or_declared():
    text = (
        "@mittens_max_threads = constant i32 96, align 4\n"
        "define spir_kernel void @mittens_entry(ptr addrspace(4) %p) #0 {\n  ret void\n}\n"
    )
    assert "@mittens_entry(ptr addrspace(2) %p) #0 !reqd_work_group_size !{i32 96, i32 1, i32 1} {" in (
        spirv_module.prepared(text, None)
    )
    assert "!{i32 128, i32 1, i32 1}" in spirv_module.prepared(text, 128)
    assert "mittens_max_threads" not in spirv_module.prepared(text, None)
    assert bfloat_lowering.lowered(text) == text
