"""The ways to run a case: as it is, compiled, differentiated, and batched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import mlx.core as mx
import numpy as np
from verification.fuzz.case import Case
from verification.fuzz.compare import Tolerance, first_difference, to_float64
from verification.fuzz.draw import FLOATS, Draw

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON, SMALLEST_NORMAL

MODES = {
    "forward": 0.5,
    "compiled": 0.08,
    "shapeless": 0.05,
    "vjp": 0.14,
    "jvp": 0.08,
    "second order": 0.05,
    "vmap": 0.1,
}
GRADIENTS = ("vjp", "jvp", "second order")
# One of this many is called in a function that is compiled for all shapes.
SHAPELESS = {"vjp": 0.3, "jvp": 0.3}

# How often the float64 gradient is taken at inputs moved by half a unit each, and how many such moves are allowed:
# a sum of n terms rounds n times. The furthest of few moves is a matter of luck, by a factor of two.
MOVES = 16
ALLOWED_MOVES = 16

# The error that a gradient may always have, by root mean squares.
WORST_GRADIENT = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 8e-2}

Function = Callable[..., "tuple[mx.array, ...]"]
Result = TypeVar("Result")


def draw_mode(draw: Draw, case: Case) -> str:
    mode = draw.pick(list(MODES), list(MODES.values()))
    if case.empty and mode in GRADIENTS:
        return "vjp"
    if case.empty and mode == "shapeless":
        return "compiled"  # mx 0.32.4 takes the larger of the sizes 0 and 1 where it fuses broadcasts for any shape
    if mode in GRADIENTS and not (case.differentiable and case.ordinary):
        return "forward"
    # The draw goes on as if this had not been drawn.
    if mode in SHAPELESS and not case.empty and copy.deepcopy(draw).chance(SHAPELESS[mode]):
        return f"shapeless {mode}"
    return mode


def as_tuple(result: mx.array | Sequence[mx.array]) -> tuple[mx.array, ...]:
    return (result,) if isinstance(result, mx.array) else tuple(result)


def wide(a: mx.array) -> mx.array:
    return a.astype(mx.float64) if a.dtype in FLOATS else a


def evaluated(function: Function, arrays: Sequence[mx.array] = ()) -> tuple[mx.array, ...]:
    results = as_tuple(function(*arrays))
    mx.eval(*results)
    return results


class OpFailed(Exception):
    """An op's own exception, not one of comparing its results."""


def _attempted(call: Callable[[], Result]) -> Result:
    """The result of a call of an op."""
    try:
        return call()
    except Exception as error:
        raise OpFailed(f"{type(error).__name__}: {error}") from error


def called(function: Function, arrays: Sequence[mx.array] = ()) -> tuple[mx.array, ...]:
    """The results of an op."""
    return _attempted(lambda: evaluated(function, arrays))


def try_evaluate(function: Function | None, arrays: Sequence[mx.array] = ()) -> tuple[mx.array, ...] | None:
    """mx's results, or None where mx has none: its own limits are not ours."""
    try:
        return None if function is None else evaluated(function, arrays)
    except Exception:
        return None


def run(case: Case, mode: str, draw: Draw) -> str | None:
    """The fault of a case in a mode, or None."""
    how = {"forward": _forward, "compiled": _forward, "shapeless": _forward, "vmap": _vmap}.get(mode, _gradients)
    drawn = copy.deepcopy(draw)
    try:
        return how(case, mode, draw)
    except OpFailed as failure:
        error = failure.__cause__
        if case.empty and (isinstance(error, ValueError) and str(error).startswith("[") or "NYI" in str(error)):
            return None  # an op may refuse empty arrays, if it says so; and mx calls that it has not implemented
        if not case.empty and case.twin is not None and _twin_fails(case, how, mode, drawn):
            return None  # ours may refuse calls that mx refuses
        return str(failure)


def _twin_fails(case: Case, how: Callable[[Case, str, Draw], str | None], mode: str, draw: Draw) -> bool:
    try:
        how(replace(case, ours=case.twin, twin=None), mode, draw)
    except OpFailed:
        return True
    return False


