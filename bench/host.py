"""The host's time for a call: to build it, and to encode it for the device, beside mx's.

A loop builds CALLS calls of one op and hands them over by `mx.async_eval`. The wait for the results is not timed.
Each way of calling (mm.OP, mx's under `mm.patch()`, mx's) runs three loops in a row, and the last one counts: a graph
with other kernels than before costs MLX more, which the first two loops pay. The ways run in all orders, in turn.

Usage: python3 host.py [ROUNDS] [cpu|gpu] [OP ...]
"""

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import mlx.core as mx

import mlx_mittens as mm

CALLS = 400


def twins() -> dict[str, tuple[Callable[[], mx.array], Callable[[], mx.array]]]:
    """Each op's call of ours, and mx's, on inputs small enough that no device makes the host wait.

    The patch takes nn.Linear's calls, not products with `@`: gemv's patched figures are mx's.
    """
    x, heads, keys = mx.ones((1, 1, 1024)), mx.ones((1, 8, 1, 64)), mx.ones((1, 8, 64, 64))
    weight, matrix = mx.ones((1024,)), mx.random.normal((1024, 1024)) * 0.02
    packed = mx.quantize(matrix.astype(mx.bfloat16), group_size=64, bits=4)
    x, heads, keys, weight, matrix = (each.astype(mx.bfloat16) for each in (x, heads, keys, weight, matrix))
    mx.eval(x, heads, keys, weight, matrix, packed)
    return {
        "softmax": (lambda: mm.softmax(x, axis=-1), lambda: mx.softmax(x, axis=-1)),
        "rms_norm": (lambda: mm.rms_norm(x, weight, 1e-5), lambda: mx.fast.rms_norm(x, weight, 1e-5)),
        "layer_norm": (
            lambda: mm.layer_norm(x, weight, weight, 1e-5),
            lambda: mx.fast.layer_norm(x, weight, weight, 1e-5),
        ),
        "quantized_matmul": (
            lambda: mm.quantized_matmul(x, *packed, transpose=True, group_size=64, bits=4),
            lambda: mx.quantized_matmul(x, *packed, transpose=True, group_size=64, bits=4),
        ),
        "gemv": (lambda: mm.gemv(matrix, x), lambda: x @ matrix.T),
        "scaled_dot_product_attention": (
            lambda: mm.scaled_dot_product_attention(heads, keys, keys, scale=0.125),
            lambda: mx.fast.scaled_dot_product_attention(heads, keys, keys, scale=0.125),
        ),
    }


def loop(call: Callable[[], mx.array]) -> tuple[float, float]:
    """Microseconds of a call, to build it and to encode it."""
    start = time.perf_counter()
    results = [call() for _ in range(CALLS)]
    built = time.perf_counter()
    mx.async_eval(results)
    encoded = time.perf_counter()
    mx.synchronize()
    return (built - start) / CALLS * 1e6, (encoded - built) / CALLS * 1e6


def measure(name: str, rounds: int) -> None:
    ours, theirs = twins()[name]
    ways = {
        "direct": (ours, contextlib.nullcontext),
        "patched": (theirs, mm.patched),
        "mx": (theirs, contextlib.nullcontext),
    }
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for order in itertools.permutations(ways):
            for way in order:
                call, surroundings = ways[way]
                with surroundings():
                    times[way].append([loop(call) for _ in range(3)][-1])
    columns = []
    for way, taken in times.items():
        build, encode = (statistics.median(part) for part in zip(*taken, strict=True))
        both = statistics.median(sum(parts) for parts in taken)
        columns.append(f"{way} {both:.2f} ({build:.2f} + {encode:.2f})")
    print(f"{name:30}", ", ".join(columns), flush=True)


def main() -> None:
    arguments = sys.argv[1:]
    rounds = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 5
    if arguments and arguments[0] in ("cpu", "gpu"):
        mx.set_default_device(mx.Device(getattr(mx, arguments.pop(0))))
    print(f"microseconds of the host a call, both (build + encode), {mx.default_device()}, medians of {6 * rounds}")
    for name in arguments or twins():
        measure(name, rounds)


if __name__ == "__main__":
    main()
