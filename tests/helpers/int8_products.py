"""Products by integers on matrix units (metal/matmul/apple/m5): their exact rounding, and calls of every kernel."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

import mlx_mittens as mm
from helpers.matrices import draw, exact_product, quantize
from helpers.tolerances import PEER
from mlx_mittens import specs

GROUPS = (32, 64, 128)
# Of eight columns, in the order in which kernels keep their integers.
ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def rounded(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The integers of rows, and each group's scale, in float32 as the kernel computes them. Of finite elements."""
    parts = x.astype(np.float32).reshape(x.shape[0], -1, group)
    largest = np.abs(parts).max(-1, keepdims=True)
    is_zero = largest < np.float32(2.0**-119)
    inverse = np.where(is_zero, np.float32(0), np.float32(127) / np.where(is_zero, np.float32(1), largest))
    integers = np.rint(parts * inverse).astype(np.int32)
    scales = np.where(is_zero, np.float32(0), largest * np.float32(1 / 127))
    return integers.reshape(x.shape), scales[..., 0]


def as_rounded(x: np.ndarray, group: int) -> np.ndarray:
    """The rows that integers and scales stand for, in float64."""
    integers, scales = rounded(x, group)
    return integers * np.repeat(scales.astype(np.float64), group, 1)


def run_all() -> None:
    """Every kernel, launched by the op as on an M5, and right by float64 of the rounded x."""
    rng = np.random.default_rng(0)
    for dtype in specs.DTYPES.values():
        for group in GROUPS:
            triple = quantize(rng, (67, 2 * group), dtype, group, 4)
            x = draw(rng, (17, 2 * group), dtype)
            with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5"):
                y = mm.quantized_matmul(x, *triple, group_size=group, bits=4, activations="int8")
                mx.eval(y)
            exact = exact_product(as_rounded(specs.widen(x), group), specs.dequantized(*triple, group, 4))
            assert (np.abs(specs.widen(y) - exact.value) <= PEER[dtype] * exact.magnitude).all()
