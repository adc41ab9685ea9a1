# ruff: noqa: E501  (a line a kernel)
"""Arrays of a thread's own: an index beyond one is a fault, by the array's size; an access within it is none."""

import functools
import re

import numpy as np
import pytest
from helpers.simulate import kernel, register, run

from mlx_mittens.simulator import Fault

ARGUMENTS = "const device float* x [[buffer(0)]], device float* y [[buffer(1)]], constant int& n [[buffer(2)]]"

# Bodies that touch the elements 0 .. n of an array of eight.
BODIES = {
    "read": """float v[8];
for (int j = 0; j < 8; ++j) { v[j] = x[j]; }
float s = 0;
for (int j = 0; j <= n; ++j) { s += v[j]; }
y[i] = s;""",
    "write": """float v[8] = {};
float s = 0;
for (int j = 0; j <= n; ++j) { v[j] = x[j]; }
for (int j = 0; j < 8; ++j) { s += v[j]; }
y[i] = s;""",
    "member": """struct Part { float a[8]; float more; };
Part p = {};
for (int j = 0; j <= n; ++j) { p.a[j] = x[j]; }
y[i] = p.a[i % 8];""",
    "reference": """float v[8] = {};
fill(v, x, n);
y[i] = v[i % 8];""",
}
HELPER = """inline void fill(thread float (&v)[8], const device float* x, int n) {
  for (int j = 0; j <= n; ++j) { v[j] = x[j]; }
}
"""


def together(functions, bodies):
    """A text of many kernels, which is compiled at once, and the name of each by its body; lines as if it were alone."""
    names = {body: f"body_{i}" for i, body in enumerate(bodies)}
    line = 3 + functions.count("\n")
    texts = [f"#line {line}\n{kernel(body, ARGUMENTS, name)}" for body, name in names.items()]
    return register(functions + "".join(texts)), names


@functools.cache
def shared():
    return together(HELPER, BODIES.values())


def launch(body, n):
    file, names = shared()
    y = np.zeros(32, np.float32)
    run(file, names[body], [np.arange(16, dtype=np.float32), ("output", y), np.int32(n).tobytes()])
    return y


@pytest.mark.parametrize("name", BODIES)
def test_beyond(name):
    with pytest.raises(Fault, match=r"thread \(0, 0, 0\) .*index outside an array of its own \(test\d+\.metal:\d+\)"):
        launch(BODIES[name], 8)


@pytest.mark.parametrize("name", BODIES)
def test_within(name):
    assert np.isfinite(launch(BODIES[name], 7)).all()


def test_the_line_is_named():
    with pytest.raises(Fault) as caught:
        launch(BODIES["read"], 8)
    lines = (HELPER + kernel(BODIES["read"], ARGUMENTS)).splitlines()
    line = next(i for i, text in enumerate(lines, 3) if "s += v[j]" in text)
    assert re.search(rf"metal:{line}\)", str(caught.value))


