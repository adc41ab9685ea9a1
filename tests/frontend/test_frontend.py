"""The Metal front end: the texts that it takes, its output for both targets, its messages on texts that it refuses."""

import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.simulate import HEADER, kernel, register, run

from mlx_mittens import frontend
from mlx_mittens.frontend import CompileError, build, cache, library
from mlx_mittens.frontend.check import dialect
from mlx_mittens.frontend.read import sources
from mlx_mittens.simulator import Fault

IN_OUT = "const device float* in [[buffer(0)]], device float* out [[buffer(1)]]"
FILES = frontend.files()


# Our own kernels.


@pytest.mark.parametrize("file", FILES)
def test_our_files(file):
    variants = frontend.variants(file)
    names = [variant.name for variant in variants]
    assert names and len(set(names)) == len(names)
    for variant in variants:
        assert re.fullmatch(r"[a-z0-9_]+", variant.name)
        signature = frontend.signature(file, variant.name)
        indices = [a.index for a in signature if a.kind == "buffer"]
        assert indices == list(range(len(indices)))
        assert signature[-1].kind != "buffer"
    assert Path(frontend.simulator_library(file)).is_file()


def test_files_are_known():
    assert {"norm/rms_norm.metal", "norm/layer_norm.metal", "norm/softmax.metal", "norm/add_rms_norm.metal"} <= set(
        FILES
    )
    with pytest.raises(FileNotFoundError, match="no kernel file 'missing.metal'"):
        frontend.variants("missing.metal")
    with pytest.raises(KeyError, match="norm/rms_norm.metal has no kernel 'missing'"):
        frontend.signature("norm/rms_norm.metal", "missing")


@pytest.mark.parametrize("file", FILES)
def test_flattened(file):
    """One text without our headers' includes, that says where its lines are from."""
    text = frontend.flatten(file)
    assert text.isascii()
    included = set(re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M))
    assert not included
    headers = re.findall(r'^#line 1 "([^"]+)"$', text, re.M)
    assert headers[0] == file and len(set(headers)) == len(headers)
    # Every line is the text at its place in its file.
    folder, where, line = sources.metal_folder(), None, 0
    for row in text.splitlines():
        marker = re.match(r'#line (\d+) "([^"]+)"$', row)
        if marker:
            where, line = (folder / marker[2]).read_text().splitlines(), int(marker[1])
            continue
        original = where[line - 1] if line <= len(where) else ""
        assert row.strip() == original.strip() or "#pragma once" in original or "#include" in original
        line += 1


# The dialect, by the results of kernels.

