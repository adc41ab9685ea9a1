"""The row of the table of ops for sampling; `specs` puts it into the table.

The shape of a case is ``(rows, vocabulary)``. A token is right or wrong: its error is 0 or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import sampling
from .op import Case, Exact, Op, all_rows, cases_for_tests, widen

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
TOKENS = 20  # as many as mlx-lm's processors count


@dataclass(frozen=True, kw_only=True)
class SampleOp(Op):
    """Tokens drawn from logits. Logarithmic probabilities of tokens alone are tested beside the table."""

    # A shape that any case's options allow.
    smallest = (2, 33)

    def link(self, case: Case) -> int:
        return 1  # the key: logits would not be drawn as they are

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        rows, columns = case.shape
        return [case.shape, (2,), (rows, TOKENS), (rows, -(-columns // 32))]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        # As a model's are: most are improbable, one in a hundred may be drawn.
        logits = 2 * rng.standard_normal(case.shape, np.float32)
        logits += np.where(rng.random(case.shape) < 0.01, rng.exponential(4, case.shape), 0).astype(np.float32)
        key = rng.integers(0, 2**32, 2, dtype=np.uint32)
        tokens, mask = None, None
        if any(name in case.options for name in PENALTIES):
            # Those that are likely, some of them several times, and padding.
            likely = np.argsort(-logits, axis=-1)[:, : TOKENS // 2]
            places = rng.integers(0, likely.shape[-1], (case.shape[0], TOKENS))
            padding = rng.random(places.shape) < 0.1
            tokens = mx.array(np.where(padding, -1, np.take_along_axis(likely, places, -1)).astype(np.int32))
        if case.options.get("masks"):
            mask = mx.array(rng.integers(0, 2**32, self.shapes(case)[3], dtype=np.uint32))
        return [mx.array(logits).astype(dtype), mx.array(key), tokens, mask]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        passes = 2 if self.arguments(case).get("logprobs") == "all" else 1
        return passes * math.prod(case.shape) * dtype.size + 4 * case.shape[0]

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        logits, key, tokens, mask = arrays
        assert logits is not None and key is not None
        options = self.arguments(case)
        x = adjusted(logits, tokens, mask, **{name: options[name] for name in PENALTIES if name in options})
        likely = [log_softmax(x)] if options.get("logprobs") == "all" else []
        if options["temperature"] == 0:
            return [Exact(first_largest(x).astype(np.float64)), *likely]
        x = np.where(kept(x, logits.dtype, options), x, -np.inf)
        scale = np.float64(np.float32(1 / options["temperature"]))
        return [Exact(first_largest(x * scale + gumbel(np.array(key), x.shape)).astype(np.float64)), *likely]


def adjusted(
    logits: mx.array, tokens: mx.array | None = None, mask: mx.array | None = None, **penalties: float | np.ndarray
) -> np.ndarray:
    """The logits after penalties and mask, in float64: each step is rounded to their type, as mlx-lm's are.

    A penalty is a number, or an array of one for each row.
    """
    dtype, columns = logits.dtype, logits.shape[-1]
    rounded = lambda v: widen(mx.array(np.asarray(v, np.float32)).astype(dtype))
    x = widen(logits).reshape(-1, columns)
    rows = lambda array: np.broadcast_to(np.array(array), (*logits.shape[:-1], array.shape[-1])).reshape(len(x), -1)
    by_row = {name: np.broadcast_to(v, logits.shape[:-1]).reshape(-1) for name, v in penalties.items()}
    for row in range(len(x)) if tokens is not None else ():
        seen = rows(tokens)[row].astype(np.int64)
        found, counts = np.unique(seen[(seen >= 0) & (seen < columns)], return_counts=True)
        repetition, presence, frequency = (by_row.get(name, [0.0] * len(x))[row] for name in PENALTIES)
        v = x[row, found]
        with np.errstate(all="ignore"):
            if repetition != 0:
                v = rounded(np.where(v < 0, v * rounded(repetition), v / rounded(repetition)))
            v = rounded(v - rounded(presence))
            for i in range(counts.max(initial=0)):
                v = np.where(i < counts, rounded(v - rounded(frequency)), v)
        x[row, found] = v
    if mask is not None:
        bits = np.unpackbits(np.ascontiguousarray(rows(mask)).view(np.uint8), axis=-1, bitorder="little")
        x = np.where(bits[:, :columns] == 1, x, -np.inf)
    return x.reshape(logits.shape)


def log_softmax(x: np.ndarray) -> Exact:
    """The logarithmic probabilities of all logits, and the size of the two terms that they are the difference of."""
    largest = x.max(axis=-1, keepdims=True)
    total = largest + np.log(np.exp(x - largest).sum(axis=-1, keepdims=True))
    return Exact(x - total, np.abs(x) + np.abs(total))


def first_largest(x: np.ndarray) -> np.ndarray:
    """Where the largest of each row is, the first of equal ones; NaN counts as -inf."""
    return np.argmax(np.where(np.isnan(x), -np.inf, x), axis=-1)


def kept(x: np.ndarray, dtype: mx.Dtype, options: Mapping[str, Any]) -> np.ndarray:
    """Which logits the filters keep, in float64."""
    x = np.where(np.isnan(x), -np.inf, x)
    order = np.argsort(-x, axis=-1, kind="stable")  # the first of equal ones comes first
    ranks = np.argsort(order, axis=-1, kind="stable")
    result = np.ones(x.shape, bool)
    with np.errstate(invalid="ignore"):
        mass = np.exp(x - x.max(axis=-1, keepdims=True))
    if 0 < options.get("top_p", 0) < 1:
        descending = np.take_along_axis(x, order, axis=-1)
        total = np.cumsum(np.take_along_axis(mass, order, axis=-1), axis=-1)
        enough = np.argmax(total >= options["top_p"] * total[..., -1:], axis=-1)
        result &= x >= np.take_along_axis(descending, enough[..., None], axis=-1)
    if options.get("min_p", 0) > 0:
        step = widen(mx.array(math.log(options["min_p"])).astype(dtype))
        least = (x.max(axis=-1, keepdims=True) + step).astype(np.float32)
        result &= x >= widen(mx.array(least).astype(dtype))
    if options.get("top_k", 0) > 0:
        result &= ranks < options["top_k"]
    return result


def threefry(key: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds."""
    third = key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    words = (key[0], key[1], third)
    with np.errstate(over="ignore"):
        first, second = first + key[0], second + key[1]
        for i in range(5):
            for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
                first = first + second
                second = (second << np.uint32(turn) | second >> np.uint32(32 - turn)) ^ first
            first = first + words[(i + 1) % 3]
            second = second + words[(i + 2) % 3] + np.uint32(i + 1)
    return first, second