# Reads of an array's elements before they are written, and the same without that read.
UNINITIALISED = {
    "one element": "float v[4];\nfor (int j = 0; j < n; ++j) { v[j] = x[j]; }\ny[i] = v[0] + v[3];",
    "all but the first": "int v[4], w = 2;\nv[0] = 1;\nfor (int j = 0; j < n; ++j) { v[j] = j; }\nfor (int j = 0; j < 4; ++j) { w += v[j]; }\ny[i] = w;",
    "of a loop before": "float s = 0;\nfor (int r = 0; r < 2; ++r) {\n  half v[2];\n  if (r == 0 || n == 4) { v[0] = x[r]; }\n  s += v[0];\n}\ny[i] = s;",
    "two dimensions": "thread float v[2][2];\nfor (int j = 0; j < n; ++j) { v[j / 2][j % 2] = x[j]; }\ny[i] = v[1][1];",
    "in a function": "float v[4];\nfirst(v, x, n);\ny[i] = v[3];",
    "of a template": "y[i] = last<float, 4>(x, n);",
    "vectors": "float4 v[4];\nfor (int j = 0; j < n; ++j) { v[j] = x[j]; }\ny[i] = v[3].z;",
    "a sum of vectors": "half2 v[4];\nv[3] = 0;\nfor (int j = 0; j < n; ++j) { v[j] = 0; }\nfor (int j = 0; j < 4; ++j) { v[j] += half2(x[j]); }\ny[i] = v[1].x;",
    "a component's sum": "float4 v[4];\nfor (int j = 0; j < n; ++j) { v[j].x = 0; }\nfor (int j = 0; j < 4; ++j) { v[j].x += x[j]; }\ny[i] = v[1].x;",
    "an index of a component": "int2 v[4]; float4 w = 0;\nfor (int j = 0; j < n; ++j) { v[j].x = 1; }\nw[v[3].x & 3] = x[0];\ny[i] = w.y;",
    "vectors in a function": "float3 v[4];\nfirst_components(v, x, n);\ny[i] = v[2].x;",
    "vectors of a template": "y[i] = last<float2, 4>(x, n).y;",
    "structs": "Pair v[4];\nfor (int j = 0; j < n; ++j) { v[j].a = x[j]; }\ny[i] = v[3].a;",
    "a sum in a struct": "Pair v[4];\nfor (int j = 0; j < n; ++j) { v[j].a = v[j].b = 1; }\nfor (int j = 0; j < 4; ++j) { v[j].b += x[j]; }\ny[i] = v[0].b;",
    "vectors in a struct": "Both v[2][2];\nfor (int j = 0; j < n; ++j) { v[j / 2][j % 2].f = float4(1); v[j / 2][j % 2].n = j; }\ny[i] = v[1][1].f.w;",
    "a struct that is copied": "Pair v[4];\nfor (int j = 0; j < n; ++j) { v[j].a = 1; }\nPair p = v[3];\ny[i] = n == 4 ? p.a : p.b;",
    "matrices": "float2x2 v[4];\nfor (int j = 0; j < n; ++j) { v[j][0][1] = 1; }\ny[i] = v[2][0][1];",
    "packed vectors": "packed_float3 v[4];\nfor (int j = 0; j < n; ++j) { v[j] = packed_float3(1, 2, 3); }\ny[i] = v[3].z;",
    "a sum": "float v[4];\nv[3] = 0;\nfor (int j = 0; j < n; ++j) { v[j] = 0; }\nfor (int j = 0; j < 4; ++j) { v[j] += x[j]; }\ny[i] = v[2];",
}  # fmt: skip
FUNCTIONS = """struct Pair { float a, b; };
struct Both { float4 f; int n; half2 h; };
inline void first_components(thread float3* v, const device float* x, int n) {
  for (int j = 0; j < n; ++j) { v[j].x = x[j]; }
}
inline void set(thread float4& v, int j, float value) { v[j] = value; v.z = value; }
inline float pick(thread float& v, bool c) { return c ? v : 0; }
inline void swap_pairs(thread Pair (&v)[4]) { Pair p = v[0]; v[0] = v[3]; v[3] = p; }
inline void first(thread float* v, const device float* x, int n) {
  for (int j = 0; j < n; ++j) { v[j] = x[j]; }
}
template <typename T, int size> T last(const device float* x, int n) {
  T v[size];
  for (int j = 0; j < n; ++j) { v[j] = T(x[j]); }
  return v[size - 1];
}
"""


@functools.cache
def shared_private():
    return together(FUNCTIONS, [*UNINITIALISED.values(), *SOUND.values()])


def launch_private(body, n):
    file, names = shared_private()
    if body not in names:
        file, names = together(FUNCTIONS, [body])
    y = np.zeros(32, np.float32)
    arguments = [np.arange(16, dtype=np.float32), ("output", y), np.int32(n).tobytes()]
    run(file, names[body], arguments, private=True)
    return y


@pytest.mark.parametrize("name", UNINITIALISED)
def test_what_nothing_has_written(name):
    with pytest.raises(
        Fault, match=r'\(test\d+\.metal:\d+\) at byte \d+ of its own array "v", which nothing has written'
    ):
        launch_private(UNINITIALISED[name], 2)


@pytest.mark.parametrize("name", UNINITIALISED)
def test_what_is_written_first(name):
    assert np.isfinite(launch_private(UNINITIALISED[name], 4)).all()


