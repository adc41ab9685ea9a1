"""Tensors and cooperative tensors of Metal 4 in the simulator: kernels of our own, right and wrong, and MLX's."""

import re
import struct

import numpy as np
import pytest
from helpers.simulate import register, run
from helpers.tolerances import FLOAT16, FLOAT16_TWICE, SUM

from mlx_mittens import frontend
from mlx_mittens.cli.main import main
from mlx_mittens.simulator import Fault, enabled

ml_dtypes = pytest.importorskip("ml_dtypes")

HEADERS = """#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;
"""
TYPES = {"half": np.float16, "bfloat": ml_dtypes.bfloat16, "float": np.float32, "int8_t": np.int8, "int": np.int32}


@pytest.fixture(params=[False, True], ids=["m5", "shuffled"])
def shuffled(request):
    return request.param


def ints(*values):
    return np.array(values, np.int32).tobytes()


def longs(*values):
    return np.array(values, np.int64).tobytes()


def drawn(rng, shape, name):
    dtype = TYPES[name]
    return (
        rng.integers(-128, 128, shape).astype(dtype) if name == "int8_t" else rng.standard_normal(shape).astype(dtype)
    )


def near(found, expected, limit):
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=limit * np.abs(expected).max())


def product(left, right, transpose_left, transpose_right):
    a, b = left.astype(np.float64), right.astype(np.float64)
    return (a.T if transpose_left else a) @ (b.T if transpose_right else b)


# Of one SIMD-group, in registers: filled by index, by the places that the tensors say.
REGISTERS = """
[[kernel]] void test(device const {left}* a [[buffer(0)]], device const {right}* b [[buffer(1)]],
                     device {result}* c [[buffer(2)]]) {{
  constexpr auto desc = matmul2d_descriptor({m}, {n}, {k}, {tl}, {tr}, {relaxed}, matmul2d_descriptor::mode::{mode});
  matmul2d<desc, execution_simdgroup> op;
  auto x = op.get_left_input_cooperative_tensor<{left}, {right}, {result}>();
  auto w = op.get_right_input_cooperative_tensor<{left}, {right}, {result}>();
  auto y = op.get_destination_cooperative_tensor<decltype(x), decltype(w), {result}>();
  for (ushort i = 0; i < x.get_capacity(); ++i) {{
    const auto at = x.get_multidimensional_index(i);
    x[i] = a[at[1] * {left_columns} + at[0]];
  }}
  for (ushort i = 0; i < w.get_capacity(); ++i) {{
    const auto at = w.get_multidimensional_index(i);
    w[i] = b[at[1] * {right_columns} + at[0]];
  }}
  for (ushort i = 0; i < y.get_capacity(); ++i) {{
    y[i] = {result}(1);
  }}
  op.run(x, w, y);
  for (ushort i = 0; i < y.get_capacity(); ++i) {{
    const auto at = y.get_multidimensional_index(i);
    c[at[1] * {n} + at[0]] = y[i];
  }}
}}
"""

FORMS = [
    ("half", "half", "float", (16, 32, 16), False, False, "multiply"),
    ("half", "half", "float", (16, 16, 32), False, True, "multiply_accumulate"),
    ("bfloat", "bfloat", "float", (32, 32, 32), True, False, "multiply_accumulate"),
    ("bfloat", "float", "float", (32, 16, 16), True, True, "multiply"),
    ("half", "half", "half", (16, 32, 16), False, True, "multiply_accumulate"),
    ("int8_t", "int8_t", "int", (16, 32, 32), False, True, "multiply_accumulate"),
    ("half", "int8_t", "float", (16, 32, 16), False, False, "multiply"),
]


@pytest.mark.parametrize(("left", "right", "result", "sizes", "tl", "tr", "mode"), FORMS)
def test_a_product_in_registers(left, right, result, sizes, tl, tr, mode, shuffled, rng):
    m, n, k = sizes
    a, b = drawn(rng, (k, m) if tl else (m, k), left), drawn(rng, (n, k) if tr else (k, n), right)
    names = {"left": left, "right": right, "result": result, "m": m, "n": n, "k": k, "mode": mode, "relaxed": "false"}
    text = REGISTERS.format(
        **names, tl=str(tl).lower(), tr=str(tr).lower(), left_columns=a.shape[1], right_columns=b.shape[1]
    )
    c = np.zeros((m, n), TYPES[result])
    counts = run(register(HEADERS + text), "test", [a, b, c], shuffled_tensors=shuffled)
    expected = product(a, b, tl, tr) + (mode == "multiply_accumulate")
    near(c, expected, {"float": SUM, "half": FLOAT16, "int": 0}[result])
    assert counts["tensor_operations"] == 1 and counts["matrix_operations"] == 0