def _tolerances(case: Case, results: int, batched: bool = False) -> list[Tolerance]:
    of_rounding = (batched and case.noise_of_composition) or case.noise
    with np.errstate(all="ignore"):
        noise = of_rounding() if of_rounding else [0.0]
    noise = noise if len(noise) == results else noise * results
    return [Tolerance(case.units, n) for n in noise]


def _tolerances_of_nothing(case: Case, results: int) -> list[Tolerance]:
    return _tolerances(case, results) if case.rounds_nothing else [Tolerance()] * results


def compiled_for_all_shapes(function: Function, arrays: Sequence[mx.array]) -> Function:
    """A function that mx.compile has traced at twice the sizes of arrays, or at these where numbers among the options
    of the op do not fit twice as much."""
    for size in (2, 1):
        compiled = mx.compile(function, shapeless=True)
        try:
            compiled(*(mx.tile(a, [1 if n == 1 else size for n in a.shape]) if a.ndim else a for a in arrays))
        except ValueError:
            if size == 1:
                raise
        else:
            break
    return compiled


def _fallbacks() -> int:
    return sum(sum(counts["mx"].values()) for counts in mm.stats().values())


def _forward(case: Case, mode: str, draw: Draw) -> str | None:
    function, before = case.ours, _fallbacks()
    if mode == "shapeless":
        function = _attempted(lambda: compiled_for_all_shapes(case.ours, case.arrays))
    elif mode == "compiled":
        function = mx.compile(case.ours)
        called(function, case.arrays)
    results = called(function, case.arrays)
    if case.empty:
        expected = case.of_nothing()
        return first_difference(results, expected, None, _tolerances_of_nothing(case, len(expected)))
    exact = [np.array(a) for a in evaluated(case.exact, [wide(a) for a in case.arrays])]
    twins = try_evaluate(case.twin, case.arrays)
    hides = case.hides and _fallbacks() == before
    return first_difference(results, exact, twins, _tolerances(case, len(exact)), hides)


def _of_some(function: Function, arrays: Sequence[mx.array], places: Sequence[int]) -> Function:
    """A function of some of its arguments."""

    def of_some(*some: mx.array) -> tuple[mx.array, ...]:
        filled = list(arrays)
        for place, array in zip(places, some):
            filled[place] = array
        return as_tuple(function(*filled))

    return of_some


def _vjp(function: Function, primals: Sequence[mx.array], cotangents: Sequence[mx.array], _) -> Sequence[mx.array]:
    return mx.vjp(function, primals, cotangents)[1]


def _jvp(function: Function, primals: Sequence[mx.array], _, directions: Sequence[mx.array]) -> Sequence[mx.array]:
    return mx.jvp(function, primals, directions)[1]


def _second_order(
    function: Function, primals: Sequence[mx.array], cotangents: Sequence[mx.array], directions: Sequence[mx.array]
) -> Sequence[mx.array]:
    """The gradient of the gradients' product with the directions."""
    total = mx.float64 if any(a.dtype == mx.float64 for a in primals) else mx.float32

    def along(*some: mx.array) -> mx.array:
        gradients = mx.vjp(function, list(some), cotangents)[1]
        return sum((a.astype(total) * b.astype(total)).sum() for a, b in zip(gradients, directions))

    return as_tuple(mx.grad(along, argnums=list(range(len(primals))))(*primals))


def _derived_for_all_shapes(case: Case, derive: Callable, places: Sequence[int]) -> Callable:
    """A function of cotangents and directions, which mx.compile traces for all shapes with the arrays of the case."""

    def derived(cotangents: Sequence[mx.array], directions: Sequence[mx.array]) -> Sequence[mx.array]:
        count, ends = len(case.arrays), len(case.arrays) + len(cotangents)

        def of_all(*arrays: mx.array) -> Sequence[mx.array]:
            own, first, second = arrays[:count], list(arrays[count:ends]), list(arrays[ends:])
            return derive(_of_some(case.ours, own, places), [own[i] for i in places], first, second)

        arrays = [*case.arrays, *cotangents, *directions]
        return compiled_for_all_shapes(of_all, arrays)(*arrays)

    return derived


