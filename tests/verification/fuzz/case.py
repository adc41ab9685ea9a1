"""One random call of an op, with its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

Call = Callable[..., "mx.array | tuple[mx.array, ...]"]


@dataclass
class Case:
    """One random call of an op.

    Attributes:
        text: Everything that was drawn.
        arrays: The array arguments.
        ours: The op, as a function of the arrays.
        twin: mx's op, or None where mx has none.
        exact: The op in float64, of plain mx operations, so that mx differentiates it.
        of_nothing: The results where an argument has no elements: mx's own operations are not for all of these,
            so nothing of mx's is run there.
        differentiable: Which arguments have gradients to compare.
        noise: Bound on the effect of rounding on each result, or on all.
        noise_of_composition: The same where `mx.vmap` takes the op apart into others, if that is more.
        rounds_nothing: Whether `of_nothing` has sums over other arguments, which `noise` bounds as well.
        gradient_noise: Bound on the effect of rounding the result on each gradient in `differentiable`, given the
            cotangents that `mx.vjp` takes.
        second_order_noise: The same of gradients of gradients, given cotangents and directions: their terms may cancel.
        ordinary: Whether numbers are normal ones; gradients are compared only then.
        hides: Whether a mask or a window hides some of the numbers, which mx on a CPU lets through where they are not
            finite: that excuses a call that went to mx, and no kernel.
        units: Units in the last place that a result may be off.
    """

    text: str
    arrays: list[mx.array]
    ours: Call
    twin: Call | None
    exact: Call
    of_nothing: Callable[[], list[np.ndarray]]
    differentiable: Sequence[int] = ()
    noise: Callable[[], list[np.ndarray | float]] | None = None
    noise_of_composition: Callable[[], list[np.ndarray | float]] | None = None
    rounds_nothing: bool = False
    gradient_noise: Callable[[Sequence[mx.array]], list[float]] | None = None
    second_order_noise: Callable[[Sequence[mx.array], Sequence[mx.array]], list[float]] | None = None
    ordinary: bool = True
    hides: bool = False
    units: float = 4.0

    @property
    def empty(self) -> bool:
        return any(a.size == 0 for a in self.arrays)