# Sound: parts that stay unwritten are not read, though a compiler could read them early.
SOUND = {
    "a guarded element": "float v[8]; for (int j = 0; j < n; ++j) v[j] = x[j]; float s = 0; for (int j = 0; j < 8; ++j) s += j < n ? v[j] : 0; y[i] = s;",
    "an element of vectors": "float4 v[2]; v[0].x = 1; v[0].y = v[1].z = 2; y[i] = v[0].x + v[1].z;",
    "an early return": "float v[2]; if (i > 40) { return; } v[0] = 1; { float v[2]; v[1] = 3; y[i] = v[1]; } y[i] += v[0];",
    "components one by one": "float4 v[2]; for (int j = 0; j < n; ++j) { v[0][j] = x[j]; v[1].xy = v[1].zw = float2(x[j]); } y[i] = v[0].z + v[1].w;",
    "components by reference": "float4 v[2]; set(v[0], 1, x[2]); thread float4& w = v[1]; w.z = w.x = 3; thread float4* p = v; p[1].y = (*p).y; (*p)[2] = p->y; y[i] = w.z + v[0].z;",
    "components in structs": "Both v[2]; v[0].f.y = x[1]; v[0].h.x = 2; v[1].n = v[0].f.y > 0 ? 1 : 2; Both w[2]; w[1].h = v[0].h; w[0].f[n - 4] = 1; y[i] = v[1].n + w[1].h.x + w[0].f.x;",
    "structs in part": "Pair v[4]; for (int j = 0; j < 4; ++j) { v[j].b = x[j]; } Pair w[2] = {v[0], v[1]}; Pair u[2]; u[1] = w[0]; swap_pairs(v); y[i] = u[1].b + v[3].b;",
    "structs with values": "struct Most { float m = 1; int at; }; struct Made { float f; Made() : f(2) {} }; Most v[2]; Made w[2]; Pair u[2] = {}; y[i] = v[1].m + w[1].f + u[n - 3].b;",
    "vectors with values": "float4 v[2] = {}; const float2 w[2] = {float2(1), float2(2)}; bool4 b[2]; b[0].x = true; y[i] = v[n - 3].x + w[n % 2].y + b[0].x;",
    "matrices of simdgroups": "simdgroup_float8x8 v[2]; v[0] = make_filled_simdgroup_matrix<float, 8, 8>(1.0f); simdgroup_multiply(v[1], v[0], v[0]); simdgroup_half8x8 w[1]; threadgroup half h[64]; h[i] = h[i + 32] = 1; threadgroup_barrier(mem_flags::mem_threadgroup); simdgroup_load(w[0], h, 8); y[i] = v[1].thread_elements()[0];",
    "a library's results": "float4 v[3]; float4 s = sincos(float4(x[1]), v[0]); int4 e[1]; v[1] = frexp(s, e[0]); v[2] = modf(s, v[1]); y[i] = v[0].x + v[2].y + e[0].z;",
    "pointers and types": "const device float* p[2]; p[0] = p[1] = x + 1; bool t[2]; t[0] = t[1] = p[0][0] == x[1]; array<float, 2> w[2]; w[0][1] = 2; y[i] = t[n - 4] + w[0][1];",
    "a struct": "struct Pair { float a[2]; }; Pair p; p.a[0] = x[i % 4]; Pair q = p; y[i] = q.a[0];",
    "values": "float v[4] = {}; const int w[2] = {1, 2}; bool b[2] = {true}; y[i] = v[n - 1] + w[n % 2] + b[1];",
    "a label": "switch (n) { case 0: y[i] = 0; float v[2]; v[0] = x[0]; y[i] = v[0]; break; case 4: y[i] = 4; break; default: y[i] = 5; }",
    "a load of later rounds": "float v[2]; float s = 0; int j = 0; do { if ((n + j) % 4 != 0) s += v[0]; v[0] = j * 2.0f + s; } while (++j < n); y[i] = s;",
    "a component by the round": "float2 v[2]; for (int j = 0; j < n; ++j) { v[0][j & 1] = x[j]; } y[i] = v[0].x;",
    "components of a branch": "float4 v[2]; v[0].y = 1; if (n == 4) { v[0].x = 2; v[0].z = 3; } y[i] = n == 4 ? v[0].x + v[0].z : v[0].y;",
    "components of two branches": "float4 v[1]; v[0].y = 1; if (x[i % 4] > 1) v[0].x = 2; else v[0].z = 1; y[i] = v[0].y;",
    "components that functions compute": "float2 v[2][2]; for (int r = 0; r < 2; ++r) { v[0][0][r] = sin(x[r]); v[0][1][r] = exp(x[r]); v[1][0][r] = fma(x[r], 2, 1); v[1][1][r] = pow(x[r], 2); } float2 s = 0; for (int j = 0; j < 2; ++j) for (int u = 0; u < 2; ++u) s += v[j][u]; y[i] = s.x + s.y;",
    "components of three": "float3 v[2]; for (int j = 0; j < 3; ++j) { v[0][j] = fma(x[j], 2.0f, 1.0f); v[1][j] = x[j]; } float3 s = v[0] * v[1]; y[i] = s.x + s.y + s.z;",
    "components of halfs": "half4 v[3]; for (int j = 0; j < 4; ++j) { for (int k = 0; k < 3; ++k) v[k][j] = half(rsqrt(x[j] + 1)); } half4 s = v[0] + v[1] * v[2]; y[i] = s.x + s.y + s.z + s.w;",
    "a guarded reference": "float v[2]; pick(v[0], false); v[1] = 1; y[i] = pick(v[1], n == 4) + pick(v[0], n != 4);",
    "components of a switch": "float4 v[1]; switch (int(x[i % 4])) { case 0: v[0].x = 1; break; case 1: v[0].y = 2; break; default: v[0].zw = float2(3, 4); } int k = int(x[i % 4]); y[i] = k == 0 ? v[0].x : k == 1 ? v[0].y : v[0].z + v[0].w;",
    "components in structs, computed": "struct P { float2 a; float b; }; P v[2]; for (int r = 0; r < 2; ++r) { v[0].a[r] = fma(x[r], 2.0f, 1.0f); v[1].a[r] = exp(x[r]); } y[i] = v[0].a.x + v[1].a.y + (n == 5 ? v[0].b : 0);",
    "parts of a table": "float2 b[2][4]; for (int j = 0; j < 2; ++j) { for (int r = 0; r < 2; ++r) { const uint v = uint(x[r]); b[j][0][r] = fma(as_type<float>((v & 15u) | 0x4b000000u), x[r], 1.0f); b[j][1][r] = fma(as_type<float>((v & 240u) | 0x4b000000u), x[r], 1.0f); b[j][2][r] = x[r]; b[j][3][r] = fma(x[r], 2.0f, 1.0f); } } float2 s = 0; for (int j = 0; j < 2; ++j) for (int u = 0; u < 4; ++u) s += b[j][u]; y[i] = s.x + s.y;",
    "a copy": "uint v[2]; *(thread float2*)v = float2(1, 2); y[i] = as_type<float>(v[1]);",
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_arrays_that_are_sound(name):
    launch_private(SOUND[name], 4)


# Through a pointer the compiler knows no size, and the watcher checks the fence around the array.
BY_POINTER = """inline void put(thread float* v, int k) { v[k] = 1; }
inline float get(const thread half4* v, int k) { return v[k].y; }
"""


@pytest.mark.parametrize("at", [4, 8, -1, -3])
def test_beyond_by_a_pointer(at):
    body = f"float v[4]; put(v, n); put(v, n + {at}); y[i] = v[0];"
    file, names = together(BY_POINTER, [body])
    data = [np.zeros(16, np.float32), ("output", np.zeros(32, np.float32)), np.int32(0).tobytes()]
    message = (
        rf'writes 4 bytes \(test\d+\.metal:\d+\) at byte {4 * at} of its own array "v", which has 16 bytes: out of'
    )
    with pytest.raises(Fault, match=message):
        run(file, names[body], data, private=True)


def test_within_by_a_pointer():
    body = "half4 v[3]; float w[2]; for (int k = 0; k < 3; ++k) v[k] = half4(k); put(w, n + 1); put(w, n); y[i] = get(v, n + 2) + w[n];"
    file, names = together(BY_POINTER, [body])
    y = np.zeros(32, np.float32)
    run(file, names[body], [np.zeros(16, np.float32), ("output", y), np.int32(0).tobytes()], private=True)
    assert (y == 3).all()


def test_an_index_outside_is_said_first():
    with pytest.raises(Fault, match="uses an index outside an array of its own"):
        launch_private("float v[4], w[4];\nv[0] = w[0] = 1;\ny[i] = v[n];", 4)
