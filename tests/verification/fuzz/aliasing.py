"""Caches that rope_append updates in place: no other array that shares their memory ever changes."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from helpers.tolerances import SUM
from verification.fuzz.draw import Draw
from verification.fuzz.trial import Trial

import mlx_mittens as mm
from mlx_mittens.specs import reference

WIDTH, CAPACITY, QUERY_HEADS, BASE = 8, 12, 2, 1e4

# Ways to refer to a cache, each as an operation that mx and numpy both know.
ALIASES: dict[str, Callable[..., object]] = {
    "slice": lambda a: a[:, :, :4],
    "middle": lambda a: a[:, :, 2:9],
    "steps": lambda a: a[..., ::2],
    "sum": lambda a: a.sum(axis=2),
    "itself": lambda a: a,
    "transposed": lambda a: a.transpose(0, 2, 1, 3),
    "reshaped": lambda a: a.reshape(-1, WIDTH),
    "one more axis": lambda a: a[None],
}
# And buffers that only mx knows, whose numbers are the cache's.
COPIES: dict[str, Callable[[mx.array], object]] = {
    "contiguous": mx.contiguous,
    "cast to its type": lambda a: a.astype(mx.float32),
    "stop_gradient": mx.stop_gradient,
    "mx.array": mx.array,
    "numpy without a copy": lambda a: np.array(a, copy=False),
    "memoryview": memoryview,
}


class _Cache:
    """Keys or values, and their numbers in numpy."""

    def __init__(self, draw: Draw, key_heads: int):
        self.expected = draw.rng.standard_normal((1, key_heads, CAPACITY, WIDTH)).astype(np.float32)
        self.array = mx.array(self.expected)

    def alias(self, kind: str) -> tuple[str, object, np.ndarray]:
        if kind in ALIASES:
            return kind, ALIASES[kind](self.array), np.array(ALIASES[kind](self.expected))
        mx.eval(self.array)
        return kind, COPIES[kind](self.array), self.expected.copy()

    def append(self, array: mx.array, new: np.ndarray, position: int) -> None:
        self.expected = self.expected.copy()
        self.expected[:, :, position : position + new.shape[2]] = new
        self.array = array


def aliasing(draw: Draw) -> Trial:
    """Some steps of a cache, between them arrays that share its memory, evaluated now or later."""
    key_heads, tokens, steps = draw.pick((1, 2)), draw.pick((1, 1, 2)), draw.integer(1, 5)

    def run() -> str | None:
        keys, values = _Cache(draw, key_heads), _Cache(draw, key_heads)
        aliases: list[tuple[str, object, np.ndarray]] = []
        if draw.chance(0.7):
            mx.eval(keys.array, values.array)
        for step in range(steps):
            position = step * tokens
            for _ in range(draw.integer(0, 2)):
                kind = draw.pick([*ALIASES, *COPIES])
                aliases.append(draw.pick((keys, values)).alias(kind))
                if isinstance(aliases[-1][1], mx.array) and draw.chance(0.4):
                    mx.eval(aliases[-1][1])
            if draw.chance(0.3):
                aliases += [("the cache before", c.array, c.expected) for c in (keys, values)]
            heads = draw.rng.standard_normal((1, QUERY_HEADS + 2 * key_heads, tokens, WIDTH)).astype(np.float32)
            _, new_keys, new_values = np.split(heads, [QUERY_HEADS, QUERY_HEADS + key_heads], axis=1)
            queries, *caches = mm.rope_append(
                mx.array(heads), keys.array, values.array, WIDTH, base=BASE, offset=position, start=position
            )
            keys.append(caches[0], reference.rope(new_keys, WIDTH, BASE, position)[0], position)
            values.append(caches[1], new_values, position)
            del caches
            after = draw.pick(("queries", "caches later", "caches", "nothing"), (0.3, 0.2, 0.1, 0.4))
            if after == "queries":
                mx.eval(queries)
            elif after != "nothing":
                (mx.eval if after == "caches" else mx.async_eval)(keys.array, values.array)
        draw.rng.shuffle(aliases)
        aliases += [("the keys", keys.array, keys.expected), ("the values", values.array, values.expected)]
        for kind, array, expected in aliases:
            if not np.allclose(np.array(array), expected, rtol=0, atol=2 * SUM):
                return f"an alias changed: {kind}"
        return None

    return Trial(f"{steps} steps", f"{key_heads} heads, {tokens} tokens a step", run)