EXPRESSIONS = {
    # Vectors.
    "float4(1, 2, 3, 4).w": 4,
    "float4(float2(1, 2), 3, 4).y": 2,
    "float4(1, float2(2, 3), 4).z": 3,
    "float4(float3(1, 2, 3), 4).wzyx.x": 4,
    "float4(7).z": 7,
    "float4(half4(1.5h, 2.5h, 3.5h, 4.5h)).w": 4.5,
    "float(half4(float4(0.1, 0.2, 0.3, 0.4)).x)": float(np.float16(0.1)),
    "float(bfloat2(1.01, 2).x)": 1.0078125,
    "float(uint3(3, 4, 5).y + uint3(1).x)": 5,
    "float(int4(float4(1.9, -1.9, 0, 0)).y)": -1,
    "vec<float, 4>(1, 2, 3, 4).z": 3,
    "metal::vec<float, 2>(5).y": 5,
    "float2{6, 7}.y": 7,
    "float(ushort4(1, 2, 3, 70000).w)": 70000 % 65536,
    "dot(float4(1, 2, 3, 4), float4(1, 1, 1, 2))": 14,
    "length(float2(3, 4))": 5,
    "cross(float3(1, 0, 0), float3(0, 1, 0)).z": 1,
    "float(all(float2(1, 2) < float2(2, 3)))": 1,
    "float(any(isnan(float4(1, NAN, 2, 3))))": 1,
    "select(float2(1, 2), float2(3, 4), float2(0, 1) < float2(1, 1)).y": 2,
    "select(1.0, 2.0, true)": 2,
    "max(float4(1, 5, 2, 4), 3.0).x": 3,
    "float(half3(1, 2, 3).zyx.x)": 3,
    # Literals: no double anywhere.
    "float(sizeof(1.0))": 4,
    "float(sizeof(1e3))": 4,
    "float(sizeof(.5))": 4,
    "float(sizeof(1.0h))": 2,
    "float(sizeof(2.0bf))": 2,
    "float(1.0h / 3.0h)": float(np.float16(1) / np.float16(3)),
    "16777217.0 - 16777216.0": 0,
    "float(0x1F)": 31,
    "float(0xbf)": 191,
    "0x1p-3f": 0.125,
    "float(1000u)": 1000,
    # Sizes of types, as on a GPU.
    "float(sizeof(long) + sizeof(size_t) + sizeof(half4) + sizeof(float3) + sizeof(bfloat))": 8 + 8 + 8 + 16 + 2,
    "float(sizeof(packed_float3) + sizeof(packed_half4))": 12 + 8,
    # Bits.
    "float(as_type<uint>(1.0f) >> 23)": 127,
    "as_type<float>(0x40490fdb)": np.pi,
    "float(as_type<ushort2>(0x00030002u).y)": 3,
    "float(as_type<half>(ushort(0x3c00)))": 1,
    "float(popcount(0xf0f0u))": 8,
    "float(clz(1u))": 31,
    "float(clz(0u))": 32,
    "float(ctz(8))": 3,
    "float(reverse_bits(1u) >> 28)": 8,
    "float(rotate(0x80000001u, 1u))": 3,
    "float(extract_bits(0xabcdu, 4u, 8u))": 0xBC,
    "float(insert_bits(0xffu, 0u, 2u, 3u))": 0xE3,
    "float(mulhi(0x80000000u, 6u))": 3,
    "float(madsat(65536, 32768, -10) == 2147483638)": 1,
    "float(madsat(-65536, 32769, 70000) == -2147479184)": 1,
    "float(madsat(65536u, 65536u, 1u) == 0xffffffffu)": 1,
    "float(madsat(-65536, 65536, 5) == -2147483647 - 1)": 1,
    "float(abs(-5))": 5,
    "float(pack_float_to_unorm10a2(float4(1, 0, 0.5, 1)) >> 20)": 512 + 3 * 1024,
    "unpack_unorm10a2_to_float(0x40000001u).w": 1 / 3,
    "float(unpack_unorm10a2_to_half(0x3ffu).x)": 1,
    "float(pack_half_to_unorm565(half3(1, 0, 1)))": 31 + (31 << 11),
    "unpack_unorm565_to_float(ushort(0x07e0)).y": 1,
    "float(pack_float_to_srgb_unorm4x8(float4(0.5, 0, 1, 2)) & 255)": 188,
    "float(pack_float_to_srgb_unorm4x8(float4(0.5, 0, 1, 0.5)) >> 24)": 128,
    "float(pack_float_to_srgb_unorm4x8(unpack_unorm4x8_srgb_to_float(0x00bc0a05u)))": 0x00BC0A05,
    "unpack_unorm4x8_srgb_to_float(0x0a000000u).w": 10 / 255,
    "float(simd_is_helper_thread())": 0,
    "float(absdiff(3u, 5u))": 2,
    "float(absdiff(-2000000000, 2000000000))": 4e9,
    "float(absdiff(char4(-128, 1, 2, 3), char4(127)).x)": 255,
    "float(is_same_v<decltype(absdiff(short2(1), short2(2))), ushort2>)": 1,
    "float(extract_bits(uint4(0xabcdu), 4u, 8u).w)": 0xBC,
    "float(extract_bits(int2(-16, 0xf8), 3u, 5u).y)": -1,
    "float(extract_bits(uchar4(0xab), 4u, 4u).z)": 0xA,
    "float(insert_bits(uint2(0xffu), uint2(0u), 2u, 3u).y)": 0xE3,
    "float(insert_bits(uint4(1), uint4(0xfffffff0u), 0u, 32u).y)": 0xFFFFFFF0,
    "float(insert_bits(uchar2(1), uchar2(0xf0), 0u, 8u).y)": 0xF0,
    # Numbers.
    "float(numeric_limits<half>::max())": 65504,
    "numeric_limits<float>::infinity()": np.inf,
    "-numeric_limits<float>::infinity()": -np.inf,
    "float(numeric_limits<int>::min())": -(2.0**31),
    "float(numeric_limits<uchar>::max())": 255,
    "float(numeric_limits<bfloat>::epsilon())": 2.0**-7,
    "numeric_limits<float>::quiet_NaN()": np.nan,
    # Functions at their edges.
    "max(NAN, 2.0f)": 2,
    "min(2.0f, NAN)": 2,
    "fmax(-INFINITY, 3.0)": 3,
    "clamp(5.0, 0.0, 1.0)": 1,
    "saturate(-2.0)": 0,
    "mix(2.0, 4.0, 0.25)": 2.5,
    "step(1.0, 0.5)": 0,
    "sign(-3.0)": -1,
    "fract(2.75)": 0.75,
    "fract(-1e-9f)": 1 - 2.0**-24,
    "float(fract(half2(-1e-7h, 1.5h)).x)": 1 - 2.0**-11,
    "fract(NAN)": np.nan,
    "float(ilogb(0.0f))": -(2.0**31),
    "float(ilogb(-0.0h))": -(2.0**31),
    "float(ilogb(INFINITY))": 2.0**31,
    "float(ilogb(NAN))": -(2.0**31),
    "float(ilogb(float2(5, 0.25f)).y)": -2,
    "float(ilogb(as_type<float>(2u)))": -148,
    "float(isnormal(6e-5h)) + 2 * float(isnormal(6.2e-5h)) + 4 * float(isnormal(0.0h))": 2,
    "float(any(isnormal(half2(1e-6h)))) + 2 * float(isnormal(1e-6f))": 2,
    "rint(2.5)": 2,
    "round(2.5)": 3,
    "trunc(-2.7)": -2,
    "fmod(7.5, 2.0)": 1.5,
    "copysign(3.0, -1.0)": -3,
    "ldexp(1.5, 4)": 24,
    "fma(2.0, 3.0, 4.0)": 10,
    "pow(2.0, 10.0)": 1024,
    "precise::sqrt(2.25)": 1.5,
    "fast::divide(3.0, 2.0)": 1.5,
    "metal::exp(-INFINITY)": 0,
    "fast::exp2(3.0)": 8,
    "float(metal::exp(half(12)))": np.inf,
    "float(isinf(INFINITY)) + float(isfinite(1.0))": 2,
    "float(M_PI_F)": np.pi,
    # Arithmetic in half and bfloat rounds at each step.
    "float(half(2048) + half(1) + half(1))": 2048,
    "float(bfloat(256) + bfloat(1) + bfloat(1))": 256,
    "float(half(65504) * half(2) * half(0.5))": np.inf,
    # Templates and traits.
    "float(is_same_v<remove_cv_t<const half>, half>) + float(is_integral_v<uint>)": 2,
    "float(conditional_t<true, short, long>(70000))": 4464,
}


