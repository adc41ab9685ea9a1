"""Random calls of the norms and of softmax."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from verification.fuzz import exact
from verification.fuzz.case import Case
from verification.fuzz.compare import to_float64
from verification.fuzz.draw import Draw, describe, float32, promoted

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON, SMALLEST_NORMAL

EPSILON32 = EPSILON[mx.float32]
EPS = (1e-5, 1e-6, 0.0, 1e-3, 1.0, 1e-12)


def rows_shape(draw: Draw) -> list[int]:
    """A shape of one to five axes, with a length of any size last."""
    shape = [draw.size(draw.limit(4097, 97))]
    for _ in range(draw.pick((0, 1, 1, 1, 2, 2, 3, 4))):
        length = draw.pick(
            (0, 1, 2, 3, 5, 7, 8, 9, 17, 33, 64), (0.02, 0.38, 0.1, 0.1, 0.1, 0.08, 0.06, 0.06, 0.04, 0.03, 0.03)
        )
        if np.prod(np.maximum(shape, 1)) * max(length, 1) > draw.limit(30000, 3000):
            length = 1
        shape.insert(0, length)
    return shape


def _vector(draw: Draw, shape: list[int], dtype: mx.Dtype) -> mx.array:
    """A weight or a bias, of a type that may be another one."""
    return draw.array(draw.numbers(shape[-1:], draw.kind()), draw.dtype_like(dtype))


def rms_norm(draw: Draw) -> Case:
    dtype, shape, kind = draw.dtype(), rows_shape(draw), draw.kind()
    eps, weighted = float32(draw.pick(EPS)), draw.chance(0.8)
    arrays = [draw.array(draw.numbers(shape, kind), dtype)]
    arrays += [_vector(draw, shape, dtype) for _ in range(weighted)]
    return Case(
        describe(arrays, draw, numbers=kind, eps=eps),
        arrays,
        ours=lambda x, weight=None: mm.rms_norm(x, weight, eps),
        twin=lambda x, weight=None: mx.fast.rms_norm(x, weight, eps),
        exact=lambda x, weight=None: exact.rms_norm(x, weight, eps),
        of_nothing=lambda: [np.zeros(shape)],
        differentiable=range(len(arrays)),
        ordinary=kind == "normal",
    )


def layer_norm(draw: Draw) -> Case:
    dtype, shape, kind = draw.dtype(), rows_shape(draw), draw.kind()
    eps, weighted, biased = float32(draw.pick(EPS)), draw.chance(0.75), draw.chance(0.75)
    arrays = [draw.array(draw.numbers(shape, kind), dtype)]
    arrays += [_vector(draw, shape, dtype) for _ in range(weighted + biased)]

    def parts(x: mx.array, *rest: mx.array) -> tuple[mx.array, mx.array | None, mx.array | None]:
        return x, rest[0] if weighted else None, rest[-1] if biased else None

    def twin(*a: mx.array) -> mx.array:
        # Where the squares of a row overflow, its normed numbers are 0; where its sum does too, mx's are NaN.
        x, weight, bias = parts(*a)
        y = mx.fast.layer_norm(x, weight, bias, eps)
        normed_to_zero = mx.zeros_like(y) if bias is None else mx.broadcast_to(bias, y.shape).astype(y.dtype)
        return mx.where(mx.isfinite(y) | ~mx.isfinite(x).all(-1, keepdims=True), y, normed_to_zero)

    def noise() -> list[np.ndarray | float]:
        # x - mean is rounded in float32 at the size of x; the product before the bias may be rounded to the type.
        x, weight, _ = parts(*map(to_float64, arrays))
        centred = x - x.mean(-1, keepdims=True)
        inverse = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
        size = np.abs(centred * inverse) * (1 if weight is None else np.abs(weight))
        shift = np.abs(x).max(-1, keepdims=True) * inverse * (1 if weight is None else np.abs(weight))
        step = EPSILON[promoted(*(a.dtype for a in arrays))]
        total = 4 * EPSILON32 * (size + 4 * shift) + 2 * step * size
        return [np.where(np.isfinite(total), total, 0)]

    return Case(
        describe(arrays, draw, numbers=kind, eps=eps, weight=weighted, bias=biased),
        arrays,
        ours=lambda *a: mm.layer_norm(*parts(*a), eps),
        twin=twin,
        exact=lambda *a: exact.layer_norm(*parts(*a), eps),
        of_nothing=lambda: [np.zeros(shape)],
        differentiable=range(len(arrays)),
        noise=noise,
        ordinary=kind == "normal",
    )


def add_rms_norm(draw: Draw) -> Case:
    dtype, shape, kinds = draw.dtype(), rows_shape(draw), (draw.kind(), draw.kind())
    eps, weighted = float32(draw.pick(EPS)), draw.chance(0.8)
    arrays = [
        draw.array(draw.numbers(shape, kinds[0]), dtype),
        draw.array(draw.numbers(shape, kinds[1]), draw.dtype_like(dtype)),
    ]
    arrays += [_vector(draw, shape, dtype) for _ in range(weighted)]
    sum_dtype = promoted(arrays[0].dtype, arrays[1].dtype)

    def twin(x: mx.array, residual: mx.array, weight: mx.array | None = None) -> tuple[mx.array, mx.array]:
        total = x + residual
        return mx.fast.rms_norm(total, weight, eps), total

    def in_float64(x: mx.array, residual: mx.array, weight: mx.array | None = None) -> tuple[mx.array, mx.array]:
        # What is normed is the sum as it was rounded to its type.
        total = x + residual
        rounded = total.astype(mx.float32).astype(sum_dtype).astype(mx.float64)
        total = total + mx.stop_gradient(mx.where(mx.isfinite(rounded), rounded - total, mx.array(0.0, mx.float64)))
        return exact.rms_norm(total, weight, eps), total

    return Case(
        describe(arrays, draw, numbers=kinds, eps=eps),
        arrays,
        ours=lambda x, residual, weight=None: mm.add_rms_norm(x, residual, weight, eps),
        twin=twin,
        exact=in_float64,
        of_nothing=lambda: [np.zeros(shape), np.zeros(shape)],
        differentiable=range(len(arrays)),
        ordinary=kinds == ("normal", "normal"),
    )


def softmax(draw: Draw) -> Case:
    dtype, shape, kind = draw.dtype(), rows_shape(draw), draw.kind()
    if draw.chance(0.3):
        shape = [shape[-1], *shape[:-1]]
    if draw.chance(0.02):
        shape = []
    x, rank = draw.array(draw.numbers(shape, kind), dtype), len(shape)
    choice = draw.pick(("last", "any", "several", "all"), (0.55, 0.2, 0.15, 0.1)) if rank else "all"
    axis = {
        "last": lambda: draw.pick((-1, rank - 1)),
        "any": lambda: draw.integer(-rank, rank - 1),
        "several": lambda: [int(i) for i in draw.rng.choice(rank, draw.integer(1, rank), replace=False)],
        "all": lambda: None,
    }[choice]()
    precise = draw.chance(0.5)

    def noise() -> list[np.ndarray | float]:
        # An exponential moves by the rounding of its argument; below the smallest normal number there is no precision.
        a, axes = to_float64(x), tuple(axis) if isinstance(axis, list) else axis
        below = a.max(axis=axes, keepdims=True) - a
        y = np.exp(-below)
        y = y / y.sum(axis=axes, keepdims=True)
        total = 2 * EPSILON32 * np.minimum(below, 1e3) * y + SMALLEST_NORMAL[mx.float32]
        return [np.where(np.isfinite(total), total, 0)]

    return Case(
        describe([x], draw, numbers=kind, axis=axis, precise=precise),
        [x],
        ours=lambda a: mm.softmax(a, axis=axis, precise=precise),
        twin=lambda a: mx.softmax(a, axis=axis, precise=True),
        exact=lambda a: exact.softmax(a, axis),
        of_nothing=lambda: [np.zeros(shape)],
        differentiable=[0],
        noise=noise,
        ordinary=kind == "normal",
    )
