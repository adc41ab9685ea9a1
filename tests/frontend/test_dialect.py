"""The dialect check: MLX's kernels pass, and each broken kernel is refused for its own reason.

verification/test_levels.py checks our kernels.
"""

import itertools
import re

import pytest

from mlx_mittens import frontend
from mlx_mittens.frontend.check import dialect
from mlx_mittens.peer import mlx_sources

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = """
[[kernel]] void test(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {{
  {}
}}
"""

_serial = itertools.count()


def problems(text):
    name = f"dialect{next(_serial)}.metal"
    frontend.register_source(name, HEADER + text)
    return [(problem.line, problem.what) for problem in dialect.check(name)]


def in_kernel(body):
    return KERNEL.format(body)


def test_a_text_is_checked_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    checked, check = [], dialect._problems
    monkeypatch.setattr(dialect, "_problems", lambda *arguments: checked.append(arguments) or check(*arguments))
    name = f"dialect{next(_serial)}.metal"
    frontend.register_source(name, HEADER + in_kernel("double a = 1;"))
    assert dialect.check(name) == dialect.check(name) != []
    assert len(checked) == 1
    assert dialect.refused(name) and len(checked) == 2, "whether it is strict matters"
    frontend.register_source(name, HEADER + in_kernel("y[i] = 1;"))
    assert dialect.check(name) == [] and len(checked) == 3


def test_a_sound_kernel_passes():
    helpers = """
    constant float scale = 2;
    constant constexpr int table[2] = {1, 2};
    struct Pair {
      float a, b;
      Pair(float a) thread : a(a), b{a} {}
      static Pair of(float a) { return Pair(a); }
      thread float& first() thread { return a; }
    };
    template <typename T, int N = 4>
    METAL_FUNC T total(const thread T (&values)[N], threadgroup T* shared, constant T& more) {
      T sum = more + *shared;
      for (int i = 0; i < N; ++i) {
        if constexpr (N > 2) { sum += values[i]; }  // newer than C++14, and an extension there
        if (T v = values[i]; v > 0) { sum += v; }  // caf\u00e9
      }
      return sum;
    }
    inline float area(float2 v) { return v.x * v.y; }
    typedef thread float* Own;
    using Given = const device float*;
    template <typename U> using PointerTo = U*;
    inline float first_of(Own own, Given given, float Other) { return own[0] + given[0] + Other; }
    """
    body = """threadgroup float shared[64];
    float values[4] = {x[i], 1, 2, 3};
    const device float4* packs = (const device float4*)(x);
    values[1] = first_of(values, x, 1);
    shared[i] = area(float2(1, 2)) * simd_sum(metal::exp(x[i]));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = total(values, shared, scale) + Pair(3).a + table[1] + dot(packs[0], float4(1)) * precise::sqrt(2.0f);"""
    assert problems(helpers + in_kernel(body)) == []


