"""Random calls of sample: a token has to be one that the filters keep, and the largest with its noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from verification.fuzz.compare import LARGEST, to_float64
from verification.fuzz.draw import Draw, describe
from verification.fuzz.trial import Trial

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON
from mlx_mittens.specs.sampling import PENALTIES, adjusted, first_largest, gumbel, kept

EPSILON32 = EPSILON[mx.float32]
MODES = {"forward": 0.5, "compiled": 0.15, "state": 0.15, "vmap": 0.2}

# How far the share of a logit may be from float64: sums of up to 2^20 rounded exponentials.
SHARE = 1e-5


def _options(draw: Draw) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": draw.pick((0.0, 1.0, 0.7, 0.1, 2.5, 100.0), (3, 4, 3, 1, 2, 1))}
    if draw.chance(0.4):
        options["top_k"] = draw.pick((1, 2, 5, 40, 500, draw.integer(1, 5000)))
    if draw.chance(0.4):
        options["top_p"] = draw.pick((0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 1.0, float(draw.rng.random())))
    if draw.chance(0.3):
        options["min_p"] = draw.pick((0.0, 1e-9, 0.01, 0.1, 0.9, 1.0, float(draw.rng.random())))
    return options


def _adjustments(draw: Draw, shape: list[int]) -> tuple[dict[str, mx.array], dict[str, float]]:
    """Arrays of penalties and masks for logits of a shape, each with the same first dimension, and numbers."""
    lead, columns = shape[:-1], shape[-1]
    arrays, numbers = {}, {}
    if draw.chance(0.5):
        words = draw.rng.integers(0, 2**32, (*lead, -(-columns // 32)), dtype=np.uint32)
        few = draw.rng.integers(0, 2**32, words.shape, dtype=np.uint32)
        mask = draw.pick((words, words & few & np.roll(few, 1), words | few, np.zeros_like(words)), (4, 3, 3, 1))
        arrays["mask"] = mx.array(mask.view(draw.pick((np.uint32, np.int32))))
    if draw.chance(0.6):
        count = draw.pick((0, 1, 3, 20, 300), (1, 2, 4, 8, 2))
        tokens = draw.rng.integers(0, draw.pick((columns, min(columns, 8))), (*lead, count))
        outside = draw.rng.choice([-1, columns, -(2**31), 2**31 - 1], tokens.shape)
        tokens = np.where(draw.rng.random(tokens.shape) < draw.pick((0.0, 0.2, 1.0), (3, 5, 1)), outside, tokens)
        arrays["tokens"] = mx.array(tokens.astype(draw.pick((np.int32, np.int64))))
        for name in PENALTIES:
            choices = (0.0, 1.0, 1.3, 0.5) if name == "repetition_penalty" else (0.0, 0.5, -0.7, 2.0)
            if draw.chance(0.3):
                arrays[name] = mx.array(draw.rng.choice(choices, lead).astype(np.float32))
            elif draw.chance(0.6):
                numbers[name] = draw.pick(choices)
    return arrays, numbers


def _shape(draw: Draw) -> list[int]:
    """Rows of one threadgroup mostly, and some that several share."""
    columns = max(draw.size(draw.limit(4097, 513)), 1)
    if draw.chance(draw.limit(15, 8) / 100):
        columns = draw.integer(4096, draw.limit(160_000, 10_000))
    if columns > 4097:
        return [1, columns]
    shape = [columns]
    for _ in range(draw.pick((0, 1, 1, 2, 3))):
        length = draw.pick((0, 1, 2, 3, 7, 9), (0.03, 0.5, 0.2, 0.1, 0.1, 0.07))
        shape.insert(0, length if math.prod(shape) * length <= draw.limit(30_000, 3000) else 1)
    return shape


def _wrong_row(
    x: np.ndarray, dtype: mx.Dtype, noise: np.ndarray, options: dict[str, Any], token: int, logprob: float | None
) -> str | None:
    """The fault in the token of one row of logits in float64, or None."""
    if not 0 <= token < x.size:
        return f"token {token} of {x.size}"
    x = np.where(np.isnan(x), -np.inf, x)
    if logprob is not None:
        largest = x.max()
        total = largest + np.log(np.exp(x - largest).sum()) if np.isfinite(largest) else np.nan
        exact = x[token] - total
        of_mx = abs(mx.logsumexp(mx.array(x.astype(np.float32))).item() - total)  # which batched calls are composed of
        allowed = max(8 * EPSILON32 * (abs(exact) + abs(largest) + 16), 2 * np.nan_to_num(of_mx))
        if np.isnan(exact) != np.isnan(logprob) or abs(logprob - exact) > allowed:
            return f"logprob {logprob}, exact {exact}"
    temperature = options["temperature"]
    if temperature == 0 or np.isinf(x.max()):
        expected = int(first_largest(x[None])[0])
        return None if token == expected else f"token {token}, the first of the largest is {expected}"
    # Where the sum of exponentials comes near top_p, rounding decides which logits are kept.
    top_p = options.get("top_p", 0.0)
    near = lambda change: {**options, "top_p": min(max(top_p * (1 + change) + change, 1e-300), 1)} if top_p else options
    certain, possible = (kept(x[None], dtype, near(change))[0] for change in (-SHARE, SHARE))
    if not possible[token]:
        return f"token {token}, whose logit is {x[token]}, is not kept"
    scaled = x * np.float64(np.float32(1 / temperature))
    scaled = np.where(np.abs(scaled) > LARGEST[mx.float32], np.copysign(np.inf, scaled), scaled)
    score = scaled + noise
    best = np.where(certain, score, -np.inf).max()
    if np.isinf(best):
        expected = int(np.argmax(np.where(certain, score, -np.inf)))
        return None if token == expected else f"token {token}, expected {expected}"
    allowed = 8 * EPSILON32 * (np.abs(scaled[possible & np.isfinite(scaled)]).max(initial=0) + 32)
    if score[token] < best - allowed:
        return f"token {token} has {score[token]:.9g} with its noise, another {best:.9g}"
    return None


def _wrong_logprobs(logits: mx.array, logprobs: mx.array) -> str | None:
    """The fault in the logarithmic probabilities of all logits, or None."""
    if logprobs.dtype != logits.dtype or logprobs.shape != logits.shape:
        return f"logprobs are {logprobs.dtype}{logprobs.shape}, expected {logits.dtype}{logits.shape}"
    found, x = (to_float64(a).reshape(-1, a.shape[-1]) for a in (logprobs, logits))
    with np.errstate(all="ignore"):
        largest = x.max(-1, keepdims=True)
        total = largest + np.log(np.exp(x - np.where(np.isinf(largest), 0, largest)).sum(-1, keepdims=True))
        exact = x - np.where(np.isinf(largest), largest, total)
        allowed = 8 * EPSILON32 * (np.abs(x) + np.abs(total) + 16) + EPSILON[logits.dtype] * np.abs(exact)
        near = np.abs(found - exact) <= allowed
    same = (np.isnan(found) & np.isnan(exact)) | (found == exact) | near
    overflows = np.abs(exact) >= LARGEST[logits.dtype]
    both = np.isnan(x).any(-1, keepdims=True) & np.isposinf(x).any(-1, keepdims=True)  # where mx has either
    wrong = np.argwhere(~(same | overflows | both))
    return f"logprobs at {wrong[0]}: {found[tuple(wrong[0])]}, exact {exact[tuple(wrong[0])]}" if len(wrong) else None


def why_wrong(
    logits: mx.array, key: mx.array, options: dict[str, Any], tokens: mx.array, logprobs: mx.array | None
) -> str | None:
    """The fault in the tokens of logits, or None."""
    shape = tuple(logits.shape[:-1])
    if tokens.dtype != mx.uint32 or tuple(tokens.shape) != shape:
        return f"tokens are {tokens.dtype}{list(tokens.shape)}, expected uint32{list(shape)}"
    if logprobs is not None and logprobs.ndim == logits.ndim:
        wrong = _wrong_logprobs(logits, logprobs) if logits.size else None
        if wrong:
            return wrong
        logprobs = None
    if logprobs is not None and (logprobs.dtype != mx.float32 or tuple(logprobs.shape) != shape):
        return f"logprobs are {logprobs.dtype}{list(logprobs.shape)}, expected float32{list(shape)}"
    x = to_float64(logits).reshape(-1, logits.shape[-1])
    drawn = np.array(tokens).reshape(-1)
    likely = None if logprobs is None else to_float64(logprobs).reshape(-1)
    noise = gumbel(np.array(key), x.shape) if x.size and options["temperature"] else np.zeros(x.shape)
    for row in range(len(x)):
        logprob = None if likely is None else float(likely[row])
        with np.errstate(all="ignore"):
            text = _wrong_row(x[row], logits.dtype, noise[row], options, int(drawn[row]), logprob)
        if text:
            return f"row {row}: {text}"
    return None


def sample(draw: Draw) -> Trial:
    """A call as it is, compiled, without a key, or batched."""
    mode, options = draw.pick(list(MODES), list(MODES.values())), _options(draw)
    logprobs = draw.pick((False, True, "all"))
    dtype, kind, shape = draw.dtype(), draw.kind(), _shape(draw)
    count = draw.integer(1, 3) if mode == "vmap" and math.prod(shape) <= 30_000 else 1
    shape = [count, *shape] if mode == "vmap" else shape
    keys = draw.rng.integers(0, 2**32, (count, 2), dtype=np.uint32)
    batched_keys, seed = mode == "vmap" and draw.chance(0.5), draw.integer(0, 2**31)
    logits = draw.array(draw.numbers(shape, kind), dtype)
    arrays, numbers = _adjustments(draw, shape) if draw.chance(0.4) else ({}, {})
    text = describe(
        [logits, *arrays.values()],
        draw,
        numbers=kind,
        options={**options, **numbers},
        given=list(arrays),
        logprobs=logprobs,
        keys=keys.tolist(),
        seed=seed,
    )

    def outputs(result: mx.array | tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array | None]:
        return result if isinstance(result, tuple) else (result, None)

    def called(logits: mx.array, *others: mx.array) -> mx.array | tuple[mx.array, mx.array]:
        key, given = others[len(arrays) :], dict(zip(arrays, others, strict=False))
        return mm.sample(logits, *key, **options, **numbers, **given, logprobs=logprobs)

    def run() -> str | None:
        key = mx.array(keys[0])
        function: Callable[..., Any] = called
        given = {name: np.array(a) for name, a in arrays.items() if name in PENALTIES}
        of_rows = {name: a for name, a in arrays.items() if name not in PENALTIES}
        changed = logits
        if arrays and logits.size:
            changed = mx.array(adjusted(logits, **of_rows, **given, **numbers).astype(np.float32)).astype(dtype)
        inputs = (logits, *arrays.values())
        if mode == "vmap":
            key = mx.array(keys) if batched_keys else key
            in_axes = (*[0] * len(inputs), 0 if batched_keys else None)
            tokens, likely = outputs(mx.vmap(function, in_axes=in_axes)(*inputs, key))
            for i in range(count):
                own_key = key[i] if batched_keys else key
                wrong = why_wrong(changed[i], own_key, options, tokens[i], None if likely is None else likely[i])
                if wrong:
                    return f"element {i} of {count}: {wrong}"
            return None
        if mode == "state":
            mx.random.seed(seed)
            key = mx.random.split(mx.random.key(seed))[1]
            return why_wrong(changed, key, options, *outputs(function(*inputs)))
        if mode == "compiled":
            function = mx.compile(called)
            mx.eval(function(*inputs, key))
        return why_wrong(changed, key, options, *outputs(function(*inputs, key)))

    return Trial(mode, text, run)
