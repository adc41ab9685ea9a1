"""How far the results of a case are from float64, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .op import BLOCKWISE, EPSILON, SMALLEST_NORMAL, Case, Exact, Op, in_blocks, run, widen

# From here on a value rounds to infinity.
_OVERFLOW = {
    mx.float32: 2.0**128 - 2.0**103,
    mx.float16: 2.0**16 - 2.0**4,
    mx.bfloat16: 2.0**128 - 2.0**119,
    mx.uint8: math.inf,
    mx.uint32: math.inf,
}


def error(actual: mx.array, exact: Exact) -> float:
    """Largest relative error of a result.

    Each element's distance from the exact value is taken relative to the largest of that value, the root mean square of
    its row, the terms it sums up (beside which a value that happens to cancel cannot be more exact) and the smallest
    normal number of its type. To this scale we add the effect of rounding inner float32 numbers.

    Returns:
        float: The error; infinity where the shape differs, or a NaN or an infinity stands in the wrong place.
    """
    if tuple(actual.shape) != exact.value.shape:
        return math.inf
    if exact.value.size == 0:
        return 0.0
    columns = exact.value.shape[-1] if exact.value.ndim else 1
    result = np.array(actual.astype(mx.float32)).reshape(-1, columns)
    value = exact.value.reshape(-1, columns)
    magnitude = None if exact.magnitude is None else exact.magnitude.reshape(-1, columns)
    inner = None if exact.inner is None else exact.inner.reshape(-1, columns)

    def of_rows(block: slice) -> float:
        sizes, moved = (None if a is None else a[block] for a in (magnitude, inner))
        return _error(result[block], value[block], sizes, moved, actual.dtype)

    return max(in_blocks(of_rows, *value.shape)) if value.size >= BLOCKWISE else of_rows(slice(None))


def _error(
    result: np.ndarray, value: np.ndarray, magnitude: np.ndarray | None, inner: np.ndarray | None, dtype: mx.Dtype
) -> float:
    result, value = result.astype(np.float64), _overflow(value, dtype)
    finite = np.isfinite(value)
    if not finite.all():
        if not np.array_equal(result[~finite], value[~finite], equal_nan=True):
            return math.inf
        result, value = np.where(finite, result, 0), np.where(finite, value, 0)
    if not np.isfinite(result).all():
        return math.inf
    size = np.sqrt(np.mean(value * value, axis=-1, keepdims=True))
    scale = np.maximum(np.maximum(np.abs(value), size), SMALLEST_NORMAL[dtype])
    if magnitude is not None:
        scale = np.maximum(scale, np.nan_to_num(magnitude))
    if inner is not None:
        scale = scale + np.nan_to_num(inner) * (EPSILON[mx.float32] / EPSILON[dtype])
    return float(np.max(np.abs(result - value) / scale))


def _overflow(a: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Values that a type cannot hold become infinities, as they do in it."""
    return np.where(np.abs(a) >= _OVERFLOW[dtype], np.copysign(np.inf, a), a)


def tolerance(dtype: mx.Dtype, twin_error: float, vjp: bool = False, float32_units: int = 4) -> float:
    """The error we allow ourselves: twice the twin's error, or as much as rounding alone explains.

    Rounding explains one unit in the last place of a 16-bit type, two for gradients, which start from rounded values.
    In float32 every step rounds to the result's own type, so the twin is at times right by luck: we allow four units,
    or the op's number from the table, and four times as many for gradients.
    """
    units = float32_units if dtype == mx.float32 else 1
    if vjp:
        units *= 4 if dtype == mx.float32 else 2
    return max(units * EPSILON[dtype], 2 * twin_error if math.isfinite(twin_error) else 0)


@dataclass(frozen=True)
class Check:
    """How far a case's results are from float64, the worst of its outputs."""

    error: float
    twin_error: float
    passed: bool
    detail: str = ""


def check(
    op: Op,
    case: Case,
    arrays: Sequence[mx.array | None],
    cotangents: Sequence[mx.array] = (),
    twin_device: mx.Device | None = None,
) -> Check:
    """Runs a case, ours and mx's (on another device, if one is given), and compares both with float64."""
    ours = run(op, op.ours, case, arrays, cotangents)
    mx.eval(ours)
    with mx.stream(twin_device or mx.default_device()):
        twin = run(op, op.twin, case, arrays, cotangents)
        mx.eval(twin)
    return compare(op, case, ours, twin, op.exact(case, arrays, cotangents), arrays)


def compare(
    op: Op,
    case: Case,
    ours: Sequence[mx.array],
    twin: Sequence[mx.array],
    exact: Sequence[Exact],
    arrays: Sequence[mx.array | None],
) -> Check:
    """Compares results with the exact ones and says which element is worst where they do not pass."""
    names = _result_names(op, case, arrays, len(exact))
    errors, twin_errors, details = [], [], []
    for name, a, b, c in zip(names, op.compared(case, ours), op.compared(case, twin), exact, strict=True):
        errors.append(error(a, c))
        twin_errors.append(error(b, c))
        if a.dtype != b.dtype:
            errors[-1] = math.inf
            details.append(f"{name} is {a.dtype}, mx gives {b.dtype}")
        elif not errors[-1] <= tolerance(a.dtype, twin_errors[-1], case.vjp, op.units):
            details.append(f"{name}: error {errors[-1]:.2e}, mx {twin_errors[-1]:.2e}; {worst(a, c.value)}")
    return Check(max(errors), max(twin_errors), not details, "; ".join(details))


def _result_names(op: Op, case: Case, arrays: Sequence[mx.array | None], outputs: int) -> list[str]:
    if case.vjp:
        return [f"gradient of {op.parameters[i][0]}" for i in op.trained(arrays)]
    return [f"output {i}" if outputs > 1 else "output" for i in range(outputs)]


def worst(actual: mx.array, exact: np.ndarray) -> str:
    if tuple(actual.shape) != exact.shape:
        return f"shape {tuple(actual.shape)}, expected {exact.shape}"
    result, exact = widen(actual), _overflow(exact, actual.dtype)
    with np.errstate(invalid="ignore"):
        distance = np.abs(result - exact)
    wrong = np.isfinite(result) != np.isfinite(exact)
    distance = np.where(wrong, np.inf, np.nan_to_num(distance, nan=0.0, posinf=0.0))
    where = np.unravel_index(int(np.argmax(distance)), distance.shape)
    return f"worst at {tuple(map(int, where))}: {result[where]:.9g}, expected {exact[where]:.9g}"