@pytest.fixture(scope="module")
def expressions():
    bodies = enumerate(f"  out[i] = {expression};" for expression in EXPRESSIONS)
    return register("".join(kernel(body, "device float* out [[buffer(0)]]", f"test{n}") for n, body in bodies))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression(expressions, expression):
    out = np.zeros(1, np.float32)
    run(expressions, f"test{list(EXPRESSIONS).index(expression)}", [out], threads=1)
    np.testing.assert_array_equal(out[0], np.float32(EXPRESSIONS[expression]))


UNARY = {
    "exp": (np.exp, -80, 80),
    "exp2": (np.exp2, -120, 120),
    "exp10": (lambda x: 10.0**x, -30, 30),
    "log": (np.log, 1e-6, 1e6),
    "log2": (np.log2, 1e-6, 1e6),
    "log10": (np.log10, 1e-6, 1e6),
    "sqrt": (np.sqrt, 0, 1e9),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1e-9, 1e9),
    "sin": (np.sin, -10, 10),
    "cos": (np.cos, -10, 10),
    "tan": (np.tan, -1.5, 1.5),
    "sinh": (np.sinh, -9, 9),
    "cosh": (np.cosh, -9, 9),
    "tanh": (np.tanh, -6, 6),
    "asin": (np.arcsin, -1, 1),
    "acos": (np.arccos, -1, 1),
    "atan": (np.arctan, -50, 50),
    "asinh": (np.arcsinh, -50, 50),
    "acosh": (np.arccosh, 1.001, 50),
    "atanh": (np.arctanh, -0.99, 0.99),
    "floor": (np.floor, -50, 50),
    "ceil": (np.ceil, -50, 50),
}


@pytest.fixture(scope="module")
def unary():
    parts = []
    for name in UNARY:
        for type_name in ("float", "half", "float4"):
            arguments = f"const device {type_name}* in [[buffer(0)]], device {type_name}* out [[buffer(1)]]"
            parts.append(kernel(f"  out[i] = metal::{name}(in[i]);", arguments, f"{name}_{type_name}"))
    return register("".join(parts))


@pytest.mark.parametrize("name", UNARY)
def test_functions_are_exact_to_two_ulp(unary, name, rng):
    function, low, high = UNARY[name]
    x = rng.uniform(low, high, 512).astype(np.float32)
    for type_name, threads in (("float", 512), ("float4", 128)):
        y = np.zeros_like(x)
        run(unary, f"{name}_{type_name}", [x, y], threads=threads)
        exact = function(x.astype(np.float64))
        assert (np.abs(y - exact) <= 2 * np.spacing(np.abs(exact).astype(np.float32))).all()
    x = np.clip(x, -8, 8).astype(np.float16)
    y = np.zeros_like(x)
    run(unary, f"{name}_half", [x, y], threads=512)
    exact = function(x.astype(np.float64))
    finite = np.isfinite(exact) & (np.abs(exact) < 60000)
    assert (np.abs(y - exact)[finite] <= np.spacing(np.abs(exact[finite]).astype(np.float16))).all()


def outputs(text, name="test", threads=4, arguments=(), **options):
    out = np.zeros(threads, np.float32)
    run(register(text), name, [*arguments, out], threads=threads, **options)
    return out.tolist()


def test_threadgroup_declarations():
    text = """template <typename T, int n>
struct Tile {
  static constexpr int size = n;
  T first;
};
[[kernel]] void test(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[4], b[2][4], c;
  threadgroup Tile<float, 4> tiles[Tile<half, 2>::size * 2];
  threadgroup metal::vec<half, 4> v
      [4];
  threadgroup float* p = &b[1][0];
  threadgroup const float* q = a;
  a[i] = i;
  p[i] = 10 * i;
  b[0][i] = 0;
  tiles[i].first = 100 * i;
  v[i] = half4(i);
  if (i == 0) { c = 1000; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = q[3 - i] + b[1][3 - i] + tiles[3 - i].first + c + float(v[i].w);
}
"""
    assert outputs(text) == [1333 + 0, 1222 + 1, 1111 + 2, 1000 + 3]


