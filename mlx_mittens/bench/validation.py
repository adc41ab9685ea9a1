"""Greedy tokens and logits of a model on our kernels and on mx's, and which of the two float32 is closer to.

mlx-lm's own generation loop runs on mx, then on ours. Where the tokens differ, ours runs again along mx's tokens, so
that logits are compared over one sequence. The same model in float32 is the judge: on mx, many tokens at a time, along
mx's tokens. Each run has a stream of its own, or graphs that hold mx's kernels would stay in our run.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..patching.patches import patched
from ..specs import EPSILON
from ..stats import Stats, stats
from .models import converted_copy
from .streams import new_stream, on_stream

__all__ = ["Difference", "Failure", "OurFailure", "Validation", "validate"]

# Tokens that the float32 run takes at a time: their logits are float32, and a vocabulary may have 250,000 words.
_STEP = 64

# After so long a run says how far it is.
_SAY_SECONDS = 10.0

# Logits may be this much further from float32 than mx's.
_TIMES_MX = 2

# Largest difference of float32 logits by another order of sums, relative to the logits: 256 units in the last place,
# for the sums of all layers. mx's own float32 logits are no measure of it: the judge's sums have the same order.
_FLOAT32 = 256 * EPSILON[mx.float32]


class Failure(Exception):
    """mx cannot run the model, for the reason that the message gives."""


class OurFailure(Exception):
    """Our run raised an error, where mx's had none."""


@dataclass(frozen=True)
class Difference:
    """A position at which our token is not mx's.

    Attributes:
        position: Of the token, the first that is generated being 0.
        ours: Our token.
        mx: The token of mx.
        float32: The token of float32.
        ahead: By how much float32's logit of ours is above its logit of mx's token.
        within_rounding: Whether that is no more than mx's logits are off.
    """

    position: int
    ours: int
    mx: int
    float32: int
    ahead: float
    within_rounding: bool

    @property
    def passed(self) -> bool:
        """Whether our token is as good as mx's."""
        return self.ahead >= 0 or self.within_rounding


@dataclass(frozen=True)
class Validation:
    """Results of the runs.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        tokens: Tokens that mx generated, over which all is compared.
        same: How many tokens are the same when each goes on with its own.
        differences: Where tokens differ along mx's sequence, and where the runs part.
        repeatable: Whether our run gave the same token again where the runs part.
        difference: The largest difference between our logits and mx's along mx's tokens.
        error: The largest difference between our logits and float32's.
        mx_error: That between mx's logits and float32's.
        typical_error: The median, over the tokens, of the root mean square of our logits' errors.
        typical_mx_error: That of mx's.
        allowed_error: Limit of ``typical_error``.
        stats: Which kernels ran, and which calls went to mx.
    """

    prompt_tokens: int
    tokens: int
    same: int
    differences: list[Difference]
    repeatable: bool
    difference: float
    error: float
    mx_error: float
    typical_error: float
    typical_mx_error: float
    allowed_error: float
    stats: Stats

    @property
    def first(self) -> Difference | None:
        """Where the runs part."""
        return next((found for found in self.differences if found.position == self.same), None)

    @property
    def worst(self) -> Difference | None:
        """The difference that is furthest from right, if one is not passed."""
        failed = [found for found in self.differences if not found.passed]
        return min(failed, key=lambda found: found.ahead) if failed else None

    @property
    def logits_passed(self) -> bool:
        """Whether our logits are as close to float32 as mx's; NaN is not."""
        return self.typical_error <= self.allowed_error and math.isfinite(self.difference)

    @property
    def passed(self) -> bool:
        return self.logits_passed and self.worst is None

    @property
    def kernels(self) -> int:
        """How many kernels ran."""
        return sum(sum(counts["kernels"].values()) for counts in self.stats.values())

    @property
    def left_to_mx(self) -> int:
        """How many calls went to mx."""
        return sum(sum(counts["mx"].values()) for counts in self.stats.values())


