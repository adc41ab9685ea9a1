"""Running one kernel of a text in the simulator, for the tests of the front end and of the simulator."""

import itertools

import numpy as np

from mlx_mittens import _ext, frontend

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"

_serial = itertools.count()


def register(text: str) -> str:
    """A name for a text, with the usual header before it: its first line is line 3."""
    name = f"test{next(_serial)}.metal"
    frontend.register_source(name, HEADER + text)
    return name


def run(
    file,
    kernel,
    arguments,
    threadgroups=1,
    threads=32,
    *,
    watch=True,
    constants=None,
    private=False,
    watched=None,
    **options,
):
    """Runs a kernel; arguments are arrays or bytes: the last is the output unless they are (role, array) pairs.

    Returns the counts; outputs are written in place. A kernel that is compiled to be watched may run without it.
    """
    pairs = [a if isinstance(a, tuple) else (None, a) for a in arguments]
    last = max((i for i, (_, a) in enumerate(pairs) if isinstance(a, np.ndarray)), default=None)
    triples = []
    for i, (role, data) in enumerate(pairs):
        role = role or ("constant" if isinstance(data, bytes) else "output" if i == last else "input")
        data = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else data
        triples.append(("", role, data))
    library = frontend.simulator_library(file, watch if watched is None else watched, constants, private)
    return _ext.simulate(library, kernel, triples, _triple(threadgroups), _triple(threads), watch=watch, **options)


def kernel(body: str, arguments: str, name: str = "test") -> str:
    """A kernel's text: `i`, `group`, `lane` and `simdgroup` are there besides the arguments."""
    return (
        f"[[kernel]] void {name}({arguments},\n"
        "    uint i [[thread_position_in_threadgroup]], uint group [[threadgroup_position_in_grid]],\n"
        "    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {\n"
        f"{body}\n}}\n"
    )


def _triple(size):
    return [size, 1, 1] if isinstance(size, int) else list(size)
