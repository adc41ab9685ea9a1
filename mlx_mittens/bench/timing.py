"""How the benchmark times calls: inputs that rotate through more memory than the caches hold, and who holds the clock.

On a CPU we time a call with its ``mx.eval``. A GPU works through queued calls while the host prepares more, and small
kernels take less time than the host needs to hand them over; so calls are queued behind other work, and we time the
GPU's part: from that work's end on. The host's part is reported beside it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from . import machine

# Memory that the inputs of a case rotate through, and how many copies of a case's inputs at most.
_GPU_BYTES = 256 << 20
_CPU_BYTES = (64 << 20, 512 << 20)
_CPU_CACHES = 4
_GPU_SETS = 16384
_CPU_SETS = 4096

# The same, of a short rotation: inputs stay in the caches if this many copies fit.
_SHORT_GPU_BYTES = 128 << 20
_SHORT_CPU_BYTES = (32 << 20, 256 << 20)
_SHORT_CPU_CACHES = 2
_SHORT_SETS = 512
_OWN_BUFFER_BYTES = 64 << 20  # smaller inputs are views of one buffer: thousands of buffers would take long to make

# Calls behind other work: MLX lets the host wait once ten command buffers, of a hundred kernels on a large GPU, are on
# their way, or fewer that read much. A call may be several kernels, so this many may prove too many.
_MOST_QUEUED = 700
_FEWEST_QUEUED = 4
_ATTEMPTS = 4

Arrays = list[mx.array]


def _copies(a: mx.array | None, count: int, own_buffer: bool) -> list[mx.array | None]:
    """An array's values in ``count`` places of memory."""
    if a is None:
        return [None] * count
    if own_buffer or a.nbytes >= _OWN_BUFFER_BYTES:
        return [a + mx.zeros((), a.dtype) for _ in range(count)]
    pool = mx.contiguous(mx.broadcast_to(a[None], (count, *a.shape)))
    return [part.reshape(a.shape) for part in mx.split(pool, count)]


def _size(arrays: Sequence[mx.array | None]) -> int:
    return sum(a.nbytes for a in arrays if a is not None)


def rotation(
    arrays: Sequence[mx.array | None], device: str, updated: Container[int] = (), short: bool = False
) -> list[list[mx.array | None]]:
    """Copies of a set of inputs, together larger than the caches; inputs that a call updates get buffers of their own.

    Args:
        arrays: The inputs.
        device: ``cpu`` or ``gpu``.
        updated: The inputs that a call updates.
        short: Fewer copies, which take less time to make.
    """
    if device == "gpu":
        wanted, limit = (_SHORT_GPU_BYTES, _SHORT_SETS) if short else (_GPU_BYTES, _GPU_SETS)
    else:
        caches, (least, most) = (_SHORT_CPU_CACHES, _SHORT_CPU_BYTES) if short else (_CPU_CACHES, _CPU_BYTES)
        wanted, limit = min(max(caches * machine.cache_bytes(), least), most), _SHORT_SETS if short else _CPU_SETS
    count = min(max(2, math.ceil(wanted / max(_size(arrays), 1))), limit)
    sets = [list(group) for group in zip(*(_copies(a, count, i in updated) for i, a in enumerate(arrays)))]
    mx.eval([a for group in sets for a in group if a is not None])
    return sets


class Sampler:
    """Times calls on a CPU: ``sampler(count)`` gives the seconds of one, going on where it last stopped."""

    def __init__(
        self,
        build: Callable[[list], Arrays],
        link: int,
        updated: Mapping[int, int],
        sets: list,
        first: int,
    ):
        self._build, self._link, self._updated, self._sets, self._position = build, link, updated, sets, first
        self.host: list[float] = []  # seconds of the host for a call, where that is a part of its own

    def _inputs(self, count: int) -> Iterator[list]:
        for _ in range(count):
            yield self._sets[self._position % len(self._sets)]
            self._position += 1

    def __call__(self, count: int) -> float:
        start = time.perf_counter()
        for group in self._inputs(count):
            results = self._build(group)
            for argument, result in self._updated.items():
                group[argument] = results[result]
            mx.eval(results)
        return (time.perf_counter() - start) / count


class _Work:
    """Work for a GPU of any length: products of matrices, each of a tenth of a millisecond or more."""

    def __init__(self) -> None:
        self.beside = mx.new_stream(mx.default_device())  # for work that waits
        width, self._seconds = 8, 0.0  # small: a CPU's product of width 512 takes half a second
        while self._seconds < 1e-4:
            width *= 2
            self._x, self._w = mx.random.normal((2, width, width)) * width**-0.5
            mx.eval(self._x, self._w)
            times = []
            for _ in range(3):  # at first a kernel may be compiled
                start = time.perf_counter()
                mx.eval(self._products(16))
                times.append(time.perf_counter() - start)
            self._seconds = min(times) / 16

    def _products(self, count: int) -> mx.array:
        x = self._x
        for _ in range(count):
            x = x @ self._w
        return x

    def of(self, seconds: float) -> mx.array:
        """Work of about these seconds, which is not begun."""
        return self._products(math.ceil(seconds / self._seconds))


