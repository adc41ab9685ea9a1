"""Benchmark of whole models: decode and prefill of an architecture with random weights, on our kernels and on mx's.

Ours run twice: under `patched()`, and in a model that `nn.convert` has fused. What is timed: mlx-lm's own generation
loop for decode, after a prompt that our kernels have processed for all; one call of the model for prefill. On a CPU mx
may take a minute for a token: it then gets fewer tokens, which is said. Where a token takes milliseconds the contenders
take turns, and the best of each one's counts: on a shared machine the host's part scatters.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import importlib.util
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import machine, models
from .nn import convert
from .patching import patched
from .runs import Ending, JsonFile, each, finish, progress
from .seams import SEAMS
from .table import Column, show
from .usage import UsageError, chosen

FORMATS: dict[str, int | None] = {"4-bit": 4, "8-bit": 8, "half": None}
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}

# Turns of the contenders at most, and after how many seconds none begins any more.
_TURNS = 5
_TURN_SECONDS = 8.0


@dataclass(frozen=True)
class Speed:
    """How fast one contender was."""

    tokens_per_s: float
    tokens: int  # that were timed


@dataclass(frozen=True)
class Row:
    """One line of the result: a model, in one format, decoding or reading a prompt."""

    model: str
    weights: str
    dtype: str
    device: str
    phase: str
    mittens: Speed  # under patched()
    converted: Speed  # by nn.convert
    mx: Speed | None
    problem: str | None = None  # why mx could not run it

    @property
    def ratio(self) -> float:
        return self.mittens.tokens_per_s / self.mx.tokens_per_s if self.mx else math.nan

    @property
    def converted_ratio(self) -> float:
        return self.converted.tokens_per_s / self.mx.tokens_per_s if self.mx else math.nan


def _state(caches: list) -> list:
    return [cache.state for cache in caches]


def _prefill(model: nn.Module, tokens: int) -> tuple[float, list]:
    """Seconds of one call with so many tokens, and the cache it filled."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    prompt = mx.random.randint(0, model.args.vocab_size, (1, tokens))
    mx.eval(prompt)
    mx.synchronize()
    start = time.perf_counter()
    logits = model(prompt, cache=caches)[:, -1]
    mx.eval(logits, _state(caches))
    mx.synchronize()
    return time.perf_counter() - start, caches


def _one_token(model: nn.Module, caches: list) -> float:
    """Seconds of one token."""
    caches = copy.deepcopy(caches)
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(model(mx.array([[1]]), cache=caches), _state(caches))
    mx.synchronize()
    return time.perf_counter() - start


def _decode(model: nn.Module, caches: list, tokens: int, seconds: float) -> Speed:
    """mlx-lm's loop over so many tokens, or for so long; the median of a token's time."""
    from mlx_lm.generate import generate_step

    first = _one_token(model, caches)
    if 3 * first > seconds:  # the loop runs one ahead: it would take three
        return Speed(1 / first, 1)
    times = []
    start = before = time.perf_counter()
    for _ in generate_step(mx.array([1]), model, max_tokens=tokens, prompt_cache=copy.deepcopy(caches)):
        now = time.perf_counter()
        times.append(now - before)
        before = now
        if now - start > seconds:
            break
    steady = times[1:] or times  # the first waits for two: the loop runs one ahead
    return Speed(1 / statistics.median(steady), len(steady))


def _prompt_speed(model: nn.Module, tokens: int, token_seconds: float, seconds: float) -> Speed:
    """The best of up to three prompts; shorter ones where a whole one would take too long."""
    count = max(1, min(tokens, int(seconds / token_seconds)))
    times = [_prefill(model, count)[0]]
    while sum(times) * (1 + 1 / len(times)) < seconds and len(times) < 3:
        times.append(_prefill(model, count)[0])
    return Speed(count / min(times), count)


def _converted(model: nn.Module) -> nn.Module:
    """A second model on the same weights, fused."""
    weights = {id(array): array for _, array in tree_flatten(model.parameters())}
    return convert(copy.deepcopy(model, weights))


def _in_turns(contenders: dict[str, Callable[[], Speed]]) -> tuple[dict[str, Speed], str | None]:
    """The best speed of each; more turns where they are short. mx's may be missing, then with the reason."""
    best: dict[str, Speed] = {}
    problem = None
    start = time.perf_counter()
    for _ in range(_TURNS):
        for name, run in contenders.items():
            try:
                speed = run()
            except RuntimeError as error:  # on a CPU mx has no half types for some products
                if name != "mx":
                    raise
                problem = str(error)
                continue
            if name not in best or speed.tokens_per_s > best[name].tokens_per_s:
                best[name] = speed
        if time.perf_counter() - start > _TURN_SECONDS:
            break
    return best, problem


