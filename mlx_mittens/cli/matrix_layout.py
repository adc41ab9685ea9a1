"""Which lane of an M5's SIMD-group holds which elements of a product's operands, asked of the GPU.

Apple documents it by `get_multidimensional_index` alone. MLX's kernels, and the simulator, assume one layout. The
simulator assumes one of reductions too.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_LANES, _MOST = 32, 16
_OPERANDS = ("left operand", "right operand", "destination")
_REDUCTIONS = ("reduction of rows", "reduction of columns")
_HEADER = """
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;

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

template <typename Tensor>
void mittens_values(const thread Tensor& tensor, device int* places, uint lane) {
  for (ushort i = 0; i < 16; ++i) {
    const bool is_there = i < tensor.get_capacity() && tensor.is_valid_element(i);
    places[(lane * 16 + i) * 2] = is_there ? tensor.get_multidimensional_index(i)[0] : -1;
    places[(lane * 16 + i) * 2 + 1] = is_there ? 0 : -1;
  }
}
"""
# The descriptor of MLX's products: 16 rows, 32 columns, 16 terms, and the right operand lies by columns.
_SOURCE = """
constexpr auto mode = matmul2d_descriptor::mode::multiply_accumulate;
constexpr auto desc = matmul2d_descriptor(16, 32, 16, false, true, true, mode);
matmul2d<desc, execution_simdgroup> op;
const uint lane = thread_index_in_simdgroup;
"""
_OF_OPERANDS = """
auto left = op.get_left_input_cooperative_tensor<half, half, float>();
auto right = op.get_right_input_cooperative_tensor<half, half, float>();
auto sums = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
mittens_places(left, places, lane);
mittens_places(right, places + 1024, lane);
mittens_places(sums, places + 2048, lane);
"""
_OF_REDUCTIONS = """
using Operand = tensor<device half, dextents<int, 2>, tensor_inline>;
auto rows = op.get_row_reduction_destination_cooperative_tensor<Operand, Operand, float>();
auto columns = op.get_column_reduction_destination_cooperative_tensor<Operand, Operand, float>();
mittens_values(rows, places, lane);
mittens_values(columns, places + 1024, lane);
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
    """The layout of operands on the default device, by a kernel that asks for it.

    Raises:
        RuntimeError: It does not compile, as before macOS 26.2, or there is no Metal.
    """
    return _asked("mittens_matrix_layout", _OF_OPERANDS, _OPERANDS)


def asked_of_reductions() -> dict[str, Places]:
    """The layout of the values of rows and columns, as `asked`."""
    return _asked("mittens_reduction_layout", _OF_REDUCTIONS, _REDUCTIONS)


def _asked(name: str, source: str, names: tuple[str, ...]) -> dict[str, Places]:
    kernel: Any = mx.fast.metal_kernel(
        name=name, input_names=["x"], output_names=["places"], header=_HEADER, source=_SOURCE + source
    )
    sizes = {"grid": (_LANES, 1, 1), "threadgroup": (_LANES, 1, 1)}
    shapes = [(len(names), _LANES, _MOST, 2)]
    (places,) = kernel(inputs=[mx.zeros((1,))], output_shapes=shapes, output_dtypes=[mx.int32], **sizes)
    rows: list[list[list[list[int]]]] = places.tolist()
    return {of: [[(row, column) for row, column in lane] for lane in lanes] for of, lanes in zip(names, rows)}


def told() -> str:
    """Whether the layout is the one that MLX assumes; else the first place that is another."""
    try:
        other = _first_other(asked())
    except RuntimeError as error:
        return f"the layout of matrix units could not be asked for: {_first_line(error)}"
    if other:
        of, lane, i, found, place = other
        return (
            f"not the layout that MLX's kernels assume: of the {of} lane {lane} has row and column {_text(found)} as "
            f"element {i}, where they take it for {_text(place)}; they would be wrong here, and so is "
            "tensor_layout='m5' of the simulator"
        )
    return f"the layout that MLX's kernels and the simulator assume{_told_of_reductions()}"


def _told_of_reductions() -> str:
    """What is to be added where reductions lie otherwise than in the simulator."""
    try:
        other = _first_other(asked_of_reductions())
    except RuntimeError as error:
        return f"; that of reductions could not be asked for: {_first_line(error)}"
    if other is None:
        return ""
    of, lane, i, (found, _), (place, _) = other
    return (
        f"; but in the {of} lane {lane} has value {found} as element {i}, where the simulator has {place}, so that "
        "tensor_layout='m5' is wrong for it"
    )


def _first_other(found: dict[str, Places]) -> tuple[str, int, int, tuple[int, int], tuple[int, int]] | None:
    for of, lanes in found.items():
        for lane, places in enumerate(assumed()[of]):
            for i, place in enumerate(places):
                if lanes[lane][i] != place:
                    return of, lane, i, lanes[lane][i], place
    return None


def _first_line(error: RuntimeError) -> str:
    return next(iter(str(error).splitlines()), "no reason was given")


def _text(place: tuple[int, int]) -> str:
    return "nothing" if place == (-1, -1) else f"{place[0]}, {place[1]}"
