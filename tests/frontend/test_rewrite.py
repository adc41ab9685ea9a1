"""Passes over tokens: the output of each for a text, by itself."""

import pytest

from mlx_mittens.frontend import rewrite
from mlx_mittens.frontend.read.tokens import RewriteError
from mlx_mittens.frontend.rewrite import TO_CHECK, to_run
from mlx_mittens.frontend.rewrite.draft import Draft


def after(text, *passes, constants=None):
    """A text after some passes, which follow the cut of the attributes."""
    draft = Draft(text, constants)
    for one in (rewrite.cut_attributes, *passes):
        one(draft)
    return draft.written()


LOOP = "void f() {{ for (int i = 0; i < n; ++i) {} }}"

# A pass, a text, and the text behind the pass.
PASSES = {
    "attributes": (rewrite.cut_attributes, "uint i [[thread_position_in_grid]], int n", "uint i , int n"),
    "a plain member stays": (
        rewrite.member_functions,
        "struct A { int f() const { return 1; } int f() const device { return 1; } };",
        "struct A { int f() const { return 1; }  };",
    ),
    "a member in one space": (
        rewrite.member_functions,
        "struct A { int f() const device { return 1; } };",
        "struct A { int f() const  { return 1; } };",
    ),
    "a member in two spaces": (
        rewrite.member_functions,
        "struct A { A(int x) device : x(x) {} A(int x) threadgroup : x(x) {} int x; };",
        "struct A { A(int x)  : x(x) {}  int x; };",
    ),
    "a constructor in threadgroup memory": (
        rewrite.mark_threadgroup_constructors,
        "struct A { A() threadgroup = default; };",
        "struct A { public: using mittens_in_threadgroup = void;  A() threadgroup = default; };",
    ),
    "rounds of a loop in which lanes part": (
        rewrite.count_rounds,
        LOOP.format("if (x) simd_sum(y);"),
        LOOP.format("{ const ::mittens::Round mittens_round;  if (x) simd_sum(y); }"),
    ),
    "no rounds of one in which none parts": (
        rewrite.count_rounds,
        LOOP.format("simd_sum(y);"),
        LOOP.format("simd_sum(y);"),
    ),
    "kernels": (rewrite.kernels, "kernel void f(device float* x) {}", " void f(device float* x) {}"),
    "instantiations": (
        rewrite.kernels,
        'template <typename T> [[kernel]] void f(device T* x) {} template [[host_name("f")]] [[kernel]] void f<int>;',
        "template <typename T>  void f(device T* x) {} ",
    ),
    "an array in threadgroup memory": (
        rewrite.threadgroup_arrays,
        "{ threadgroup float x[32], y; }",
        "{ MITTENS_THREADGROUP_ARRAY(x, float [32]); MITTENS_THREADGROUP_ARRAY(y, float ); }",
    ),
    "a pointer to threadgroup memory": (
        rewrite.threadgroup_arrays,
        "{ threadgroup float* x = y; }",
        "{ threadgroup float* x = y; }",
    ),
    "an array of a thread's own": (
        rewrite.private_arrays,
        "void f() { float x[4], y; }",
        "void f() { float x_memory[4], y; MITTENS_PRIVATE_ARRAY(x) }",
    ),
    "an array with initial values": (
        rewrite.private_arrays,
        "void f() { float x[2] = {1, 2}; }",
        "void f() { float x[2] = {1, 2}; }",
    ),
    "a number in constant memory": (rewrite.constants, "constant int N = 4;", "constant const int N = 4;"),
    "a function constant": (
        rewrite.constants,
        "constant bool wide [[function_constant(3)]];",
        "static const bool wide = ::mittens::function_constant<bool>();",
    ),
    "an array as a parameter": (
        rewrite.parameters,
        "void f(constant const int64_t strides[2], int n)",
        "void f(constant const int64_t * strides, int n)",
    ),
    "a number by reference": (rewrite.parameters, "void f(constant int& n)", "void f(constant const int& n)"),
    "a constructor": (
        rewrite.constructors,
        "x = metal::vec<T, 4>(a, b);",
        "x = ::mittens::construct<metal::vec<T, 4>>(a, b);",
    ),
    "a reference to an array of vectors": (
        rewrite.constructors,
        "void f(thread vec<T, 2> (&x)[4])",
        "void f(thread vec<T, 2> (&x)[4])",
    ),
    "a cast": (rewrite.casts, "y = (float4)x.a[1] + z;", "y = (float4)::mittens::convert<float4>(x.a[1]) + z;"),
    "a cast by an alias": (
        rewrite.named_casts,
        "using V = float4; y = (V)x; z = V(x); w = static_cast<V>(x);",
        "using V = float4; y = (V)::mittens::convert<V>(x); z = ::mittens::convert<V>(x); "
        "w = ::mittens::convert<V>(x);",
    ),
    "a conversion function": (rewrite.types, "operator float2() const", "operator ::metal::vec<float, 2>() const"),
    "a qualified constructor": (rewrite.types, "x = metal::float4(y);", "x = float4(y);"),
    "a reference to an array by name": (rewrite.types, "f(device uint4 (&x)[2])", "f(device vec<uint, 4> (&x)[2])"),
    "strings": (rewrite.strings, 'log("a" "b");', 'log((constant char*)("a" "b"));'),
    "no strings of the compiler": (rewrite.strings, 'static_assert(x, "a");', 'static_assert(x, "a");'),
    "numbers": (
        rewrite.numbers,
        "1.0 + 1e3h + 2.5bf + 3.0f + 4",
        "1.0f + half(1e3f) + bfloat(2.5f) + 3.0f + 4",
    ),
    "numbers that no bfloat holds": (
        rewrite.inexact_numbers,
        "float x = 1; y = 1.5f + 2.0h;",
        "float x = 0x1.0000020000000p+0f; y = 0x1.8000020000000p+0f + half(2.0f);",
    ),
    "expressions that no bfloat holds": (
        rewrite.inexact_expressions,
        "constant float x = 2 * n; y = float(n);",
        "constant float x = ::mittens::inexact(2 * n); y = float(::mittens::inexact(n));",
    ),
    "an assignment between spaces": (
        rewrite.assignments,
        "{ *((threadgroup A*)(x)) = *((const device A*)(y)); }",
        "{ ::mittens::assign(((threadgroup A*)(x)) ,((const device A*)(y))); }",
    ),
    "an assignment of an expression": (
        rewrite.assignments,
        "{ *((device float*)(x)) = *((device float*)(y)) + 1; }",
        "{ *((device float*)(x)) = *((device float*)(y)) + 1; }",
    ),
}


