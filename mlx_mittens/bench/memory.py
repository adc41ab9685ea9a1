"""Memory of whole models, for a prompt and the tokens after it, by the kind of cache, on our kernels and mx's.

Each figure is of a process of its own, in which mlx-lm's generation loop runs once. MLX counts its own memory. The
system counts resident memory, with Python, its modules and memory that is freed and not given back.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from ..patching.patches import patched
from .models import Subject

# Bits of a cache's numbers, by the names of caches.
CACHES: dict[str, int | None] = {"half": None, "8-bit": 8, "4-bit": 4}
SIDES = ("patched", "mx")
GROUP_SIZE = 64


@dataclass(frozen=True)
class Phase:
    """Bytes of a phase: MLX's peak, MLX's at the end, the resident peak, and resident at the end.

    The most that was resident is that since the process began where the system is not Linux.
    """

    peak: int
    held: int
    resident_peak: int
    resident: int


@dataclass(frozen=True)
class Row:
    """A model with one kind of cache.

    Attributes:
        side: ``patched`` or ``mx``.
        loaded: Bytes that MLX held before the prompt: the weights.
        prompt: Up to the first token.
        tokens: From there on.
        problem: Why it could not run; there are no figures then.
    """

    model: str
    weights: str
    dtype: str
    layers: int | None
    cache: str
    side: str
    keys: int
    loaded: int = 0
    prompt: Phase | None = None
    tokens: Phase | None = None
    problem: str | None = None


def measure(subject: Subject, cache: str, side: str, prompt: int, tokens: int) -> Row:
    """Runs a model once in a process of its own, on the default device.

    Args:
        subject: The model to load.
        cache: One of `CACHES`.
        side: One of `SIDES`.
        prompt: How many tokens are read.
        tokens: How many are generated, 2 at least.
    """
    device = "gpu" if mx.default_device() == mx.gpu else "cpu"
    asked = {"subject": asdict(subject), "cache": cache, "side": side, "prompt": prompt, "tokens": tokens}
    code = f"import sys\nsys.path[:] = {sys.path!r}\nfrom mlx_mittens.bench.memory import child\nchild()"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps({**asked, "device": device}), capture_output=True, text=True
    )
    head: dict[str, Any] = {"cache": cache, "side": side, "keys": prompt + tokens}
    if done.returncode:
        problem = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Row(subject.model, subject.weights, subject.dtype, subject.layers, **head, problem=problem)
    found = json.loads(done.stdout.splitlines()[-1])
    of_prompt, of_tokens = (Phase(**found[name]) for name in ("prompt", "tokens"))
    return Row(**found["subject"], **head, loaded=found["loaded"], prompt=of_prompt, tokens=of_tokens)


def child() -> None:
    """Runs the request in a line of JSON, and prints its figures as one."""
    print(json.dumps(_run(json.loads(sys.stdin.read()))))


def _run(asked: Mapping[str, Any]) -> dict[str, Any]:
    from mlx_lm.generate import generate_step

    mx.set_default_device(mx.gpu if asked["device"] == "gpu" else mx.cpu)
    subject, model = Subject(**asked["subject"]).load()
    mx.eval(model.parameters())
    mx.clear_cache()
    loaded = mx.get_active_memory()
    prompt = mx.arange(asked["prompt"]) % 256
    bits = CACHES[asked["cache"]]
    options: dict[str, Any] = (
        {} if bits is None else {"kv_bits": bits, "kv_group_size": GROUP_SIZE, "quantized_kv_start": 0}
    )
    with patched() if asked["side"] == "patched" else contextlib.nullcontext():
        _begin()
        steps = generate_step(prompt, model, max_tokens=asked["tokens"], **options)
        next(steps)
        of_prompt = _phase()
        _begin()
        for _ in range(asked["tokens"] - 1):
            next(steps)
        of_tokens = _phase()  # the caches go with the last step
    return {"subject": asdict(subject), "loaded": loaded, "prompt": asdict(of_prompt), "tokens": asdict(of_tokens)}


def _begin() -> None:
    """Lets both peaks begin anew."""
    mx.reset_peak_memory()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _phase() -> Phase:
    peak, now = _resident()
    return Phase(mx.get_peak_memory(), mx.get_active_memory(), peak, now)


def _resident() -> tuple[int, int]:
    """The most bytes of this process that were in memory, and the bytes in memory now."""
    if sys.platform.startswith("linux"):  # getrusage has the peak of the parent there
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS"))  # type: ignore[return-value]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
    return peak, int(shown.stdout) * 1024
