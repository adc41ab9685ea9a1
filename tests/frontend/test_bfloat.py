"""bfloat as Metal has it: made of floats by a cast alone, with operators, without mathematics and SIMD-group functions.

The check compiles it as a type of clang's own, not as a class. These statements are ones that a class would tell apart.
"""

import re

from mlx_mittens import frontend
from mlx_mittens.frontend.check import dialect

HEADER = """#include <metal_stdlib>
using namespace metal;
constant int two = 2;
constant float of_two = two;
constant float sum = 1 + two;
enum Number { none, one };
struct Member { bfloat v; };
template <typename T> struct Of { T v; };
template <typename T> T cast_of(float x) { return static_cast<T>(x); }
template <typename T> T as_it_is(float x) { return x; }
template <typename T, int n> constexpr float from() { return T(n); }
inline bfloat itself(bfloat x) { return x; }
inline float number() { return 1; }
inline void set(thread float& x) { x = 1; }
struct Exp { template <typename T> T operator()(T x) { return metal::exp(x); } };
"""

# Statements, in which a is an array of bfloat, b of bfloat4, f a float, h a half and n an integer.
TAKEN = """
a[i] = static_cast<bfloat>(f);
a[i] = (bfloat)f;
a[i] = bfloat(f * h);
a[i] = bfloat(1.5f);
a[i] = 1.5bf;
a[i] = bfloat(1.5h);
a[i] = n;
a[i] = i > 3;
a[i] = one;
a[i] = 'a';
a[i] = long(n);
a[i] += a[0] * a[1];
a[i] = a[i] / a[0] - 1;
a[i] = 1 - a[i] * i;
a[i] = -a[i];
a[i]++; --a[i];
a[i] = i > 3 ? a[i] : 0;
f = 2.0f * a[i];
f = a[i]; f += a[i];
h = half(a[i]);
n = a[i];
if (a[i] > 1.0f || a[i] != a[0] || !a[i]) a[i] = 0;
if (isnan(a[i]) || isinf(a[i])) a[i] = 0;
a[i] = select(a[i], a[0], i > 3);
bfloat v[2] = {1, 2.0bf}; a[i] = v[1];
a[i] = numeric_limits<bfloat>::infinity();
a[i] = bfloat(-INFINITY);
a[i] = bfloat(exp(float(a[i])));
f = exp(a[i]) + max(a[i], f);
a[i] = bfloat(simd_sum(float(a[i])));
a[i] = as_type<bfloat>(simd_shuffle_down(as_type<ushort>(a[i]), 1));
a[i] = cast_of<bfloat>(f);
const auto product = a[i] * 2.0f; a[i] = bfloat(product);
threadgroup bfloat s[32]; s[i] = a[i]; a[i] = s[0];
b[i] = bfloat4(float4(f));
b[i] = b[i] * b[0] + bfloat(2.0f);
b[i] = 0;
float4 w = float4(b[i]); b[i] = bfloat4(w * 2);
b[i].xy = bfloat2(1.0f, f);
constexpr float third = 1.0f / 3.0f; f = third;
constexpr float zero = from<int, 2>(); const float least = n < 3 || f > 0 ? f : from<int, 3>(); f = zero + least;
simdgroup_bfloat8x8 m; simdgroup_load(m, a, 8); simdgroup_store(m, a, 8);
"""

REFUSED = """
a[i] = f;
a[i] = 1.0f;
a[i] = 0.5;
a[i] = h;
a[i] = 1.5h;
bfloat v(f); a[i] = v;
bfloat v{f}; a[i] = v;
bfloat v[2] = {1.0f, 2.0f}; a[i] = v[0];
a[i] *= 2.0f;
a[i] += f;
a[i] += h;
a[i] = a[i] * 0.5f;
a[i] = 1.0f - a[i];
a[i] = i > 3 ? a[i] : 0.0f;
a[i] = i > 3 ? 1.0f : 2.0f;
a[i] = (n, 1.0f);
a[i] = float(n);
a[i] = float(two);
a[i] = of_two;
a[i] = sum;
const float x = 1 + 2; a[i] = x;
constexpr int m = 2; constexpr float x = m * 3; a[i] = x;
const int m = 2; const float x = float(m) * 4; a[i] = x;
a[i] = INFINITY;
a[i] = M_PI_F;
a[i] = numeric_limits<float>::max();
a[i] = number();
a[i] = itself(1.5f);
a[i] = itself(h);
Member s{1.0f}; a[i] = s.v;
Of<bfloat> s{f}; a[i] = s.v;
const thread bfloat& r = f; a[i] = r;
bfloat v = a[i]; set(v); a[i] = v;
h = a[i];
f = h * a[i];
if (a[i] < h) a[i] = 0;
const auto product = a[i] * 2.0f; a[i] = product;
a[i] = exp(a[i]);
a[i] = metal::sqrt(a[i]);
a[i] = fast::sin(a[i]);
a[i] = precise::log(a[i]);
a[i] = max(a[i], a[0]);
a[i] = abs(a[i]);
a[i] = fma(a[i], a[0], a[1]);
a[i] = clamp(a[i], a[0], a[1]);
a[i] = pow(a[i], 2.0f);
f = simd_sum(a[i]);
f = simd_max(a[i]);
a[i] = simd_shuffle_xor(a[i], 1);
a[i] = simd_broadcast_first(a[i]);
a[i] = simd_prefix_inclusive_sum(a[i]);
a[i] = quad_min(a[i]);
a[i] = a[i] % a[0];
a[i] = a[i] & a[0];
a[a[i]] = 0;
switch (a[i]) { default: a[i] = 0; }
threadgroup bfloat s[32]; s[i] = 0.5f; a[i] = s[i];
b[i] = float4(f);
b[i] = f;
b[i].x = f;
b[i] = b[i] * 2.0f;
b[i].x = dot(b[i], b[0]);
b[i].xy = {1.0f, 2.0f};
float4 w = b[i]; b[i] = bfloat4(w);
float4 w = float4(f) * b[i]; b[i] = bfloat4(w);
"""

# One function instead of a line for each: the mistake is where it is instantiated from, in HEADER.
INSTANTIATED = {"a[i] = as_it_is<bfloat>(f);": "as_it_is", "a[i] = Exp{}(a[i]);": "operator()"}


def lines_with_problems(statements):
    """The problems by statement. Each is a kernel in a line of its own."""
    kernels = [
        f"kernel void k{number}(device bfloat* a, device bfloat4* b, device float* out, uint i "
        f"[[thread_position_in_grid]]) {{ float f = out[i]; half h = half(f); int n = int(i); {statement} "
        "out[i] = f + h + n; }\n"
        for number, statement in enumerate(statements)
    ]
    frontend.register_source("bfloats.metal", HEADER + "".join(kernels))
    first = HEADER.count("\n") + 1
    found = {}
    for problem in dialect.check("bfloats.metal"):
        found.setdefault(problem.line - first, []).append(problem.what)
    return found


def statements_of(text):
    return text.strip().split("\n")


def test_what_is_taken():
    taken = statements_of(TAKEN)
    found = lines_with_problems(taken)
    assert not found, {taken[line]: what for line, what in found.items()}


def test_what_is_refused():
    refused = statements_of(REFUSED)
    found = lines_with_problems(refused)
    assert [refused[line] for line in set(range(len(refused))) - found.keys()] == []
    assert min(found) >= 0


def test_what_a_template_makes_of_it_is_refused():
    for statement, name in INSTANTIATED.items():
        (line,) = lines_with_problems([statement])
        assert line < 0 and re.search(rf"\b{re.escape(name)}", HEADER.split("\n")[line - 1])