@pytest.mark.parametrize("what", PASSES)
def test_a_pass(what):
    one, text, expected = PASSES[what]
    assert after(text, *[one] * (one is not rewrite.cut_attributes)) == expected


def test_function_constants():
    text = "constant int n [[function_constant(0)]]; int m = is_function_constant_defined(n) ? n : 1;"
    passes = rewrite.constants, rewrite.function_constant_tests
    assert after(text, *passes, constants={0: "7"}) == "static constexpr int n = int(7); int m = true ? n : 1;"
    assert after(text, *passes, constants={}) == "static constexpr int n = int(); int m = false ? n : 1;"
    assert "= ::mittens::function_constant<bool>() ? n : 1;" in after(text, *passes)


@pytest.mark.parametrize("text", ["sizeof(bool4)", "device bool2* x", "struct A { bool3 x; }; constant A& y"])
def test_vectors_of_bool_in_memory_are_refused(text):
    with pytest.raises(RewriteError, match="a vector of bool in memory"):
        rewrite.refuse_truths_in_memory(Draft(text))


def test_what_is_replaced_keeps_its_lines():
    text = '{ threadgroup float x[\n# 7 "a.h"\n4\n]; }'
    assert after(text, rewrite.threadgroup_arrays).split("\n")[1:] == ['# 7 "a.h"', "", "; }"]


def test_of_edits_the_largest_stands_and_places_are_found_again():
    draft = Draft("a b c d")
    draft.replace(1, 2, "inner")
    draft.replace(0, 3, "outer")
    draft.insert(3, "!")
    draft.result.text = draft.written()
    assert draft.result.text == "outer d!"
    assert [draft.result.original(draft.result.text.index(word)) for word in ("outer", "d")] == [0, 6]


def test_passes_of_a_run_and_of_a_check():
    assert rewrite.numbers in to_run() and rewrite.numbers not in TO_CHECK
    assert rewrite.inexact_numbers in TO_CHECK and rewrite.inexact_numbers not in to_run()
    more = {rewrite.count_rounds, rewrite.private_arrays, rewrite.named_casts}
    assert set(to_run(*more)) - set(to_run()) == more and not more & set(TO_CHECK)