def test_address_spaces_choose_overloads():
    text = """float which(const device float* p) { return 1; }
float which(const threadgroup float* p) { return 2; }
float which(constant float* p) { return 3; }
float which(const thread float* p) { return 4; }
constant float table[2] = {5, 6};
[[kernel]] void test(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[1];
  float own = 0;
  out[i] = i == 0 ? which(out) : i == 1 ? which(shared) : i == 2 ? which(table) : which(&own);
}
"""
    assert outputs(text) == [1, 2, 3, 4]


def test_arrays_of_vectors_by_reference_and_by_pointer():
    text = """template <typename T, int n>
void fill(thread vec<T, 2> (&pairs)[n], uint i) {
  for (int j = 0; j < n; ++j) {
    pairs[j] = vec<T, 2>(T(i), T(j));
  }
}
float last(thread const vec<float, 2> (*pairs)[3]) { return (*pairs)[2].x + 10 * (*pairs)[2].y; }
[[kernel]] void test(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  vec<float, 2> pairs[3];
  fill<float, 3>(pairs, i);
  out[i] = last(&pairs);
}
"""
    assert outputs(text) == [20, 21, 22, 23]


def test_arrays_of_vectors_by_their_short_names():
    """Where such a name stands before a bracket it is a constructor, but not here."""
    text = """void fill(thread float2 (&pairs)[3], uint i) {
  for (int j = 0; j < 3; ++j) {
    pairs[j] = float2(i, j);
  }
}
float last(thread const float2 (*pairs)[3]) {
  const thread float2 (&same)[3] = *pairs;
  const thread float2* first = &same[0];
  return float2(*pairs[0])[0] + 10 * same[2].y + 100 * float2(*first)[1];
}
[[kernel]] void test(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float2 pairs[3];
  fill(pairs, i);
  out[i] = last(&pairs);
}
"""
    assert outputs(text) == [20, 21, 22, 23]


def test_array_parameters_and_member_functions():
    text = """struct Pair {
  float a;
  float b;
  Pair(float a, float b) thread : a(a), b{b} {}
  Pair(float a) device : a(a), b(0) {}
  float sum() const thread { return a + b; }
  float sum() const device { return -1; }
  float sum() const threadgroup { return -1; }
  thread float& first() thread { return a; }
};
float pick(constant const int strides[2], const device float in[4], int k) { return strides[1] * in[k]; }
[[kernel]] void test(const device float* in [[buffer(0)]], constant const int* strides [[buffer(1)]],
    device float* out [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  Pair pair(in[i], 1);
  pair.first() += 1;
  out[i] = pair.sum() + pick(strides, in, i);
}
"""
    out = np.zeros(4, np.float32)
    run(register(text), "test", [np.arange(4, dtype=np.float32), np.array([1, 10], np.int32).tobytes(), out], threads=4)
    assert out.tolist() == [2, 13, 24, 35]


def test_structs_cross_address_spaces_as_a_whole():
    text = """struct alignas(16) Chunk { uint8_t v[16]; };
[[kernel]] void test(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[16];
  *((threadgroup Chunk*)(&a[i * 4])) = *((const device Chunk*)(&in[i * 4]));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = a[i * 5];
}
"""
    assert outputs(text, arguments=[np.arange(16, dtype=np.float32)]) == [0, 5, 10, 15]


@pytest.mark.parametrize("keyword", ["kernel", "[[kernel]]", "[[max_total_threads_per_threadgroup(64 * N)]] kernel"])
def test_a_template_is_no_variant_of_its_own(keyword):
    text = f"template <int N> {keyword} void fill(device int* x [[buffer(0)]]) {{ *x = N; }}\n"
    name = f"tests/fill {keyword}.metal"
    frontend.register_source(name, text + 'template [[host_name("fill_2")]] [[kernel]] decltype(fill<2>) fill<2>;\n')
    [fill] = frontend.translate(name).kernels.values()
    assert fill.template == "int N" and fill.max_threads == ("64 * N" if "64" in keyword else None)
    frontend.register_source(name, text)
    assert frontend.variants(name) == []


def test_instantiations():
    text = """template <typename T, int n, bool flag = false>
[[kernel]] void fill(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  out[i] = float(T(n + 0.5)) + flag;
}
#define instantiate(name, type) \\
  template [[host_name("fill_" name "_3")]] [[kernel]] decltype(fill<type, 3>) fill<type, 3>;
instantiate("float", float)
instantiate("int", int)
template [[host_name("fill flagged")]] [[kernel]] void fill<float, 1, true>(device float*, uint);
[[kernel]] void plain(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) { out[i] = 9; }
kernel void old_style(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) { out[i] = 8; }
"""
    file = register(text)
    variants = {variant.name: variant for variant in frontend.variants(file)}
    assert set(variants) == {"fill_float_3", "fill_int_3", "fill flagged", "plain", "old_style"}
    assert variants["fill_int_3"].function == "fill" and variants["plain"].template_args is None
    expected = {"fill_float_3": 3.5, "fill_int_3": 3, "fill flagged": 2.5, "plain": 9, "old_style": 8}
    assert {name: outputs(text, name)[0] for name in variants} == expected
    assert frontend.entry_name("fill flagged") == "fill_flagged"


