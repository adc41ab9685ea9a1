"""Times requests of a model: all at once, as rows of mlx-lm's batches, beside one by one, by the kind of cache.

All counts from the first prompt to the last token. Requests at once are what `batch_generate` does, under `patched()`;
one by one they run there and on mx alone. The contenders take turns, and the best of each one's counts. mx, which may
need a minute for a prompt on a CPU, has one turn for each kind of cache. Where a contender takes longer than its
seconds, requests one by one end early: the time of a request then follows from the prompts and the tokens that were
timed.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..patching import quantized_batches
from ..patching.patches import patched
from . import machine
from .models import Speed, Subject, vocabulary
from .streams import new_stream, on_stream

GROUP_SIZE = 64
CONTENDERS = ("at_once", "one_by_one", "mx")

# Turns of the contenders at most, and after how many seconds none begins any more.
_TURNS = 5
_TURN_SECONDS = 20.0


@dataclass(frozen=True)
class Row:
    """A number of requests to a model with one kind of cache.

    Attributes:
        cache: ``half``, or the bits of its numbers, as ``8-bit``.
        at_once: All as rows of one batch, patched.
        one_by_one: Patched.
        mx: One by one, on mx alone, of the first number of requests.
        problems: Why a contender could not run, by its name.
    """

    model: str
    weights: str
    dtype: str
    layers: int | None
    device: str
    requests: int
    cache: str
    at_once: Speed | None
    one_by_one: Speed | None
    mx: Speed | None
    problems: Mapping[str, str]


def prompts_of(count: int, longest: int, tokens: int) -> list[list[int]]:
    """Random prompts of several lengths, from half of the longest on."""
    drawn = random.Random(0)
    lengths = [longest - i * (longest // 2) // count for i in range(count)]
    drawn.shuffle(lengths)
    return [[drawn.randrange(tokens) for _ in range(length)] for length in lengths]


def _at_once(model: nn.Module, prompts: list[list[int]], bits: int | None, tokens: int, seconds: float) -> Speed:
    """Requests as rows of a batch, to their ends."""
    loop: Any = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
    caches = None if bits is None else [quantized_batches.new_caches(model, GROUP_SIZE, bits) for _ in prompts]
    mx.synchronize()
    start = time.perf_counter()
    with on_stream(mx.default_stream(mx.default_device())) as stream:
        generator = loop.BatchGenerator(model, **stream)
        try:
            generator.insert(prompts, [tokens] * len(prompts), caches=caches)
            found = 0
            while responses := generator.next_generated():
                found += len(responses)
        finally:
            generator.close()
    return Speed(found / (time.perf_counter() - start), found)


def _one_by_one(
    options: Callable[[nn.Module, int | None], dict[str, Any]],
    model: nn.Module,
    prompts: list[list[int]],
    bits: int | None,
    tokens: int,
    seconds: float,
) -> Speed:
    """Requests by mlx-lm's loop, one behind another, up to the first that would begin behind the seconds.

    Args:
        options: Gives the loop's options by which its cache has such bits.
    """
    from mlx_lm.generate import generate_step

    firsts: list[float] = []
    others, found = 0.0, 0
    mx.synchronize()
    begun = time.perf_counter()
    with on_stream(mx.default_stream(mx.default_device())) as stream:
        for prompt in prompts:
            start = time.perf_counter()
            if firsts and start - begun > seconds:
                break
            steps = generate_step(mx.array(prompt), model, max_tokens=tokens, **options(model, bits), **stream)
            next(steps)
            firsts.append(time.perf_counter() - start)
            found += 1
            for _ in steps:
                found += 1
                if time.perf_counter() - begun > seconds:
                    break
            others += time.perf_counter() - start - firsts[-1]
        mx.synchronize()  # the loop runs one ahead: its last token would run in the next contender's time
    of_request = sum(firsts) / len(firsts)
    if tokens > 1:
        of_request += others / max(1, found - len(firsts)) * (tokens - 1)
    return Speed(tokens / of_request, found)


def _with_ours(model: nn.Module, bits: int | None) -> dict[str, Any]:
    """A cache as a row of our batches has it; windows are quantized too."""
    return {} if bits is None else {"prompt_cache": quantized_batches.new_caches(model, GROUP_SIZE, bits)}


def _with_theirs(_: nn.Module, bits: int | None) -> dict[str, Any]:
    return {} if bits is None else {"kv_bits": bits, "kv_group_size": GROUP_SIZE, "quantized_kv_start": 0}


_RUNS: dict[str, Callable[..., Speed]] = {
    "at_once": _at_once,
    "one_by_one": partial(_one_by_one, _with_ours),
    "mx": partial(_one_by_one, _with_theirs),
}


def measure(
    subject: Subject,
    counts: Sequence[int],
    caches: Mapping[str, int | None],
    tokens: int,
    prompt: int,
    seconds: float,
    step: Callable[[str], None],
) -> Iterator[list[Row]]:
    """Times one model in one format, for each number of requests with each kind of cache.

    Args:
        subject: The model.
        counts: Numbers of requests.
        caches: The bits of each kind of cache, None of half types.
        tokens: How many are generated of each request.
        prompt: How many tokens the longest prompt has.
        seconds: After which requests one by one end early.
        step: Is told of each number of requests that is done.

    Yields:
        list: The rows of a number of requests.

    Raises:
        model_folders.ModelError: A model of the user's cannot be loaded.
    """
    import mlx_lm.models.cache  # noqa: F401  # quantized caches are made of its

    asked = subject
    subject, model = subject.load()
    streams = {name: new_stream() for name in ("patched", "mx")}
    problems: dict[_Contender, str] = {}
    of_mx: dict[_Contender, Speed] = {}

    def run(name: str, bits: int | None, prompts: list[list[int]], tokens: int) -> Speed:
        side = "mx" if name == "mx" else "patched"
        with mx.stream(streams[side]), patched() if side == "patched" else contextlib.nullcontext():
            return _RUNS[name](model, prompts, bits, tokens, seconds)

    for count in counts:
        prompts = prompts_of(count, prompt, vocabulary(model))
        contenders = {
            (cache, name): partial(run, name, bits, prompts) for name in CONTENDERS for cache, bits in caches.items()
        }
        if not of_mx:
            of_mx, wrong = _timed({key: run for key, run in contenders.items() if key[1] == "mx"}, tokens, 1)
            problems |= wrong
        ours, wrong = _timed({key: run for key, run in contenders.items() if key[1] != "mx"}, tokens, _TURNS)
        problems |= wrong
        head = (subject.model, subject.weights, subject.dtype, subject.layers, machine.device(), count)
        rows = []
        for cache in caches:
            at_once, one_by_one = (ours.get((cache, name)) for name in ("at_once", "one_by_one"))
            of_cache = {name: problems[cache, name] for name in CONTENDERS if (cache, name) in problems}
            rows.append(Row(*head, cache, at_once, one_by_one, of_mx.get((cache, "mx")), of_cache))
        step(f"{asked}: {count} requests")
        yield rows


_Contender = tuple[str, str]  # a kind of cache and one of `CONTENDERS`
_REFUSALS = (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError)


def _timed(
    contenders: Mapping[_Contender, Callable[[int], Speed]], tokens: int, turns: int
) -> tuple[dict[_Contender, Speed], dict[_Contender, str]]:
    """The best of each in turns, and why one cannot run, as where a model refuses a cache.

    Where there are several turns, each generates two tokens before: that compiles.
    """
    problems: dict[_Contender, str] = {}
    best: dict[_Contender, Speed] = {}
    start = time.perf_counter()
    for turn in range(turns):
        for name, run in contenders.items():
            if name in problems:
                continue
            try:
                if turn == 0 and turns > 1:
                    run(2)
                speed = run(tokens)
            except _REFUSALS as error:
                problems[name] = f"{type(error).__name__}: {error}"
                continue
            if name not in best or speed.tokens_per_s > best[name].tokens_per_s:
                best[name] = speed
        if time.perf_counter() - start > _TURN_SECONDS:
            break
    return best, problems
