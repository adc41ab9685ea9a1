"""How much MLX puts into one of Metal's command buffers, and whether a token gains by more.

MLX ends a command buffer after a number of launches, or once these read a number of MB of buffers that
others before them do not. Each end costs the GPU and the host some time. MLX reads both limits from the environment,
once in a process, so that each is tried in a process of its own. Nothing here sets them for others: `calibrate` tries,
and `doctor` advises.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import _ext

__all__ = ["Limits", "Trial", "advice", "best", "holds", "limits", "tried", "try_all"]

VARIABLES = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")

# Limits that are tried beside MLX's own. 2,000 MB are out: others cannot have memory that its launches free until
# a buffer ends.
_TRIED = ((200, 200), (1000, 400), (1000, 1000))
_LEAST_GAIN = 0.01  # of a token's time, to be worth a setting
_MOST_MEMORY = 1.1  # times the memory with MLX's own limits

_ROUNDS = 3
_LAYERS = 24
_TOKENS = 48
_WIDTH, _INNER = 2048, 8192
_SECONDS = 120.0  # that a process may take


@dataclass(frozen=True)
class Limits:
    """Launches, and MB of buffers that they read."""

    ops: int
    mb: int

    def __str__(self) -> str:
        return f"{self.ops} launches or {self.mb} MB"


@dataclass(frozen=True)
class Trial:
    """A token's time with some limits.

    Attributes:
        ops: Launches of a command buffer.
        mb: MB of buffers that they read.
        own: Whether these are MLX's own limits.
        us: Median time of a token in microseconds.
        spread: Half the interquartile range of the times, relative.
        peak: The most bytes that MLX held.
    """

    ops: int
    mb: int
    own: bool
    us: float
    spread: float
    peak: int

    @property
    def limits(self) -> Limits:
        return Limits(self.ops, self.mb)


def limits() -> Limits | None:
    """Limits of this process; None where MLX has no Metal, or does not say."""
    found = _ext.command_buffer_limits()
    return found and Limits(*found)


def tried(found: Iterable[Mapping[str, Any]]) -> list[Trial]:
    """Limits in a calibration's file; none where it cannot be read."""
    try:
        trials = [Trial(**values) for values in found]
    except TypeError:
        return []
    numbers = [number for trial in trials for number in (trial.ops, trial.mb, trial.us, trial.spread, trial.peak)]
    known = all(type(number) in (int, float) for number in numbers)
    return trials if known and any(trial.own is True for trial in trials) else []


def best(trials: Sequence[Trial]) -> Trial | None:
    """The least limits that are as good as any, where a token gains by them; None where MLX's own will do."""
    own = next((trial for trial in trials if trial.own), None)
    if own is None:
        return None
    fits = [trial for trial in trials if not trial.own and trial.peak <= _MOST_MEMORY * own.peak]
    if not fits:
        return None
    fastest = min(fits, key=lambda trial: trial.us)
    noise = own.us * own.spread + fastest.us * fastest.spread
    if own.us - fastest.us <= max(noise, _LEAST_GAIN * own.us):
        return None
    alike = [trial for trial in fits if trial.us <= fastest.us * (1 + fastest.spread)]
    return min(alike, key=lambda trial: (trial.mb, trial.ops))


def holds(current: Limits, environment: Mapping[str, str]) -> str:
    """The limits in this process, and who set them."""
    named = [name for name in VARIABLES if environment.get(name)]
    say = "says" if len(named) == 1 else "say"
    return f"end after {current}" + (
        f", as {' and '.join(named)} {say}" if named else ", MLX's own limits for this GPU"
    )


def advice(current: Limits, trials: Sequence[Trial]) -> str:
    """The best of the settings tried on this Mac."""
    if not trials:
        return "`mlx-mittens calibrate` tries others"
    chosen = best(trials)
    own = next(trial for trial in trials if trial.own)
    if chosen is None:
        named = "" if current == own.limits else f": unset {' and '.join(VARIABLES)}"
        return f"no others that were tried make a token faster than MLX's own, {own.limits}{named}"
    gain = f"{1 - chosen.us / own.us:.0%} less time than with MLX's own, {own.limits}"
    if current == chosen.limits:
        return f"a token of the trial took {gain}"
    settings = " ".join(f"{name}={value}" for name, value in zip(VARIABLES, (chosen.ops, chosen.mb), strict=True))
    return f"set {settings} before Python starts: a token of the trial took {gain}"


