"""Calls with arguments that are wrong in some way: a value, or a ValueError or TypeError, never a signal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from verification.fuzz.draw import FLOATS, Draw, type_name
from verification.fuzz.modes import as_tuple
from verification.fuzz.trial import Trial

import mlx_mittens as mm

DTYPES = (
    mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64, mx.float16, mx.bfloat16,
    mx.float32, mx.float64, mx.complex64,
)  # fmt: skip
INTEGERS = (0, -1, 1, 2, 3, 5, 7, 16, 31, 33, 64, 128, 256, 2**31 - 1, -(2**31), 2**31, 2**62, 2**64)
NUMBERS = (0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-300, 1e300, 1e38, 3.5e38)
OBJECTS: tuple[Any, ...] = (
    None, True, False, *INTEGERS, -(2**63) - 1, 10**30, *NUMBERS, 1.5, -1e-5, "", "causal", "affine", "q4_0", "Q8_0",
    "q4_0\0", "x" * 1000, [], [1.0, 2.0], (1, 2), {}, object(), b"abc", 1j, np.float32(1), np.int64(3),
    np.ones((3, 8), np.float32), np.ones(8), mx.float32, mx.cpu, mx.gpu, mx.array(1.0), mx.array([]), abs, int, ...,
)  # fmt: skip


def _random_array(draw: Draw) -> mx.array:
    shape = [draw.pick((0, 1, 2, 3, 8, 16, 32, 64)) for _ in range(draw.integer(0, 5))]
    while np.prod(shape) > 2**16:
        shape.pop()
    return mx.array(draw.rng.integers(0, 100, shape)).astype(draw.pick(DTYPES))


def _object(draw: Draw) -> Any:
    if draw.chance(0.8):
        return draw.pick(OBJECTS)
    return draw.pick((_random_array, lambda d: [_random_array(d)], lambda d: (_random_array(d),) * 3))(draw)


def right_calls(dtype: mx.Dtype) -> dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]]:
    """A right call of each op: its arguments by position and by name."""

    def array(*shape: int) -> mx.array:
        return mx.ones(shape, dtype)

    def quantized(*shape: int, bits: int) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(array(*shape), group_size=32, bits=bits))

    def matmul() -> tuple[list[Any], dict[str, Any]]:
        words, scales, biases = quantized(8, 64, bits=4)
        more = {"transpose": True, "group_size": 32, "bits": 4, "mode": "affine", "bias": array(8)}
        return [array(2, 64), words], {"scales": scales, "biases": biases, **more}

    def chosen(*arrays: Any, **more: Any) -> tuple[list[Any], dict[str, Any]]:
        return list(arrays), {"rhs_indices": mx.array([[0, 1]]), "sorted_indices": False, **more}

    q, kv = (1, 4, 3, 64), (1, 2, 8, 64)
    steps = (1, 3, 2)  # of a batch and heads
    norms = {"query_norm": array(8), "key_norm": array(8), "eps": 1e-6}
    return {
        "rms_norm": lambda: ([array(3, 8), array(8), 1e-5], {}),
        "layer_norm": lambda: ([array(3, 8), array(8), array(8), 1e-5], {}),
        "add_rms_norm": lambda: ([array(3, 8), array(3, 8), array(8), 1e-5], {}),
        "softmax": lambda: ([array(3, 8)], {"axis": -1, "precise": True}),
        "sample": lambda: (
            [array(3, 8), mx.random.key(0)],
            {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "logprobs": True},
        ),
        "matmul": lambda: ([array(2, 16), array(8, 16), array(8)], {"transpose": True}),
        "gemv": lambda: ([array(8, 16), array(2, 16), array(8)], {"transpose": True}),
        "quantized_matmul": matmul,
        "quantized_swiglu": lambda: ([array(2, 64), *(quantized(8, 64, bits=4) for _ in range(2)), 32, 4], {}),
        "block_matmul": lambda: ([array(2, 64), mx.zeros((8, 36), mx.uint8), "q4_0", array(8)], {}),
        "block_masked_mm": lambda: (
            [array(2, 64), array(64, 40), 32, array(1, 2), array(1, 2), array(2, 2)],
            {},
        ),
        "block_quantize": lambda: ([array(2, 64), "q8_0"], {}),
        "block_dequantize": lambda: ([mx.zeros((2, 36), mx.uint8), "q4_0", dtype], {}),
        "scaled_dot_product_attention": lambda: (
            [array(*q), array(*kv), array(*kv)],
            {"scale": 0.125, "mask": mx.zeros((3, 8), dtype), "sinks": array(4), "window": 4},
        ),
        "quantized_scaled_dot_product_attention": lambda: (
            [array(*q), quantized(*kv, bits=8), quantized(*kv, bits=8), 0.125, None, 32, 8],
            {"sinks": array(4), "window": 4},
        ),
        "cascade_attention": lambda: (
            [array(*q), array(*kv), array(*kv), array(1, *kv[1:]), array(1, *kv[1:])],
            {"scale": 0.125, "mask": mx.zeros((3, 8), dtype), "sinks": array(4)},
        ),
        "paged_attention": lambda: (
            [
                *(array(*q), array(3, q[1], 16, q[3]), array(3, q[1], 16, q[3])),
                *(mx.zeros((q[0], 2), mx.int32), mx.zeros((q[0],), mx.int32)),
            ],
            {"scale": 0.125, "sinks": array(4), "window": 4},
        ),
        "paged_append": lambda: (
            [
                *(array(2, 2, 1, 8), array(2, 2, 1, 8), array(3, 2, 16, 8), array(3, 2, 16, 8)),
                *(mx.array([[0], [1]]), mx.zeros((2,), mx.int32)),
            ],
            {},
        ),
        "index_scores": lambda: ([array(2, 3, 1, 64), array(2, 5, 64), array(2, 1, 3)], {"scale": 0.125}),
        "take_tokens": lambda: ([array(2, 3, 5, 8), array(2, 3, 5, 4), mx.zeros((2, 1, 3), mx.int32)], {}),
        "rope_append": lambda: (
            [array(1, 6, 2, 8), array(1, 2, 9, 8), array(1, 2, 9, 8), 8],
            {"base": 1e4, "offset": 3, "scale": 1.0, "start": 3, "traditional": True, **norms},
        ),
        "quantized_rope_append": lambda: (
            [array(1, 6, 2, 32), *(quantized(1, 2, 9, 32, bits=4) for _ in range(2)), 8],
            {"base": 1e4, "offset": 3, "start": 3, "group_size": 32, "bits": 4},
        ),
        "norm_add_norm": lambda: (
            [array(3, 8), array(3, 8), array(8), array(8), 1e-5],
            {"weight_offset": 1.0, "next_weight_offset": 1.0},
        ),
        "qk_norm": lambda: ([array(1, 2, 3, 8), array(1, 1, 3, 8), array(8), array(8), 1e-5], {"weight_offset": 1.0}),
        "softcap": lambda: ([array(3, 8), 30.0], {}),
        "gather_qmm": lambda: chosen(array(1, 2, 64), *quantized(3, 8, 64, bits=4), group_size=32, bits=4),
        "gather_mm": lambda: chosen(array(1, 2, 8), array(3, 8, 5)),
        "gather_swiglu": lambda: chosen(
            array(1, 2, 64), *(quantized(3, 8, 64, bits=4) for _ in range(2)), group_size=32, bits=4
        ),
        "gather_sum": lambda: (
            [array(1, 2, 64), *quantized(3, 8, 64, bits=4), mx.array([[0, 1]]), array(1, 2)],
            {"bias": array(3, 8), "group_size": 32, "bits": 4},
        ),
        "quantized_embedding": lambda: (
            [mx.array([[0, 3]]), *quantized(8, 64, bits=4)],
            {"group_size": 32, "bits": 4, "mode": "affine"},
        ),
        "quantized_matmuls": lambda: (
            [array(1, 64), [quantized(n, 64, bits=4) for n in (8, 5)]],
            {"group_size": 32, "bits": 4, "bias": [array(8), array(5)]},
        ),
        "mixture": lambda: (
            [
                *(array(1, 64), array(1, 3), 2),
                *(quantized(*shape, bits=4) for shape in ((3, 32, 64), (3, 32, 64), (3, 64, 32))),
                *(quantized(*shape, bits=4) for shape in ((32, 64), (32, 64), (64, 32))),
                array(1, 1),
            ],
            {
                "group_size": 32,
                "bits": 4,
                "router_bias": array(3),
                "renormalize": True,
                "scale": 1.0,
                "eps": 1e-20,
                "groups": (1, 1),
                "dropped": 0.0,
                "bias": [array(3, 32), array(3, 32), array(3, 64)],
            },
        ),
        "route_top_k": lambda: (
            [array(3, 8), 2, array(8), "sigmoid"],
            {
                **{"renormalize": True, "descending": True, "scale": 1.0, "precise": True, "eps": 1e-6},
                **{"groups": (2, 1), "dropped": 0.0},
            },
        ),
        "gated_delta_update": lambda: (
            [*(array(*steps, 8) for _ in range(3)), *(array(*steps) for _ in range(2)), array(1, 2, 8, 8)],
            {"mask": mx.ones((1, 3), mx.bool_)},
        ),
        "gated_delta_inputs": lambda: (
            [
                *(array(2, 3, 1, 8), array(2, 3, 1, 8), array(2, 3, 1, 2, 8), array(2, 3, 1, 2), array(2, 3, 1, 2)),
                *(array(2, 3, 32), array(32, 4), array(2), array(2)),
            ],
            {"mask": mx.ones((2, 3), mx.bool_), "lengths": mx.array([1, 2]), "key_eps": 1e-6},
        ),
        "gated_delta_token": lambda: (
            [
                *(array(2, 1, 8), array(2, 1, 8), array(2, 1, 2, 8), array(2, 1, 2, 8), array(2, 1, 2)),
                *(array(2, 1, 2), array(2, 3, 32), array(32, 4), array(2), array(2), array(8), array(2, 2, 8, 8)),
            ],
            {"eps": 1e-6, "key_eps": 1e-6, "gate": "sigmoid"},
        ),
        "short_conv_token": lambda: ([array(2, 24), array(2, 2, 8), array(8, 3), array(8)], {}),
        "ssm_inputs": lambda: (
            [array(2, 3, 32), array(2, 3, 32), array(32, 4), array(32)],
            {"inner": 16, "mask": mx.ones((2, 3), mx.bool_), "lengths": mx.array([1, 2])},
        ),
        "ssm_token": lambda: (
            [
                *(array(2, 50), array(2, 3, 32), array(32, 4), array(32), array(2), array(2), array(2)),
                array(2, 2, 8, 8),
            ],
            {"time_step_limit": (0.001, 100.0), "gated": True},
        ),
        "ssm_update": lambda: (
            [array(*steps, 8), array(2), *(array(*steps, 8) for _ in range(2)), array(2), array(*steps), array(2)],
            {"state": array(1, 2, 8, 8), "time_step_limit": (0.001, 100.0), "mask": mx.ones((1, 3), mx.bool_)},
        ),
    }


def _other_array(draw: Draw, a: mx.array) -> mx.array:
    """An array of another type, shape or rank."""
    change = draw.pick(("type", "length", "one more axis", "one axis less", "nothing", "some ones"))
    if change == "type":
        return a.astype(draw.pick(DTYPES))
    if change == "one more axis":
        return mx.expand_dims(a, draw.integer(0, a.ndim))
    if change == "one axis less":
        return a[0] if a.ndim and a.shape[0] else a
    if change == "nothing":
        return mx.zeros([0] * a.ndim, a.dtype)
    shape = list(a.shape)
    if change == "some ones":
        return mx.zeros([draw.pick((1, n)) for n in shape], a.dtype)
    if shape:
        axis = draw.integer(0, len(shape) - 1)
        n = shape[axis]
        shape[axis] = draw.pick((n + 1, max(n - 1, 0), n * 2, 0, 1))
    return mx.zeros(shape, a.dtype)


def _changed(draw: Draw, value: Any) -> Any:
    if isinstance(value, mx.array) and draw.chance(0.6):
        return _other_array(draw, value)
    if isinstance(value, tuple) and value and draw.chance(0.7):
        parts = list(value)
        if draw.chance(0.2):
            parts.pop()
        elif draw.chance(0.1):
            parts.append(parts[0])
        else:
            place = draw.integer(0, len(parts) - 1)
            parts[place] = _changed(draw, parts[place])
        return tuple(parts) if draw.chance(0.9) else parts
    if isinstance(value, bool):
        return _object(draw)
    if isinstance(value, int) and draw.chance(0.6):
        return draw.pick(INTEGERS)
    if isinstance(value, float) and draw.chance(0.6):
        return draw.pick(NUMBERS)
    return _object(draw)


def _shown(value: Any) -> str:
    if isinstance(value, mx.array):
        return f"{type_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return repr(value)[:40]


def bad_input(draw: Draw) -> Trial:
    """A right call with one to three of its arguments changed."""
    calls = right_calls(draw.pick(FLOATS))
    op = draw.pick(list(calls))
    arguments, options = calls[op]()
    for _ in range(draw.pick((1, 1, 1, 2, 3))):
        if options and draw.chance(0.45):
            name = draw.pick(list(options))
            options[name] = _changed(draw, options[name])
        elif draw.chance(0.03):
            options[draw.pick(("stream", "unknown", "eps", "x", "w"))] = _object(draw)
        elif arguments and draw.chance(0.05):
            arguments.pop()
        elif arguments:
            place = draw.integer(0, len(arguments) - 1)
            arguments[place] = _changed(draw, arguments[place])
    named = [f"{name}={_shown(value)}" for name, value in options.items()]

    def run() -> str | None:
        try:
            mx.eval(*as_tuple(getattr(mm, op)(*arguments, **options)))
        except (ValueError, TypeError):
            return None
        return None

    return Trial(op, f"{op}({', '.join([*map(_shown, arguments), *named])})", run)
