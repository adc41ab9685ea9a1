"""A row of the table of ops for any family: an op whose row names the dimensions of its arrays."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from .op import Case, Exact, Op, add_outliers, widen


@dataclass(frozen=True, kw_only=True)
class ShapedOp(Op):
    """An op with one result; its layout names the dimensions of each array argument, and of the result.

    A case's shape gives the sizes of the dimensions, in the order in which the layout names them. The array arguments
    are the first ones of the op's signature. Gradients are tested beside the table.

    Attributes:
        layout: As in ``"rows columns, outputs columns -> rows outputs"``.
        reference: The op in float64, for the arguments of a call.
        updates: Whether the result is the first argument, in place if nobody else needs it.
    """

    parameters: tuple[tuple[str, str], ...] = field(init=False)
    layout: str
    reference: Callable[..., Exact]
    updates: bool = False

    def __post_init__(self) -> None:
        names = list(inspect.signature(self.ours).parameters)
        object.__setattr__(self, "parameters", tuple((name, "rows") for name in names[: len(self.arrays)]))

    @property
    def arrays(self) -> list[tuple[str, ...]]:
        """The dimensions of each array argument."""
        return [tuple(text.split()) for text in self.layout.partition("->")[0].split(",")]

    @property
    def result(self) -> tuple[str, ...]:
        """The dimensions of the result."""
        return tuple(self.layout.partition("->")[2].split())

    @property
    def dimensions(self) -> list[str]:
        """Every dimension, in the order of a case's shape."""
        return list(dict.fromkeys(name for names in self.arrays for name in names))

    @property
    def smallest(self) -> tuple[int, ...]:
        """A shape that any case's options allow."""
        return self.tests[0].shape

    def _shape(self, names: Sequence[str], case: Case) -> tuple[int, ...]:
        sizes = dict(zip(self.dimensions, case.shape, strict=True))
        return tuple(sizes[name] for name in names)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        return [self._shape(names, case) for names in self.arrays]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        drawn: list[mx.array | None] = []
        for shape in self.shapes(case):
            numbers = rng.standard_normal(shape, dtype=np.float32)
            add_outliers(rng, numbers)
            drawn.append(mx.array(numbers).astype(dtype))
        return drawn

    def updated(self, case: Case) -> Mapping[int, int]:
        return {0: 0} if self.updates else {}

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        sizes = [math.prod(shape) for shape in self.shapes(case)]
        if self.updates:
            return 2 * dtype.size * sum(sizes[1:])
        return dtype.size * (sum(sizes) + math.prod(self._shape(self.result, case)))

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        return [self.reference(*map(widen, arrays), **self.arguments(case))]
