"""Running the Metal kernels on the CPU, in a simulator that watches them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import _ext

Fault = _ext.SimulatorFault


@contextlib.contextmanager
def enabled(seed: int = 0, watch: bool = True) -> Iterator[None]:
    """Sends ops on the CPU through their Metal kernels, in the simulator.

    Ops are lazy: what counts is where they are evaluated, not where they are called. The environment variable
    ``MLX_MITTENS_SIMULATOR=1`` does the same for a whole process.

    Args:
        seed: Shuffles the order in which threads and threadgroups run; 0 is the natural order.
        watch: Whether every memory access is checked.
    """
    before = _ext.simulator_state()
    _ext.simulator_configure(True, seed, watch)
    try:
        yield
    finally:
        _ext.simulator_configure(*before)
