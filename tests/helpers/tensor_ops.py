"""Kernels of Metal 4's tensor operations, and their operands, for the tests of the simulator."""

import ml_dtypes
import numpy as np

from mlx_mittens import frontend

HEADERS = """#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;
"""
TYPES = {
    "half": np.float16,
    "bfloat": ml_dtypes.bfloat16,
    "float": np.float32,
    "int8_t": np.int8,
    "uint8_t": np.uint8,
    "int": np.int32,
}


_KERNELS = "mlx/backend/metal/kernels"


def mlx_kernel(name, headers, instantiation):
    """Registers an instantiation of a kernel of MLX's, which is called test, under a file's name."""
    lines = [f'#include "{_KERNELS}/{header}"' for header in headers]
    frontend.register_source(name, "\n".join([*lines, f'instantiate_kernel("test", {instantiation})']) + "\n")
    return name


def ints(*values):
    return np.array(values, np.int32).tobytes()


def longs(*values):
    return np.array(values, np.int64).tobytes()


def drawn(rng, shape, name):
    if name in ("int8_t", "uint8_t"):
        return rng.integers(-128, 128, shape).astype(TYPES[name])
    return rng.standard_normal(shape).astype(TYPES[name])


def near(found, expected, limit):
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=limit * np.abs(expected).max())


def product(left, right, transpose_left, transpose_right):
    a, b = left.astype(np.float64), right.astype(np.float64)
    return (a.T if transpose_left else a) @ (b.T if transpose_right else b)


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
