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
