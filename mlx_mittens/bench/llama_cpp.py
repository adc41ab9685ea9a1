"""llama.cpp beside our models: its own benchmark, on a GGUF file of the user's, in the same run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .. import _ext

# Names the executable, and the file with the model for it.
EXECUTABLE = "MLX_MITTENS_LLAMA_BENCH"
MODEL = "MLX_MITTENS_LLAMA_MODEL"

_REPETITIONS = 3


class PeerError(Exception):
    """llama.cpp cannot be timed; the message says what to do."""


@dataclass(frozen=True)
class Figure:
    """Times of a phase by llama-bench.

    Attributes:
        phase: ``decode``, or ``prefill`` with the tokens of the prompt.
        tokens_per_s: The mean of its repetitions.
        spread: Their standard deviation, relative.
        build: The commit of llama.cpp.
        threads: Threads that it used.
        weights: The model as llama.cpp names it, with its format.
    """

    phase: str
    tokens_per_s: float
    spread: float
    build: str
    threads: int
    weights: str

    def __str__(self) -> str:
        how = f"{self.weights}, build {self.build}, {self.threads} threads"
        return f"llama.cpp {self.phase}: {self.tokens_per_s:.4g} tokens/s, +- {self.spread:.0%} ({how})"


def find() -> tuple[str, Path]:
    """The executable and the file that the environment names.

    Raises:
        PeerError: One is not named, or not there.
    """
    named, model = os.environ.get(EXECUTABLE, ""), os.environ.get(MODEL, "")
    if not named:
        raise PeerError(f"{EXECUTABLE} is not set: expected the path of llama-bench, which a build of llama.cpp makes")
    executable = shutil.which(named)
    if executable is None:
        raise PeerError(f"{EXECUTABLE} is {named!r}, which is no executable: expected the path of llama-bench")
    if not model:
        raise PeerError(f"{MODEL} is not set: expected a GGUF file of the model that is timed")
    if not Path(model).is_file():
        raise PeerError(f"{MODEL} is {model!r}, which is no file: expected a GGUF file of the model that is timed")
    return executable, Path(model)


def measure(executable: str, model: Path, prompt: int, tokens: int) -> list[Figure]:
    """Times decode and a prompt, with as many threads as our native code uses.

    Raises:
        PeerError: It fails, or prints something else than expected.
    """
    layers = "0" if mx.default_device() == mx.cpu else "99"  # on the GPU
    command = [executable, "-m", str(model), "-p", str(prompt), "-n", str(tokens), "-r", str(_REPETITIONS)]
    command += ["-t", str(_ext.cpu_threads()), "-ngl", layers, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise PeerError(f"{executable} ended with status {done.returncode}: {last}")
    try:
        figures = [_figure(test) for test in json.loads(done.stdout)]
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise PeerError(
            f"{executable} printed no table of llama-bench in JSON ({type(error).__name__}: {error}): "
            "expected llama-bench of llama.cpp from 2025 on"
        ) from None
    return sorted(figures, key=lambda figure: figure.phase)


def _figure(test: dict) -> Figure:
    phase = "decode" if test["n_gen"] else f"prefill {test['n_prompt']}"
    speed = float(test["avg_ts"])
    return Figure(
        phase, speed, float(test["stddev_ts"]) / speed, test["build_commit"], int(test["n_threads"]), test["model_type"]
    )
