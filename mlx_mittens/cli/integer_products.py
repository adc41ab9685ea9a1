"""Whether the matrix units of an M5 multiply integers exactly: a small product by the kernel for int8 activations.

Some GPUs without such units compile kernels of integers and answer wrongly.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..ops.matmul import quantized_matmul

# Rows and outputs of a tile and of a part of one; columns of three groups.
_ROWS, _OUTPUTS, _COLUMNS, _GROUP = 80, 70, 192, 64


def multiplied() -> tuple[np.ndarray, np.ndarray]:
    """The product by the default device, and the exact one: sums of integers, which float32 holds.

    Each group of a row has 127, so that its scale is 1, and the weights' scales are 1.

    Raises:
        RuntimeError: The kernel does not compile, as before macOS 26.2.
        ValueError: The GPU has no matrix units for integers.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (_ROWS, _COLUMNS))
    x[:, ::_GROUP] = 127
    w = rng.integers(0, 16, (_OUTPUTS, _COLUMNS))
    words = np.bitwise_or.reduce([w[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8)])
    scales = mx.ones((_OUTPUTS, _COLUMNS // _GROUP))
    y = quantized_matmul(
        mx.array(x.astype(np.float32)),
        *(mx.array(words), scales, -8 * scales),
        group_size=_GROUP,
        bits=4,
        activations="int8",
    )
    return np.array(y), x @ (w - 8).T


def told() -> str:
    """Whether it is exact; else the first element that is not."""
    try:
        found, exact = multiplied()
    except (RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), "no reason was given")
        return f"the product of integers could not be computed: {first}"
    wrong = np.argwhere(found != exact)
    if not len(wrong):
        return f"integers of 8 bits are multiplied exactly ({_ROWS}x{_COLUMNS}x{_OUTPUTS})"
    row, column = wrong[0]
    return (
        f"integers of 8 bits are multiplied wrongly: {len(wrong)} of {exact.size} sums, the first in row {row}, column "
        f"{column}, where {found[row, column]:g} should be {exact[row, column]}; leave activations='int8' out here"
    )