def test_relaxed_precision_rounds_floats_to_ten_bits(shuffled):
    a, b = np.zeros((16, 32), np.float32), np.zeros((16, 32), np.float32)
    a[0, 0] = a[1, 0] = b[:, 0] = 1
    a[0, 0] += 2**-12  # below half of the last bit that stays
    a[1, 0] += 2**-10
    names = {"left": "float", "right": "float", "result": "float", "m": 16, "n": 16, "k": 32, "mode": "multiply"}
    text = REGISTERS.format(**names, relaxed="true", tl="false", tr="true", left_columns=32, right_columns=32)
    c = np.zeros((16, 16), np.float32)
    run(register(HEADERS + text), "test", [a, b, c], shuffled_tensors=shuffled)
    assert (c[0] == 1).all() and (c[1] == 1 + 2**-10).all() and (c[2:] == 0).all()


# Of tensors in memory, by several SIMD-groups; sizes that tiles do not divide.
MEMORY = """
[[kernel]] void test(device half* a [[buffer(0)]], device half* b [[buffer(1)]], device float* c [[buffer(2)]],
                     constant int* sizes [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]]) {{
  tensor<device half, dextents<int, 2>, tensor_inline> A(a, dextents<int, 2>(sizes[2], sizes[0]));
  tensor<device half, dextents<int, 2>, tensor_inline> B(b, dextents<int, 2>(sizes[2], sizes[1]));
  tensor<device float, dextents<int, 2>, tensor_inline> C(c, dextents<int, 2>(sizes[1], sizes[0]));
  constexpr auto desc = matmul2d_descriptor({m}, {n}, static_cast<int>(dynamic_extent), false, true);
  matmul2d<desc, {scope}> op;
  auto x = A.slice(0, int(group.y) * {m});
  auto w = B.slice(0, int(group.x) * {n});
  auto y = C.slice(int(group.x) * {n}, int(group.y) * {m});
  {body}
}}
"""
STORED = """auto result = op.get_destination_cooperative_tensor<decltype(x), decltype(w), float>();
  op.run(x, w, result);
  result.store(y);"""
INDEXED = """auto result = op.get_destination_cooperative_tensor<decltype(x), decltype(w), float>();
  op.run(x, w, result);
  for (ushort i = 0; i < result.get_capacity(); ++i) {
    if (!result.is_valid_element(i)) continue;
    const auto at = result.get_multidimensional_index(i);
    const int row = group.y * 64 + at[1], column = group.x * 32 + at[0];
    if (row < sizes[0] && column < sizes[1]) c[row * sizes[1] + column] = result[i];
  }"""


