"""Which lane of an M5's SIMD-group holds which elements of a product's operands, asked of the GPU.

Apple documents it by `get_multidimensional_index` alone. MLX's kernels, and the simulator, assume one layout; of
reductions the simulator alone does.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_LANES, _MOST = 32, 16
_OPERANDS = ("left operand", "right operand", "destination")  # that MLX's kernels use by index
_REDUCTIONS = ("reduction of rows", "reduction of columns")
_HEADER = """
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;

template <typename Tensor>
void mittens_values(const thread Tensor& tensor, device int* places, uint lane) {
  for (ushort i = 0; i < 16; ++i) {
    const bool is_there = i < tensor.get_capacity() && tensor.is_valid_element(i);
    places[(lane * 16 + i) * 2] = is_there ? tensor.get_multidimensional_index(i)[0] : -1;
    places[(lane * 16 + i) * 2 + 1] = is_there ? 0 : -1;
  }
}

template <typename Tensor>
void mittens_places(const thread Tensor& tensor, device int* places, uint lane) {
  for (ushort i = 0; i < 16; ++i) {
    const bool is_there = i < tensor.get_capacity() && tensor.is_valid_element(i);
    int row = -1, column = -1;
    if (is_there) {
      const auto at = tensor.get_multidimensional_index(i);
      column = at[0];
      row = at[1];
    }
    places[(lane * 16 + i) * 2] = row;
    places[(lane * 16 + i) * 2 + 1] = column;
  }
}
"""
# The descriptor of MLX's products: 16 rows, 32 columns, 16 terms, and the right operand lies by columns.
_SOURCE = """
constexpr auto mode = matmul2d_descriptor::mode::multiply_accumulate;
constexpr auto desc = matmul2d_descriptor(16, 32, 16, false, true, true, mode);
matmul2d<desc, execution_simdgroup> op;
auto left = op.get_left_input_cooperative_tensor<half, half, float>();
auto right = op.get_right_input_cooperative_tensor<half, half, float>();
auto sums = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
using Left = decltype(left);
using Right = decltype(right);
auto rows = op.get_row_reduction_destination_cooperative_tensor<Left, Right, float>();
auto columns = op.get_column_reduction_destination_cooperative_tensor<Left, Right, float>();
const uint lane = thread_index_in_simdgroup;
mittens_places(left, places, lane);
mittens_places(right, places + 1024, lane);
mittens_places(sums, places + 2048, lane);
mittens_values(rows, places + 3072, lane);
mittens_values(columns, places + 4096, lane);
"""
# Row and column of each lane's elements, -1 for missing ones; of a value of a reduction its row or column, and 0.
Places = list[list[tuple[int, int]]]


def assumed() -> dict[str, Places]:
    """The layout that MLX's kernels assume: fragments of 16x16, eight elements a lane, and wide operands are two.

    A lane has the values of the rows and columns of its elements.
    """

    def place(lane: int, i: int, of: str) -> tuple[int, int]:
        first_row, first_column = lane >> 2 & 4 | lane >> 1 & 3, (lane >> 2 & 2 | lane & 1) * 4
        if of == "reduction of rows":
            return first_row + 8 * i, 0
        if of == "reduction of columns":
            return first_column + 16 * (i // 4) + i % 4, 0
        row, column, second = first_row + 8 * (i % 8 // 4), first_column + i % 4, 16 * (i // 8)
        return (row + second, column) if of == "right operand" else (row, column + second)

    counts = dict(zip((*_OPERANDS, *_REDUCTIONS), (8, 16, 16, 2, 8)))
    return {
        of: [[place(lane, i, of) if i < count else (-1, -1) for i in range(_MOST)] for lane in range(_LANES)]
        for of, count in counts.items()
    }


def asked() -> dict[str, Places]:
    """The layout of the default device, by a kernel that asks for it.

    Raises:
        RuntimeError: It does not compile, as before macOS 26.2, or there is no Metal.
    """
    kernel: Any = mx.fast.metal_kernel(
        name="mittens_matrix_layout", input_names=["x"], output_names=["places"], header=_HEADER, source=_SOURCE
    )
    asked_of = (*_OPERANDS, *_REDUCTIONS)
    shape = (len(asked_of), _LANES, _MOST, 2)
    sizes = {"grid": (_LANES, 1, 1), "threadgroup": (_LANES, 1, 1)}
    (places,) = kernel(inputs=[mx.zeros((1,))], output_shapes=[shape], output_dtypes=[mx.int32], **sizes)
    rows: list[list[list[list[int]]]] = places.tolist()
    return {
        operand: [[(row, column) for row, column in lane] for lane in lanes] for operand, lanes in zip(asked_of, rows)
    }


def told() -> str:
    """Whether the layout is the one that MLX assumes; else the first place that is another."""
    try:
        found = asked()
    except RuntimeError as error:
        first = next(iter(str(error).splitlines()), "no reason was given")
        return f"the layout of matrix units could not be asked for: {first}"
    for operand, lanes in assumed().items():
        for lane, places in enumerate(lanes):
            for i, place in enumerate(places):
                if (other := found[operand][lane][i]) != place:
                    who = "MLX's kernels and the simulator" if operand in _OPERANDS else "kernels with reductions"
                    return (
                        f"not the layout that {who} assume: of the {operand} lane {lane} has row and column "
                        f"{_text(other)} as element {i}, where they take it for {_text(place)}; kernels that assume it "
                        "would be wrong here, and so is tensor_layout='m5' of the simulator"
                    )
    return "the layout that MLX's kernels and the simulator assume"


def _text(place: tuple[int, int]) -> str:
    return "nothing" if place == (-1, -1) else f"{place[0]}, {place[1]}"