def measure(
    name: str, weights: str, dtype: str, tokens: int, prompt: int, seconds: float, say: Callable[[str], None]
) -> tuple[list[Row], dict[str, float]]:
    """Times one model in one format; rows for decode and prefill, and the share of a token's time of each op."""
    say(f"{name} {weights} {dtype}: weights")
    model = models.build(name, DTYPES[dtype], FORMATS[weights])
    converted = _converted(model)
    with patched():
        _, caches = _prefill(model, prompt)  # kernels are compiled on first use
        _decode(model, caches, 4, seconds)
    with patched(attention_layer=False):  # its ops are to be seen
        share = shares(model, caches)
    _prefill(converted, prompt)
    _decode(converted, caches, 4, seconds)

    def ours(run: Callable[[], Speed]) -> Callable[[], Speed]:
        def under_patch() -> Speed:
            with patched():
                return run()

        return under_patch

    say(f"{name} {weights} {dtype}: decode")
    decode, problem = _in_turns(
        {
            "mittens": ours(lambda: _decode(model, caches, tokens, seconds)),
            "converted": lambda: _decode(converted, caches, tokens, seconds),
            "mx": lambda: _decode(model, caches, tokens, seconds),
        }
    )
    say(f"{name} {weights} {dtype}: prefill")
    prompts = {
        "mittens": ours(lambda: _prompt_speed(model, prompt, 0.0001, seconds)),
        "converted": lambda: _prompt_speed(converted, prompt, 0.0001, seconds),
    }
    if "mx" in decode:
        prompts["mx"] = lambda: _prompt_speed(model, prompt, 1 / decode["mx"].tokens_per_s, seconds)
    prefill, _ = _in_turns(prompts)
    common = {"model": name, "weights": weights, "dtype": dtype, "device": machine.device(), "problem": problem}
    return [
        Row(phase=phase, mittens=speeds["mittens"], converted=speeds["converted"], mx=speeds.get("mx"), **common)
        for phase, speeds in (("decode", decode), (f"prefill {prompt}", prefill))
    ], share


def _timed() -> Iterator[tuple[str, Any, str]]:
    """What a model calls its ops by: the name of the op, the function's owner, and its name there."""
    for seam in SEAMS:
        if seam.is_loaded() and not seam.shared and not seam.needs:  # what needs others is made of their ops
            yield seam.op, *seam.owner()
    yield "gather_qmm", mx, "gather_qmm"


@contextlib.contextmanager
def _clocks(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the time of each op, waiting for its inputs before and for its result after."""
    saved = [(label, owner, name, getattr(owner, name)) for label, owner, name in _timed()]
    running = False  # a layer's time holds that of the function that it calls

    def clocked(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            if running:
                return function(*args, **kwargs)
            mx.eval([a for a in (*args, *kwargs.values()) if isinstance(a, mx.array)])
            running = True
            start = time.perf_counter()
            try:
                result = function(*args, **kwargs)
                mx.eval(result)
            finally:
                running = False
            seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - start
            return result

        return run

    for label, owner, name, function in saved:
        setattr(owner, name, clocked(label, function))
    try:
        yield
    finally:
        for _, owner, name, function in saved:
            setattr(owner, name, function)


def shares(model: nn.Module, caches: list) -> dict[str, float]:
    """The share of each op in the time of one token, where each is waited for; the rest is ``other``."""
    caches = copy.deepcopy(caches)
    token = mx.array([[1]])
    mx.eval(model(token, cache=caches))
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    with _clocks(seconds):
        mx.eval(model(token, cache=caches), _state(caches))
    total = time.perf_counter() - start
    seconds["other"] = total - sum(seconds.values())
    return {label: value / total for label, value in sorted(seconds.items(), key=lambda item: -item[1])}


_COLUMNS = (
    Column("model", left=True),
    Column("weights", left=True),
    Column("dtype", left=True),
    Column("phase", left=True),
    Column("patched"),
    Column("converted", 3),
    Column("mx", 1),
    Column("patched/mx", 2),
    Column("converted/mx", 4),
    Column("mx timed", 5),
)


def _cells(row: Row) -> list[str]:
    """A row as text, under `_COLUMNS`; where mx was given fewer tokens it says how many."""
    ours = [f"{row.mittens.tokens_per_s:.4g}", f"{row.converted.tokens_per_s:.4g}"]
    if row.mx is None:
        theirs = ["cannot", "", "", ""]
    else:
        fewer = str(row.mx.tokens) if row.mx.tokens < row.mittens.tokens else ""
        theirs = [f"{row.mx.tokens_per_s:.3g}", f"{row.ratio:.2f}x", f"{row.converted_ratio:.2f}x", fewer]
    return [row.model, row.weights, row.dtype, row.phase, *ours, *theirs]


# What the options are that make no sense without --model, where they are not given.
DEFAULTS = {"weights": ",".join(FORMATS), "dtype": "bfloat16", "prompt": 128, "tokens": 64, "seconds": 30.0}


def given(arguments: argparse.Namespace) -> list[str]:
    """Which of these options were given."""
    return [name for name in DEFAULTS if name in vars(arguments)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the bench command needs for models."""
    group = parser.add_argument_group("whole models")
    group.add_argument("--model", metavar="A,B", help=f"time these instead of ops: {', '.join(models.ARCHITECTURES)}")
    for name, what, more in (
        ("weights", "formats", {"metavar": "A,B"}),
        ("dtype", "of what is not quantized", {"metavar": "A,B"}),
        ("prompt", "tokens of the prompt", {"type": int}),
        ("tokens", "tokens to decode at most", {"type": int}),
        ("seconds", "for one figure, about", {"type": float}),
    ):
        text = f"{what} ({DEFAULTS[name]})"
        group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text, **more)