def try_all(run: Callable[[tuple[int, int] | None], Mapping[str, Any]] | None = None) -> list[Trial]:
    """A token's time with MLX's own limits and with others, in turns.

    Args:
        run: Gives the limits, the times of tokens in microseconds and the memory of a process with these limits; by
            default a process is started.

    Raises:
        RuntimeError: A process failed.
    """
    run = run or _in_process
    settings = (None, *_TRIED)
    results: dict[tuple[int, int] | None, list[Mapping[str, Any]]] = {setting: [] for setting in settings}
    for turn in range(_ROUNDS):
        for setting in settings if turn % 2 == 0 else settings[::-1]:
            results[setting].append(run(setting))
    return [_trial(setting is None, found) for setting, found in results.items()]


def _trial(own: bool, found: Sequence[Mapping[str, Any]]) -> Trial:
    times = [us for result in found for us in result["us"]]
    lower, middle, upper = statistics.quantiles(times, n=4)
    ops, mb = found[0]["limits"]
    return Trial(ops, mb, own, middle, (upper - lower) / 2 / middle, max(result["peak"] for result in found))


# Code of the process. It uses the parent's sys.path, so the current folder cannot shadow the package.
_CHILD = "from mlx_mittens.calibration.command_buffers import child; child()"


def _in_process(setting: tuple[int, int] | None) -> Mapping[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if setting is not None:
        environment.update(zip(VARIABLES, map(str, setting), strict=True))
    code = f"import sys\nsys.path[:] = {sys.path!r}\n{_CHILD}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"a trial of command buffers took more than {_SECONDS:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"a trial of command buffers failed: {last}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child() -> None:
    """Times tokens with this process's limits, and prints a line of JSON."""
    print(json.dumps(timed(_LAYERS, _TOKENS, _WIDTH, _INNER)))


def timed(layers: int, tokens: int, width: int, inner: int) -> dict[str, Any]:
    """The times of tokens, one on its way while the one before is waited for, as generation does."""
    import mlx.core as mx

    def quantized(rows: int, columns: int) -> tuple[mx.array, mx.array, mx.array]:
        w, scales, biases = mx.quantize(mx.random.normal((rows, columns), dtype=mx.float16) * columns**-0.5, 64, 4)
        return w, scales, biases

    def product(x: mx.array, matrix: tuple[mx.array, mx.array, mx.array]) -> mx.array:
        return mx.quantized_matmul(x, *matrix, transpose=True, group_size=64, bits=4)

    matrices = [(quantized(inner, width), quantized(width, inner)) for _ in range(layers)]
    weight = mx.ones((width,), mx.float16)

    def token(x: mx.array) -> mx.array:
        for up, down in matrices:
            h = product(mx.fast.rms_norm(x, weight, 1e-5), up)
            x = x + product(h * mx.sigmoid(h), down)
        return mx.fast.rms_norm(x, weight, 1e-5)

    y = mx.fast.rms_norm(mx.ones((1, width), mx.float16), weight, 1e-5)
    mx.eval(matrices, weight, y)
    mx.reset_peak_memory()
    times = []
    before = time.perf_counter()
    for _ in range(tokens):
        following = token(y)
        mx.async_eval(following)
        mx.eval(y)
        y, now = following, time.perf_counter()
        times.append((now - before) * 1e6)
        before = now
    mx.eval(y)
    found = limits()
    return {
        "limits": [found.ops, found.mb] if found else [0, 0],
        "us": times[tokens // 4 :],  # kernels are compiled before
        "peak": mx.get_peak_memory(),
    }


def as_values(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """As a calibration's file has them."""
    return [asdict(trial) for trial in trials]