def _gradients(case: Case, mode: str, draw: Draw) -> str | None:
    for_all_shapes, mode = mode.startswith("shapeless "), mode.removeprefix("shapeless ")
    derive = {"vjp": _vjp, "jvp": _jvp, "second order": _second_order}[mode]
    places = list(case.differentiable)
    primals = [case.arrays[i] for i in places]
    ours = _of_some(case.ours, case.arrays, places)
    # Gradients are composed of mx's sums, which are not for views of nothing.
    view = 0.0 if case.empty or mode == "second order" else 0.4
    cotangents = [draw.normal(a.shape, a.dtype, view) for a in called(ours, primals)]
    directions = [draw.normal(a.shape, a.dtype, view) for a in primals]
    derived = _derived_for_all_shapes(case, derive, places) if for_all_shapes else lambda *a: derive(ours, primals, *a)
    results = called(lambda: derived(cotangents, directions))
    if case.empty:
        return _gradients_of_nothing(results, primals)
    if mode != "second order" and any(a.dtype == mx.float16 and not mx.isfinite(a).all().item() for a in results):
        # Terms that a composition rounds to float16 may be beyond it where their sum is not. Derivatives are linear.
        cotangents, directions = ([a * 2.0**-8 for a in arrays] for arrays in (cotangents, directions))
        results = called(lambda: derived(cotangents, directions))
    exact_of = _of_some(case.exact, [wide(a) for a in case.arrays], places)

    def exact_at(primals, cotangents, directions) -> list[np.ndarray]:
        wides = [[wide(a) for a in arrays] for arrays in (primals, cotangents, directions)]
        return [np.array(a) for a in evaluated(lambda: derive(exact_of, *wides))]

    exact = exact_at(primals, cotangents, directions)
    theirs = _of_some(case.twin, case.arrays, places) if case.twin is not None else None

    def of_mx_at(primals, cotangents, directions) -> tuple[mx.array, ...] | None:
        return try_evaluate(theirs and (lambda: derive(theirs, primals, cotangents, directions)))

    twins = of_mx_at(primals, cotangents, directions)
    plain = [Tolerance(case.units, whole=True)] * len(exact)
    if not first_difference(results, exact, twins, plain):
        return None

    # Some gradients are small differences of large terms. Inputs moved by rounding show how much of them rounding
    # decides, and so does the worst of mx's gradients: all of a call come from the same inner numbers. Where terms
    # cancel for all inputs, as in a norm of one column, moves do not show it, and mx's gradients may be 0 by luck: so
    # mx's are taken at all moved inputs too, in float32, in which all ops compute. Twice mx's absolute error there is
    # allowed as well, since a relative error says nothing where the exact gradient is 0, as for a mask of one column,
    # which moves all scores of a row alike. A case may know its rounding errors. Results of subnormal numbers, such as
    # weights of a softmax, have few bits.
    inputs = (primals, cotangents, directions)
    at_moves = [[[_moved(a, draw) for a in arrays] for arrays in inputs] for _ in range(MOVES)]
    moved = [exact_at(*arrays) for arrays in at_moves]
    samples = [(twins, exact)]
    samples += [(of_mx_at(*([_narrow(a) for a in arrays] for arrays in at)), m) for at, m in zip(at_moves, moved)]
    of_mx = 2 * max((e for a, b in samples if a for e in map(_relative_error, a, b)), default=0.0)
    of_rounding = [0.0] * len(exact)
    if mode == "vjp" and case.gradient_noise:
        of_rounding = case.gradient_noise(cotangents)
    elif mode == "second order" and case.second_order_noise:
        of_rounding = case.second_order_noise(cotangents, directions)
    tolerances = []
    for i, (value, result) in enumerate(zip(exact, results)):
        errors = [np.abs(to_float64(a[i]) - b[i]) for a, b in samples if a]
        twice_mx_error = 2 * max((error[np.isfinite(error)].max(initial=0) for error in errors), default=0.0)
        absolute = max(twice_mx_error, of_rounding[i], ALLOWED_MOVES * SMALLEST_NORMAL[mx.float32])
        furthest = max(np.nan_to_num(np.abs(m[i] - value)).max(initial=0) for m in moved)
        largest = np.abs(value[np.isfinite(value)]).max(initial=0)
        noise = max(ALLOWED_MOVES * furthest, of_mx * largest, absolute)
        tolerances.append(Tolerance(case.units, noise, whole=True))
        of_moves = ALLOWED_MOVES * max(_relative_error(m[i], value) for m in moved)
        relative, allowed = _relative_error(result, value), max(WORST_GRADIENT[result.dtype], of_mx, of_moves)
        if relative > allowed and _root_mean_square(to_float64(result) - value) > absolute:
            return f"result {i} is off by {relative:.2e}, by root mean squares; allowed {allowed:.2e}"
    return first_difference(results, exact, twins, tolerances)


