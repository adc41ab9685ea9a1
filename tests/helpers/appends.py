"""Helpers that the tests of appends to a cache share."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_mittens import specs
from mlx_mittens.specs import Case


def case_of(*shape: int, **options) -> Case:
    return Case("test", shape, options)


def draw(op: specs.Op, rng: np.random.Generator, case: Case, dtype: mx.Dtype = mx.float32) -> list[mx.array | None]:
    """A case's inputs, computed: none where it has no norms, offsets or frequencies."""
    arrays = op.draw(rng, case, dtype)
    mx.eval([a for a in arrays if a is not None])
    return arrays


def run(op: specs.Op, case: Case, arrays: list[mx.array | None]):
    return specs.run(op, op.ours, case, arrays)
