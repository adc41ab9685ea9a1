# ruff: noqa: E501  (a line a kernel)
"""Vectors as Metal has them in the simulator: truths, casts, and accesses to one component."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.simulate import kernel, register
from helpers.simulate import run as launch

import mlx_mittens as mm
from mlx_mittens.frontend import CompileError
from mlx_mittens.simulator import Fault

HEAD = "uint i = thread_position_in_grid.x; device float4* p = (device float4*)y; const device float4* q = (const device float4*)x;\n"


HELPERS = "template <typename T, typename S> T made(S x) { return T(x); }\n"


def run(body, grid=8):
    kernel = mm.simulator.metal_kernel("vectors", ["x"], ["y"], HEAD + body, HELPERS)
    sizes = {"output_shapes": [(8, 4)], "output_dtypes": [mx.float32], "grid": (grid, 1, 1), "threadgroup": (8, 1, 1)}
    return np.array(kernel(inputs=[mx.arange(32.0).reshape(8, 4)], **sizes)[0])


# Results of the first row, where x has 0, 1, 2, 3.
VALUES = {
    "a comparison": ("p[i] = float4(q[i] < 2);", [1, 1, 0, 0]),
    "a comparison by casts": ("p[i] = q[i] * float4(int4(q[i] < 2)) + static_cast<float4>(q[i] > 1) + (float4)(q[i] == 0);", [1, 1, 1, 1]),
    "a comparison in a variable": ("auto m = q[i] < 2; bool4 n = !m; p[i] = float4(m) + 2 * float4(n);", [1, 1, 2, 2]),
    "components of a comparison": ("p[i] = float4((q[i] < 2).x, float((q[i] < 2).w), 1 + (q[i] < 2).y, (q[i] < 2).xy.x + 0.5f);", [1, 0, 2, 1.5]),
    "a choice by a comparison": ("p[i] = select(float4(5), q[i], q[i] > 1) + (any(q[i] > 2) ? 1 : 0);", [6, 6, 3, 4]),
    "components of truths": ("bool4 b = q[i] < 2; bool2 c = b.xz; b.w = true; b.yz = bool2(false, true); bool t = b.r; p[i] = float4(t, any(c), all(b.zw), b.y ? 5 : 6);", [1, 1, 1, 6]),
    "truths that change places": ("bool3 b(true, false, true); b.xy = b.yx; p[i] = float4(b.x, b.y, b.z, 0);", [0, 1, 1, 0]),
    "elements of truths": ("bool2 b; b[0] = q[i].x < 2; b[i & 1] = false; b[1] = true; p[i] = float4(b.x, b.y, b[0], b[1]);", [0, 1, 0, 1]),
    "a cast of integers": ("int4 n = int4(-3); uint4 u = uint4(3000000000u); p[i] = (float4)n + (vec<float, 4>)u + (float4)(1);", [2999999998] * 4),
    "a cast by an alias": ("using V = float4; int4 n = int4(-3); p[i] = V(n) + V(int4(q[i]));", [-3, -2, -1, 0]),
    "casts of unsigned integers by an alias": ("using V = float4; typedef uint4 U; uint4 n = uint4(3221225472u); p[i] = V(n) + (V)n + static_cast<V>(n) + V(U(float4(0x3p30f))) - float4(0x9p30f);", [3 * 2.0**30] * 4),
    "casts by a template parameter": ("p[i] = made<float4>(uint4(3221225472u)) + float4(made<uint4>(float4(0x3p30f))) - float4(made<int4>(float4(-0x1p30f)));", [7 * 2.0**30] * 4),
    "casts of half and bfloat": ("using H = half4; using B = bfloat4; B b = B(half4(1.5h, 2, 3, 4)); H h = H(b); p[i] = float4(b) + float4((H)B(h));", [3, 4, 6, 8]),
    "a cast to integers": ("int4 n = (int4)(q[i] + 0.7f); short4 s = (short4)(half4)q[i]; p[i] = (float4)n - float4(s);", [0, 0, 0, 0]),
    "a cast before an operator": ("p[i] = 2 * (float4)(1) - (float4)-q[i] + (float4)q[i].xxyy * sizeof(float4);", [2, 3, 20, 21]),
    "a packed vector in a struct": ("struct Row { float a; packed_float2 b; packed_half4 c; char d; packed_char4 e; }; p[i] = float4(sizeof(Row), alignof(packed_float4), alignof(packed_half2), sizeof(packed_short3));", [28, 4, 2, 6]),
    "bits": ("p[i] = as_type<float4>(int4(0x40000000)); p[i].y = as_type<float>(as_type<uint4>(q[i]).w);", [2, 3, 2, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    body, expected = VALUES[name]
    np.testing.assert_array_equal(run(body)[0], np.float32(expected))


# Heads the kernels below, which get `i` as the thread's position.
LAUNCHED = HEAD.partition(";")[2] + "\n"
ARGUMENTS = "const device float* x [[buffer(0)]], device float* y [[buffer(1)]]"


def launched(body, watch=True):
    """As `run`, of a registered source, as `mm.ops.custom.launch` takes it."""
    y = np.zeros((8, 4), np.float32)
    launch(
        register(HELPERS + kernel(LAUNCHED + body, ARGUMENTS)),
        "test",
        [np.arange(32, dtype=np.float32), y],
        1,
        8,
        watch=watch,
    )
    return y


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_values_of_a_registered_source(name, watch):
    body, expected = VALUES[name]
    np.testing.assert_array_equal(launched(body, watch)[0], np.float32(expected))


# Sound kernels that write or read a part of a vector.
PARTS = {
    "device": "p[i].x = 1; p[i].y = 2; p[i].zw = float2(3);",
    "device, three": "device float3* r = (device float3*)y; r[i].x = 1; r[i].z = 3; r[i].y = 2; y[4 * i + 3] = 1;",
    "device, by index": "for (int j = 0; j < 4; ++j) p[i][j] = j;",
    "threadgroup": "threadgroup float4 s[8]; s[i].x = 1; s[i].y = 2; p[i] = float4(s[i].x, s[i].y, s[i].yx);",
    "several threads": "threadgroup float2 s[8]; s[i / 2][i % 2] = 1; threadgroup_barrier(mem_flags::mem_threadgroup); p[i] = float4(s[i & 3].x, s[i & 3].y, 1, 1);",
    "a component by index": "threadgroup float2 s[8]; s[i / 2][i % 2] = sin(q[0].y); if (q[0].z > 1) s[i / 2][i & 1] += 1; threadgroup_barrier(mem_flags::mem_threadgroup); p[i] = float4(s[i & 3][i & 1]);",
    "components that functions compute": "for (int j = 0; j < 4; ++j) p[i][j] = fma(q[i][j], 2.0f, exp(q[i][j]));",
    "packed": "device packed_float2* r = (device packed_float2*)(y + 1); if (i == 0) { y[0] = y[31] = 0; } if (i < 7) { r[2 * i] = packed_float2(q[i].xy); r[2 * i + 1].x = 1; r[2 * i + 1].y = 2; } else { r[14] = packed_float2(1); }",
    "packed, four": "device packed_float4* r = (device packed_float4*)(y + 1); if (i == 0) { y[0] = y[29] = y[30] = y[31] = 0; } if (i < 7) { r[i] = packed_float4(q[i]); }",
    "a sum": "p[i] = 0; p[i].y += 2; p[i].zw *= q[i].xy;",
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_sound(name):
    assert np.isfinite(run(PARTS[name])).all()


BROKEN = {
    "threadgroup float4 s[8]; s[i].x = 1; p[i] = float4(s[i].y);": "reads 4 bytes .* at byte 4 of threadgroup array",
    "threadgroup float4 s[8]; s[i].x = 1; s[i].y += 2; p[i] = float4(s[i].y);": "reads 4 bytes .* at byte 4 of threadgroup array",
    "threadgroup float2 s[8]; s[i / 2].x = i; p[i] = float4(1);": "a race",
    "device float3* r = (device float3*)y; r[i + 1].x = 1;": 'writes 4 bytes .* at byte 128 of buffer "y".*out of bounds',
    "const device float3* r = (const device float3*)x; p[i] = float4(r[i + 1].y);": 'reads 4 bytes .* of buffer "x".*out of bounds',
    "device float3* r = (device float3*)(y + 1); if (i < 7) r[i] = float3(1);": "misaligned",
    "p[i].x = 1; p[i].z = 1; p[i].w = 1;": 'buffer "y" was not written at byte 4 ',
    "device float4* r = (device float4*)(y + 1); if (i < 7) r[i].x = 1;": "misaligned",
}  # fmt: skip


@pytest.mark.parametrize("body", BROKEN)
def test_parts_that_are_not(body):
    with pytest.raises(Fault, match=BROKEN[body]):
        run(body)


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_registered_source_that_are_sound(name):
    assert np.isfinite(launched(PARTS[name])).all()


@pytest.mark.parametrize("body", BROKEN)
def test_parts_of_a_registered_source_that_are_not(body):
    with pytest.raises(Fault, match=BROKEN[body]):
        launched(body)


# Vectors of bool are bits in clang's memory.
REFUSED = [
    "bool4 m = ((const device bool4*)x)[i]; p[i] = float4(m);",
    "device bool2 const* m = (device bool2 const*)y; p[i] = float4(m[i].x);",
    "using B = bool3; p[i] = float4(((const device B*)x)[i].x);",
    "p[i] = float4(((const device vec<bool, 4>*)x)[i].x);",
    "using B = const metal::bool4; p[i] = float4(((device B*)x)[i]);",
    "typedef metal::bool2 B; p[i] = float4(((const device B*)x)[i].x);",
    "struct Q { float a; }; struct P : Q { bool2 b; }; p[i] = float4(((const device P*)x)[i].a);",
    "struct Q { bool2 b; }; struct P : Q { float a; }; p[i] = float4(((const device P*)x)[i].a);",
    "struct Row { float a; bool4 m; }; p[i] = float4(((const device Row*)x)[i].a);",
    "p[i] = float4(sizeof(bool4));",
]


@pytest.mark.parametrize("body", REFUSED)
def test_truths_in_memory_are_refused(body):
    with pytest.raises(CompileError, match=r":\d+: error: a vector of bool in memory.*write uchar4"):
        run(body)


def test_truths_in_the_threads_own_memory_are_not():
    body = "struct Row { float a; bool4 m; }; Row r[2]; r[i & 1].m = q[i] < 2; bool2 b[2]; b[1] = r[i & 1].m.xy; p[i] = float4(b[1].x, b[1].y, r[i & 1].m.z, 5);"
    np.testing.assert_array_equal(run(body)[0], [1, 1, 0, 5])
