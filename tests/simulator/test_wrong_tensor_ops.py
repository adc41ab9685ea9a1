"""Wrong kernels with Metal 4's tensor operations: each is named for what it is."""

import re

import numpy as np
import pytest
from helpers.simulate import register, run
from helpers.tensor_ops import CHAINED, HEADERS, MEMORY, STORED, ints

from mlx_mittens import frontend
from mlx_mittens.cli.main import main
from mlx_mittens.simulator import Fault

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
RUN = "op.run(x, w, y);\n"
LOAD = """tensor A(a, dextents<int, 2>(16, 16));
  tensor B(b, dextents<int, 2>(32, 16));
  x.load(A);
  w.load(B);
  for (ushort i = 0; i < y.get_capacity(); ++i) y[i] = 0.0f;
"""
RESULT = "tensor C(c, dextents<int, 2>(32, 16));\n"
TILE = "threadgroup float tile[512];\n  tensor T(tile, dextents<int, 2>(32, 16));\n"
REDUCED = "auto rows = op.get_row_reduction_destination_cooperative_tensor<decltype(x), decltype(w), float>();\n"
REDUCE = "reduce_rows(y, rows, reduction_operation::max, -INFINITY);\n"
PACKED = """tensor A(a, dextents<int, 2>(16, 16));
  tensor<device uint4b_format, dextents<int, 2>, tensor_inline> B((device uchar*)b, dextents<int, 2>(16, 32));
  tensor C(c, dextents<int, 2>(32, 16));
  matmul2d<matmul2d_descriptor(16, 32, 8, false, true), execution_simdgroup> op;
  auto x = A.slice(BEGIN, 0);
  auto w = B.slice(BEGIN, 0);
  op.run(x, w, C);
"""
BY_SIMDGROUP = FILL.replace("0.0f", "float(simdgroup)")


def in_memory(scope, body):
    return MEMORY.partition("{{")[2].rpartition("}}")[0].format(m=64, n=32, scope=scope, body=body)