def random_bits(key: np.ndarray, size: int) -> np.ndarray:
    """The bits that mx.random draws for an array of this size."""
    half, ahead = size // 2, size - size // 2
    first = np.arange(ahead, dtype=np.uint32)
    second = first + np.uint32(ahead)
    if size % 2:
        second[half] = 0
    low, high = threefry(key, first, second)
    return np.concatenate([low, high[:half]])


def gumbel(key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Gumbel noise of an array, in float64, from the float32 uniform numbers that mx.random draws."""
    bits = random_bits(key, math.prod(shape))
    uniform = np.minimum(bits.astype(np.float32) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    uniform = np.where(bits == 0, 2.0**-33, uniform.astype(np.float64))
    return -np.log(-np.log(uniform)).reshape(shape)


def _ours(logits, key, tokens=None, mask=None, *, temperature, masks=False, **options):
    logits = logits if temperature else mx.depends(logits, key)  # a call waits for the one before
    return sampling.sample(logits, key, tokens=tokens, mask=mask, temperature=temperature, **options)


def _twin(logits, key, tokens=None, mask=None, *, temperature, masks=False, logprobs=False, **options):
    penalties = {name: options.pop(name) for name in PENALTIES if name in options}
    logits, filters = _adjusted_by_mx(logits, tokens, mask, **penalties), options
    if not logprobs:
        return _drawn_by_mx(logits, key, temperature, **filters)
    likely = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return _drawn_by_mx(logits, key, temperature, **filters), likely


def _adjusted_by_mx(logits, tokens, mask, repetition_penalty=0.0, presence_penalty=0.0, frequency_penalty=0.0):
    """As mlx-lm's processors do it, for several rows. Padding goes to a column behind the row."""
    x = logits
    if tokens is not None:
        x = mx.concatenate([x, mx.zeros((x.shape[0], 1), x.dtype)], axis=-1)
        places = mx.where((tokens < 0) | (tokens >= logits.shape[-1]), logits.shape[-1], tokens)
        if repetition_penalty:
            found = mx.take_along_axis(x, places, axis=-1)
            found = mx.where(found < 0, found * repetition_penalty, found / repetition_penalty)
            x = mx.put_along_axis(x, places, found, axis=-1)
        if presence_penalty:
            found = mx.take_along_axis(x, places, axis=-1) - presence_penalty
            x = mx.put_along_axis(x, places, found, axis=-1)
        if frequency_penalty:
            rows = mx.arange(x.shape[0])[:, None]
            x = x.at[rows, places].subtract(frequency_penalty)
        x = x[:, :-1]
    if mask is not None:
        bits = (mask[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
        x = mx.where(mx.flatten(bits, -2)[:, : x.shape[-1]] == 1, x, -mx.inf)
    return x


def _drawn_by_mx(logits, key, temperature, top_k=0, top_p=0.0, min_p=0.0):
    if temperature == 0:
        return mx.argmax(mx.depends(logits, key), axis=-1)
    x = logits
    if top_p > 0:
        ascending = mx.sort(x, axis=-1)
        mass = mx.softmax(ascending.astype(mx.float32), axis=-1)
        above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
        dropped = (above >= top_p).sum(axis=-1, keepdims=True)
        x = mx.where(x < mx.take_along_axis(ascending, dropped, axis=-1), -mx.inf, x)
    if min_p > 0:
        x = mx.where(x < x.max(axis=-1, keepdims=True) + math.log(min_p), -mx.inf, x)
    if 0 < top_k < x.shape[-1]:
        rest = mx.argpartition(-x, kth=top_k - 1, axis=-1)[..., top_k:]
        x = mx.put_along_axis(x, rest, mx.array(-mx.inf, x.dtype), axis=-1)
    return mx.random.categorical(x.astype(mx.float32) * (1 / temperature), key=key)


_PENALTIES: dict[str, Any] = dict(zip(PENALTIES, (1.3, 0.5, 0.25), strict=True))
_CHAT: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01}

SAMPLE_OPS: tuple[Op, ...] = (
    SampleOp(
        name="sample",
        parameters=all_rows("logits", "key", "tokens", "mask"),
        ours=_ours,
        twin=_twin,
        twin_text="mlx-lm's samplers",
        summary="tokens drawn from logits by temperature, top-k, top-p and min-p, without a sort, with penalties for "
        "the last ones and a mask of those that are allowed",
        options={"temperature": 1.0},
        # Rows of one threadgroup and of several; filtered logits that fit threadgroup memory, and that do not.
        tests=cases_for_tests((1, 1), (3, 7), (2, 33), (1, 9001))
        + cases_for_tests((3, 70), (1, 9001), temperature=0.0)
        + cases_for_tests((5, 515), **_CHAT)
        + cases_for_tests((2, 33), (1, 2100), temperature=0.8, top_p=0.9)
        + cases_for_tests((2, 1030), temperature=1.3, top_k=5)
        + cases_for_tests((2, 130), temperature=1.5, min_p=0.1)
        + cases_for_tests((3, 67), (1, 9001), temperature=0.0, logprobs="all")
        + cases_for_tests((2, 515), **_CHAT, logprobs="all")
        + cases_for_tests((3, 67), (1, 9001), temperature=0.0, **_PENALTIES, masks=True)
        + cases_for_tests((2, 515), **_CHAT, **_PENALTIES)
        + cases_for_tests((1, 9001), (2, 515), temperature=0.0, **_PENALTIES, logprobs="all"),
        cases=(
            Case("Qwen3 vocabulary", (1, 151936), {"temperature": 0.0}, quick=True),
            Case("Qwen3 vocabulary", (1, 151936), {"temperature": 0.7}),
            Case("Qwen3", (1, 151936), {"temperature": 0.0, "logprobs": "all"}),
            Case("Qwen3 vocabulary", (1, 151936), {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, quick=True),
            Case("Llama-3 vocabulary, batch", (8, 128256), _CHAT),
            Case("Qwen3 vocabulary, penalties", (1, 151936), {**_CHAT, **_PENALTIES}),
            Case("Qwen3 vocabulary, mask", (1, 151936), {"temperature": 0.7, "masks": True}),
        ),
    ),
)
