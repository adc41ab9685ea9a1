"""mlx-lm's samplers and logits processors, as ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .. import _ext
from .digests import plain


@dataclass(frozen=True, eq=False)  # hashed by who it is, as a function
class _Sampler:
    """A sampler of mlx-lm's in one op: logarithmic probabilities to tokens."""

    temperature: float
    filters: dict[str, Any]

    def __call__(self, logprobs: mx.array) -> mx.array:
        top_k = self.filters["top_k"]
        if top_k >= logprobs.shape[-1]:
            from mlx_lm.sample_utils import apply_top_k

            apply_top_k(logprobs, top_k)  # raises mlx-lm's error
        return _ext.sample_logprobs(logprobs, self.temperature, **self.filters)


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Any = None,
) -> _Sampler | None:
    """A sampler without the features that the op lacks: XTC, and min-p that keeps several tokens at least."""
    lacks = xtc_probability > 0 or (min_p != 0 and min_tokens_to_keep != 1)
    if lacks or not temp > 0 or not 0 <= min_p <= 1 or not isinstance(top_k, int):
        return None
    return _sampler(float(temp), max(top_k, 0), top_p if 0 < top_p < 1 else 0.0, float(min_p))


@functools.lru_cache(64)
def _sampler(temperature: float, top_k: int, top_p: float, min_p: float) -> _Sampler:
    """One for all requests with these options: mlx-lm's batches draw for all rows in one call where they share it."""
    return _Sampler(temperature, {"top_k": top_k, "top_p": top_p, "min_p": min_p})


@dataclass(frozen=True, eq=False)
class _Penalty:
    """A logits processor of mlx-lm's, which a sampler takes into its launches."""

    which: int  # repetition, presence, frequency
    penalty: float
    context: int
    original: Callable[[mx.array, mx.array], mx.array]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        result = None
        if isinstance(tokens, mx.array) and not _ext.exporting():
            result = _ext.penalized_logits(logits, tokens, self.which, self.penalty, self.context)
        return self.original(tokens, logits) if result is None else result


def make_logits_processors(
    logit_bias: dict[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[Any] | None:
    """mlx-lm's processors; penalties for the last tokens become part of the draw."""
    from mlx_lm import sample_utils

    processors = plain(sample_utils.make_logits_processors)(logit_bias)
    makers = (
        (sample_utils.make_repetition_penalty, repetition_penalty, repetition_context_size),
        (sample_utils.make_presence_penalty, presence_penalty, presence_context_size),
        (sample_utils.make_frequency_penalty, frequency_penalty, frequency_context_size),
    )
    for which, (make, penalty, size) in enumerate(makers):
        if penalty is None or penalty == 0:
            continue
        original = make(penalty, size)
        is_known = isinstance(penalty, (int, float)) and isinstance(size, int) and size >= 0
        context = size or 2**31 - 1  # tokens[-0:] are all of them
        processors.append(_Penalty(which, float(penalty), context, original) if is_known else original)
    return processors


def greedy(logprobs: mx.array) -> mx.array:
    return _ext.sample_logprobs(logprobs, 0.0)
