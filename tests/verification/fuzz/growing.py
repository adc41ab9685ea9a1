"""mlx-lm's caches from the first prompt on: appends of a patched or a converted model, beside mlx-lm in float32."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from verification.fuzz.compare import to_float64
from verification.fuzz.draw import Draw, float32, type_name
from verification.fuzz.trial import Trial

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.nn import rebinding
from mlx_mittens.specs import EPSILON

STEP = 16  # by which caches grow, in the place of 256
EPS = float32(1e-6)
FIELDS = ("offset", "_idx", "_offset", "rotated", "start_position", "left_padding")
KINDS = ("plain", "plain", "quantized", "chunked", "window", "window", "batch", "batch of windows")


@contextlib.contextmanager
def _small_steps() -> Iterator[None]:
    from mlx_lm.models import cache

    kinds = (
        *(cache.KVCache, cache.QuantizedKVCache, cache.ChunkedKVCache, cache.RotatingKVCache),
        *(cache.BatchKVCache, cache.BatchRotatingKVCache),
    )
    before = [kind.step for kind in kinds]
    try:
        for kind in kinds:
            kind.step = STEP
        yield
    finally:
        for kind, step in zip(kinds, before, strict=True):
            kind.step = step


def _maker(draw: Draw, kind: str, width: int) -> tuple[int, str, Callable[[], Any]]:
    """The rows of a batch, the other draws, and a function that makes a cache."""
    from mlx_lm.models import cache

    most, rows = draw.pick((2, 5, 8, 16, 17, 40)), draw.pick((1, 1, 2, 3))
    if kind == "plain":
        return rows, "", cache.KVCache
    if kind == "quantized":
        group_size, bits = draw.pick([size for size in (32, 64) if width % size == 0]), draw.pick((4, 8))
        return rows, f"{bits} bits in groups of {group_size}", lambda: cache.QuantizedKVCache(group_size, bits)
    if kind == "chunked":
        return rows, f"chunks of {most}", lambda: cache.ChunkedKVCache(most)
    if kind == "window":
        keep = draw.integer(0, most - 1)
        return rows, f"{most} tokens, {keep} of them the first", lambda: cache.RotatingKVCache(most, keep)
    padding = [draw.integer(0, 3) for _ in range(rows)]
    if kind == "batch":
        return rows, f"padding {padding}", lambda: cache.BatchKVCache(padding)
    return rows, f"{most} tokens, padding {padding}", lambda: cache.BatchRotatingKVCache(most, padding)


def _parts(held: Any) -> list[mx.array]:
    return [a for part in held for a in (part if isinstance(part, (tuple, list)) else (part,))]


class _Ours:
    """The functions that a model has under the patch, or converted."""

    def __init__(self, converted: bool):
        self.converted = converted

    def turn(self, x: mx.array, **options: Any) -> mx.array:
        return _ext.try_rope(x, **options) if self.converted else mx.fast.rope(x, **options)

    def norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mm.rms_norm(x, weight, EPS) if self.converted else mx.fast.rms_norm(x, weight, EPS)

    def append(self, made: Any, keys: mx.array, values: mx.array) -> Any:
        if self.converted:
            return rebinding.update_and_fetch(made, keys, values)
        return made.update_and_fetch(keys, values)


def growing_caches(draw: Draw) -> Trial:
    dtype, kind, converted = draw.dtype(), draw.pick(KINDS), draw.chance(0.5)
    query_heads, key_heads, width = draw.pick((1, 2, 4)), draw.pick((1, 2)), draw.pick((32, 64, 64, 96, 128))
    rows, drawn, make = _maker(draw, kind, width)
    dims = width if draw.chance(0.6) else 2 * draw.integer(1, width // 2)
    traditional, normed, base = draw.chance(0.2), draw.chance(0.3), draw.pick((1e4, 5e5))
    count = draw.integer(1, draw.limit(8, 4))
    lengths = [draw.pick((1, 1, 1, 2, 3, 7, 15, 16, 17, 33, draw.limit(100, 20))) for _ in range(count)]
    # The event before each step, and whether it is evaluated at once.
    between = [draw.pick(("", "", "", "", "trim", "copy")) for _ in lengths]
    trims = [draw.integer(1, 20) for _ in lengths]
    all_at_once = draw.chance(0.4)
    evaluates = [all_at_once or draw.chance(0.6) for _ in lengths]
    heads = [
        [draw.normal((rows, n, tokens, width), dtype) for n in (query_heads, key_heads, key_heads)]
        for tokens in lengths
    ]
    weights = [draw.normal([width], dtype) for _ in range(2)] if normed else []
    turn = {"dims": dims, "traditional": traditional, "base": base, "scale": 1.0}

    def run_steps(functions: Any, ours: bool) -> tuple[list[list[mx.array]], Any]:
        made, results = make(), []
        for i, fresh in enumerate(heads):
            if between[i] == "trim" and made.is_trimmable() and not made.empty():
                made.trim(trims[i])
            elif between[i] == "copy":
                made = copy.deepcopy(made)
            if hasattr(made, "maybe_trim_front"):
                made.maybe_trim_front()
            q, k, v = (a * 1 if ours else a.astype(mx.float32) for a in fresh)
            if normed:
                q, k = (functions.norm(x, w if ours else w.astype(mx.float32)) for x, w in zip((q, k), weights))
            q, k = (functions.turn(x, offset=made.offset, **turn) for x in (q, k))
            seen = functions.append(made, k, v)
            # Read as by attention: mlx-lm may give the buffer itself, which a later step changes.
            results.append([q, *(a * 1 for a in _parts(seen))])
            if evaluates[i]:
                mx.eval(results[-1])
        mx.eval(results, _parts((made.keys, made.values)))
        return results, made

    def values_of(results: list[mx.array], made: Any) -> list[np.ndarray]:
        """Arrays in float64; of a quantized cache, its words unpacked."""
        if kind != "quantized":
            return [to_float64(a) for a in results]
        first, rest = results[: len(results) % 3], results[len(results) % 3 :]
        whole = [mx.dequantize(*rest[i : i + 3], made.group_size, made.bits) for i in (0, 3)]
        return [to_float64(a) for a in (*first, *whole)]

    def limits(tokens: int, made: Any) -> tuple[float, float]:
        """Of queries, and of a cache's keys and values."""
        size = max(float(np.abs(to_float64(a)).max(initial=0)) for fresh in heads for a in fresh)
        turned = max(float(np.abs(to_float64(w)).max()) for w in weights) * width**0.5 if normed else size
        turned *= 2**0.5
        # Positions before a row's padding are negative. Half types may round a norm before it is turned.
        error = (EPSILON[mx.float32] * (4 + (tokens + 4) * (3 + np.log(base))) + 4 * EPSILON[dtype]) * turned
        held = error + 4 * EPSILON[dtype] * size
        if kind == "quantized":
            held += 1.1 * 2 * max(size, turned) * 2 / (2**made.bits - 1) + 8 * EPSILON[dtype] * max(size, turned)
        return error, held

    def run() -> str | None:
        with _small_steps():
            theirs, before = run_steps(_Ours(False), False)
            mm.stats(reset=True)
            with contextlib.nullcontext() if converted else mm.patched():
                ours, after = run_steps(_Ours(converted), True)
            op = "quantized_rope_append" if kind == "quantized" else "rope_append"
            appends = sum(mm.stats().get(op, {"kernels": {}})["kernels"].values())
        if all(evaluates) and appends != len(lengths):
            return f"{appends} appends for {len(lengths)} steps"
        for field in FIELDS:
            a, b = (np.array(getattr(made, field, None)) for made in (after, before))
            if not np.array_equal(a, b):
                return f"{field} is {a}, mlx-lm's is {b}"
        of_queries, of_held = limits(sum(lengths), after)
        pairs = [(a, b, f"step {i}") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
        pairs.append((_parts((after.keys, after.values)), _parts((before.keys, before.values)), "the buffers"))
        for found, expected, where in pairs:
            shapes = [[a.shape for a in some] for some in (found, expected)]
            if shapes[0] != shapes[1]:
                return f"{where}: shapes {shapes[0]}, mlx-lm's {shapes[1]}"
            both = zip(values_of(found, after), values_of(expected, before), strict=True)
            for j, (a, b) in enumerate(both):
                limit = of_queries if j == 0 and where != "the buffers" else of_held
                distance = float(np.abs(a - b).max(initial=0))
                if not distance <= limit:
                    return f"{where}, array {j}: {distance:.3g} from mlx-lm's in float32, limit {limit:.3g}"
        return None

    how = "converted" if converted else "patched"
    steps = ", ".join(f"{b} {n}".strip() for b, n in zip(between, lengths))
    text = (
        f"{how} {kind} cache ({drawn}) of {type_name(dtype)}, {rows} rows, {query_heads} and {key_heads} heads of "
        f"{width}, {dims} turned, base {base:g}, traditional {traditional}, norms {normed}; steps {steps}; "
        f"trims {trims}; evaluated {evaluates}; {draw.layouts}"
    )
    return Trial(f"{kind}, {how}", text, run)
