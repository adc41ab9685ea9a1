"""Times whole models: decode and prefill of an architecture or of a user's model, on our kernels and on mx's.

Ours run twice: under `patched()`, and in a model that `nn.convert` has fused. We time mlx-lm's own generation
loop, for decode after a prompt that our kernels have processed for all, for prefill up to the first token. Each
contender has run both before, since MLX too compiles kernels at run time. On a CPU mx may take a minute for a token: it
then decodes fewer tokens, and all read a shorter prompt, which is said. Where a token takes milliseconds the contenders
take turns, and the best of each one's counts: on a shared machine the host's part scatters. Each has a stream of its
own, or graphs that hold our kernels would stay in mx's turns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..nn import convert
from ..patching.patches import patched
from ..patching.targets import TARGETS
from . import architectures, machine, model_folders
from .streams import new_stream, on_stream

# Formats of random weights, as `architectures.build` takes them. "mxfp4" is what `mlx_lm.convert --q-mode mxfp4` makes.
FORMATS: dict[str, dict[str, Any]] = {
    "4-bit": {"bits": 4},
    "8-bit": {"bits": 8},
    "half": {},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}
_Result = TypeVar("_Result")
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}

# Turns of the contenders at most, and after how many seconds none begins any more.
_TURNS = 5
_TURN_SECONDS = 8.0

# The share of the memory that is available which random weights may take: caches, joined copies of the weights of
# attention in the converted model, and other processes need the rest.
_SHARE_OF_MEMORY = 0.5


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
    layers: int | None = None  # that were timed
    published_layers: int | None = None  # that the architecture has; of a user's model the same

    @property
    def ratio(self) -> float:
        return self.mittens.tokens_per_s / self.mx.tokens_per_s if self.mx else math.nan

    @property
    def converted_ratio(self) -> float:
        return self.converted.tokens_per_s / self.mx.tokens_per_s if self.mx else math.nan


@dataclass(frozen=True)
class Subject:
    """A model to time: of random weights in a format, or the user's, whose format its files say."""

    model: str  # the name of an architecture; a folder or a name on the hub
    weights: str = ""
    dtype: str = ""
    layers: int | None = None  # of random weights; None: as many as the memory has room for

    def __str__(self) -> str:
        return " ".join(filter(None, (self.model, self.weights, self.dtype)))

    def load(self) -> tuple[Subject, nn.Module]:
        """The model, and the subject with the format that it has."""
        if not self.weights:
            loaded = model_folders.load(self.model)
            return Subject(self.model, loaded.weights, loaded.dtype), loaded.model
        dtype, quantization = DTYPES[self.dtype], FORMATS[self.weights]
        try:
            layers = layers_for_memory(self.model, dtype, quantization) if self.layers is None else self.layers
        except MemoryError as error:
            raise MemoryError(f"{error}: choose smaller weights, or --layers") from None
        layers = min(layers, published_layers(self.model))
        model = architectures.build(self.model, dtype, **quantization, num_hidden_layers=layers)
        return Subject(self.model, self.weights, self.dtype, layers), model


def published_layers(name: str) -> int:
    """The layers of an architecture."""
    return int(architectures.ARCHITECTURES[name]["num_hidden_layers"])


def layers_for_memory(name: str, dtype: mx.Dtype, quantization: dict[str, Any]) -> int:
    """How many layers of an architecture with random weights are built: all, if half of the memory holds them.

    Args:
        name: One of ``ARCHITECTURES``.
        dtype: Of unquantized weights.
        quantization: As in `FORMATS`.

    Raises:
        MemoryError: The fewest are too many.
    """
    available = machine.available_bytes()
    if available is None:
        return published_layers(name)
    room = int(available * _SHARE_OF_MEMORY)
    fitting = architectures.fitting_layers(name, dtype, room, **quantization)
    if not fitting:
        raise MemoryError(
            f"{architectures.period(name)} of the layers of {name} need more than half of the memory available, "
            f"{room / 1e9:.1f} GB"
        )
    return fitting


def vocabulary(model: nn.Module) -> int:
    """How many tokens there are; a model within another class, as of one that sees, does not say."""
    return getattr(model.args, "vocab_size", None) or model(mx.array([[0]])).shape[-1]


def _state(caches: list) -> list:
    return [cache.state for cache in caches]


