"""The ops and their gradients in float64 numpy: the reference of every executor.

Inputs are arrays of any float type and are widened first; nothing is rounded on the way, so a result's distance from
these is its whole error. Gradients follow the formulas written by hand, not an automatic derivation of the forward
code. Each ``*_vjp`` takes the op's arguments, then the cotangents of its outputs, and returns one gradient for each
array argument (``None`` for an absent one). With ``magnitude=True`` it gives, instead, how large the terms are whose
sum a gradient is: where they cancel, an error is measured by their size and not by the gradient's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import ArrayLike

Axis = int | Sequence[int] | None


@overload
def _widen(a: ArrayLike) -> np.ndarray: ...
@overload
def _widen(a: None) -> None: ...
def _widen(a: ArrayLike | None) -> np.ndarray | None:
    return None if a is None else np.asarray(a, dtype=np.float64)


def _over_rows(a: np.ndarray, magnitude: bool = False, inner: np.ndarray | float = 0.0) -> np.ndarray:
    """Sums over all axes but the last: the gradient of an array that was broadcast over rows.

    With magnitude, the size of a sum of `inner`, the numbers that the terms were computed from. Where they cancel, the
    terms may hold nothing but their rounding.
    """
    if magnitude:
        return np.sqrt(_over_rows(np.broadcast_to(inner, a.shape) ** 2))
    return a.reshape(-1, a.shape[-1]).sum(axis=0) if a.size else np.zeros(a.shape[-1])


def _mean(a: np.ndarray) -> np.ndarray:
    return a.sum(axis=-1, keepdims=True) / max(a.shape[-1], 1)


def _sum(*terms: np.ndarray, magnitude: bool) -> np.ndarray:
    return sum((np.abs(term) if magnitude else term for term in terms), start=np.zeros(()))


def rms_norm(x, weight, eps: float, weight_offset: float = 0.0) -> np.ndarray:
    x, weight = _widen(x), _widen(weight)
    y = x / np.sqrt(_mean(x * x) + eps)
    return y if weight is None else y * (weight + weight_offset)


def rms_norm_vjp(x, weight, dy, eps: float, weight_offset: float = 0.0, magnitude: bool = False, rounded: bool = False):
    x, weight, dy = _widen(x), _widen(weight), _widen(dy)
    n = 1 / np.sqrt(_mean(x * x) + eps)
    g = dy if weight is None else dy * (weight + weight_offset)
    dx = _sum(n * g, -x * n**3 * _mean(g * x), magnitude=magnitude)
    terms = dy * x * n
    return dx, None if weight is None else _over_rows(terms, magnitude, terms if rounded else 0.0)


def layer_norm(x, weight, bias, eps: float) -> np.ndarray:
    x, weight, bias = _widen(x), _widen(weight), _widen(bias)
    centred = x - _mean(x)
    y = centred / np.sqrt(_mean(centred * centred) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def layer_norm_vjp(x, weight, bias, dy, eps: float, magnitude: bool = False):
    x, weight, dy = _widen(x), _widen(weight), _widen(dy)
    centred = x - _mean(x)
    n = 1 / np.sqrt(_mean(centred * centred) + eps)
    y = centred * n
    g = dy if weight is None else dy * weight
    dx = n * _sum(g, -_mean(g), -y * _mean(g * y), magnitude=magnitude)
    # Of a row that hardly varies nothing but rounding is left of x - mean: x, not y, says how much.
    dweight = None if weight is None else _over_rows(dy * y, magnitude, dy * x * n)
    return dx, dweight, None if bias is None else _over_rows(dy, magnitude)


def softmax(a, axis: Axis = None) -> np.ndarray:
    a = _widen(a)
    if a.size == 0:
        return a.copy()
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    e = np.exp(a - a.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def softmax_vjp(a, dy, axis: Axis = None, magnitude: bool = False, smallest: float = 0.0):
    dy = _widen(dy)
    y = softmax(a, axis)
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    mean = (y * dy).sum(axis=axis, keepdims=True)
    if not magnitude:
        return (y * (dy - mean),)
    # y comes rounded, in steps that shrink no more below the smallest normal number; all of them move the mean.
    size = np.maximum(y, smallest)
    moved = np.sqrt(((size * (dy - mean)) ** 2).sum(axis=axis, keepdims=True))
    return (size * _sum(dy, -mean, moved, magnitude=True),)


def add_rms_norm(x, residual, weight, eps: float, weight_offset: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    total = _widen(x) + _widen(residual)
    return rms_norm(total, weight, eps, weight_offset), total


def add_rms_norm_vjp(
    x, residual, weight, dnormed, dtotal, eps: float, weight_offset: float = 0.0, magnitude: bool = False
):
    # The norm is of a sum that was rounded to the inputs' type.
    total = _widen(x) + _widen(residual)
    dx, dweight = rms_norm_vjp(total, weight, dnormed, eps, weight_offset, magnitude, rounded=True)
    dx = _sum(dx, _widen(dtotal), magnitude=magnitude)
    return dx, dx, dweight


def norm_add_norm(
    x,
    residual,
    weight,
    next_weight,
    eps: float,
    weight_offset: float = 0.0,
    next_weight_offset: float = 0.0,
    clip_sum: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    # Sums of the cases are within the range of float16; tests/unit/norm/test_clipped_sums.py has others.
    return add_rms_norm(rms_norm(x, weight, eps, weight_offset), residual, next_weight, eps, next_weight_offset)


def norm_add_norm_vjp(
    x,
    residual,
    weight,
    next_weight,
    dnormed,
    dtotal,
    eps: float,
    weight_offset: float = 0.0,
    next_weight_offset: float = 0.0,
    clip_sum: bool = False,
    magnitude: bool = False,
):
    x, first = _widen(x), rms_norm(x, weight, eps, weight_offset)
    dtotal, _, dnext = add_rms_norm_vjp(
        first, residual, next_weight, dnormed, dtotal, eps, next_weight_offset, magnitude
    )
    # The gradient through the sum is as large as the sum's terms, even where these cancel.
    if magnitude:
        n = 1 / np.sqrt(_mean(x * x) + eps)
        g = dtotal if weight is None else dtotal * np.abs(_widen(weight) + weight_offset)
        dx = n * g + np.abs(x) * n**3 * _mean(g * np.abs(x))
        return dx, dtotal, None if weight is None else _over_rows(dtotal, True, dtotal * np.abs(x) * n), dnext
    dx, dweight = rms_norm_vjp(x, weight, dtotal, eps, weight_offset)
    return dx, dtotal, dweight, dnext


def qk_norm(
    queries, keys, query_weight, key_weight, eps: float, weight_offset: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    return rms_norm(queries, query_weight, eps, weight_offset), rms_norm(keys, key_weight, eps, weight_offset)


def qk_norm_vjp(
    queries,
    keys,
    query_weight,
    key_weight,
    dqueries,
    dkeys,
    eps: float,
    weight_offset: float = 0.0,
    magnitude: bool = False,
):
    of_queries = rms_norm_vjp(queries, query_weight, dqueries, eps, weight_offset, magnitude)
    of_keys = rms_norm_vjp(keys, key_weight, dkeys, eps, weight_offset, magnitude)
    return of_queries[0], of_keys[0], of_queries[1], of_keys[1]


def softcap(logits, cap: float) -> np.ndarray:
    return cap * np.tanh(_widen(logits) / cap)


def softcap_vjp(logits, dy, cap: float, magnitude: bool = False):
    dy = _widen(dy)
    squared = np.tanh(_widen(logits) / cap) ** 2
    return (_sum(dy, -dy * squared, magnitude=magnitude),)


def _integers(words: np.ndarray, bits: int) -> np.ndarray:
    """Integers one after another in words of 32 bits, the first in the lowest ones."""
    if 32 % bits == 0:
        integers = (words[..., None] >> (np.arange(32 // bits, dtype=np.uint32) * bits)) & (2**bits - 1)
        return integers.reshape(*words.shape[:-1], -1)
    ones = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return (ones.reshape(*words.shape[:-1], -1, bits) << np.arange(bits, dtype=np.uint8)).sum(-1)


def small_floats(bits: np.ndarray, exponent_bits: int, fraction_bits: int) -> np.ndarray:
    """Floats of a sign, an exponent and a fraction, without infinities; of 8 bits the largest is no number."""
    fraction = (bits & (2**fraction_bits - 1)) / 2.0**fraction_bits
    exponent = (bits >> fraction_bits & (2**exponent_bits - 1)).astype(int)
    least = 2 - 2 ** (exponent_bits - 1)
    size = np.where(exponent == 0, np.ldexp(fraction, least), np.ldexp(1 + fraction, least + exponent - 1))
    if fraction_bits == 3:
        size = np.where((bits & 0x7F) == 0x7F, np.nan, size)
    return np.where(bits >> (exponent_bits + fraction_bits) & 1, -size, size)


def dequantize(words: np.ndarray, scales, biases, group_size: int, bits: int, mode: str = "affine") -> np.ndarray:
    """The numbers that `mx.quantize` packed, in float64; modes but affine have no biases."""
    values = _integers(words, bits)
    if mode != "affine":
        scales = np.array(scales)
        powers = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
        scales = small_floats(scales, 4, 3) if mode == "nvfp4" else powers
        values = small_floats(values, *((4, 3) if bits == 8 else (2, 1)))
    values = values.reshape(*words.shape[:-1], -1, group_size)
    with np.errstate(invalid="ignore"):  # NaN from infinities is an answer like any other
        rows = values * _widen(scales)[..., None]
        rows = rows if biases is None else rows + _widen(biases)[..., None]
    return rows.reshape(*words.shape[:-1], -1)


def rope(
    x, dims: int, base: float | None, offset: int, freqs=None, traditional: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotary embedding of ``x``, [..., tokens, width]. Traditional pairs are neighbours.

    Also gives the size of each element's terms, and how far the rounding of its angle moves it. An angle is a product
    of float32 numbers; one may be an exponential.
    """
    x, freqs = _widen(x), _widen(freqs)
    pairs = dims // 2
    exponents = np.zeros(pairs) if base is None else np.log(base) * np.arange(pairs) / pairs
    frequencies = 1 / freqs if base is None else np.exp(-exponents)
    angles = (offset + np.arange(x.shape[-2]))[:, None] * frequencies
    c, s = np.cos(angles), np.sin(angles)
    low, high = (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (slice(0, pairs), slice(pairs, dims))
    a, b = x[..., low], x[..., high]
    moved = np.abs(angles) * (1 + exponents) * np.hypot(a, b)
    y, terms, inner = x.copy(), np.abs(x), np.zeros_like(x)
    y[..., low], y[..., high] = a * c - b * s, a * s + b * c
    terms[..., low], terms[..., high] = np.abs(a * c) + np.abs(b * s), np.abs(a * s) + np.abs(b * c)
    inner[..., low] = inner[..., high] = moved
    return y, terms, inner
