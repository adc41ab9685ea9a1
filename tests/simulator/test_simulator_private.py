# ruff: noqa: E501  (a line a kernel)
"""Arrays of a thread's own: an index beyond one is a fault, by the array's size; what stays within is none."""

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


def launch(body, n):
    file = register(HELPER + kernel(body, ARGUMENTS))
    y = np.zeros(32, np.float32)
    run(file, "test", [np.arange(16, dtype=np.float32), ("output", y), np.int32(n).tobytes()])
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


# What of an array is read before it is written, and the same without that read.
UNINITIALISED = {
    "one element": "float v[4];\nfor (int j = 0; j < n; ++j) { v[j] = x[j]; }\ny[i] = v[0] + v[3];",
    "all but the first": "int v[4], w = 2;\nv[0] = 1;\nfor (int j = 0; j < n; ++j) { v[j] = j; }\nfor (int j = 0; j < 4; ++j) { w += v[j]; }\ny[i] = w;",
    "of a loop before": "float s = 0;\nfor (int r = 0; r < 2; ++r) {\n  half v[2];\n  if (r == 0 || n == 4) { v[0] = x[r]; }\n  s += v[0];\n}\ny[i] = s;",
    "two dimensions": "thread float v[2][2];\nfor (int j = 0; j < n; ++j) { v[j / 2][j % 2] = x[j]; }\ny[i] = v[1][1];",
    "in a function": "float v[4];\nfirst(v, x, n);\ny[i] = v[3];",
    "of a template": "y[i] = last<float, 4>(x, n);",
    "a sum": "float v[4];\nv[3] = 0;\nfor (int j = 0; j < n; ++j) { v[j] = 0; }\nfor (int j = 0; j < 4; ++j) { v[j] += x[j]; }\ny[i] = v[2];",
}  # fmt: skip
FUNCTIONS = """inline void first(thread float* v, const device float* x, int n) {
  for (int j = 0; j < n; ++j) { v[j] = x[j]; }
}
template <typename T, int size> T last(const device float* x, int n) {
  T v[size];
  for (int j = 0; j < n; ++j) { v[j] = T(x[j]); }
  return v[size - 1];
}
"""


def launch_private(body, n):
    y = np.zeros(32, np.float32)
    arguments = [np.arange(16, dtype=np.float32), ("output", y), np.int32(n).tobytes()]
    run(register(FUNCTIONS + kernel(body, ARGUMENTS)), "test", arguments, private=True)
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
    "a struct": "struct Pair { float a[2]; }; Pair p; p.a[0] = x[i % 4]; Pair q = p; y[i] = q.a[0];",
    "values": "float v[4] = {}; const int w[2] = {1, 2}; bool b[2] = {true}; y[i] = v[n - 1] + w[n % 2] + b[1];",
    "a copy": "uint v[2]; *(thread float2*)v = float2(1, 2); y[i] = as_type<float>(v[1]);",
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_arrays_that_are_sound(name):
    launch_private(SOUND[name], 4)


def test_an_index_outside_is_said_first():
    with pytest.raises(Fault, match="uses an index outside an array of its own"):
        launch_private("float v[4], w[4];\nv[0] = w[0] = 1;\ny[i] = v[n];", 4)
