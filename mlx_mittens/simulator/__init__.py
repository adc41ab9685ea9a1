"""Running Metal kernels on the CPU, in a simulator that watches them: the ops', and those of mx.fast.metal_kernel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .. import _ext, gpus
from .metal_kernel import Kernel, metal_kernel, redirect, restore
from .prediction import EstimatedLaunch, PredictedLaunch, PredictedLaunches, predicted
from .profile import Launch, LineCounts, profiled

__all__ = [
    "EstimatedLaunch",
    "Fault",
    "Kernel",
    "Launch",
    "LineCounts",
    "PredictedLaunch",
    "PredictedLaunches",
    "enabled",
    "metal_kernel",
    "predicted",
    "profiled",
]


Fault = _ext.SimulatorFault

STEP_LIMIT = 1_000_000_000

_lock = threading.Lock()
_open: list[tuple[object, int, bool, int, str]] = []  # a token and the settings of every block that is open
_before: tuple[bool, int, bool, int, str]  # the settings from before the first block that is open


@contextlib.contextmanager
def enabled(seed: int = 0, watch: bool = True, step_limit: int = STEP_LIMIT, gpu: str = "apple") -> Iterator[None]:
    """Sends ops on the CPU, and the kernels of ``mx.fast.metal_kernel``, through the simulator.

    Ops are lazy: what counts is where they are evaluated, not where they are called. The environment variable
    ``MLX_MITTENS_SIMULATOR=1`` does the same for the ops of a whole process.

    A kernel of ``mx.fast.metal_kernel`` goes to the simulator if it is called within the block, on a Mac too, in place
    of the GPU. The block applies to kernels created inside it, and to existing kernels stored in a module attribute. It
    does not apply to an existing kernel that is stored elsewhere, such as in a local variable.

    The settings are the process's: blocks may nest, and overlap in several threads. The one entered last counts, and
    all is as before once the last is left.

    Args:
        seed: Shuffles the order in which threads and threadgroups run; 0 is the natural order.
        watch: Whether every memory access is checked.
        step_limit: Branches that one threadgroup may take before its kernel counts as endless.
        gpu: Which GPU the simulator stands for: an Apple chip such as "m2-max" (``mlx-mittens simulate --help`` lists
            them), "h200", or "apple" or "nvidia" for a usual one. Which kernels the ops choose and how they share out
            work depends on it; on a GPU with matrix units, such as the M5's, some calls go to mx.

    Raises:
        ValueError: There is no such GPU.
    """
    gpus.named(gpu)
    global _before
    block = (object(), seed, watch, step_limit, gpu)
    with _lock:
        if not _open:
            _before = _ext.simulator_state()
            redirect()
        _open.append(block)
        _ext.simulator_configure(True, *block[1:])
    try:
        yield
    finally:
        with _lock:
            _open.remove(block)
            if _open:
                _ext.simulator_configure(True, *_open[-1][1:])
            else:
                restore()
                _ext.simulator_configure(*_before)