def test_signature():
    text = """struct Params { int n; };
constant bool more [[function_constant(3)]];
template <typename T>
[[kernel]] void test(const device T* x, device T* y [[buffer(4)]], constant Params& params, const constant int* shape,
    device float* extra [[buffer(7), function_constant(more)]], threadgroup float* scratch [[threadgroup(0)]],
    uint3 at [[thread_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {}
template [[host_name("test_half")]] [[kernel]] decltype(test<half>) test<half>;
"""
    found = [(a.name, a.kind, a.index) for a in frontend.signature(register(text), "test_half")]
    assert found == [
        ("x", "buffer", 0),
        ("y", "buffer", 4),
        ("params", "buffer", 1),
        ("shape", "buffer", 2),
        ("extra", "buffer", 7),
        ("scratch", "threadgroup", 0),
        ("at", "thread_position_in_grid", None),
        ("lane", "thread_index_in_simdgroup", None),
    ]


# Texts that do not compile.

REFUSED = {
    "unknown_name": ("  out[i] = missing;", r":4:12: error: use of undeclared identifier 'missing'"),
    "device_to_thread": ("  float* p = out;\n  out[i] = *p;", r":4:10: error: .*'float \*' with .*'device float \*'"),
    "device_to_threadgroup": (
        "  threadgroup float* p = out;",
        r"error: .*'threadgroup float \*' with .*'device float \*'",
    ),
    "threadgroup_to_device": (
        "  threadgroup float a[4];\n  device float* p = a;\n  out[i] = *p;",
        r":5:17: error: .*'device float \*' with .*'threadgroup",
    ),
    "constant_to_device": (
        "  device float* p = table;\n  out[i] = *p;",
        r"error: .*'device float \*' with .*'constant float",
    ),
    "write_to_const": ("  in[i] = 1;", r"error: .*read-only|error: .*const"),
    "missing_semicolon": ("  out[i] = 1\n  out[i] = 2;", r":4:13: error: expected ';'"),
    "open_bracket": ("  out[i = 1;", r"error"),
    "too_many_elements": ("  out[i] = float2(1, 2, 3).x;", r"error: .*too few or too many elements"),
    "unknown_swizzle": ("  out[i] = float2(1, 2).z;", r":4:\d+: error: vector component access exceeds type"),
    "as_type_of_another_size": ("  out[i] = as_type<float>(half(1));", r"error: .*as_type changes the size"),
    "bitwise_and_of_floats": ("  out[i] = in[i] & in[i];", r":4:\d+: error: invalid operands"),
    "wrong_argument_count": ("  out[i] = simd_sum(in[i], in[i], in[i]);", r":4:\d+: error: no matching function"),
    "matrix_of_another_shape": (
        "  simdgroup_matrix<float, 4, 4> m;\n  out[i] = m.thread_elements()[0];",
        r"error: .*simdgroup_matrix is 8x8",
    ),
    "standard_library": ("  out[i] = std::max(1.0f, 2.0f);", r":4:\d+: error: use of undeclared identifier 'std'"),
    "exceptions": ("  throw 1;", r":4:\d+: error: .*exceptions"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    body, message = REFUSED[name]
    head = f"constant float table[1] = {{1}}; [[kernel]] void broken({IN_OUT}, uint i [[thread_index_in_threadgroup]])"
    text = f"{head} {{\n{body}\n}}\n"
    file = register(text)
    with pytest.raises(CompileError) as caught:
        frontend.simulator_library(file)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert file in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('#include "missing.h"\n', r':3: error: there is no header "missing\.h"'),
        ("#if\n#endif\n", r":3:\d+: error: expected value in expression"),
        (
            "[[kernel]] void test(device float* out [[buffer(0)]], uint i) {}\n",
            r":3: error: argument 'i' of a kernel has no attribute",
        ),
        (
            "[[kernel]] void test(device float* out [[buffer(0)]], uint i [[thread_index]]) {}\n",
            r"error: .*thread_index",
        ),
        (
            "template <typename T> [[kernel]] void f(device T* o [[buffer(0)]]) {}\n\n"
            'template [[host_name("a")]] [[kernel]] decltype(f<flot>) f<flot>;\n',
            r":5:\d+: error: .*flot",
        ),
        (
            'void f() {}\ntemplate [[host_name("a")]] [[kernel]] decltype(f<float>) f<float>;\n',
            r"error: it instantiates f, which is not a kernel",
        ),
        ("float f(float x) { return x; }\n", r"error: the file has no kernel"),
        ("[[kernel]] void test(device float* out [[buffer(0)]]) { out[0] = 1; }}\n", r":3: error: '}' closes nothing"),
    ],
)  # fmt: skip
def test_refused_files(text, message):
    file = register(text)
    with pytest.raises(CompileError) as caught:
        frontend.simulator_library(file)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert str(Path(__file__).parents[2]) not in str(caught.value)  # no paths of this machine


