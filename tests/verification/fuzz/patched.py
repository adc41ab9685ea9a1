"""Wrong calls of the functions that the patch replaces: the same value, or the same error, as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from helpers.tolerances import LAYERS, SUMS
from verification.fuzz.draw import Draw
from verification.fuzz.trial import Trial

import mlx_mittens as mm

FUNCTIONS = {
    "rms_norm": (mx.fast, "rms_norm"),
    "layer_norm": (mx.fast, "layer_norm"),
    "scaled_dot_product_attention": (mx.fast, "scaled_dot_product_attention"),
    "softmax": (mx, "softmax"),
    "quantized_matmul": (mx, "quantized_matmul"),
}
ORIGINALS = {name: getattr(*place) for name, place in FUNCTIONS.items()}


def is_undone() -> bool:
    """Whether all functions are MLX's own."""
    return all(getattr(*place) is ORIGINALS[name] for name, place in FUNCTIONS.items())


def _right_calls() -> tuple[dict[str, tuple[list[Any], dict[str, Any]]], list[Any]]:
    """A right call of each function, and substitutes for its arguments."""
    x, weight, q = mx.ones((3, 64)), mx.ones((64,)), mx.ones((1, 2, 3, 64))
    words, scales, biases = mx.quantize(mx.ones((8, 64)), group_size=32, bits=4)
    calls = {
        "rms_norm": ([x, weight, 1e-5], {}),
        "layer_norm": ([x, weight, weight, 1e-5], {}),
        "scaled_dot_product_attention": ([q, q, q], {"scale": 0.1, "mask": None}),
        "softmax": ([x], {"axis": -1}),
        "quantized_matmul": (
            [x, words],
            {"scales": scales, "biases": biases, "transpose": True, "group_size": 32, "bits": 4},
        ),
    }
    objects = [None, 1, -1, 2**40, 1.5, float("nan"), "x", [1.0], (1,), {}, object()]
    return calls, objects + [x, weight, q, words, scales, mx.ones((2, 2), mx.complex64), mx.ones((3, 63)), mx.array(3)]


def _outcome(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any]) -> mx.array | Exception:
    try:
        result = function(*arguments, **options)
        mx.eval(result)
        return result
    except Exception as error:
        return error


def _difference(ours: mx.array | Exception, theirs: mx.array | Exception) -> str | None:
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        same = type(ours) is type(theirs)
        return None if same else f"patched: {ours!r:.200}, mx: {theirs!r:.200}"
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"patched: {ours.shape} {ours.dtype}, mx: {theirs.shape} {theirs.dtype}"
    if not mx.allclose(ours, theirs, rtol=LAYERS, atol=SUMS, equal_nan=True).item():
        return "the values differ"
    return None


def patched_errors(draw: Draw) -> Trial:
    calls, objects = _right_calls()
    name = draw.pick(list(calls))
    arguments, options = calls[name]
    changes = []
    for _ in range(draw.pick((1, 1, 2))):
        place: int | str = draw.integer(0, len(arguments) - 1)
        if options and draw.chance(0.5):
            place = draw.pick([*options, "stream", "unknown", "mask", "sinks"])
        value = draw.pick(objects)
        (arguments if isinstance(place, int) else options)[place] = value
        changes.append(f"{place}: {str(value.shape) if isinstance(value, mx.array) else repr(value):.40}")

    def run() -> str | None:
        original = _outcome(ORIGINALS[name], arguments, options)
        with mm.patched():
            ours = _outcome(getattr(*FUNCTIONS[name]), arguments, options)
        return _difference(ours, original) if is_undone() else "the patch was not undone"

    return Trial(name, f"{name} with {', '.join(changes)}", run)
