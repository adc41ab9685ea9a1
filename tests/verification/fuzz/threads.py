"""Threads that call ops and patched functions on streams of their own, while others patch and unpatch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from helpers.tolerances import SUMS
from verification.fuzz.draw import Draw
from verification.fuzz.patched import is_undone
from verification.fuzz.trial import Trial

import mlx_mittens as mm

CALLS = 60
CALLERS = 4
PATCHERS = 2
LONGEST_SECONDS = 120.0


def _calls(draw: Draw) -> dict[str, Callable[[mx.Stream], mx.array]]:
    """Calls of patched functions and of ops, on one set of inputs."""
    x, weight, w = (mx.array(draw.numbers(s).astype(np.float32)) for s in ((7, 96), (96,), (40, 96)))
    q, k, v = (mx.array(draw.numbers(s).astype(np.float32)) for s in ((1, 4, 5, 64), (1, 2, 33, 64), (1, 2, 33, 64)))
    words, scales, biases = mx.quantize(w, group_size=32, bits=4)
    heads, cache = mx.concatenate([q, q], 1), mx.zeros((1, 2, 9, 64))
    mx.eval(x, weight, w, q, k, v, words, scales, biases, heads, cache)
    packed = {"transpose": True, "group_size": 32, "bits": 4}

    def attention(s: mx.Stream) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal", stream=s)

    return {
        "rms_norm": lambda s: mx.fast.rms_norm(x, weight, 1e-5, stream=s),
        "layer_norm": lambda s: mx.fast.layer_norm(x, weight, weight, 1e-5, stream=s),
        "softmax": lambda s: mx.softmax(x, axis=-1, stream=s),
        "attention": attention,
        "quantized_matmul": lambda s: mx.quantized_matmul(x, words, scales, biases, **packed, stream=s),
        "gemv": lambda s: mm.gemv(w, x, stream=s),
        "add_rms_norm": lambda s: mx.add(*mm.add_rms_norm(x, x, weight, 1e-5, stream=s), stream=s),
        "fused": lambda s: mx.fast.rms_norm(mx.add(x, x, stream=s), weight, 1e-5, stream=s),
        "rope_append": lambda s: mm.rope_append(heads, cache, cache, 64, base=1e4, offset=2, stream=s)[0],
        "gradient": lambda s: mx.grad(lambda z: mx.fast.rms_norm(z, weight, 1e-5).sum())(x),
    }


class _Stress:
    def __init__(self, draw: Draw):
        self.calls = _calls(draw)
        self.expected = {name: np.array(call(mx.default_stream(mx.cpu))) for name, call in self.calls.items()}
        self.findings: list[str] = []
        self.finished = threading.Event()

    def compile(self) -> None:
        """The kernels for the simulator, which takes longer than the threads may."""
        with mm.patched(), mm.simulator.enabled():
            for name, call in self.calls.items():
                self.check(name, call(mx.default_stream(mx.cpu)))

    def guarded(self, work: Callable[[np.random.Generator], None], seed: int) -> threading.Thread:
        def run() -> None:
            try:
                work(np.random.default_rng(seed))
            except Exception as error:
                self.findings.append(f"{work.__name__}: {type(error).__name__}: {error}")

        return threading.Thread(target=run, daemon=True)

    def call(self, rng: np.random.Generator) -> None:
        streams = [mx.new_thread_local_stream(mx.cpu), mx.default_stream(mx.cpu)]
        for _ in range(CALLS):
            name, stream = str(rng.choice(list(self.calls))), streams[int(rng.integers(0, 2))]
            with mx.stream(stream):
                result = self.calls[name](stream)
                if rng.random() < 0.4:
                    mx.async_eval(result)
                self.check(name, result)

    def patch(self, rng: np.random.Generator) -> None:
        while not self.finished.is_set():
            choice = rng.random()
            if choice < 0.3:
                mm.patch(strict=bool(rng.random() < 0.2), softmax=bool(rng.random() < 0.5))
            elif choice < 0.6:
                mm.unpatch()
            else:
                with mm.patched():
                    time.sleep(0.001)
                    self.check("rms_norm", self.calls["rms_norm"](mx.default_stream(mx.cpu)))
            time.sleep(0.001)

    def simulate(self, rng: np.random.Generator) -> None:
        while not self.finished.is_set():
            with mm.simulator.enabled(seed=int(rng.integers(0, 5))):
                self.check("gemv", self.calls["gemv"](mx.default_stream(mx.cpu)))

    def check(self, name: str, result: mx.array) -> None:
        if not np.allclose(np.array(result), self.expected[name], rtol=SUMS, atol=SUMS):
            self.findings.append(f"{name}: the result is wrong")


def threads(draw: Draw) -> Trial:
    simulated = draw.index % 5 == 1

    def run() -> str | None:
        stress = _Stress(draw)
        if simulated:
            stress.compile()
        seed = draw.integer(0, 2**31)
        callers = [stress.guarded(stress.call, seed + i) for i in range(CALLERS)]
        others = [stress.guarded(stress.patch, seed + 100 + i) for i in range(PATCHERS)]
        others += [stress.guarded(stress.simulate, seed + 200) for _ in range(simulated)]
        for thread in callers + others:
            thread.start()
        end = time.monotonic() + LONGEST_SECONDS
        for thread in callers:
            thread.join(max(0.0, end - time.monotonic()))
        stress.finished.set()
        for thread in others:
            thread.join(max(1.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in callers + others):
            return f"threads are stuck after {LONGEST_SECONDS:.0f} s"
        mm.unpatch()
        if not is_undone():
            return "the patch was not undone"
        return stress.findings[0] if stress.findings else None

    return Trial("with the simulator" if simulated else "native", f"{CALLERS} callers, {PATCHERS} patchers", run)