@functools.cache
def _work() -> _Work:
    return _Work()


def _as_large(result: mx.array, like: mx.array) -> mx.array:
    """A result in another array's shape: a view of it where it is large enough, else one copy that repeats it."""
    if (result.shape, result.dtype) == (like.shape, like.dtype):
        return result
    flat = result.reshape(-1)
    if flat.dtype != like.dtype:
        flat = flat[: flat.nbytes // like.itemsize * like.itemsize // flat.itemsize].view(like.dtype)
    if flat.size < like.size:
        flat = mx.broadcast_to(flat, (math.ceil(like.size / flat.size), flat.size)).reshape(-1)
    return flat[: like.size].reshape(like.shape)


@dataclass(frozen=True)
class _Timing:
    result: mx.array
    seconds: float  # from the end of the work on that it waited for
    host: float  # seconds that building it and handing it over took


class _QueuedSampler(Sampler):
    """Calls on a GPU, queued while other work runs that they wait for: their time is from its end to theirs.

    They are a chain, each call on the result of the one before, as the layers of a model are: MLX runs independent
    launches side by side, which hides the time of a single one. Where a result is smaller than the input it stands in
    for, we measure the time of repeating it and take it off. Buffers that calls update go from one to the next.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._host_seconds = 20e-6
        self._most = _MOST_QUEUED

    def _calls(self, count: int, gate: mx.array) -> mx.array:
        """The last result of a chain of calls; the first waits for the gate."""
        state = gate
        for group in self._inputs(count):
            arguments = list(group)
            like = arguments[self._link]
            arguments[self._link] = mx.depends(like, gate) if state is gate else _as_large(state, like)
            results = self._build(arguments)
            for argument, result in self._updated.items():
                if argument != self._link:
                    group[argument] = results[result]
            state = results.pop(self._updated.get(self._link, 0))
            if results:  # else MLX would not compute results that the next call does not need
                state = mx.depends(state, results)
            del arguments, results  # arrays with other references are not updated in place
        return state

    def _links(self, count: int, result: mx.array, gate: mx.array) -> mx.array:
        """Operations between the calls of a chain, where results are smaller than inputs."""
        like = self._sets[0][self._link]
        state = mx.depends(mx.zeros(result.shape, result.dtype), gate)
        for _ in range(count - 1):
            state = _as_large(_as_large(state, like), state)
        return state

    def _timed(self, work_seconds: float, make: Callable[[mx.array], mx.array]) -> _Timing | None:
        """Times calls that wait for other work; None where the work was done before all was handed over."""
        work = _work()  # made at its first use, which takes long
        gate = work.of(work_seconds)
        mx.synchronize()
        start = time.perf_counter()
        with mx.stream(work.beside):
            result = make(gate)
        built = time.perf_counter()
        mx.async_eval(gate)
        begun = time.perf_counter()
        mx.async_eval(result)
        queued = time.perf_counter()
        mx.synchronize()  # which polls; waiting for an array sleeps, and wakes up late
        opened = time.perf_counter()
        mx.synchronize(work.beside)
        end = time.perf_counter()
        if opened - queued < 0.1 * (opened - begun):
            return None
        return _Timing(result, end - opened, built - start + queued - begun)

    def __call__(self, count: int) -> float:
        count = min(count, self._most)
        host_seconds = self._host_seconds
        for _ in range(_ATTEMPTS):
            work_seconds = 1.5 * count * host_seconds + 0.2e-3
            calls = self._timed(work_seconds, functools.partial(self._calls, count))
            if calls:
                host_seconds = calls.host / count
                smaller = calls.result.nbytes < self._sets[0][self._link].nbytes
                make_links = functools.partial(self._links, count, calls.result)
                links = self._timed(work_seconds, make_links) if smaller else None
                if links or not smaller:
                    self._host_seconds = host_seconds
                    self.host.append(host_seconds)
                    return max(calls.seconds - (links.seconds if links else 0.0), 1e-9) / count
            host_seconds *= 1.5  # it was the host's first call, or a pause of its; or MLX let it wait for the work
            if count > _FEWEST_QUEUED:
                count = self._most = max(math.ceil(count / 2), _FEWEST_QUEUED)
        return super().__call__(count)  # handing a call over waits for the GPU


def sampler(
    build: Callable[[list], Arrays],
    link: int,
    updated: Mapping[int, int],
    sets: list,
    first: int,
    device: str,
) -> Sampler:
    """The sampler that times a case on a device.

    Args:
        build: Makes a call on a set of inputs; its results.
        link: Which of the inputs the result of the call before stands in for.
        updated: The inputs that a call updates in place, and which result each is then.
        sets: The inputs to rotate through.
        first: Where to begin.
        device: ``cpu`` or ``gpu``.
    """
    return (Sampler if device == "cpu" else _QueuedSampler)(build, link, updated, sets, first)
