"""The formats of MLX's quantized weights: the kernels and the operands that differ between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..ops.custom import int32, int64
from .mlx_sources import TYPES, instance

# Words of a step of MLX's product of one row: a lane takes two, of 2 bits one.
_LANES = 32

Weights = tuple[mx.array, mx.array, mx.array | None]  # words, scales, and the biases of affine ones


@dataclass(frozen=True)
class Format:
    """How weights are quantized.

    Attributes:
        group_size: Weights that share a scale.
        bits: Of a weight.
        mode: `affine`, `mxfp4`, `mxfp8` or `nvfp4`.
    """

    group_size: int = 64
    bits: int = 4
    mode: str = "affine"

    @property
    def is_affine(self) -> bool:
        """Whether groups have biases, and scales of x's type; the kernels of all others are the same ones."""
        return self.mode == "affine"

    @property
    def step(self) -> int:
        """Columns that a SIMD-group takes at a time in MLX's product of one row."""
        values_a_word = 8 if self.bits in (3, 5) else 4 if self.bits == 6 else 32 // self.bits
        return values_a_word * (1 if self.bits == 2 else 2) * _LANES

    def kernel(self, function: str, dtype: mx.Dtype, *template: object) -> tuple[str, str]:
        """An instantiation of a kernel.

        Args:
            function: Its name without the format.
            dtype: Of x.
            template: Its template arguments after the format's.
        """
        family = ("quantized" if self.is_affine else "fp_quantized") + "_nax" * ("_nax" in function)
        name = f"{'affine' if self.is_affine else 'fp'}_{function}"
        return instance(family, name, TYPES[dtype], self.group_size, self.bits, *template)

    def operands(self, weights: Weights, has_scale_of_all: bool = True) -> list[mx.array]:
        """The kernel's arguments of weights, in order.

        Args:
            weights: Words, scales, and biases of affine ones.
            has_scale_of_all: Whether a kernel for small floats takes a scale of all weights, which it then ignores.
        """
        w, scales, biases = weights
        if biases is not None:
            return [w, scales, biases]
        return [w, scales, mx.zeros((1,))] if has_scale_of_all else [w, scales]


def layouts(x: mx.array, weights: Weights) -> list[bytes]:
    """Axes, shapes and strides of x and of weights, which lie in memory row by row."""
    w, *of_groups = weights
    values = [int32(x.ndim - 2), int32(*x.shape), strides_of(x.shape), int32(w.ndim - 2), int32(*w.shape)]
    return values + [strides_of(a.shape) for a in (w, *of_groups) if a is not None]


def strides_of(shape: Sequence[int]) -> bytes:
    """Strides of a shape that lies in memory row by row."""
    return int64(*(math.prod(shape[i + 1 :]) for i in range(len(shape))))
