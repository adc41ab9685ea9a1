"""Programs that run on and on: their memory does not grow."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
from verification.fuzz.draw import Draw
from verification.fuzz.trial import Trial

import mlx_mittens as mm

ROUNDS = 5
GROWTH_BYTES = 256 * 1024
# Freed memory stays with the allocator there.
SANITIZED = "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ

Step = Callable[[], None]


def _model(quantized: bool = False) -> nn.Module:
    from mlx_lm.models import llama

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 128, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, rope_theta=1e4, **sizes, **heads))
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


def _generation(
    model: nn.Module, make_cache: Callable[[], list] | None = None, between: Step | None = None
) -> Iterator[Step]:
    """Steps that decode a token each; every 100 of them a new cache."""
    from mlx_lm.models.cache import make_prompt_cache

    token, cache = mx.array([[1]]), []
    for i in itertools.count():
        if i % 100 == 0:
            cache = make_cache() if make_cache else make_prompt_cache(model)
        if between and i % 10 == 0:
            between()

        def step() -> None:
            nonlocal token
            token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
            mx.eval(token)

        yield step


def _patched(quantized: bool = False, cache: str | None = None, again: bool = False) -> Iterator[Step]:
    from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

    make = {
        None: None,
        "quantized": lambda: [QuantizedKVCache(group_size=64, bits=8) for _ in range(2)],
        "rotating": lambda: [RotatingKVCache(64, keep=4) for _ in range(2)],
    }[cache]

    def patch_again() -> None:
        mm.unpatch()
        mm.patch()

    with mm.patched():
        yield from _generation(_model(quantized), make, patch_again if again else None)


def _converted() -> Iterator[Step]:
    model = _model()
    mm.nn.convert(model)
    yield from _generation(model)


def _compiled_gradient() -> Iterator[Step]:
    x, weight = mx.ones((4, 64)), mx.ones((64,))
    gradient = mx.compile(mx.grad(lambda z: mm.softmax(mm.rms_norm(z, weight, 1e-5), axis=-1).square().sum()))
    while True:
        yield lambda: mx.eval(gradient(x))


PROGRAMS: dict[str, Callable[[], Iterator[Step]]] = {
    "patched": _patched,
    "patched, quantized": lambda: _patched(quantized=True),
    "patched, quantized cache": lambda: _patched(cache="quantized"),
    "patched, rotating cache": lambda: _patched(cache="rotating"),
    "patched again and again": lambda: _patched(again=True),
    "converted": _converted,
    "compiled gradient": _compiled_gradient,
}


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def memory(draw: Draw) -> Trial:
    """Rounds of the same steps; memory that grows in every round after the first is a leak."""
    name = list(PROGRAMS)[draw.index % len(PROGRAMS)]
    steps = 200

    def run() -> str | None:
        program = PROGRAMS[name]()
        marks = []
        try:
            for _ in range(ROUNDS):
                for step in itertools.islice(program, steps):
                    step()
                gc.collect()
                marks.append((mx.get_active_memory(), _resident_bytes()))
        finally:
            program.close()
        active, resident = (min(b - a for a, b in zip(m[1:], m[2:])) for m in zip(*marks))
        if active > 0:
            return f"MLX's active memory grows by at least {active} bytes in {steps} steps"
        if resident > GROWTH_BYTES and not SANITIZED:
            return f"the process grows by at least {resident} bytes in {steps} steps"
        return None

    return Trial(name, f"{ROUNDS} rounds of {steps} steps", run)