def test_an_error_in_ptx_names_the_kernel():
    file = register("[[kernel]] void broken(device float* out [[buffer(0)]]) { out[0] = nothing; }\n")
    with pytest.raises(CompileError, match=r"kernel 'broken' of .*\n.*:3:\d+: error"):
        frontend.ptx(file, "broken")


def test_lines_are_kept():
    """Whatever the rewriting puts in place of several lines."""
    text = """constant bool
    flag
    [[function_constant(0)]];
#define twice(x) ((x) * \\
    2)
template <typename T>
[[kernel,
  max_total_threads_per_threadgroup(
      64)]]
void test(
    device T* out
    [[buffer(0)]],
    uint i
    [[thread_index_in_threadgroup]]) {
  threadgroup T
      a
      [4];
  a[i] = twice(3);
  out[i] = flag ? a[i] : wrong;
}
template
    [[host_name(
        "test")]]
    [[kernel]] decltype(test<float>) test<float>;
int last = also_wrong;
"""
    file = register(text)
    first = HEADER.count("\n")
    rows = text.splitlines()
    with pytest.raises(CompileError) as caught:
        frontend.simulator_library(file)
    for word in ("wrong", "also_wrong"):
        line = first + 1 + next(i for i, row in enumerate(rows) if re.search(rf"\b{word};", row))
        assert re.search(rf"{file}:{line}:\d+: error: use of undeclared identifier '{word}'", str(caught.value))


# The cache.


def test_translated_once():
    """For the names of its kernels, for their parameters, and for the simulator."""
    before = build._translate.cache_info().misses
    file = register(kernel("  out[i] = 5;", "device float* out [[buffer(0)]]", "translated_once"))
    assert [variant.name for variant in frontend.variants(file)] == ["translated_once"]
    assert frontend.signature(file, "translated_once")[0].name == "out"
    frontend.simulator_library(file)
    assert build._translate.cache_info().misses == before + 1


def test_compiled_once(tmp_path, monkeypatch):
    frontend.compiler_problem()  # the compiler is found once, and noted in the cache of that time
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path / "cache"))
    text = kernel("  out[i] = 1;", "device float* out [[buffer(0)]]")
    file = register(text)
    first = frontend.simulator_library(file)
    assert Path(first).parent == tmp_path / "cache"
    stamp = Path(first).stat().st_mtime_ns
    assert frontend.simulator_library(file) == first and Path(first).stat().st_mtime_ns == stamp
    assert frontend.simulator_library(file, watch=False) != first
    assert frontend.simulator_library(register(text.replace("= 1", "= 2"))) != first
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".so", ".pch"}


def test_the_library_is_parsed_once(tmp_path, monkeypatch):
    """For all kernels; where the kept result is of no use, the kernel compiles all the same."""
    frontend.compiler_problem()
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    for value in (1, 2):
        frontend.simulator_library(register(kernel(f"  out[i] = {value};", "device float* out [[buffer(0)]]")))
    [library] = tmp_path.glob("stdlib-*.pch")
    library.write_bytes(b"of another compiler")
    frontend.simulator_library(register(kernel("  out[i] = 3;", "device float* out [[buffer(0)]]")))
    assert len(list(tmp_path.glob("*.so"))) == 3
    library.unlink()
    sound = register(kernel("  out[i] = 4;", "device float* out [[buffer(0)]]"))
    assert dialect.check(sound) == [] and len(list(tmp_path.glob("stdlib-*.pch"))) == 1, "with other flags"


def test_two_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    file = register(kernel("  out[i] = 1;", "device float* out [[buffer(0)]]"))
    found = []
    workers = [threading.Thread(target=lambda: found.append(frontend.simulator_library(file))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4 and len(set(found)) == 1


def test_a_cache_that_cannot_be_written_stops_no_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"  # below a file no folder can be made, by root neither
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(folder))
    file = register(kernel("  out[i] = 1;", "device float* out [[buffer(0)]]"))
    with pytest.warns(RuntimeWarning, match=f"{folder} cannot be written to .* Set MLX_MITTENS_CACHE") as caught:
        first = frontend.simulator_library(file)
        assert frontend.simulator_library(file) == first and frontend.simulator_library(file, watch=False) != first
    assert len(caught) == 1 and Path(first).is_file() and not Path(first).is_relative_to(tmp_path)
    text = "import sys; from mlx_mittens.frontend import cache; print(cache.writable_folder())"
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True)
    assert result.returncode == 0 and not Path(result.stdout.strip()).exists(), "it is gone with its process"


def test_a_cache_that_is_deleted_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        path = cache.cached("made.txt", lambda path: path.write_text("made"))
        assert path == tmp_path / "cache" / "made.txt" and path.read_text() == "made"
        shutil.rmtree(path.parent)


def test_a_temporary_cache_that_is_deleted_is_made_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(2):
            path = cache.cached("made.txt", lambda path: path.write_text("made"))
            assert path.read_text() == "made"
            shutil.rmtree(path.parent)
    assert len(caught) == 1