# Mistakes: the reason given, the line that it is given for, and the text. In a kernel the body is line 6.
BROKEN = {
    "double": ("no double", 6, in_kernel("double d = x[i]; y[i] = d;")),
    "static variable": ("static variable", 6, in_kernel("static int calls = 0; y[i] = calls;")),
    "lambda": ("lambda", 6, in_kernel("auto f = [](float a) { return a; }; y[i] = f(x[i]);")),
    "lambda with a capture": ("lambda", 6, in_kernel("float a = 1; auto f = [&a] { return a; }; y[i] = f();")),
    "std": ("std::", 6, in_kernel("y[i] = std::exp(x[i]);")),
    "recursion": (
        "'count' calls itself",
        3,
        "int count(int n) { return n > 0 ? 1 + count(n - 1) : 0; }" + in_kernel("y[i] = count(int(x[i]));"),
    ),
    "recursion of two": (
        "'even' calls itself",
        4,
        "bool even(int n);\n"
        "bool odd(int n) { return n ? even(n - 1) : false; } bool even(int n) { return n ? odd(n - 1) : true; }"
        + in_kernel("y[i] = even(int(x[i]));"),
    ),
    "pointer argument": ("'p' of 'get' names no address space", 3, "float get(const float* p) { return *p; }"),
    "reference argument": ("'v' of 'set' names no address space", 3, "void set(float& v) { v = 1; }"),
    "argument of a member": (
        "'o' of 'add' names no address space",
        5,
        "struct Sum {\n  float v;\n  void add(const Sum& o) { v += o.v; }\n};",
    ),
    "alias of a pointer": (
        "'p' of 'get' names no address space",
        3,
        "typedef const float* Floats; float get(Floats p) { return *p; }",
    ),
    "alias of a reference": (
        "'v' of 'set' names no address space",
        3,
        "using Result = float&; void set(const Result v) { v = 1; }",
    ),
    "alias of a pointer, returned": (
        "'first' returns",
        3,
        "using Floats = float*; inline Floats first(thread float* p) { return p; }",
    ),
    "alias of a pointer, as a member": (
        "'p' names no address space",
        3,
        "using Floats = float*; struct A { Floats p; };" + in_kernel("y[i] = 1;"),
    ),
    "reference result": ("'first' returns", 3, "float& first(thread float* p) { return *p; }"),
    "kernel argument": (
        "'x' of 'test' names no address space",
        3,
        "[[kernel]] void test(float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1; }",
    ),
    "local pointer": ("'p' names no address space", 6, in_kernel("float v = x[i]; float* p = &v; y[i] = *p;")),
    "local reference": ("'v' names no address space", 6, in_kernel("float a = 1; const float& v = a; y[i] = v;")),
    "cast": ("'float\\*' names no address space", 6, in_kernel("float v = 1; y[i] = *(float*)(&v);")),
    "cast by name": (
        "names no address space",
        6,
        in_kernel("float v = 1; y[i] = *reinterpret_cast<const float*>(&v);"),
    ),
    "member": ("'p' names no address space", 3, "struct A { const float* p; };" + in_kernel("y[i] = 1;")),
    "address spaces mixed": ("address space|cannot initialize", 6, in_kernel("threadgroup float* p = y; y[i] = *p;")),
    "writes what is const": ("read-only|const", 6, in_kernel("x[i] = 1; y[i] = 1;")),
    "threadgroup memory in a function": (
        "not a kernel",
        3,
        "float f(float v) { threadgroup float s[4]; s[0] = v; return s[0]; }" + in_kernel("y[i] = f(x[i]);"),
    ),
    "initial value of threadgroup memory": (
        "initial value",
        6,
        in_kernel("threadgroup float s[2] = {0, 0}; y[i] = s[0];"),
    ),
    "too much threadgroup memory": (
        "32772 bytes of threadgroup memory",
        4,
        in_kernel("threadgroup float a[4097]; threadgroup float b[4096]; a[i] = b[i] = x[i]; y[i] = a[i];"),
    ),
    "variable outside of constant memory": ("'scale'.*has to be 'constant'", 3, "constexpr float scale = 2;"),
    "static member outside of constant memory": (
        "'size'.*has to be 'constant'",
        3,
        "struct Shape { static constexpr int size = 2; };",
    ),
    "quoted include": ("no header", 3, '#include "mine.h"\n' + in_kernel("y[i] = 1;")),
    "not ASCII": ("'\u00e9' is not ASCII", 6, in_kernel("float caf\u00e9 = 1; y[i] = 1;")),
    "unknown function": ("undeclared", 6, in_kernel("y[i] = lgamma(x[i]);")),
    "clang's own function": ("__builtin_expf' is not Metal's", 6, in_kernel("y[i] = __builtin_expf(x[i]);")),
    "function of our front end's alone": (
        "no function 'construct'",
        6,
        in_kernel("y[i] = mittens::construct<float2>(x[i]).x;"),
    ),
    "type identification": ("is_same", 6, in_kernel("y[i] = typeid(x[i]) == typeid(float);")),
    "inline assembly": ("metal_stdlib", 6, in_kernel('asm("nop"); y[i] = 1;')),
    "thread_local": ("in the kernel", 6, in_kernel("thread_local float a = 1; y[i] = a;")),
    "new": ("no new", 6, in_kernel("y[i] = *new float(1);")),
    "goto": ("no goto", 6, in_kernel("again: if (y[i] < 1) { y[i] += 1; goto again; }")),
    "exceptions": ("exceptions", 6, in_kernel("if (x[i] < 0) throw 1; y[i] = 1;")),
    "virtual function": (
        "virtual",
        3,
        "struct A { virtual float f() thread { return 1; } };" + in_kernel("A a; y[i] = a.f();"),
    ),
    "array of a length known later": ("variable length", 6, in_kernel("int n = int(x[i]); float a[n]; y[i] = a[0];")),
    "deduced template arguments": (
        "deduction",
        6,
        "template <typename T> struct Box { T v; Box(T v) : v(v) {} };" + in_kernel("Box b(x[i]); y[i] = b.v;"),
    ),
    "concept": ("concept", 3, "template <typename T> concept Small = sizeof(T) < 4;" + in_kernel("y[i] = 1;")),
    "kernel that returns": (
        "a kernel is void",
        3,
        "[[kernel]] int test(device int* y [[buffer(0)]]) { y[0] = 1; return 1; }",
    ),
    "kernel argument without an attribute": (
        "no attribute",
        3,
        "[[kernel]] void test(device int* y [[buffer(0)]], uint i) { y[i] = 1; }",
    ),
    "unknown attribute": (
        "no attribute 'thread_in_grid'",
        3,
        "[[kernel]] void test(device int* y [[buffer(0)]], uint i [[thread_in_grid]]) { y[i] = 1; }",
    ),
    "bracket never closed": ("closes nothing", 3, "[[kernel]] void test(device int* y [[buffer(0)]]) { y[0] = (1; }"),
    "missing semicolon": ("expected ';'", 6, in_kernel("y[i] = x[i]")),
    "shuffle of bfloat": (
        "take no bfloat",
        6,
        in_kernel("bfloat b = bfloat(x[i]); y[i] = float(simd_shuffle(b, ushort(3)));"),
    ),
    "shuffle of pairs of bfloat": (
        "take no bfloat",
        6,
        in_kernel("y[i] = float(simd_shuffle_xor(bfloat2(bfloat(x[i])), ushort(3)).x);"),
    ),
    "wrong type": (
        "no matching|cannot|incompatible|no viable",
        6,
        in_kernel("float4 v = float4(1); float2 w = v; y[i] = w.x;"),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_refused_for_its_reason(what):
    reason, line, text = BROKEN[what]
    found = problems(text)
    assert any(re.search(reason, why) for _, why in found), found
    assert {at for at, _ in found} == {line}, found


# The kernels that MLX ships calibrate the check: Apple's compiler takes them, and nothing of these has to be left out.
MLX = [
    ("softmax", "softmax_single_row", "half", "float"),
    ("softmax", "softmax_looped", "bfloat16_t", "float"),
    ("gemv", "gemv", "bfloat16_t", 8, 1, 1, 32, 4, 4, False, False),
    ("gemv", "gemv_t", "half", 1, 16, 8, 4, 4, 4, False, False),
    ("quantized", "affine_qmv_fast", "bfloat16_t", 64, 4, False),
    ("quantized", "affine_qmm_t", "half", 64, 4, True, False),
    ("sdpa_vector", "sdpa_vector", "float", 128, 128),
    ("sdpa_vector", "sdpa_vector_2pass_1", "half", 64, 64),
    ("steel_attention", "attention", "half", 32, 16, 128, 128, 4, 1, "half", "float"),
]


@pytest.mark.parametrize("kernel", MLX, ids=lambda kernel: kernel[1])
def test_mlxs_own_kernels_pass(kernel):
    assert dialect.check(mlx_sources.instance(*kernel)[0]) == []
