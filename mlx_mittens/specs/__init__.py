"""The one table of ops: tests, benchmark, doctor and the README's table all read its rows.

A row names an op, its mx twin, its float64 reference, how its inputs look, the shapes it is tested on and the shapes of
real models it is timed on. `mlx-mittens new` adds the row of a new op to the module of its family.
"""

from __future__ import annotations

import itertools

from .attention import ATTENTION_OPS
from .cache import ROPE_OPS
from .cascade import CASCADE_OPS
from .chosen_keys import CHOSEN_KEY_OPS
from .compare import Check, check, compare, error, tolerance, worst
from .embedding import EMBEDDING_OPS
from .layer_inputs import LAYER_INPUT_OPS
from .masked import MASKED_OPS
from .matmul import MATRIX_OPS
from .moe import MOE_OPS
from .norm import ROW_OPS, RowOp, Spread
from .op import (
    DTYPES,
    EPSILON,
    SMALLEST_NORMAL,
    Case,
    Exact,
    Op,
    call,
    dequantized,
    gradients,
    run,
    widen,
)
from .paged import PAGED_APPEND_OPS, PAGED_ATTENTION_OPS
from .recurrence import RECURRENCE_OPS
from .sampling import SAMPLE_OPS
from .shaped import ShapedOp
from .token_layers import TOKEN_LAYER_OPS

__all__ = [
    "DTYPES",
    "EPSILON",
    "OPS",
    "ROW_OPS",
    "SMALLEST_NORMAL",
    "Case",
    "Check",
    "Exact",
    "Op",
    "RowOp",
    "ShapedOp",
    "Spread",
    "call",
    "check",
    "compare",
    "dequantized",
    "error",
    "get",
    "gradients",
    "markdown",
    "run",
    "tolerance",
    "widen",
    "worst",
]

OPS: tuple[Op, ...] = (
    *(*ROW_OPS, *SAMPLE_OPS, *MATRIX_OPS, *EMBEDDING_OPS, *MASKED_OPS, *ATTENTION_OPS, *CASCADE_OPS),
    *(*PAGED_ATTENTION_OPS, *ROPE_OPS, *PAGED_APPEND_OPS, *CHOSEN_KEY_OPS),
    *(*MOE_OPS, *RECURRENCE_OPS, *LAYER_INPUT_OPS, *TOKEN_LAYER_OPS),
)


def get(name: str) -> Op:
    """Returns the row of an op.

    Raises:
        KeyError: No op has that name; the message lists those there are.
    """
    for op in OPS:
        if op.name == name:
            return op
    raise KeyError(f"no op is called {name!r}; the ops are {', '.join(op.name for op in OPS)}")


def markdown() -> str:
    """The README's table of ops; ops with the same text share a row."""
    lines = ["| op | its mx twin | what it does |", "|---|---|---|"]
    for (twin, summary), ops in itertools.groupby(OPS, lambda op: (op.twin_text, op.summary)):
        lines.append(f"| {', '.join(f'`mm.{op.name}`' for op in ops)} | {twin} | {summary} |")
    return "\n".join(lines)