def test_a_cache_on_a_full_disk_is_not_used(tmp_path, monkeypatch):
    script = """
import resource, signal, tempfile
from mlx_mittens.frontend import cache
tempfile.gettempdir()  # which writes a file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # every write fails, and files can be made, as on a full disk
print(cache.writable_folder() == cache.cache_folder())
"""
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "False\n" and "cannot be written to" in result.stderr, result.stderr


def test_a_full_cache_that_cannot_be_written_is_read(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    file = register(kernel("  out[i] = 1;", "device float* out [[buffer(0)]]"))
    first = frontend.simulator_library(file)
    monkeypatch.setattr(cache, "writable_folder", None)
    assert frontend.simulator_library(file) == first and Path(first).parent == tmp_path


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("MLX_MITTENS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    with pytest.warns(RuntimeWarning, match="no home directory"):
        path = cache.cached("made.txt", lambda path: path.write_text("made"))
    assert path.read_text() == "made"


def test_no_compiler(monkeypatch):
    from mlx_mittens.frontend import compiler

    compiler._find.cache_clear()
    monkeypatch.setenv("MLX_MITTENS_CLANG", "/nowhere/clang++")
    try:
        assert "/nowhere/clang++" in frontend.compiler_problem()
        with pytest.raises(RuntimeError, match="cannot compile kernels here"):
            frontend.simulator_library("norm/rms_norm.metal")
    finally:
        compiler._find.cache_clear()


@pytest.mark.parametrize("name, taken", [("Apple clang", False), ("Homebrew clang", True), ("clang", True)])
def test_apples_clang_serves_where_there_is_no_other(monkeypatch, tmp_path, name, taken):
    """It compiles for no GPU."""
    from mlx_mittens.frontend import compiler

    program = tmp_path / "clang++"
    program.write_text(f'#!/bin/sh\necho "{name} version 21.0.0 (clang-2100.1.2)"\n')
    program.chmod(0o755)
    monkeypatch.delenv("MLX_MITTENS_CLANG", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda _: str(program))
    compiler._find.cache_clear()
    try:
        found = compiler.find_compiler()
        assert (found.clang == (str(program),)) == taken
        compiler._find.cache_clear()
        monkeypatch.setattr(compiler, "_ziglang", lambda: None)
        assert compiler.find_compiler().clang == (str(program),)
    finally:
        compiler._find.cache_clear()


def test_a_zig_that_did_not_answer_is_asked_again(monkeypatch, tmp_path):
    from mlx_mittens.frontend import compiler

    zig = tmp_path / "zig"
    zig.write_text("")
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path / "cache"))
    answers = iter([None, (22, "clang version 22.1.8")])
    monkeypatch.setattr(compiler, "_version", lambda command: next(answers))
    assert compiler._known_version(zig) is None
    assert compiler._known_version(zig) == (22, "clang version 22.1.8")
    assert compiler._known_version(zig) == (22, "clang version 22.1.8")  # which is known now


# PTX.


@pytest.fixture(scope="module")
def ptx_file():
    return register(
        """struct Params { int rows; float scale; long stride; };
template <typename V>
[[kernel]] void copy(const device V* in [[buffer(0)]], device V* out [[buffer(1)]],
    constant Params& params [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = in[i + params.stride];
}
template [[host_name("copy_float4")]] [[kernel]] decltype(copy<float4>) copy<float4>;
template [[host_name("copy.half8")]] [[kernel]] decltype(copy<vec<half, 8>>) copy<vec<half, 8>>;
template [[host_name("copy_uint4")]] [[kernel]] decltype(copy<uint4>) copy<uint4>;
[[kernel]] void lanes(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
    device int* counts [[buffer(2)]], uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float a[64];
  a[i] = simd_sum(in[i]) + simd_shuffle_xor(in[i], 5);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = a[63 - i] + metal::rsqrt(in[i]) + fast::exp(in[i]);
  counts[i] = simd_max(int(i)) + simd_sum(int(lane));
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
[[kernel, max_total_threads_per_threadgroup(128)]] void strided(constant long* strides [[buffer(1)]],
    device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  out[strides[1] * i] = 1;
}
[[kernel]] void dynamic(device float* out [[buffer(0)]], threadgroup float* scratch [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]) {
  scratch[i] = out[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = scratch[i ^ 1];
}
"""
    )


@pytest.mark.parametrize(
    ("body", "instruction"),
    [
        ("y[i] = float4(x[i] < 2);", r"selp\.f32\s+%\w+, 0f3F800000, 0f00000000"),
        ("using V = float4; y[i] = V(int4(z[i]));", r"cvt\.rn\.f32\.s32"),
        ("z[i] = 1 << z[i + 1];", r"and\.b32\s+%\w+, %\w+, 31"),
        ("int q = z[i] / z[i + 1]; z[i] = z[i + 1] == 0 ? -5 : q;", r"selp\.b32\s+%\w+, -5,"),
    ],
)
def test_ptx_of_a_registered_source_is_as_metal_has_it(body, instruction):
    arguments = "device float4* x [[buffer(0)]], device float4* y [[buffer(1)]], device int* z [[buffer(2)]]"
    assert re.search(instruction, frontend.ptx(register(kernel(body, arguments)), "test"))


