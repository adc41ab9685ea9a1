"""Tensors and cooperative tensors of Metal 4 in the simulator. Wrong kernels: test_wrong_tensor_ops.py."""

import numpy as np
import pytest
from helpers.simulate import register, run
from helpers.tensor_ops import CHAINED, HEADERS, INDEXED, MEMORY, STORED, TYPES, drawn, ints, near, product
from helpers.tolerances import BFLOAT16, FLOAT16, SUM

from mlx_mittens import frontend
from mlx_mittens.cli.main import main
from mlx_mittens.simulator import enabled


@pytest.fixture(params=[False, True], ids=["m5", "shuffled"])
def shuffled(request):
    return request.param


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
    assert counts["tensor_multiplies"] == m * n * k
    assert counts["byte_tensor_multiplies"] == (m * n * k if left == right == "int8_t" else 0)


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


# 4 bits on the right of a product, two of them in a byte of memory; sizes that tiles do not divide.
PACKED = """
[[kernel]] void test(device {left}* a [[buffer(0)]], device uint* b [[buffer(1)]], device {result}* c [[buffer(2)]],
                     constant int* sizes [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]]) {{
  const int M = sizes[0], N = sizes[1], K = sizes[2];
  tensor A(a, dextents<int, 2>(K, M));
  tensor<device {right}, dextents<int, 2>, tensor_inline> B((device uchar*)b, dextents<int, 2>(K, N), {{1, K}});
  tensor C(c, dextents<int, 2>(N, M));
  constexpr auto desc = matmul2d_descriptor(16, 32, 32, false, true, false,
                                            matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<desc, {scope}> op;
  const int row = group.y * 16, column = group.x * 32;
  auto first = A.slice(0, row);
  auto second = B.slice(0, column);
  auto sums = op.get_destination_cooperative_tensor<decltype(first), decltype(second), {result}>();
  for (auto it = sums.begin(); it != sums.end(); ++it) {{
    *it = 0;
  }}
  for (int k = 0; k < K; k += 32) {{
    auto x = A.slice(k, row);
    auto w = B.slice(k, column);
    op.run(x, w, sums);
  }}
  auto y = C.slice(column, row);
  sums.store(y);
}}
"""


@pytest.mark.parametrize("scope", ["execution_simdgroup", "execution_simdgroups<2>"])
@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ("half", "int4b_format", "float"),
        ("half", "uint4b_format", "half"),
        ("bfloat", "uint4b_format", "float"),
        ("bfloat", "int4b_format", "bfloat"),
        ("int8_t", "int4b_format", "int"),
        ("uint8_t", "uint4b_format", "int"),
    ],
)
def test_four_bits_on_the_right(left, right, result, scope, shuffled, rng):
    m, n, k = 19, 45, 96
    codes = rng.integers(0, 16, (n, k))
    values = np.where(codes > 7, codes - 16, codes) if right == "int4b_format" else codes
    b = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    a = drawn(rng, (m, k), left)
    c = np.zeros((m, n), TYPES[result])
    file = register(HEADERS + PACKED.format(left=left, right=right, result=result, scope=scope))
    threads = 64 if "2" in scope else 32
    data = [("input", a), ("input", b), ("output", c), ints(m, n, k)]
    counts = run(file, "test", data, (2, 2, 1), threads, shuffled_tensors=shuffled)
    near(c, product(a, values, False, True), {"float": SUM, "half": FLOAT16, "bfloat": BFLOAT16, "int": 0}[result])
    if not shuffled and threads == 32:  # a byte is loaded once for two elements
        loaded = counts["device_bytes_loaded"] - counts["params_bytes_loaded"]
        assert loaded == 2 * m * k * a.itemsize + 2 * n * k // 2


# The right operand lies by rows of 46 columns, in threadgroup memory; k is what the tensors say.
PACKED_ROWS = """
[[kernel]] void test(device half* a [[buffer(0)]], device uchar* b [[buffer(1)]], device float* c [[buffer(2)]],
                     uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uchar tile[75 * 23];
  for (uint i = thread_index; i < 75 * 23; i += 64) tile[i] = b[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  tensor A(a, dextents<int, 2>(75, 16));
  tensor<threadgroup int4b_format, dextents<int, 2>, tensor_inline> B(tile, dextents<int, 2>(46, 75));
  tensor C(c, dextents<int, 2>(46, 16));
  matmul2d<matmul2d_descriptor(16, 64), execution_simdgroups<2>> op;
  op.run(A, B, C);
}
"""


def test_four_bits_by_rows(shuffled, rng):
    codes = rng.integers(0, 16, (75, 46))
    b = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    a, c = drawn(rng, (16, 75), "half"), np.zeros((16, 46), np.float32)
    run(register(HEADERS + PACKED_ROWS), "test", [a, b, c], threads=64, shuffled_tensors=shuffled)
    near(c, product(a, np.where(codes > 7, codes - 16, codes), False, False), SUM)


def test_a_result_that_becomes_an_operand(rng):
    a, b = (rng.integers(-2, 3, (32, 32)).astype(np.float16) for _ in range(2))
    c = np.zeros((32, 32), np.float32)
    asks = "if (!op.is_compatible_as_left_input<half, half, float>(first)) { return; }"
    run(register(HEADERS + CHAINED.replace("ASK", "")), "test", [a, b, c])
    np.testing.assert_array_equal(c, a.astype(np.float64) @ b @ b)
    data = [("input", a), ("input", b), ("inout", c)]
    run(register(HEADERS + CHAINED.replace("ASK", asks)), "test", data, shuffled_tensors=True)


KNOWN = (
    "#if !defined(__HAVE_TENSOR__) || !defined(__HAVE_INT4B_FORMAT_TYPE__) || __METAL_VERSION__ < 400\n#error\n#endif\n"
)


def test_the_macros_of_metal_4():
    text = "[[kernel]] void test(device float* c [[buffer(0)]]) { c[0] = 1; }\n"
    c = np.zeros(1, np.float32)
    run(register(HEADERS + KNOWN + text), "test", [c], threads=1)
    assert c[0] == 1
    plain = "#if defined(__HAVE_TENSOR__) || __METAL_VERSION__ >= 400\n#error\n#endif\n"
    run(register(plain + text), "test", [c], threads=1)
    run(register(f"#ifdef NEVER\n{HEADERS}\n#endif\n{plain}{text}"), "test", [c], threads=1)


def test_a_text_without_tensors_before_metal_4_is_compiled_for_gpus():
    file = register(
        "#if __METAL_VERSION__ >= 400\n#include <metal_tensor>\n"
        "constant constexpr bool has = sizeof(tensor_inline) > 0;\n"
        "#else\nconstant constexpr bool has = false;\n#endif\n"
        "[[kernel]] void test(device int* c [[buffer(0)]]) { c[0] = has ? 2 : 1; }\n"
    )
    assert "st.global" in frontend.ptx(file, "test")
    c = np.zeros(1, np.int32)
    run(file, "test", [c], threads=1)
    assert c[0] == 2


def test_the_check_takes_them_from_metal_4_on(tmp_path, capsys):
    file = tmp_path / "product.metal"
    text = MEMORY.format(m=64, n=32, scope="execution_simdgroups<4>", body=STORED)
    file.write_text(f"#include <metal_stdlib>\nusing namespace metal;\n{HEADERS}{text}")
    assert main(["check", str(file)]) == 1
    assert "product.metal:3:1: error: <metal_tensor> is of Metal 4" in capsys.readouterr().out
    file.write_text(file.read_text() + KNOWN)
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