@pytest.mark.parametrize(
    ("scope", "threads", "body"),
    [
        ("execution_simdgroups<4>", 128, STORED),
        ("execution_simdgroups<4>", 128, INDEXED),
        ("execution_simdgroup", 32, STORED),
        ("execution_simdgroup", 32, "op.run(x, w, y);"),
        ("execution_thread", 1, "op.run(x, w, y);"),
    ],
)
def test_a_product_of_tensors_in_memory(scope, threads, body, shuffled, rng):
    m, n = (8, 8) if threads == 1 else (64, 32)
    sizes = (9, 17, 35) if threads == 1 else (70, 50, 75)
    a, b = (rng.standard_normal((size, sizes[2])).astype(np.float16) for size in sizes[:2])
    c = np.zeros(sizes[:2], np.float32)
    file = register(HEADERS + MEMORY.format(m=m, n=n, scope=scope, body=body))
    data = [("input", a), ("input", b), ("output", c), ints(*sizes)]
    run(file, "test", data, (-(-sizes[1] // n), -(-sizes[0] // m), 1), threads, shuffled_tensors=shuffled)
    near(c, product(a, b, False, True), SUM)


CHAINED = """
[[kernel]] void test(device half* a [[buffer(0)]], device half* b [[buffer(1)]], device float* c [[buffer(2)]]) {
  constexpr auto desc = matmul2d_descriptor(32, 32, 32);
  matmul2d<desc, execution_simdgroup> op;
  tensor A(a, dextents<int, 2>{32, 32}, array<int, 2>{1, 32});
  tensor B(b, dextents<int, 2>{32, 32}, array<int, 2>{1, 32});
  tensor C(c, dextents<int, 2>{32, 32}, array<int, 2>{1, 32});
  auto first = op.get_destination_cooperative_tensor<decltype(A), decltype(B), half>();
  op.run(A, B, first);
  ASK
  auto x = op.get_left_input_cooperative_tensor<half, half, float>(first);
  op.run(x, B, C);
}
"""


def test_a_result_that_becomes_an_operand(rng):
    a, b = (rng.integers(-2, 3, (32, 32)).astype(np.float16) for _ in range(2))
    c = np.zeros((32, 32), np.float32)
    asks = "if (!op.is_compatible_as_left_input<half, half, float>(first)) { return; }"
    run(register(HEADERS + CHAINED.replace("ASK", "")), "test", [a, b, c])
    np.testing.assert_array_equal(c, a.astype(np.float64) @ b @ b)
    data = [("input", a), ("input", b), ("inout", c)]
    run(register(HEADERS + CHAINED.replace("ASK", asks)), "test", data, shuffled_tensors=True)
    with pytest.raises(Fault, match=r"test\d+\.metal:\d+: a cooperative tensor becomes an operand of another layout"):
        run(register(HEADERS + CHAINED.replace("ASK", "")), "test", data, shuffled_tensors=True)


SETUP = """constexpr auto desc = matmul2d_descriptor(16, 32, 16, false, false, false,
                                            matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<desc, execution_simdgroup> op;
  auto x = op.get_left_input_cooperative_tensor<half, half, float>();
  auto w = op.get_right_input_cooperative_tensor<half, half, float>();
  auto y = op.get_destination_cooperative_tensor<decltype(x), decltype(w), float>();
"""
FILL = """for (ushort i = 0; i < x.get_capacity(); ++i) x[i] = half(i + lane);
  for (ushort i = 0; i < w.get_capacity(); ++i) w[i] = half(i + lane);
  for (ushort i = 0; i < y.get_capacity(); ++i) y[i] = 0.0f;
"""
# The body of a wrong kernel, the threads of its threadgroup, whether the layout is shuffled, and the message.
WRONG = {
    "divergence": (SETUP + FILL + "if (lane < 31) op.run(x, w, y);", 32, False, "is missed by 1 of 32"),
    "left operand not filled": (
        SETUP + FILL.replace("x.get_capacity()", "7") + "op.run(x, w, y);", 32, False, "reads an operand with elements",
    ),
    "destination not filled": (
        SETUP + FILL.replace("y[i] = 0.0f", "x[0] = 1") + "op.run(x, w, y);", 32, False, "adds to a destination",
    ),
    "an element beyond the capacity": (SETUP + "x[8] = 1.0h;", 32, False, r"get_capacity\(\) says how many"),
    "a layout assumed": (SETUP + FILL + "op.run(x, w, y);", 32, True, "left operand.*differs between GPUs"),
    "a layout assumed on the right": (
        SETUP + FILL.replace("half(i + lane)", "1.0h", 1) + "op.run(x, w, y);", 32, True, "right operand.*differs",
    ),
    "another number of SIMD-groups": (
        MEMORY.partition("{{")[2].rpartition("}}")[0].format(m=64, n=32, scope="execution_simdgroups<4>", body=STORED),
        64, False, "another number of SIMD-groups",
    ),
    "a slice beyond its buffer": (
        "tensor<device half, dextents<int, 2>, tensor_inline> A(a, dextents<int, 2>(16, 16));\n"
        "  auto part = A.slice<16, 16>(0, 1);\n" + SETUP + FILL
        + "x.load(part); op.run(x, w, y); c[lane] = y[0];", 32, False, "of buffer \"a\"",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_named(name):
    body, threads, shuffled, said = WRONG[name]
    text = (
        "[[kernel]] void test(device half* a [[buffer(0)]], device half* b [[buffer(1)]],\n"
        "  device float* c [[buffer(2)]], constant int* sizes [[buffer(3)]], uint lane [[thread_index_in_simdgroup]],\n"
        f"  uint2 group [[threadgroup_position_in_grid]]) {{\n  {body}\n}}\n"
    )
    a, b, c = np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float32)
    data = [("input", a), ("input", b), ("output", c), ints(16, 16, 16)]
    file = register(HEADERS + text)
    with pytest.raises(Fault, match=rf"test\d+\.metal:\d+.*{said}|{said}.*test\d+\.metal:\d+"):
        run(file, "test", data, threads=threads, shuffled_tensors=shuffled, complete=False)


REFUSED = {
    "sizes of three sixteens": ("(16, 16, 16)", "<half, half, float>", "one of m, n and k is 32"),
    "a size that is no multiple": ("(16, 32, 8)", "<half, half, float>", "multiples of 16"),
    "a k that is not known": ("(16, 32)", "<half, half, float>", "need a k that is a constant"),
    "a result that is too narrow": ("(16, 32, 16)", "<float, half, half>", "no product of these types"),
    "bytes with a float": ("(16, 32, 16)", "<int8_t, int8_t, float>", "no product of these types"),
    "no rows": ("(0, 32, 16)", "<half, half, float>", "one row and one column"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_compiler_takes(name):
    sizes, types, said = REFUSED[name]
    text = (
        "[[kernel]] void test(device float* c [[buffer(0)]]) {\n"
        f"  constexpr auto desc = matmul2d_descriptor{sizes};\n"
        "  matmul2d<desc, execution_simdgroup> op;\n"
        f"  auto x = op.get_left_input_cooperative_tensor{types}();\n  c[0] = x.get_capacity();\n}}\n"
    )
    with pytest.raises(frontend.CompileError, match=re.escape(said)):
        run(register(HEADERS + text), "test", [np.zeros(1, np.float32)])


def test_the_check_takes_them_from_metal_4_on(tmp_path, capsys):
    file = tmp_path / "product.metal"
    text = MEMORY.format(m=64, n=32, scope="execution_simdgroups<4>", body=STORED)
    file.write_text(f"#include <metal_stdlib>\nusing namespace metal;\n{HEADERS}{text}")
    assert main(["check", str(file)]) == 1
    assert "product.metal:3:1: error: <metal_tensor> is of Metal 4" in capsys.readouterr().out
    assert main(["check", "--std", "metal4.0", str(file)]) == 0
    assert "note: products of tensors run right on an M5 with macOS 26.2" in capsys.readouterr().out
    file.write_text(file.read_text().replace("(64, 32, static_cast<int>(dynamic_extent)", "(sizes[0], 32, 16"))
    assert main(["check", "--std", "metal4.0", str(file)]) == 1
    assert "constant expression" in capsys.readouterr().out


def test_an_unknown_layout():
    with (
        pytest.raises(ValueError, match="tensor_layout is 'm4': expected 'm5' or 'shuffled'"),
        enabled(tensor_layout="m4"),
    ):
        pass


KERNELS = "mlx/backend/metal/kernels"
GEMM = ["utils.h", "steel/gemm/gemm_nax.h"]


def mlx_kernel(name, headers, instantiation):
    lines = [f'#include "{KERNELS}/{header}"' for header in headers]
    frontend.register_source(name, "\n".join([*lines, f'instantiate_kernel("test", {instantiation})']) + "\n")
    return name


def assumes_its_layout(*arguments, **options):
    """Which a shuffled one shows: MLX's kernels fill operands by the places of an M5."""
    with pytest.raises(Fault, match=r"nax\.h:\d+: the left operand .*never asked"):
        run(*arguments, **options, shuffled_tensors=True)


def gemm_params(m, n, k, tile_m, tile_n, blocks):
    tiles = -(-n // tile_n), -(-m // tile_m)
    return struct.pack("<8i3q3i4x", m, n, k, k, k, n, *tiles, 0, 0, 0, 0, blocks, 1)


def test_mlx_fused_products(rng):
    m, n, k = 70, 64, 80
    file = mlx_kernel(
        "nax_fused.metal", [*GEMM, "steel/gemm/kernels/steel_gemm_fused_nax.h"],
        "gemm, half, 64, 64, 64, 2, 2, false, true, float",
    )  # fmt: skip
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k)).astype(np.float16)
    c = np.zeros((m, n), np.float16)
    data = [("input", a), ("input", b), ints(0), ("output", c), gemm_params(m, n, k, 64, 64, k // 64)]
    constants = {10: False, 100: False, 110: False, 200: False, 201: True, 202: False}
    where = (file, "test", [*data, ints(0), ints(0), longs(0)], (1, 2, 1), (32, 2, 2))
    run(*where, constants=constants)
    near(c, product(a, b, False, True), FLOAT16)
    assumes_its_layout(*where, constants=constants)


def test_mlx_thin_products_ask_for_their_layout(shuffled, rng):
    """They load and store tensors."""
    m, n, k = 20, 70, 130
    file = mlx_kernel(
        "nax_thin.metal",
        [*GEMM, "steel/gemm/kernels/steel_gemm_thin_nax.h"],
        "gemm_thin_nax, half, 2, 2, 1, 2, 2, true",
    )
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k)).astype(np.float16)
    c = np.zeros((m, n), np.float16)
    data = [("input", a), ("input", b), ints(0), ("output", c), gemm_params(m, n, k, 32, 64, 2), ints(0)]
    constants = {100: False, 110: False, 200: False, 201: False, 202: False}
    run(file, "test", data, (2, 1, 1), 128, constants=constants, shuffled_tensors=shuffled)
    near(c, product(a, b, False, True), FLOAT16)


def test_mlx_quantized_products(rng):
    m, n, k = 64, 64, 128
    file = mlx_kernel(
        "nax_quantized.metal",
        [*GEMM, "quantized_nax.h"],
        "affine_qmm_t_nax, half, 64, 4, true, false, 64, 64, 64, 2, 2",
    )
    q = rng.integers(0, 16, (n, k)).astype(np.uint32)
    packed = np.bitwise_or.reduce([q[:, i::8] << np.uint32(4 * i) for i in range(8)])
    scales, biases = ((0.1 * rng.standard_normal((n, k // 64))).astype(np.float16) for _ in range(2))
    x, y = rng.standard_normal((m, k)).astype(np.float16), np.zeros((m, n), np.float16)
    weights = q * np.repeat(scales.astype(np.float64), 64, 1) + np.repeat(biases.astype(np.float64), 64, 1)
    data = [("input", packed), ("input", scales), ("input", biases), ("input", x), ("output", y), ints(k), ints(n)]
    data += [ints(m), ints(0), ints(0), longs(0), ints(0), ints(0), longs(0), longs(0), longs(0)]
    where = (file, "test", data, (1, 1, 1), (32, 2, 2))
    run(*where)
    near(y, x.astype(np.float64) @ weights.T, FLOAT16_TWICE)
    assumes_its_layout(*where)


def test_mlx_attention(rng):
    heads, length, size, queries, keys = 1, 70, 64, 64, 32
    file = mlx_kernel(
        "nax_attention.metal", ["utils.h", "steel/attn/kernels/steel_attention_nax.h"],
        f"attention_nax, half, {queries}, {keys}, {size}, {size}, 4, 1, half, float",
    )  # fmt: skip
    q, k, v = (rng.standard_normal((1, heads, length, size)).astype(np.float16) for _ in range(3))
    out = np.zeros_like(q)
    rest = (length % queries, length % keys)
    params = struct.pack("<6if7i", 1, heads, size, length, length, 1, size**-0.5, -(-length // queries),
                         -(-length // keys), length // queries, length // keys, *rest, 0)  # fmt: skip
    params += longs(*(heads * length * size, length * size, size) * 4)
    constants = {200: False, 201: False, 300: False, 301: True, 302: False, 303: False}
    data = [("input", q), ("input", k), ("input", v), ("output", out), params]
    where = (file, "test", data, (-(-length // queries), heads, 1), (32, 4, 1))
    run(*where, constants=constants)
    scores = np.einsum("bhqd,bhkd->bhqk", *(a.astype(np.float64) for a in (q, k))) * size**-0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    near(out, weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64), FLOAT16_TWICE)
    assumes_its_layout(*where, constants=constants)
