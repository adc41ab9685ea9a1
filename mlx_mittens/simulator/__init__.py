"""Running Metal kernels on the CPU, in a simulator that watches them: the ops' and users' by mx.fast.metal_kernel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import _ext, gpus
from . import pretence
from .metal_kernel import NO_METAL, Kernel, metal_kernel, redirect
from .profile import Launch, LineCounts, ProfiledLaunches, profiled

if TYPE_CHECKING:
    from ..prediction.launches import EstimatedLaunch, PredictedLaunch, PredictedLaunches, predicted
else:

    def __getattr__(name: str) -> object:
        if name in ("EstimatedLaunch", "PredictedLaunch", "PredictedLaunches", "predicted"):
            from ..prediction import launches  # imports this module in turn

            return getattr(launches, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "EstimatedLaunch",
    "Fault",
    "Kernel",
    "Launch",
    "LineCounts",
    "PredictedLaunch",
    "PredictedLaunches",
    "ProfiledLaunches",
    "enabled",
    "launched",
    "metal_kernel",
    "notes",
    "predicted",
    "profiled",
]


Fault = _ext.SimulatorFault

STEP_LIMIT = 1_000_000_000

_lock = threading.Lock()
_Settings = tuple[object, int, bool, int, str, bool, bool, bool]
_open: list[_Settings] = []  # a token and the settings of every block that is open
_equal_writes: list[tuple[object, bool]] = []  # a token and whether equal writes are faults, of every open block
_pretending: list[object] = []  # the tokens of the open blocks that pretend to be on a Mac
_before: tuple[bool, int, bool, int, str, bool, bool, bool]  # the settings from before the first block that is open


@contextlib.contextmanager
def enabled(
    seed: int = 0,
    watch: bool = True,
    step_limit: int = STEP_LIMIT,
    gpu: str = "apple",
    pretend_metal: bool = False,
    equal_writes: str = "note",
    subnormals: str = "keep",
    fuse: bool = False,
    tensor_layout: str = "m5",
) -> Iterator[None]:
    """Sends ops on the CPU, and the kernels of ``mx.fast.metal_kernel``, through the simulator.

    Ops are lazy: an op goes there if it is evaluated within the block, wherever it is called. The environment variable
    ``MLX_MITTENS_SIMULATOR=1`` does the same for the ops of a whole process.

    A kernel of ``mx.fast.metal_kernel`` goes to the simulator if it is called within the block, on a Mac too, in place
    of the GPU. The first block of a process puts a switch in the place of ``mx.fast.metal_kernel`` and of all kernels
    that it has made, in whatever module, object, container or closure they are held; the switch stays, and outside of
    blocks it calls MLX. Out of its reach are a kernel that was made before the first block and is held by a local
    variable of a function that runs, or by a set: without Metal the error of its call says so.

    The settings are the process's: blocks may nest, and overlap in several threads. The one entered last counts, and
    they are as before once the last is left.

    Args:
        seed: Shuffles the order in which threads and threadgroups run; 0 is the natural order.
        watch: Whether every memory access is checked.
        step_limit: Branches that one threadgroup may take before its kernel counts as endless.
        gpu: Which GPU the simulator stands for: an Apple chip such as "m2-max" (``mlx-mittens simulate --help`` lists
            them), "h200", or "apple" or "nvidia" for a usual one. Which kernels the ops choose and how they share out
            work depends on it; on a GPU with matrix units, such as the M5's, some calls go to mx.
        pretend_metal: Whether MLX answers as on a Mac, for libraries that ask before they launch a kernel:
            ``mx.metal.is_available()`` is true, and ``mx.gpu`` is a device that works. Kernels that a module did not
            make at its import, since there was no Metal, are made.
        equal_writes: Treatment of threads that write one value to one place, with no barrier between: ``"note"``
            (see ``notes``) or ``"fault"``.
        subnormals: Treatment of floats below 1.2e-38: ``"keep"``, as IEEE has it, or ``"flush"``, zero, as on a
            GPU whose kernels MLX compiles.
        fuse: Whether ``a * b + c`` within an expression rounds once, as MLX's compiler may have it.
        tensor_layout: Which lane holds which elements of a cooperative tensor of Metal 4: ``"m5"``, or ``"shuffled"``
            for a layout that has nothing of it. Layouts differ between generations of GPUs: a kernel that asks
            (``get_multidimensional_index``, ``load``, ``store``) is right in both, one that assumes a layout is not.

    Raises:
        ValueError: There is no such GPU, or ``equal_writes``, ``subnormals`` or ``tensor_layout`` is neither of its
            two.
        RuntimeError: From the block, where it called a kernel without Metal that is out of reach.

    Example:
        >>> with mm.simulator.enabled(seed=1):
        ...     y = mm.softmax(mx.ones((2, 8)), axis=-1, stream=mx.cpu)
        ...     mx.eval(y)  # within the block, or the native code runs
    """
    gpus.named(gpu)
    if equal_writes not in ("note", "fault"):
        raise ValueError(f"[enabled] equal_writes is {equal_writes!r}: expected 'note' or 'fault'")
    if subnormals not in ("keep", "flush"):
        raise ValueError(f"[enabled] subnormals is {subnormals!r}: expected 'keep' or 'flush'")
    if tensor_layout not in ("m5", "shuffled"):
        raise ValueError(f"[enabled] tensor_layout is {tensor_layout!r}: expected 'm5' or 'shuffled'")
    global _before
    block = (object(), seed, watch, step_limit, gpu, subnormals == "flush", bool(fuse), tensor_layout == "shuffled")
    with _lock:
        if not _open:
            _before = _ext.simulator_state()
            redirect(True)
        _open.append(block)
        _ext.simulator_configure(True, *block[1:])
        _equal_writes.append((block[0], equal_writes == "fault"))
        _ext.simulator_fault_on_equal_writes(_equal_writes[-1][1])
        if pretend_metal:
            _pretending.append(block[0])
            if len(_pretending) == 1:
                pretence.pretend()
    try:
        yield
    except RuntimeError as error:
        if NO_METAL not in str(error):
            raise
        raise RuntimeError(
            f"{error} A kernel of mx.fast.metal_kernel was called that the simulator cannot reach: it was made before "
            "the first block of mm.simulator.enabled(), and is held by a local variable. Make it within the block, or "
            "hold it in a module, an object or a container"
        ) from error
    finally:
        with _lock:
            _open.remove(block)
            if block[0] in _pretending:
                _pretending.remove(block[0])
                if not _pretending:
                    pretence.stop()
            _equal_writes[:] = [setting for setting in _equal_writes if setting[0] is not block[0]]
            _ext.simulator_fault_on_equal_writes(bool(_equal_writes) and _equal_writes[-1][1])
            if _open:
                _ext.simulator_configure(True, *_open[-1][1:])
            else:
                redirect(False)
                _ext.simulator_configure(*_before)


def launched() -> int:
    """How many kernels this process has run in the simulator: the same number before and after means that none ran.

    Example:
        >>> before = mm.simulator.launched()
        >>> with mm.simulator.enabled():
        ...     mx.eval(mm.softmax(mx.ones((2, 8)), axis=-1, stream=mx.cpu))
        >>> mm.simulator.launched() - before
        1
    """
    return int(_ext.simulator_launches())


def notes() -> list[str]:
    """Notes of the watcher since the last call on effects that no GPU shows, such as two threads that write one value.

    Example:
        >>> earlier = mm.simulator.notes()
        >>> kernel = mm.simulator.metal_kernel("one", ["x"], ["y"], "y[0] = x[0];")
        >>> sizes = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(1,)]}
        >>> mx.eval(kernel(inputs=[mx.ones(1)], output_dtypes=[mx.float32], **sizes))
        >>> len(mm.simulator.notes())  # 32 threads wrote the same value
        1
    """
    return list(_ext.simulator_notes())