@pytest.mark.parametrize("name", ["copy_float4", "copy.half8", "copy_uint4"])
def test_sixteen_bytes_are_one_access(ptx_file, name):
    text = frontend.ptx(ptx_file, name)
    assert re.search(r"ld\.global\.v4\.b32", text) and re.search(r"st\.global\.v4\.b32", text)
    assert len(re.findall(r"\b(ld|st)\.(global|local)", text)) == 2
    assert f".visible .entry {frontend.entry_name(name)}(" in text
    assert text.count(".entry") == 1
    assert len(re.findall(r"\.param \.u64 \.ptr \.global", text)) == 2
    assert re.search(r"\.param \.align 8 \.b8 \w+_param_2\[16\]", text)
    assert re.search(r"\.maxntid 1024", text)


def test_operations_are_the_hardwares(ptx_file):
    text = frontend.ptx(ptx_file, "lanes")
    assert len(re.findall(r"shfl\.sync", text)) == 6
    assert "redux.sync.max.s32" in text and "redux.sync.add.s32" in text
    assert re.search(r"bar(rier)?\.sync|barrier\.cta", text) and "bar.warp.sync" in text
    assert "rsqrt.approx.f32" in text and "ex2.approx.ftz.f32" in text
    assert len(re.findall(r"fma\.rn\.f32", text[text.index("rsqrt.approx.f32") :])) >= 2  # a step of Newton's
    assert re.search(r"\.shared \.align 4 \.b8 \w+\[256\]", text)
    assert "st.shared" in text and "ld.shared" in text and "st.local" not in text and ".extern" not in text


def test_parameters_by_value_and_limits(ptx_file):
    text = frontend.ptx(ptx_file, "strided")
    assert re.search(r"\.maxntid 128, 1, 1", text) and "mittens_max_threads" not in text
    assert len(re.findall(r"\.param \.u64", text)) == 2
    by_value = frontend.ptx(ptx_file, "strided", {1: 24})
    assert re.search(r"\.param \.align 16 \.b8 \w+_param_1\[32\]", by_value)
    assert by_value.index("_param_0,") < by_value.index("_param_1[")  # in the order of the buffers' indices
    assert "ld.param.b64" in by_value and "ld.local" not in by_value


def test_nvidia_has_limits_of_its_own():
    file = register(
        '#include "mittens/instantiate.h"\n'
        "template <int n> [[kernel, threads_at_most(32 * n, n > 1 ? 512 : 384)]] void few(\n"
        "    device int* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) { out[i] = 1; }\n"
        'instantiate_kernel("few_2", few, 2)\n'
    )
    assert re.search(r"\.maxntid 512, 1, 1", frontend.ptx(file, "few_2"))
    with pytest.raises(Fault, match="1 to 64 are possible"):
        run(file, "few_2", [np.zeros(65, np.int32)], 1, 65)


def test_threadgroup_memory_of_the_launch(ptx_file):
    assert re.search(r"\.extern \.shared", frontend.ptx(ptx_file, "dynamic"))


def test_architectures_and_cache(ptx_file):
    assert ".target sm_80" in frontend.ptx(ptx_file, "lanes")
    assert ".target sm_90" in frontend.ptx(ptx_file, "lanes", arch="sm_90")
    with pytest.raises(KeyError, match="no kernel 'copy'"):
        frontend.ptx(ptx_file, "copy")


def test_function_constants_in_ptx():
    text = """constant int n [[function_constant(4)]];
[[kernel]] void test(device int* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) { out[i] = n; }
"""
    file = register(text)
    assert re.search(r"st\.global\.b32\s*\[%rd\d+\], 12345;", frontend.ptx(file, "test", constants={4: 12345}))


def test_prebuilt(tmp_path, monkeypatch):
    """Files that a wheel may bring: one for each variant, used as long as the kernel's text has not changed."""
    from mlx_mittens.frontend import prebuild

    monkeypatch.setattr(sources, "files", lambda: ["norm/softmax.metal"])
    prebuild.prebuild(tmp_path / "ptx")
    names = {frontend.entry_name(v.name) for v in frontend.variants("norm/softmax.metal")}
    assert {path.stem for path in (tmp_path / "ptx" / prebuild.ARCH).iterdir()} == names
    some = tmp_path / "ptx" / prebuild.ARCH / f"{sorted(names)[0]}.ptx"
    some.write_text(some.read_text() + "// prebuilt\n")
    monkeypatch.setattr(library, "installed", lambda: tmp_path)
    assert frontend.ptx("norm/softmax.metal", some.stem).endswith("// prebuilt\n")
    frontend.register_source("norm/softmax.metal", frontend.source("norm/softmax.metal") + "\n// changed\n")
    try:
        assert not frontend.ptx("norm/softmax.metal", some.stem).endswith("// prebuilt\n")
    finally:
        sources._registered.pop("norm/softmax.metal")
