"""The row of the table of ops for products with masked blocks.

The shape of a case is ``(rows, columns, outputs)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops.matmul import block_masked_mm
from .op import Case, Exact, ModelOp, Op, add_outliers, all_rows, cases_for_tests, widen


@dataclass(frozen=True, kw_only=True)
class MaskedOp(ModelOp):
    """A product of two matrices and masks of blocks of the result and of both.

    Options of a case: ``block_size``; ``numbers``, whether masks are numbers, not bools; ``transpose``, whether the
    second matrix is a view of one whose rows are columns; ``live``, the share of blocks that are not masked out.
    """

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        rows, columns, outputs = case.shape
        m, k, n = (-(-size // self.arguments(case)["block_size"]) for size in case.shape)
        second = (outputs, columns) if self.arguments(case)["transpose"] else (columns, outputs)
        return [(rows, columns), second, (m, n), (m, k), (k, n)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        options = self.arguments(case)
        arrays: list[mx.array | None] = []
        for (name, _), shape in zip(self.parameters, self.shapes(case), strict=True):
            if name.startswith("mask"):
                mask = rng.random(shape) < options["live"]
                numbers = mx.array((mask * rng.uniform(0.5, 2, shape)).astype(np.float32)).astype(dtype)
                arrays.append(numbers if options["numbers"] else mx.array(mask))
            else:
                a = rng.standard_normal(shape, dtype=np.float32) * np.float32(case.shape[1] ** -0.25)
                add_outliers(rng, a)
                arrays.append(mx.array(a).astype(dtype))
        return arrays

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        rows, columns, outputs = case.shape
        return dtype.size * (rows * columns + columns * outputs + rows * outputs)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        a, b, *masks = (widen(array) for array in arrays if array is not None)
        b = b.T if options["transpose"] else b
        whole = [np.kron(mask, np.ones((options["block_size"],) * 2)) for mask in masks]
        of_y, of_a, of_b = (w[:r, :c] for w, (r, c) in zip(whole, ((len(a), b.shape[1]), a.shape, b.shape)))
        a, b = a * of_a, b * of_b
        return [Exact((a @ b) * of_y, np.sqrt(np.square(a) @ np.square(b)) * np.abs(of_y))]


def _arguments(b: mx.array, options: dict[str, Any]) -> tuple[mx.array, int]:
    return b.T if options["transpose"] else b, options["block_size"]


def _masked(a, b, mask_out, mask_lhs, mask_rhs, **options):
    b, block_size = _arguments(b, options)
    return block_masked_mm(a, b, block_size, mask_out, mask_lhs, mask_rhs)


def _mx_masked(a, b, mask_out, mask_lhs, mask_rhs, **options):
    dtype = a.dtype
    masks = [mask_out, mask_lhs, mask_rhs]
    if mx.default_device() != mx.gpu:  # in half types mx has none on a CPU
        a, b, *masks = (x if x.dtype == mx.bool_ else x.astype(mx.float32) for x in (a, b, *masks))
    b, block_size = _arguments(b, options)
    return mx.block_masked_mm(a, b, block_size, *masks).astype(dtype)


# One row, tiles of 32 and of 64 rows, and a column, with tails of rows, columns and outputs.
_SHAPES = ((1, 136, 80), (37, 136, 88), (64, 72, 40), (70, 136, 1))
# So many that tiles of 64 rows keep a GPU busy.
_MANY_OUTPUTS = ((64, 8, 9728),)
_OPTIONS: tuple[dict[str, Any], ...] = tuple(
    {"block_size": size, "transpose": transpose, "numbers": numbers}
    for size in (32, 64)
    for transpose in (False, True)
    for numbers in (False, True)
)

MASKED_OPS: tuple[Op, ...] = (
    MaskedOp(
        name="block_masked_mm",
        parameters=all_rows("a", "b", "mask_out", "mask_lhs", "mask_rhs"),
        ours=_masked,
        twin=_mx_masked,
        twin_text="`mx.block_masked_mm`",
        summary="products with masked blocks",
        options={"block_size": 64, "numbers": False, "transpose": True, "live": 0.6},
        tests=tuple(
            Case("test", case.shape, case.options, apple_only=True)
            for options in _OPTIONS
            for case in cases_for_tests(
                *_SHAPES, *_MANY_OUTPUTS[: options["transpose"] and options["block_size"] == 64], **options
            )
        ),
        cases=(
            Case("half of the blocks", (512, 512, 512), {"live": 0.5}, quick=True, apple_only=True),
            *(
                Case("half of the blocks", (rows, 4096, 4096), {"live": 0.5}, gpu_only=True, apple_only=True)
                for rows in (1, 512)
            ),
        ),
    ),
)