@dataclass(frozen=True)
class _Run:
    tokens: list[int]  # greedy at each position
    logits: list[mx.array]  # of each position, (vocabulary,)


class _Progress:
    """Says how far a long run is, and how long the rest will take."""

    def __init__(self, count: int, say: Callable[[str], None], seconds: float = math.inf) -> None:
        self._count, self._say, self._seconds = count, say, seconds
        self._start = self._said = time.perf_counter()

    @property
    def is_late(self) -> bool:
        """Whether the seconds have passed."""
        return time.perf_counter() - self._start > self._seconds

    def step(self, done: int) -> None:
        now = time.perf_counter()
        if now - self._said > _SAY_SECONDS:
            self._said = now
            passed = now - self._start
            left = min(passed / done * (self._count - done), self._seconds - passed)
            self._say(f"  {done} of {self._count}, {max(left, 0):.0f} s left")


def _generate(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    along: Sequence[int] = (),
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> _Run:
    """mlx-lm's generation loop: greedy, or along given tokens; one token at least, however few seconds."""
    loop = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
    found = _Run([], [])
    given = iter(along)

    def keep(_: mx.array, logits: mx.array) -> mx.array:
        found.logits.append(logits[0])
        return logits

    def next_given(_: mx.array) -> mx.array:
        return mx.array([next(given, 0)], mx.uint32)  # the loop runs one ahead

    options: dict[str, Any] = {"max_tokens": count, "logits_processors": [keep]}
    if along:
        options["sampler"] = next_given
    progress = _Progress(count, say, seconds)
    with on_stream(new_stream()) as stream:
        for token, logprobs in loop.generate_step(mx.array(list(prompt)), model, **options, **stream):
            found.tokens.append(mx.argmax(logprobs).item() if along else token)  # type: ignore[arg-type]
            if progress.is_late:
                break
            progress.step(len(found.tokens))
    del found.logits[len(found.tokens) :]
    mx.eval(found.logits)
    return found


def _float32_logits(model: nn.Module, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
    """The logits after each token from the first one on; the model is float32 from now on."""
    from mlx_lm.models.cache import make_prompt_cache

    model.set_dtype(mx.float32)
    caches = make_prompt_cache(model)
    with mx.stream(new_stream()):
        for start in range(0, len(tokens), _STEP):
            logits = model(mx.array([list(tokens[start : start + _STEP])]), cache=caches)[0].astype(mx.float32)
            mx.eval(logits, [cache.state for cache in caches])
            yield from np.array(logits)[max(0, first - start) :]


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Absolute differences; infinities of one sign, as of words that are masked, do not differ."""
    with np.errstate(invalid="ignore"):
        return np.where(a == b, np.float32(0), np.abs(a - b))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def validate(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    convert: bool = False,
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
    activations: Literal["int8"] | None = None,
) -> Validation:
    """Compares a model on our kernels with the same model on mx's.

    Args:
        model (mlx.nn.Module): Of mlx-lm's classes, not converted. It is a float32 model afterwards.
        prompt (Sequence[int]): Tokens, one at least.
        count (int): Tokens to generate.
        convert (bool): Whether ours is the model after ``nn.convert``, instead of the model under the patch.
        seconds (float): Time after which mx's run ends; its tokens until then are compared.
        say (Callable): Is told which run begins, how far a long one is and how long the rest takes.
        activations (str, optional): As of ``patch()``, for ours; not with ``convert``.

    Raises:
        Failure: mx cannot run the model.
        OurFailure: Our kernels cannot, where mx can.
    """
    say(f"mx: a prompt of {len(prompt)} tokens, then {count}")
    try:
        theirs = _generate(model, prompt, count, seconds=seconds, say=say)
    except Exception as error:
        raise Failure(f"{type(error).__name__}: {error}") from error
    count = len(theirs.tokens)
    if any(mx.any(mx.isnan(logits)).item() for logits in theirs.logits):
        raise Failure("its logits are not numbers")
    say(f"ours: {count}")
    try:
        ours, along, counted = _ours(model, prompt, theirs.tokens, convert, say, activations)
    except Exception as error:
        raise OurFailure(f"{type(error).__name__}: {error}") from error
    mx.clear_cache()
    say("float32")
    try:
        return _compare(model, prompt, theirs, ours, along, counted, say)
    except Exception as error:
        raise Failure(f"in float32, which is to judge, {type(error).__name__}: {error}") from error


def _ours(
    model: nn.Module,
    prompt: Sequence[int],
    theirs: Sequence[int],
    convert: bool,
    say: Callable[[str], None],
    activations: Literal["int8"] | None,
) -> tuple[list[int], _Run, Stats]:
    """Our greedy tokens, our run along mx's tokens, and the counts of the first."""
    subject = converted_copy(model) if convert else model
    with contextlib.nullcontext() if convert else patched(activations=activations):
        stats(reset=True)
        own = _generate(subject, prompt, len(theirs), say=say)
        counted = stats()
        same = own.tokens == list(theirs)
        if same:
            return own.tokens, own, counted
        say(f"ours along mx's tokens: {len(theirs)}")
        return own.tokens, _generate(subject, prompt, len(theirs), along=theirs, say=say), counted


def _compare(
    model: nn.Module,
    prompt: Sequence[int],
    theirs: _Run,
    ours: list[int],
    along: _Run,
    counted: Stats,
    say: Callable[[str], None] = lambda text: None,
) -> Validation:
    count = len(theirs.tokens)
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs.tokens)) if a != b), count)
    candidates = {i: along.tokens[i] for i in range(count) if along.tokens[i] != theirs.tokens[i]}
    repeatable = same == count or along.tokens[: same + 1] == ours[: same + 1]
    if same < count:
        candidates[same] = ours[same]

    largest, errors, typical, sizes = [], [], [], []
    judged: dict[int, tuple[int, float, float]] = {}  # float32's token, how far ours is ahead, and rounding's share
    exact = _float32_logits(model, [*prompt, *theirs.tokens[:-1]], len(prompt) - 1)
    progress = _Progress(count, say)
    for i, c in enumerate(exact):
        progress.step(i + 1)
        a, b = (np.array(run.logits[i].astype(mx.float32)) for run in (along, theirs))
        by_ours, by_mx = _difference(a, c), _difference(b, c)
        largest.append(_difference(a, b).max())
        errors.append((by_ours.max(), by_mx.max()))
        typical.append((_rms(by_ours), _rms(by_mx)))
        sizes.append(_rms(c[np.isfinite(c)]))
        if i in candidates:
            token, other = candidates[i], theirs.tokens[i]
            unit = max(abs(c[token]), abs(c[other])) * max(EPSILON[theirs.logits[i].dtype], _FLOAT32)
            off = by_mx.max() if np.isfinite(by_mx.max()) else 0.0  # logits of mx that overflow excuse nothing
            judged[i] = int(c.argmax()), float(c[token]) - float(c[other]), float(max(unit, off))
    error, mx_error = map(float, np.max(errors, axis=0))
    typical_error, typical_mx_error = map(float, np.median(typical, axis=0))
    differences = [
        Difference(i, candidates[i], theirs.tokens[i], best, ahead, -ahead <= rounding)
        for i, (best, ahead, rounding) in sorted(judged.items())
    ]
    return Validation(
        prompt_tokens=len(prompt),
        tokens=count,
        same=same,
        differences=differences,
        repeatable=repeatable,
        difference=float(np.max(largest)),
        error=error,
        mx_error=mx_error,
        typical_error=typical_error,
        typical_mx_error=typical_mx_error,
        allowed_error=max(_TIMES_MX * typical_mx_error, _FLOAT32 * float(np.median(sizes))),
        stats=counted,
    )