# The body of a wrong kernel, the threads of its threadgroup, whether the layout is shuffled, and the message.
WRONG = {
    "a run that one lane misses": (SETUP + FILL + "if (lane < 31) " + RUN, 32, False, "is missed by 1 of 32"),
    "a run that one lane repeats": (
        SETUP + FILL + "for (uint i = 0; i <= lane / 31; ++i) " + RUN, 32, False, "is missed by 31 of 32",
    ),
    "a run that one SIMD-group misses": (
        in_memory("execution_simdgroups<2>", "if (simdgroup == 0) { op.run(x, w, y); }"), 64, False,
        "is missed by 32 of 64",
    ),
    "another number of SIMD-groups": (
        in_memory("execution_simdgroups<4>", STORED), 64, False, "another number of SIMD-groups",
    ),
    "left operand not filled": (
        SETUP + FILL.replace("x.get_capacity()", "7") + RUN, 32, False, "reads an operand with elements",
    ),
    "right operand not filled": (
        SETUP + FILL.replace("w.get_capacity()", "lane") + RUN, 32, False, "reads an operand with elements",
    ),
    "destination not filled": (
        SETUP + FILL.replace("y[i] = 0.0f", "x[0] = 1") + RUN, 32, False, "adds to a destination",
    ),
    "an element beyond the capacity": (SETUP + "x[8] = 1.0h;", 32, False, r"get_capacity\(\) says how many"),
    "the place of an element beyond the capacity": (
        SETUP + "c[y.get_multidimensional_index(16)[0]] = 1;", 32, False, r"get_capacity\(\) says how many",
    ),
    "a layout assumed on the left": (SETUP + FILL + RUN, 32, True, "left operand.*differs between GPUs"),
    "a layout assumed on the right": (
        SETUP + FILL.replace("half(i + lane)", "1.0h", 1) + RUN, 32, True, "right operand.*differs",
    ),
    "a layout assumed of the result": (
        SETUP + LOAD + RUN + "for (ushort i = 0; i < y.get_capacity(); ++i) c[16 * lane + i] = y[i];", 32, True,
        "result of matmul2d::run was read by index.*differs between GPUs",
    ),
    "a reduction that one lane misses": (
        SETUP + REDUCED + LOAD + RUN + "if (lane < 31) " + REDUCE, 32, False, "divergence: reduce_rows",
    ),
    "a reduction of what nothing filled": (
        SETUP + REDUCED + REDUCE, 32, False, "a reduction reads a cooperative tensor with elements that nothing filled",
    ),
    "a layout assumed of a reduction": (
        SETUP + REDUCED + LOAD + RUN + REDUCE + "c[lane] = rows[0];", 32, True,
        "result of a reduction was read by index.*differs between GPUs",
    ),
    "rows mapped where lanes hold others": (
        SETUP + REDUCED + LOAD + RUN + REDUCE + "c[lane] = *rows.map_iterator(y.begin());", 32, True,
        "map_iterator finds no element in this lane: ask is_iterator_compatible",
    ),
    "a store of what nothing filled": (
        SETUP + REDUCED + "rows.store(tensor(c, extents<int, 16>()));", 32, False, "is stored with elements",
    ),
    "a map of the end": (
        SETUP + REDUCED + LOAD + RUN + REDUCE + "c[lane] = *rows.map_iterator(y.end());", 32, False,
        r"get_capacity\(\) says how many",
    ),
    "rows of 4 bits that begin in the middle of a byte": (
        PACKED.replace("BEGIN", "0").replace("dextents<int, 2>(16, 32)", "dextents<int, 2>(15, 32)"), 32, False,
        "rows of a tensor of 4 bits begin in the middle of a byte",
    ),
    "a row beyond the capacity": (SETUP + REDUCED + "rows[2] = 1;", 32, False, r"get_capacity\(\) says how many"),
    "4 bits from the middle of a byte": (
        PACKED.replace("BEGIN", "3"), 32, False, "a part of a tensor of 4 bits begins in the middle of a byte",
    ),
    "operands that differ in k": (
        in_memory("execution_simdgroups<4>", STORED).replace("B(b, dextents<int, 2>(sizes[2]",
                                                             "B(b, dextents<int, 2>(sizes[2] / 2"), 128, False,
        "the operands of matmul2d::run differ in k",
    ),
    "a load beyond its buffer": (
        SETUP + FILL + "tensor A(a, dextents<int, 2>(16, 16));\n  auto part = A.slice<16, 16>(0, 1);\n"
        "  x.load(part);\n  " + RUN + "c[lane] = y[0];", 32, False, 'of buffer "a"',
    ),
    "a store beyond its buffer": (
        SETUP + FILL + RESULT + RUN + "auto part = C.slice<32, 16>(0, 1);\n  y.store(part);", 32, False,
        'of buffer "c"',
    ),
    "sizes that are the rows' first": (
        SETUP + FILL + "tensor C(c, dextents<int, 2>(16, 33));\n  " + RUN + "auto part = C.slice(0, 17);\n"
        "  y.store(part);", 32, False, 'of buffer "c"',
    ),
    "a load of threadgroup memory that nothing wrote": (
        TILE + SETUP + FILL + "y.load(T);\n  " + RUN, 32, False, '"tile", which nothing has written: uninitialised',
    ),
    "no barrier before another SIMD-group reads": (
        TILE + SETUP + FILL + RUN + "for (uint i = lane + 32 * simdgroup; i < 512; i += 64) { tile[i] = 0; }\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  if (simdgroup == 0) { y.store(T); }\n"
        "  if (simdgroup == 1) { c[lane] = tile[lane]; }", 64, False, '"tile".* with no barrier between: a race',
    ),
    "no barrier between two products in one tile": (
        TILE + SETUP + BY_SIMDGROUP + RUN + "y.store(T);", 64, False,
        '"tile", written by .* with no barrier between: a race',
    ),
    "two SIMD-groups that store one tile": (
        SETUP + BY_SIMDGROUP + RESULT + RUN + "y.store(C);", 64, False,
        'buffer "c", written by .* with no barrier between: a race',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_faults(name):
    body, threads, shuffled, said = WRONG[name]
    text = (
        "[[kernel]] void test(device half* a [[buffer(0)]], device half* b [[buffer(1)]],\n"
        "  device float* c [[buffer(2)]], constant int* sizes [[buffer(3)]], uint lane [[thread_index_in_simdgroup]],\n"
        "  uint2 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {\n"
        f"  {body}\n}}\n"
    )
    a, b, c = np.zeros((16, 16), np.float16), np.zeros((16, 32), np.float16), np.zeros((16, 32), np.float32)
    data = [("input", a), ("input", b), ("output", c), ints(16, 16, 16)]
    file = register(HEADERS + text)
    with pytest.raises(Fault, match=rf"test\d+\.metal:\d+.*{said}|{said}.*test\d+\.metal:\d+"):
        run(file, "test", data, threads=threads, shuffled_tensors=shuffled, complete=False)


def test_an_operand_from_a_result_of_another_layout():
    data = [("input", np.zeros((32, 32), np.float16)) for _ in range(2)] + [("inout", np.zeros((32, 32), np.float32))]
    with pytest.raises(Fault, match=r"test\d+\.metal:\d+: a cooperative tensor becomes an operand of another layout"):
        run(register(HEADERS + CHAINED.replace("ASK", "")), "test", data, shuffled_tensors=True)


ASKS = """constexpr auto desc = matmul2d_descriptor({sizes});
  matmul2d<desc, {scope}> op;
  auto x = op.get_left_input_cooperative_tensor<{types}>();
  c[0] = x.get_capacity();
"""


def asks(sizes="16, 32, 16", types="half, half, float", scope="execution_simdgroup"):
    return ASKS.format(sizes=sizes, types=types, scope=scope)


OTHER = "constexpr auto other = matmul2d_descriptor({sizes});\n  matmul2d<other, execution_simdgroup> second;\n"
# The body of a kernel that no compiler takes, and the message.
REFUSED = {
    "sizes of three sixteens": (asks("16, 16, 16"), "one of m, n and k is 32"),
    "a size that is no multiple": (asks("16, 32, 8"), "multiples of 16"),
    "a k that is not known": (asks("16, 32"), "need a k that is a constant"),
    "a k below zero": (asks("16, 32, -16"), "k of matmul2d is positive, or dynamic_extent"),
    "no rows": (asks("0, 32, 16"), "one row and one column"),
    "a result that is too narrow": (asks(types="float, half, half"), "no product of these types"),
    "bytes with a float": (asks(types="int8_t, int8_t, float"), "no product of these types"),
    "integers of 32 bits": (asks(types="int, int, int"), "no product of these types"),
    "operands of several SIMD-groups": (
        asks(scope="execution_simdgroups<4>"), "operands of one SIMD-group or thread, not of several",
    ),
    "bytes of two signs": (asks(types="int8_t, uint8_t, int"), "bytes of one sign"),
    "4 bits on the left": (asks(types="int4b_format, half, float"), "4 bits on the right of half"),
    "4 bits with a float": (asks(types="float, int4b_format, float"), "4 bits on the right of half"),
    "4 bits of another sign": (asks(types="uint8_t, int4b_format, int"), "bytes of their sign"),
    "const elements": (
        "matmul2d<matmul2d_descriptor(16, 32, 16), execution_simdgroup> op;\n  const device float* p = c;\n"
        "  tensor A(p, dextents<int, 2>(16, 16));\n  tensor B(c, dextents<int, 2>(32, 16));\n"
        "  tensor C(c, dextents<int, 2>(32, 16));\n  op.run(A, B, C);",
        "matmul2d::run takes no tensors of const elements: cast the pointer",
    ),
    "an element of 4 bits by itself": (
        "tensor<device int4b_format, dextents<int, 1>, tensor_inline> A((device uchar*)c, dextents<int, 1>(8));\n"
        "  auto& at = A[{1}];",
        "an element of 4 bits is not in memory by itself",
    ),
    "a mask": (SETUP + "c[0] = y.get_mask(0);", "Metal's headers have no get_mask"),
    "a static slice": (
        "tensor C(c, dextents<int, 2>(32, 16));\n  c[0] = C.static_slice<16, 16>(0, 0).get_extent(0);",
        "Metal's headers have no static_slice",
    ),
    "a load of another rank": (
        SETUP + "tensor C(c, dextents<int, 1>(16));\n  y.load(C);", "is loaded from a tensor of its own rank",
    ),
    "rows of several SIMD-groups": (
        "tensor C(c, dextents<int, 2>(32, 32));\n"
        "  matmul2d<matmul2d_descriptor(32, 32, 32), execution_simdgroups<4>> op;\n"
        "  auto r = op.get_row_reduction_destination_cooperative_tensor<decltype(C), decltype(C), float>();",
        "reductions are of one SIMD-group",
    ),
    "columns for rows": (
        SETUP + REDUCED.replace("row_", "column_") + REDUCE, "the destination of a reduction is of another operation",
    ),
    "a reduction of an operand": (
        SETUP.replace("half, half", "float, half") + REDUCED + REDUCE.replace("y,", "x,"),
        "a reduction is of the destination of a matmul2d",
    ),
    "a reduction of types that no product has": (
        SETUP + REDUCED.replace("float>", "int>"), "matmul2d has no product of these types",
    ),
    "a map to rows of another size": (
        SETUP + "matmul2d<matmul2d_descriptor(32, 32, 16), execution_simdgroup> other;\n"
        "  auto rows = other.get_row_reduction_destination_cooperative_tensor<decltype(x), decltype(w), float>();\n"
        "  c[0] = *rows.map_iterator(y.begin());",
        "map_iterator maps elements to those of a result of the same sizes",
    ),
    "an operand from a result of another type": (
        SETUP + "matmul2d<matmul2d_descriptor(16, 32, 32), execution_simdgroup> second;\n"
        "  auto z = second.get_left_input_cooperative_tensor<half, half, float>(y);",
        "a result becomes an operand of its own element type",
    ),
    "an operand from a result of other sizes": (
        SETUP + "matmul2d<matmul2d_descriptor(16, 32, 16), execution_simdgroup> second;\n"
        "  auto z = second.get_left_input_cooperative_tensor<float, half, float>(y);",
        "a result that becomes a left operand has m rows and k columns",
    ),
    "an operand from a result in a product that transposes": (
        SETUP + "matmul2d<matmul2d_descriptor(16, 16, 32, false, true), execution_simdgroup> second;\n"
        "  auto z = second.get_left_input_cooperative_tensor<float, half, float>(y);",
        "a product that transposes nothing",
    ),
    "a scope of several threads": (asks(scope="execution_threads<2>"), "the scope of matmul2d is execution_thread or"),
    "no scope": (asks(scope="half"), "the scope of matmul2d is execution_thread or"),
    "a left operand of another operation": (
        SETUP + OTHER.format(sizes="32, 32, 16")
        + "auto z = second.get_destination_cooperative_tensor<decltype(x), decltype(w), float>();\n"
        "  second.run(x, w, z);",
        "the left operand of matmul2d::run is of another operation",
    ),
    "a right operand of another operation": (
        SETUP + OTHER.format(sizes="16, 32, 16, false, true") + "second.run(x, w, y);",
        "the right operand of matmul2d::run is of another operation",
    ),
    "a destination of another operation": (
        SETUP + OTHER.format(sizes="16, 32, 32")
        + "auto z = second.get_destination_cooperative_tensor<decltype(x), decltype(w), half>();\n"
        "  matmul2d<matmul2d_descriptor(32, 32, 16), execution_simdgroup> third;\n"
        "  auto v = third.get_left_input_cooperative_tensor<half, half, half>();\n  third.run(v, w, z);",
        "the destination of matmul2d::run is of another operation",
    ),
    "operands exchanged": (SETUP + "op.run(w, x, y);", "the left operand of matmul2d::run is of another operation"),
    "a pointer as an operand": (SETUP + "op.run(c, w, y);", "matmul2d::run takes"),
    "a load of another type": (
        SETUP + "tensor C(c, dextents<int, 2>(16, 16));\n  x.load(C);", "is loaded from a tensor of its own type",
    ),
    "a store to another type": (
        SETUP + "device half* a = nullptr;\n  tensor A(a, dextents<int, 2>(32, 16));\n  y.store(A);",
        "is stored to a tensor of its own type",
    ),
    "elements of 64 bits": (
        "device long* a = nullptr;\n  tensor A(a, dextents<int, 2>(16, 16));\n  c[0] = A.get_extent(0);",
        "a tensor is of half, bfloat, float, integers of 8 or 32 bits, int4b_format or uint4b_format",
    ),
    "a descriptor that is no constant": (
        "const auto desc = matmul2d_descriptor(int(c[0]), 32, 16);\n  matmul2d<desc, execution_simdgroup> op;",
        "constant expression",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    body, said = REFUSED[name]
    text = f"[[kernel]] void test(device float* c [[buffer(0)]]) {{\n  {body}\n}}\n"
    with pytest.raises(frontend.CompileError, match=re.escape(said)):
        run(register(HEADERS + text), "test", [np.zeros(1, np.float32)])


@pytest.mark.parametrize("name", REFUSED)
def test_the_check_refuses_them_too(name, tmp_path, capsys):
    body, said = REFUSED[name]
    file = tmp_path / "wrong.metal"
    file.write_text(
        f"#include <metal_stdlib>\nusing namespace metal;\n{HEADERS}"
        f"[[kernel]] void test(device float* c [[buffer(0)]]) {{\n  {body}\n}}\n"
    )
    assert main(["check", "--std", "metal4.0", str(file)]) == 1
    assert said in capsys.readouterr().out


def test_what_is_not_covered_is_said(tmp_path, capsys):
    file = tmp_path / "uncovered.metal"
    body = asks(types="half, uint4b_format, float").replace("left", "right")
    file.write_text(
        f"#include <metal_stdlib>\nusing namespace metal;\n{HEADERS}"
        f"[[kernel]] void test(device float* c [[buffer(0)]]) {{\n  {body}\n}}\n"
    )
    assert main(["check", "--std", "metal4.0", str(file)]) == 2
    assert "not covered: cooperative tensors of 4 bits" in capsys.readouterr().out