def _prefill(model: nn.Module, tokens: int) -> tuple[float, list]:
    """Seconds from a prompt of this length to the first token, and the cache it filled.

    As mlx-lm reads a prompt: logits are computed for its last token alone.
    """
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    prompt = mx.random.randint(0, vocabulary(model), (tokens,))
    mx.eval(prompt)
    mx.synchronize()
    start = time.perf_counter()
    with on_stream(mx.default_stream(mx.default_device())) as stream:
        for _ in generate_step(prompt, model, max_tokens=0, prompt_cache=caches, **stream):
            pass
        mx.eval(_state(caches))
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
    """mlx-lm's loop, limited by tokens and seconds; the median of a token's time."""
    from mlx_lm.generate import generate_step

    first = _one_token(model, caches)
    if 3 * first > seconds:  # the loop runs one ahead: it would take three
        return Speed(1 / first, 1)
    times = []
    start = before = time.perf_counter()
    with on_stream(mx.default_stream(mx.default_device())) as stream:
        for _ in generate_step(mx.array([1]), model, max_tokens=tokens, prompt_cache=copy.deepcopy(caches), **stream):
            now = time.perf_counter()
            times.append(now - before)
            before = now
            if now - start > seconds:
                break
        mx.synchronize()  # the loop runs one ahead: its last token would run in the next contender's time
    steady = times[1:] or times  # the first waits for two: the loop runs one ahead
    return Speed(1 / statistics.median(steady), len(steady))


def _prompt_length(model: nn.Module, tokens: int, seconds: float) -> int:
    """Runs prompts up to this number of tokens, or up to the length whose double would take too long, which it returns.

    MLX compiles kernels for a GPU by the length of the prompt: there the whole prompt is run at once.
    """
    count = tokens if mx.default_device().type == mx.gpu else 1
    while 2 * _prefill(model, count)[0] <= seconds and count < tokens:
        count = min(tokens, 2 * count)
    return count


def _prompt_speed(model: nn.Module, count: int, seconds: float) -> Speed:
    """The best of up to three prompts."""
    times = [_prefill(model, count)[0]]
    while sum(times) * (1 + 1 / len(times)) < seconds and len(times) < 3:
        times.append(_prefill(model, count)[0])
    return Speed(count / min(times), count)


def converted_copy(model: nn.Module) -> nn.Module:
    """A second model on the same weights, fused."""
    weights = {id(array): array for array in dict(tree_flatten(model.parameters())).values()}
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


# The number of steps that `measure` reports of a model.
STEPS = 3


def measure(
    subject: Subject, tokens: int, prompt: int, seconds: float, step: Callable[[str], None]
) -> tuple[list[Row], dict[str, float]]:
    """Times one model in one format; rows for decode and prefill, and the share of a token's time of each op.

    ``step`` is told of each of the `STEPS` that is done.

    Raises:
        model_folders.ModelError: A model of the user's cannot be loaded.
    """
    asked = subject
    subject, model = subject.load()
    converted = converted_copy(model)
    streams = {name: new_stream() for name in ("mittens", "converted", "mx")}
    with mx.stream(streams["mittens"]):
        with patched():
            _, caches = _prefill(model, prompt)
        with patched(attention_layer=False):  # its ops are to be seen
            share = shares(model, caches)

    def contender(name: str, run: Callable[[nn.Module], _Result]) -> Callable[[], _Result]:
        def on_its_stream() -> _Result:
            with mx.stream(streams[name]), patched() if name == "mittens" else contextlib.nullcontext():
                return run(converted if name == "converted" else model)

        return on_its_stream

    def warmed(model: nn.Module) -> int:
        _decode(model, caches, 4, seconds)
        return _prompt_length(model, prompt, seconds)

    lengths = []
    for name in streams:
        try:
            lengths.append(contender(name, warmed)())
        except RuntimeError:  # which mx raises in its turns, too
            if name != "mx":
                raise
    count = min(lengths)
    step(f"{asked}: loaded and compiled")
    decoding = lambda model: _decode(model, caches, tokens, seconds)
    decode, problem = _in_turns({name: contender(name, decoding) for name in streams})
    step(f"{asked}: decode")
    reading = lambda model: _prompt_speed(model, count, seconds)
    prefill, _ = _in_turns({name: contender(name, reading) for name in streams if name in decode})
    step(f"{asked}: prefill")
    layers = len(getattr(model, "layers", ())) or None
    published = published_layers(subject.model) if subject.model in architectures.ARCHITECTURES else layers
    row = functools.partial(
        Row,
        subject.model,
        subject.weights,
        subject.dtype,
        device=machine.device(),
        problem=problem,
        layers=layers,
        published_layers=published,
    )
    return [
        row(phase=phase, mittens=speeds["mittens"], converted=speeds["converted"], mx=speeds.get("mx"))
        for phase, speeds in (("decode", decode), (f"prefill {count}", prefill))
    ], share


def _timed() -> Iterator[tuple[str, Any, str]]:
    """Functions by which a model calls its ops: the op, the function's owner, and its name there."""
    for target in TARGETS:
        if target.is_loaded() and not target.shared and not target.needs:  # targets with needs are made of others' ops
            yield target.op, *target.owner()
    yield "gather_qmm", mx, "gather_qmm"


@contextlib.contextmanager
def _clocks(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the time of each op, waiting for its inputs before and for its result after."""
    saved = [(label, owner, name, getattr(owner, name)) for label, owner, name in _timed()]
    running = False  # a layer's time includes the function that it calls

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
