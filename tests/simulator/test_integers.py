# ruff: noqa: E501  (a line a kernel)
"""Integers as Metal has them in the simulator, where C++ leaves them undefined."""

import numpy as np
import pytest
from helpers.simulate import kernel, register, run

ARGUMENTS = "const device int* x [[buffer(0)]], device int* y [[buffer(1)]]"
LEAST = -(2**31)

# The result y[0]; x is 0, 1, -1, the least integer, 32, 7, 0, 0, ... None: some value, of no certain kind.
DIVISIONS = {
    "scalars by zero": ("y[i] = x[5] / x[0] + x[5] % x[0];", None),
    "unsigned scalars by zero": ("y[i] = uint(x[5]) / uint(x[0]) + uint(x[5]) % uint(x[0]);", None),
    "the least integer": ("y[i] = x[3] / x[2] + x[3] % x[2];", None),
    "long": ("long a = long(x[3]) << 32; y[i] = int(a / x[2]) + int(a % x[2]) + int(a / x[0]) + int(ulong(a) % ulong(x[0]));", None),
    "narrow": ("char a = x[5], b = x[0]; ushort c = x[5], d = x[0]; y[i] = a / b + c % d;", None),
    "a constant": ("const int zero = 0; y[i] = x[5] / zero + x[5] % zero;", None),
    "vectors": ("int4 a = int4(7), b = int4(x[0], 1, 2, -1); y[i] = (a / b).y + (a % b).z + (a / b).w;", 7 + 1 - 7),
    "vectors of the least integer": ("int2 a = int2(x[3], 9), b = int2(x[2], 2); y[i] = (a / b).y + (a % b).y;", 5),
    "unsigned vectors": ("uint3 a = uint3(7), b = uint3(x[0], 1, 2); y[i] = int((a / b).y + (a % b).z);", 8),
    "narrow vectors": ("short2 a = short2(7), b = short2(x[0], 2); char4 c = char4(x[5]), d = char4(x[0], 1, 2, 3); y[i] = (a / b).y + (c % d).w;", 3 + 1),
    "a choice": ("int4 a = int4(7), b = int4(x[0], 2, x[0], 7); int4 q = select(a / b, int4(-5), b == 0); y[i] = q.x * 100 + q.y * 10 + q.w;", -500 + 30 + 1),
    "a scalar's choice": ("y[i] = select(x[5] / x[0], -5, x[0] == 0);", -5),
    "by what is not zero": ("y[i] = x[5] / -x[1] * 1000 + -x[5] % 4 * 100 + x[4] / 7 * 10 + x[5] % 3;", -7000 - 300 + 40 + 1),
    "in place": ("int a = 7; a /= x[0]; a %= x[0]; uint2 b(7); b /= uint2(x[0], 2); y[i] = int(b.y);", 3),
    "into an array": ("threadgroup int s[8]; s[i % 8] = x[5] / x[0]; y[i] = 3;", 3),
}  # fmt: skip

SHIFTS = {
    "by the width": ("y[i] = (7 << x[4]) + (-7 >> x[4]) + int(7u >> uint(x[4]));", 7 - 7 + 7),
    "by more": ("y[i] = 1 << (x[4] + 3);", 8),
    "by less than nothing": ("y[i] = int(1u << x[2] >> x[2]);", 1),
    "by a constant": ("int a = x[5]; y[i] = (a << 33) + (uint(a) >> 32);", 14 + 7),
    "vectors": ("uint4 a = uint4(1) << uint4(32, 33, x[4] + 2, 3); y[i] = int(a.x + 10 * a.y + 100 * a.z + 1000 * a.w);", 1 + 20 + 400 + 8000),
    "vectors by a scalar": ("int2 a = int2(-64) >> (x[4] + 3); y[i] = a.y;", -8),
    "vectors of other widths": ("ushort2 a = ushort2(3) << ushort2(16, 17); char2 b = char2(-64) >> char2(8, 9); long2 c = long2(1) << long2(64, 66); y[i] = a.x + a.y + b.x + b.y + int(c.x + c.y);", 3 + 6 - 64 - 32 + 1 + 4),
    "narrow scalars": ("uchar a = uchar(x[5]); y[i] = a << 8;", 7 << 8),
    "long": ("y[i] = int(long(7) << (2 * x[4])) + int((1l << 34) >> (x[4] + 2));", 7 + 1),
    "in place": ("int a = 7; a <<= x[4]; a <<= 1; uint3 b(8); b >>= 35; y[i] = a + int(b.z);", 15),
}  # fmt: skip


def value(body, **options):
    x = np.array([0, 1, -1, LEAST, 32, 7, *[0] * 26], np.int32)
    y = np.zeros(32, np.int32)
    run(register(kernel(body, ARGUMENTS)), "test", [x, y], **options)
    return y[0]


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions(name, watch):
    body, expected = DIVISIONS[name]
    found = value(body, watch=watch)
    assert expected is None or found == expected


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts(name, watch):
    body, expected = SHIFTS[name]
    assert value(body, watch=watch) == expected