def run(arguments: argparse.Namespace, file: JsonFile) -> int:
    """Times the models that were asked for.

    Raises:
        UsageError: The arguments cannot be served.
    """
    options = argparse.Namespace(**{**DEFAULTS, **vars(arguments)})
    names = chosen("--model", options.model, models.ARCHITECTURES)
    formats = chosen("--weights", options.weights, FORMATS)
    dtypes = chosen("--dtype", options.dtype, DTYPES)
    if min(options.prompt, options.tokens) < 2 or not options.seconds > 0:
        raise UsageError("--prompt and --tokens take 2 or more, --seconds more than 0")
    _check_models(names)
    info = machine.describe()
    info["versions"]["mlx_lm"] = importlib.metadata.version("mlx-lm")
    print(machine.headline(info), flush=True)
    todo = list(itertools.product(names, formats, dtypes))
    rows: list[Row] = []
    share: dict[str, dict[str, float]] = {}

    def save(ending: Ending | None = None) -> None:
        head = {"machine": info, **progress(ending, len(share), len(todo)), "shares": share}
        file.write(head, "rows", [json.dumps(_as_json(row)) for row in rows], last=ending is not None)

    def one(item: tuple[str, str, str]) -> None:
        say = lambda text: print(text, file=sys.stderr, flush=True)
        new, parts = measure(*item, options.tokens, options.prompt, options.seconds, say)
        rows.extend(new)
        share[" ".join(item)] = parts
        save()
        mx.clear_cache()

    save()
    ending = each(todo, one, " ".join)
    save(ending)
    if rows:
        print("tokens/s")
        show(_COLUMNS, [_cells(row) for row in rows], [""] * len(rows))
    for problem in dict.fromkeys(f"{row.model} {row.weights}: mx cannot: {row.problem}" for row in rows if row.problem):
        print(problem)
    if share:
        print("\nshare of a token's time, each op waited for:")
    for what, parts in share.items():
        print(f"  {what}: " + ", ".join(f"{label} {part:.0%}" for label, part in parts.items()))
    if not ending.complete:
        print(f"Incomplete: {len(share)} of {len(todo)} measured.")
    return finish("bench", ending, file, passed=True)


def _check_models(names: Sequence[str]) -> None:
    """Refuses to begin where the installed mlx-lm lacks a model."""
    if importlib.util.find_spec("mlx_lm") is None:
        raise UsageError('--model needs mlx-lm: pip install "mlx-mittens[lm]"')
    for name in names:
        module = f"mlx_lm.models.{models.ARCHITECTURES[name]['model_type']}"
        if importlib.util.find_spec(module) is None:
            version = importlib.metadata.version("mlx-lm")
            raise UsageError(f"--model {name}: mlx-lm {version} has no {module}")


def _as_json(row: Row) -> dict[str, Any]:
    ratios = {"ratio": row.ratio, "converted_ratio": row.converted_ratio} if row.mx else {}
    return {**asdict(row), **ratios}
