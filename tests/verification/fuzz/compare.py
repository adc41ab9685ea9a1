"""When a result is right: near float64, within the bounds of rounding and of the error of mx's own op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_mittens.specs import EPSILON, SMALLEST_NORMAL

LARGEST = {mx.float32: 3.4028235e38, mx.float16: 65504.0, mx.bfloat16: 3.3895e38}


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from float64.

    Attributes:
        units: Units in the last place.
        noise: Bound on the effect of rounding on the way, an element or all of them: as derived by the case.
        whole: Whether a unit is the largest number's: gradients sum up terms that cancel.
    """

    units: float = 4.0
    noise: np.ndarray | float = 0.0
    whole: bool = False


def to_float64(a: mx.array) -> np.ndarray:
    """An array's numbers, exactly."""
    if a.dtype == mx.float64:
        return np.array(a)
    return np.array(a.astype(mx.float32)).astype(np.float64)


def overflow(sizes: np.ndarray) -> np.ndarray:
    """The noise of sums of terms in float32: without limit where the terms' sizes add up to more than it holds."""
    return np.where(sizes > LARGEST[mx.float32], np.inf, 0.0)


def unit_in_the_last_place(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    size = np.maximum(np.where(np.isfinite(values), np.abs(values), 0), SMALLEST_NORMAL[dtype])
    return EPSILON[dtype] * 2.0 ** np.floor(np.log2(size))


def difference(
    ours: mx.array, exact: np.ndarray, twin: mx.array | None, tolerance: Tolerance, finite_only: bool = False
) -> str | None:
    """The fault of a result, or None.

    Right is a result within the tolerance, or within twice the error of mx's op, or past the type's range as the exact
    number is. Where the exact result is NaN or infinite, one of these is right: which one, the order of sums decides.

    Args:
        ours: The result.
        exact: The same in float64.
        twin: mx's result, or None.
        tolerance: As above.
        finite_only: Whether numbers of mx's that are not finite excuse nothing.
    """
    if ours.dtype not in EPSILON:
        return f"the type is {ours.dtype}"
    if twin is not None and ours.dtype != twin.dtype:
        return f"the type is {ours.dtype}, mx's {twin.dtype}"
    if tuple(ours.shape) != exact.shape:
        return f"the shape is {tuple(ours.shape)}, expected {exact.shape}"
    if twin is not None and tuple(twin.shape) != exact.shape:
        return f"the shape is {tuple(ours.shape)}, mx's {tuple(twin.shape)}"
    if exact.size == 0:
        return None
    with np.errstate(all="ignore"):
        return _difference(ours, exact, twin, tolerance, finite_only)


def _difference(
    ours: mx.array, exact: np.ndarray, twin: mx.array | None, tolerance: Tolerance, finite_only: bool
) -> str | None:
    dtype, result = ours.dtype, to_float64(ours)
    theirs = None if twin is None else to_float64(twin)
    unit = unit_in_the_last_place(exact, dtype)
    if tolerance.whole:
        unit = np.maximum(unit, unit_in_the_last_place(np.abs(exact[np.isfinite(exact)]).max(initial=0.0), dtype))
    allowed = tolerance.units * unit + tolerance.noise
    if theirs is not None:
        error = np.abs(theirs - exact)
        error = np.where(np.isfinite(error), error, 0)
        allowed = np.maximum(allowed, 2 * (error.max() if tolerance.whole else error))

    def near(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        largest, step = LARGEST[dtype], EPSILON[dtype]
        overflows = (np.abs(b) > largest * (1 - step)) & (np.abs(a) >= largest * (1 - 8 * step))
        same = (a == b) | (overflows & (np.sign(a) == np.sign(b)))
        return same | (np.abs(a - b) <= allowed) | np.isinf(allowed)

    right = near(result, exact) | (~np.isfinite(exact) & ~np.isfinite(result))
    if theirs is not None:
        right |= near(result, theirs) & np.isfinite(theirs)
        if not finite_only:
            right |= ~np.isfinite(result) & ~np.isfinite(theirs)
    if right.all():
        return None
    wrong = np.argwhere(~right)
    at = tuple(int(i) for i in wrong[0])
    units = np.abs(result - exact)[at] / unit[at] if unit.ndim else np.abs(result - exact)[at] / unit
    text = f"{len(wrong)} of {exact.size} are wrong, the first at {at}: {result[at]:.9g}, exact {exact[at]:.9g}"
    if theirs is not None:
        text += f", mx {theirs[at]:.9g}"
    return f"{text} ({units:.1f} units, allowed {np.broadcast_to(allowed / unit, exact.shape)[at]:.1f})"


def first_difference(
    results: Sequence[mx.array],
    exact: Sequence[np.ndarray],
    twins: Sequence[mx.array] | None,
    tolerances: Sequence[Tolerance],
    finite_only: bool = False,
) -> str | None:
    """The fault of the first of several results that is not right."""
    if len(results) != len(exact):
        return f"{len(results)} results, expected {len(exact)}"
    for i, (ours, value, tolerance) in enumerate(zip(results, exact, tolerances)):
        text = difference(ours, value, None if twins is None else twins[i], tolerance, finite_only)
        if text:
            return f"result {i}: {text}"
    return None