def _root_mean_square(a: np.ndarray) -> float:
    """Of the numbers that are finite."""
    finite = a[np.isfinite(a)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _relative_error(a: mx.array | np.ndarray, exact: np.ndarray) -> float:
    """The root mean square of the error, relative to the exact numbers'."""
    result = to_float64(a) if isinstance(a, mx.array) else a
    finite = np.isfinite(exact) & np.isfinite(result)
    error, size = (_root_mean_square(v[finite]) for v in (result - exact, exact))
    return error / max(size, 1e-300)


def _moved(a: mx.array, draw: Draw) -> mx.array:
    """Each number off by the rounding of its type, up or down."""
    if a.dtype not in FLOATS:
        return a
    return wide(a) * mx.array(1 + EPSILON[a.dtype] * draw.rng.choice((-0.5, 0.5), a.shape))


def _narrow(a: mx.array) -> mx.array:
    return a.astype(mx.float32) if a.dtype == mx.float64 else a


def _gradients_of_nothing(results: Sequence[mx.array], like: Sequence[mx.array]) -> str | None:
    """Gradients of an op some of whose arguments have no elements: of the right shape, and numbers."""
    for i, (a, b) in enumerate(zip(results, like)):
        if a.shape != b.shape:
            return f"result {i} has the shape {a.shape}, expected {b.shape}"
        if a.size and not np.isfinite(to_float64(a)).all():
            return f"result {i} is not finite"
    return None


def _vmap(case: Case, mode: str, draw: Draw) -> str | None:
    """Some of the arguments are batched, along any axis; the results are as of a loop."""
    count = draw.integer(1, 3)
    axes: list[int | None] = [None] * len(case.arrays)
    batched = list(case.arrays)
    chosen = [i for i in range(len(axes)) if draw.chance(0.6)] or [draw.integer(0, len(axes) - 1)]
    for i in chosen:
        a = case.arrays[i]
        backwards = tuple(slice(None, None, -1) for _ in range(a.ndim))
        others = [a[backwards] if a.ndim and not case.empty and draw.chance(0.5) else a for _ in range(count - 1)]
        axis = 0 if case.empty else draw.integer(0, a.ndim)  # as above: no views of nothing
        batched[i] = mx.stack([a, *others], axis=axis)
        axes[i] = axis - (a.ndim + 1) if draw.chance(0.3) else axis
    before = _fallbacks()
    results = called(mx.vmap(case.ours, in_axes=tuple(axes)), batched)
    hides = case.hides and _fallbacks() == before
    where = f"in_axes={axes}, {count} elements"
    if case.empty:
        expected = [np.stack([value] * count) for value in case.of_nothing()]
        text = first_difference(results, expected, None, _tolerances_of_nothing(case, len(expected)))
        return f"{where}: {text}" if text else None
    elements = [
        [a if axis is None else mx.take(a, i, axis=axis) for a, axis in zip(batched, axes)] for i in range(count)
    ]
    exact = [evaluated(case.exact, [wide(a) for a in arrays]) for arrays in elements]
    twins = [try_evaluate(case.twin, arrays) for arrays in elements]
    stacked = [np.stack([np.array(a) for a in results]) for results in zip(*exact)]
    theirs = None if None in twins else [mx.stack(results) for results in zip(*twins)]
    tolerances = [
        Tolerance(t.units, float(np.max(t.noise, initial=0)), whole=True)
        for t in _tolerances(case, len(stacked), batched=True)
    ]
    text = first_difference(results, stacked, theirs, tolerances, hides)
    return f"{where}: {text}" if text else None
